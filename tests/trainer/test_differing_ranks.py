"""What differs between the ranks of DDP, and a checkpoint of rank 0 cannot hold, is named there and on a resume."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from support.ddp_runs import on_ranks
from support.ledger import Numbers
from support.ranks import Ranks
from support.runs import quiet_trainer
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("differing ranks") / "2")


class Learns(pl.LightningModule):
    def __init__(self, momentum: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.momentum, self.scale = torch.nn.Linear(4, 1), momentum, 1.0

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.scale * (self.net(batch["x"]) - batch["id"]).square().mean()

    def validation_step(self, batch: Any) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001, momentum=self.momentum)


class Averages(Callback):
    """Averages weights in every second step, and nothing in between."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.model.register_comm_hook(None, noop_hook)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step % 2 == 0:
            for one in pl_module.parameters():
                dist.all_reduce(one.data)
                one.data /= dist.get_world_size()


class Compresses(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        trainer.strategy.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class Scales(Callback):
    """Saves an average of the losses of rank 0."""

    def __init__(self) -> None:
        self.mean = 1.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.mean = 0.8 * self.mean + 0.2 * float(outputs["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class Words(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class Begins(Numbers):
    """Numbers from one on that a hook sets."""

    start = 0

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__((index + self.start) % len(self))


class BeginsElsewhere(Callback):
    """Sets where each rank begins, and saves where rank 0 does."""

    def __init__(self) -> None:
        self.start = 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.start = trainer.train_dataloader.dataset.start = 10 * (trainer.global_rank + 1)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.train_dataloader.dataset.start = self.start

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["start"]


class BeginsFurther(BeginsElsewhere):
    """Sets it further behind each epoch."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.start += 10 * (trainer.global_rank + 1)
        trainer.train_dataloader.dataset.start = self.start


class SavesValidated(Callback):
    """Saves behind the validation of the second epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


class ByLoss(Sampler[int]):
    def __init__(self) -> None:
        self.losses = torch.zeros(48)

    def __iter__(self) -> Any:
        return iter(torch.argsort(self.losses, stable=True)[:24].tolist())

    def __len__(self) -> int:
        return 24


class Mines(BeginsElsewhere):
    """Gives each rank losses of its own, and saves those of rank 0."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.start = 1 + trainer.global_rank
        trainer.train_dataloader.sampler.losses = torch.arange(48) * self.start % 7

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.train_dataloader.sampler.losses = torch.arange(48) * self.start % 7


# The sampler of the run at hand.
SAMPLERS: list[ByLoss] = []


class MinesEarly(Mines):
    """Restores them before the loaders are built."""

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        SAMPLERS[0].losses = torch.arange(48) * checkpoint["callbacks"][self.state_key]["start"] % 7

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pass


def words(
    folder: Path, kind: Any, steps: int, momentum: float, make: Any = None, options: Any = None
) -> list[list[str]]:
    """What a run that is stopped says, and its resume, on this rank."""
    make = make or (lambda: DataLoader(Numbers(48), batch_size=4))
    found = []
    for path in (None, folder / "x.ckpt"):
        heard, logger = Words(), logging.getLogger("lightning.pytorch")
        logger.addHandler(heard)
        logger.setLevel(logging.INFO)
        # Of no number of steps it is saved behind a validation.
        savers = [SavesValidated(folder / "x.ckpt")] if not steps and path is None else []
        limits = {"max_steps": steps + 2 * bool(path)} if steps else {"max_epochs": 3}
        how = {**on_ranks(), **limits, **(options or {})}
        trainer = quiet_trainer(kind(), StatefulDataCallback(seed=3), *savers, **how)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Learns(momentum), make(), None if steps else make(), ckpt_path=path)
            if path is None and steps:
                trainer.save_checkpoint(folder / "x.ckpt")
                dist.barrier()
        logger.removeHandler(heard)
        found.append([str(one.message) for one in caught if issubclass(one.category, StatefulWarning)] + heard.said)
    return found


@pytest.mark.parametrize(
    ("kind", "steps", "momentum", "expected"),
    [
        (Averages, 3, 0.0, ("of ranks [1] are others", "of ranks [1] were others")),
        # Weights are equal there, and momentum is not.
        (Averages, 4, 0.9, ("of ranks [1] are others", "of ranks [1] were others")),
        (Averages, 4, 0.0, ("", "")),
        (Compresses, 3, 0.0, ("(powerSGD_hook) has a state", "(powerSGD_hook) has a state")),
    ],
)
def test_what_ranks_or_hooks_hold_apart_is_warned_of(
    ranks: Ranks, kind: type[Callback], steps: int, momentum: float, expected: tuple[str, str]
) -> None:
    first, _ = ranks.of(words, kind, steps, momentum)
    for said, text in zip(first, expected, strict=True):
        found = [one for one in said if "states of optimizers" in one or "communication hook" in one]
        assert len(found) == bool(text), found
        assert text in "".join(found)


def test_a_rank_that_gets_what_rank_0_saved_says_so(ranks: Ranks) -> None:
    of_ranks = ranks.of(words, Scales, 3, 0.0)
    named = [[one for one in said if "Scales.mean was" in one] for _, said in of_ranks]
    assert not named[0]
    (said,) = named[1]
    assert "data module of rank 1 that" in said


def of_dataset() -> Any:
    return DataLoader(Begins(48), batch_size=4)


def of_sampler() -> Any:
    SAMPLERS[:] = [ByLoss()]
    return DataLoader(Numbers(48), batch_size=4, sampler=SAMPLERS[0])


@pytest.mark.parametrize(
    ("kind", "make", "steps", "options", "expected"),
    [
        (BeginsElsewhere, of_dataset, 8, {}, "start"),
        (BeginsFurther, of_dataset, 0, {}, "start"),
        (Mines, of_sampler, 12, {"use_distributed_sampler": False, "max_epochs": 3}, "what the sampler yields"),
        (MinesEarly, of_sampler, 6, {"max_epochs": 3}, "what the sampler yields"),
    ],
)
def test_data_that_hooks_set_apart_are_warned_of_on_the_rank_that_gets_those_of_rank_0(
    ranks: Ranks, kind: Any, make: Any, steps: int, options: Any, expected: str
) -> None:
    of_ranks = ranks.of(words, kind, steps, 0.0, make, options)
    (_, of_first), (_, of_second) = of_ranks
    words_of_rank = "of rank 1 is not what it was when the checkpoint was written"
    assert not [one for one in of_first if words_of_rank in one]
    (said,) = [one for one in of_second if words_of_rank in one]
    assert expected in said


class BeginsAt(IterableDataset[Any]):
    start = 0

    def __iter__(self) -> Any:
        return (Numbers(48)[(index + self.start) % 48] for index in range(24))


class Restores(BeginsElsewhere):
    """Saves where each rank begins, and restores that of the rank, or that of rank 0."""

    def __init__(self, *, of_first: bool) -> None:
        super().__init__()
        self.of_first = of_first

    def state_dict(self) -> dict[str, Any]:
        starts = [0] * dist.get_world_size()
        dist.all_gather_object(starts, self.start)
        return {"starts": starts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["starts"][0 if self.of_first else dist.get_rank()]


@pytest.mark.parametrize("of_first", [True, False])
def test_so_is_what_they_set_apart_on_iterable_datasets(ranks: Ranks, of_first: bool) -> None:
    kind, make = partial(Restores, of_first=of_first), partial(DataLoader, BeginsAt(), batch_size=4)
    named = [
        [one for one in said if "BeginsAt.start was set between two epochs in the run that wrote" in one]
        for _, said in ranks.of(words, kind, 6, 0.0, make, {"max_epochs": 3})
    ]
    assert [len(of_rank) for of_rank in named] == [0, of_first]
