"""What the tests of several sources under DDP run on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed

from lightning_stateful.errors import StatefulError
from support.ledger import Numbers
from support.runs import Outcome
from support.sources import SaveAt, datasets, mixture, round_robin, train_on

DDP: dict[str, Any] = {"strategy": "ddp", "devices": 2, "max_epochs": 2}

# Lengths that two ranks cannot share without remainders.
UNEVEN = {"news": 9, "code": 15, "web": 5}


def uneven(**options: Any) -> dict[str, Any]:
    return {"train": datasets(**UNEVEN), "log_data": True, **options}


CONFIGS: dict[str, Any] = {
    "round robin": lambda: round_robin(**uneven(tag="source", batch_size={"news": 1, "code": 3, "web": 1})),
    "mixture": lambda: mixture(**uneven(tag="source", weights=[1, 2, 1], batch_size=2)),
    "mixture, steps": lambda: mixture(**uneven(tag="source", num_steps=6, temperature=2)),
    "by sample": lambda: mixture(**uneven(by="sample")),
}
# Those that serve every sample once an epoch.
WHOLE_EPOCHS = ("round robin", "mixture", "by sample")
MOMENTS = [
    ("on_before_backward", 0, 3),
    ("on_validation_batch_end", 0, 0),
    ("on_train_batch_start", 1, 2),
    ("on_train_batch_end", 1, 3),
]
# After so many steps of an epoch a run on one rank or on two leaves the rest to the other number.
HANDED_OVER = 3


def file_name(config: str, ranks: int) -> str:
    return f"{config}, {ranks}.ckpt"


def plain(run: Outcome) -> dict[str, Any]:
    """What a test compares, as plain data."""
    return {
        "ledger": run.ledger,
        "logged": run.trainer.logger.sources,
        "weights": {name: value.tolist() for name, value in run.weights.items()},
        "end": (run.global_step, run.current_epoch, run.total_batches),
        "report": run.trainer.datamodule.position_report(),
        "length": run.trainer.num_training_batches,
    }


def hand_over(folder: Path, config: str, **options: Any) -> Outcome:
    """Train a few steps and leave a checkpoint for another number of ranks."""
    run = train_on(CONFIGS[config], max_steps=HANDED_OVER, **options)
    run.trainer.save_checkpoint(folder / file_name(config, run.trainer.world_size))
    return run


def uninterrupted(folder: Path) -> dict[str, Any]:
    return {name: plain(train_on(make, **DDP)) for name, make in CONFIGS.items()}


def every_moment(folder: Path) -> dict[str, Any]:
    """Of every configuration, the ledger up to each moment, and what the run resumed from there does."""
    found = {}
    for name, make in CONFIGS.items():
        own = folder / name
        own.mkdir(exist_ok=True)
        saver = SaveAt(own, MOMENTS)
        train_on(make, callbacks=[saver], **DDP)
        torch.distributed.barrier()
        found[name] = [
            (ledger, plain(train_on(make, ckpt_path=saver.path(number), seed=9, **DDP)))
            for number, ledger in sorted(saver.ledgers.items())
        ]
    return found


def workers_and_windows(folder: Path) -> Any:
    def make() -> Any:
        # Forking while gloo's threads are at work may deadlock within fork itself: once a run, before they are.
        return mixture(**uneven(by="sample", num_workers=2, persistent_workers=True, val=None))

    saver = SaveAt(folder, [("on_train_batch_end", 1, 2)])
    options = {**DDP, "accumulate_grad_batches": 2}
    whole = train_on(make, callbacks=[saver], **options)
    torch.distributed.barrier()
    resumed = train_on(make, ckpt_path=saver.path(0), seed=9, **options)
    return plain(whole), saver.ledgers[0], plain(resumed)


def saved_on_two_ranks(folder: Path) -> dict[str, Any]:
    return {name: plain(hand_over(folder, name, **DDP)) for name in CONFIGS}


def resumed_on_two_ranks(folder: Path) -> dict[str, Any]:
    """What one process left behind, and once more from within the epoch that is planned anew."""
    found = {}
    for name, make in CONFIGS.items():
        own = folder / name
        own.mkdir(exist_ok=True)
        saver = SaveAt(own, [("on_train_batch_end", 0, 0)])
        resumed = train_on(make, callbacks=[saver], ckpt_path=folder.parent / file_name(name, 1), **DDP)
        torch.distributed.barrier()
        again = train_on(make, ckpt_path=saver.path(0), seed=9, **DDP)
        found[name] = (plain(resumed), saver.ledgers[0], plain(again))
    return found


def other_weights(folder: Path) -> str:
    weights = [[1, 2, 1], [2, 1, 1]][torch.distributed.get_rank()]
    return refusal(lambda: mixture(**uneven(weights=weights)))


def other_lengths(folder: Path) -> str:
    lengths = {**UNEVEN, "web": 5 + torch.distributed.get_rank()}
    return refusal(lambda: round_robin(train=datasets(**lengths)))


def refusal(make: Any) -> str:
    try:
        train_on(make, **DDP)
    except StatefulError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def fewer_samples_than_ranks(folder: Path) -> dict[str, Any]:
    """Sources of one sample each, which no step can serve on both ranks."""
    sets = {"news": Numbers(1), "code": Numbers(1, first=100), "web": Numbers(4, first=200)}
    return plain(train_on(lambda: mixture(train=sets, batch_size=2, tag="source", log_data=True), **DDP))


ALL = [
    uninterrupted,
    every_moment,
    workers_and_windows,
    saved_on_two_ranks,
    resumed_on_two_ranks,
    other_weights,
    other_lengths,
    fewer_samples_than_ranks,
]
