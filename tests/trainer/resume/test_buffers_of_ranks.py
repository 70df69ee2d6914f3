"""Buffers that differ between ranks under DDP, over stops and resumes on real ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import DDPStrategy
from support.ddp_runs import on_ranks
from support.ledger import LedgerModel, Numbers
from support.ranks import Ranks
from support.runs import Moment, Outcome, SaveAt, numbers_module, quiet_trainer, seeded, train

from lightning_stateful.errors import StatefulWarning
from lightning_stateful.module_state import epoch_results
from lightning_stateful.samplers.rank_exchange import post, posted
from lightning_stateful.samplers.state_codec import to_plain

MOMENTS: list[Moment] = [
    ("on_train_batch_end", 0, 2),
    ("on_validation_end", 0, 0),
    ("on_train_epoch_end", 0, 0),
    ("on_train_batch_end", 1, 1),
    # A validation is due.
    ("on_train_batch_end", 0, 5),
]


DATA = partial(numbers_module, train=Numbers(24), val=Numbers(8, first=100))


class Queue(LedgerModel):
    """Has BatchNorm, and a queue of what this rank has seen, on which its loss depends."""

    size = 8

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
        self.register_buffer("queue", torch.zeros(self.size, 6))
        self.register_buffer("forgotten", torch.zeros(2), persistent=False)
        self.queue: Any
        self.forgotten: Any

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        seen = self.net[0](batch["x"])
        loss = super().training_step(batch, batch_idx) + (seen @ self.queue.clone().T).logsumexp(1).mean() / 10
        self.queue = torch.cat([self.queue[len(seen) :], seen.detach()])
        self.forgotten += self.global_rank
        return loss


class Manual(Queue):
    """Takes its steps itself: DDP broadcasts no buffers but before the first batch of all."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Wide(Manual):
    """Has a queue that is too large to be kept for each rank."""

    size = 2**16


class Normed(LedgerModel):
    """Has BatchNorm, and a mean of the validation's samples of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Any

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step({**batch, "x": batch["x"] - self.mean}, batch_idx)


class Validated(Normed):
    """Changes the mean in a validation, behind which DDP leaves buffers as they are for one batch."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.mean.mul_(0.5).add_(batch["x"].mean(0))


class Moves(Normed):
    """Changes the mean in training."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step({**batch, "x": batch["x"].clone()}, batch_idx)
        self.mean.mul_(0.5).add_(batch["x"].mean(0))
        return loss


class SetByRank(Normed):
    """Sets the mean behind a validation, as an epoch ends."""

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.mean.fill_(self.global_rank)


class Swaps(callbacks.Callback):
    """Has other weights and buffers in the module while it is validated."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.held = {name: one.clone() for name, one in pl_module.state_dict().items()}
        pl_module.load_state_dict({name: one * 0.5 for name, one in self.held.items()})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.held)


class Ignored(Queue):
    """Keeps its queue from DDP."""

    _ddp_params_and_buffers_to_ignore = ("queue",)


unsynced = partial(DDPStrategy, broadcast_buffers=False)
KINDS: dict[str, tuple[type[LedgerModel], dict[str, Any]]] = {
    "manual": (Manual, {}),
    "unsynced": (Queue, {"strategy": unsynced}),
    "ignored": (Ignored, {}),
    "validated": (Validated, {}),
    "automatic": (Normed, {}),
    "set": (SetByRank, {}),
    "swapped": (Moves, {"callbacks": [Swaps]}),
    "wide": (Wide, {}),
    "windows": (Normed, {"accumulate_grad_batches": 2}),
}
# Since Lightning 2.6.
if hasattr(callbacks, "EMAWeightAveraging"):
    averaging = [partial(callbacks.EMAWeightAveraging, decay=0.9)]
    KINDS |= {"averaged": (Moves, {"callbacks": averaging}), "averaged, manual": (Manual, {"callbacks": averaging})}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("buffers") / "2")


def run(kind: str, *savers: Any, seed: int = 1, **options: Any) -> Outcome:
    """A run of a kind on all ranks, which take six batches of two in an epoch."""
    model, how = KINDS[kind]
    made: dict[str, Any] = {name: of() if isinstance(of, partial) else of for name, of in how.items()}
    made["callbacks"] = [*savers, *(of() for of in made.get("callbacks", ()))]
    return train(DATA, model=seeded(model, seed), **on_ranks(**made, **options))


def state_of(path: Path) -> Any:
    """What a checkpoint has of buffers of ranks; None where it has nothing."""
    return torch.load(path, weights_only=True)["callbacks"]["StatefulDataCallback"]["results"].get("buffers")


def warned(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call gives, and its warnings of buffers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = call()
    of_ours = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    return given, [text for text in of_ours if "uffers of the module" in text and "ranks" in text]


def plain(found: Outcome) -> dict[str, Any]:
    """All that the module has at the end of a run."""
    return {name: value.tolist() for name, value in found.weights.items()}


def saved_and_resumed(folder: Path, kind: str) -> dict[str, Any]:
    """A run that is saved at all moments, one that is not, and those that go on from there."""
    saver = SaveAt(folder, MOMENTS)
    (whole, texts), untouched = warned(lambda: run(kind, saver)), run(kind)
    found: dict[str, Any] = {}
    for number, moment in enumerate(MOMENTS):
        path = saver.path(number)
        resumed, said = warned(lambda path=path: run(kind, ckpt_path=path, seed=99))
        found[str(moment)] = plain(resumed), said, state_of(path)
    return {"whole": plain(whole), "untouched": plain(untouched), "texts": texts, "resumed": found}


QUICK = ("manual", "automatic", "validated", "set", "swapped")


@pytest.mark.parametrize(
    "kind",
    [
        one if one in QUICK else pytest.param(one, marks=pytest.mark.slow)
        for one in KINDS
        if one not in ("windows", "wide")
    ],
)
def test_each_rank_goes_on_with_its_own_buffers(ranks: Ranks, kind: str) -> None:
    of_ranks = ranks.of(saved_and_resumed, kind)
    for rank, found in enumerate(of_ranks):
        assert found["whole"] == found["untouched"], rank
        assert found["texts"] == [], rank
        for moment, (weights, said, _) in found["resumed"].items():
            assert weights == found["whole"], (rank, moment)
            assert said == [], (rank, moment)
    kept = {name: state for name, (*_, state) in of_ranks[0]["resumed"].items() if state}
    # Behind a validation DDP leaves buffers as they are for one batch.
    rarely = {"on_validation_end", "on_train_epoch_end"}
    some = {"automatic": set(), "validated": rarely, "set": {"on_train_epoch_end"}}
    hooks = some.get(kind, {hook for hook, *_ in MOMENTS})
    assert {name.split("'")[1] for name in kept} == hooks


def test_an_open_window_begins_with_buffers_that_are_broadcast(ranks: Ranks) -> None:
    for found in ranks.of(saved_and_resumed, "windows"):
        assert found["whole"] == found["untouched"]
        assert {str(state) for *_, state in found["resumed"].values()} == {"None"}
        assert [said for _, said, _ in found["resumed"].values()] == [[]] * len(MOMENTS)


def finished(folder: Path) -> Any:
    """A run that was saved when it was over and goes on for an epoch, and one of as many epochs."""
    run("manual").trainer.save_checkpoint(folder / "end.ckpt")
    longer = run("manual", max_epochs=3)
    return plain(longer), plain(run("manual", ckpt_path=folder / "end.ckpt", max_epochs=3))


def test_a_finished_run_goes_on_with_the_buffers_of_each_rank(ranks: Ranks) -> None:
    for longer, resumed in ranks.of(finished):
        assert resumed == longer


def large(folder: Path) -> Any:
    """A run whose queue is too large to be kept, and what goes on from its second checkpoint."""
    saver = SaveAt(folder, MOMENTS[:2])
    whole, texts = warned(lambda: run("wide", saver))
    resumed, said = warned(lambda: run("wide", ckpt_path=saver.path(1)))
    return {"texts": texts, "said": said, "state": state_of(saver.path(1)), "weights": (plain(whole), plain(resumed))}


@pytest.mark.slow
def test_buffers_that_are_too_large_are_named_where_they_are_saved_and_on_a_resume(ranks: Ranks) -> None:
    first, second = ranks.of(large)
    assert [len(first["texts"]), len(first["said"])] == [1, 1]
    assert "(queue) differ between ranks, and are more than the 1048576 bytes a rank" in first["texts"][0]
    assert "(queue) differed between ranks" in first["said"][0]
    assert "sync_batchnorm=True" in first["said"][0]
    assert [second["texts"], second["said"]] == [[], []]
    kept = first["state"]
    assert kept[0] == {}
    # What is small is kept all the same.
    assert {name for name, value in kept[1].items() if value is None} == {"queue"}
    assert {name for name, value in kept[1].items() if value} == {"net.1.running_mean", "net.1.running_var"}


def test_another_number_of_ranks_is_told_which_buffers_it_does_not_have(ranks: Ranks) -> None:
    ranks.of(saved_and_resumed, "manual")
    path = ranks.folder_of(saved_and_resumed, "manual") / "0.ckpt"
    with pytest.warns(StatefulWarning, match=r"running_mean, .*, queue\).* on 2 ranks under DDP, and this run has 1 "):
        train(DATA, model=seeded(Manual), ckpt_path=path, max_epochs=1)


def altered(folder: Path) -> Any:
    """Resumes from checkpoints to which a rank had come too late, and whose buffers the module has no more."""
    saver = SaveAt(folder, MOMENTS[:1])
    run("manual", saver)
    found = []
    for name, of_rank in {"late": None, "other": {"gone": to_plain(torch.ones(2))}}.items():
        checkpoint = torch.load(saver.path(0), weights_only=True)
        checkpoint["callbacks"]["StatefulDataCallback"]["results"]["buffers"][1] = of_rank
        path = folder / f"{name}, {dist.get_rank()}.ckpt"
        torch.save(checkpoint, path)
        found.append(warned(lambda path=path: run("manual", ckpt_path=path))[1])
    return found


def test_what_is_not_known_or_not_there_is_warned_of(ranks: Ranks) -> None:
    first, second = ranks.of(altered)
    assert ["ranks [1] have not shown theirs" in text for text in first[0]] == [True]
    assert ["(gone)" in text and "none of this name and shape" in text for text in second[1]] == [True]
    assert [first[1], second[0]] == [[], []]


def begun_anew(folder: Path) -> Any:
    """What ranks see of one another as a fit begins, in a group of processes that has had another."""
    post(epoch_results._POSTED, [[0, 2, "on_train_batch_end"], {}])
    dist.barrier()
    before = posted(epoch_results._POSTED)
    dist.barrier()
    epoch_results.EpochResults(quiet_trainer(**on_ranks()))
    dist.barrier()
    return before, posted(epoch_results._POSTED)


def test_a_fit_does_not_take_what_ranks_had_shown_in_another_for_its_own(ranks: Ranks) -> None:
    for before, now in ranks.of(begun_anew):
        assert before == [[[0, 2, "on_train_batch_end"], {}]] * 2
        assert now == [None, None]


def alone(folder: Path) -> Any:
    """What a run on one rank saves."""
    saver = SaveAt(folder, MOMENTS[:1])
    train(model=seeded(Manual), callbacks=[saver], max_epochs=1)
    return state_of(saver.path(0))


def test_one_rank_has_nothing_to_compare(tmp_path: Path) -> None:
    assert alone(tmp_path) is None
