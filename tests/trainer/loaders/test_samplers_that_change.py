"""Samplers and datasets that something changes during training: as without the callback, and no resume in silence."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harm.basics import LENGTH, Indices, loader, permutation
from harm.laws import judged
from harm.own_samplers import CountsAtEnd, Shuffled, ShufflesWhenTold, Sized
from harm.runs import train
from harm.table import Entry, WithCallback, of
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stateful.user_samplers.wrapped_sampler import WrappedSampler


class CountsDown(Sampler[int]):
    """Its ``len`` is what is left, as Megatron's; it counts a sample when the next is asked for."""

    consumed_samples = 0

    def __len__(self) -> int:
        return LENGTH - self.consumed_samples

    def __iter__(self) -> Iterator[int]:
        for index in range(self.consumed_samples, LENGTH):
            yield index
            self.consumed_samples += 1
        self.consumed_samples = 0


class SetsConsumed(pl.Callback):
    """Brings the sampler to where the run stopped, by a state of its own."""

    def __init__(self, sampler: CountsDown) -> None:
        self.sampler, self.consumed = sampler, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.consumed = (self.consumed + 4) % LENGTH

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.consumed = state["consumed"]

    def on_train_start(self, *_: Any) -> None:
        self.sampler.consumed_samples = self.consumed


class HasTail(CountsAtEnd):
    """Counts an epoch behind its last sample, which torch asks for where the last batch is not full."""

    def __len__(self) -> int:
        return LENGTH - 2

    def __iter__(self) -> Iterator[int]:
        yield from permutation(self.epoch)[2:]
        self.epoch += 1


class NotesBad(Indices):
    """Notes samples that it finds bad."""

    def __init__(self) -> None:
        self.bad: set[int] = set()

    def __getitem__(self, index: Any) -> torch.Tensor:
        if index % 5 == 0:
            self.bad.add(index)
        return super().__getitem__(index)


class SkipsBad(Sampler[int]):
    """Leaves out what is in a set; with a length of its own."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return LENGTH - len(self.bad)

    def __iter__(self) -> Iterator[int]:
        return (index for index in range(LENGTH) if index not in self.bad)


class SkipsBadOf(SkipsBad):
    """Holds the dataset itself."""

    def __init__(self, dataset: NotesBad) -> None:
        self.dataset = dataset

    bad = property(lambda self: self.dataset.bad)  # type: ignore[assignment]  # the dataset's


class ByWeights(Shuffled):
    """Is told the epoch, and draws by weights."""

    def __init__(self) -> None:
        self.weights = torch.ones(LENGTH)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, LENGTH, replacement=True).tolist())


class WeighsAndCounts(ByWeights):
    """Counts its passes, which changes nothing."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return super().__iter__()


class KeepsLate(Shuffled):
    """Sets its permutation anew in each pass, and from its second epoch on keeps another one."""

    kept: Any = None

    def __iter__(self) -> Iterator[int]:
        self.latest = torch.randperm(LENGTH).tolist()
        self.kept = self.latest.copy() if self.epoch and self.kept is None else self.kept
        return iter(self.kept or self.latest)


class OfSobol(Sized):
    """Goes on with the numbers of an engine of torch's that it holds."""

    def __init__(self) -> None:
        self.engine = torch.quasirandom.SobolEngine(1, scramble=True, seed=2)  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[int]:
        return iter((self.engine.draw(LENGTH).flatten() * LENGTH).long().tolist())


class Sets(pl.Callback):
    """Does something to an object in one of its hooks."""

    def __init__(self, hook: str, change: Callable[[Any, int, int], None], changed: Any) -> None:
        def go(trainer: Any, module: Any, *arguments: Any) -> None:
            change(changed, trainer.current_epoch, arguments[-1] if arguments else 0)

        setattr(self, hook, go)


def set_weights(sampler: Any, epoch: int, batch: int) -> None:
    if batch == 2:
        sampler.weights[:] = torch.arange(LENGTH) // 4 == epoch


def tell(told: Any, epoch: int, batch: int) -> None:
    told.set_epoch(2 * epoch + 1)


class Told(Dataset[torch.Tensor]):
    """Gives other samples in each epoch that it is told, and keeps it under a name of its own."""

    _told = 0

    def set_epoch(self, epoch: int) -> None:
        self._told = epoch

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(100 * self._told + index)


class ToldIterable(IterableDataset[torch.Tensor]):
    """The same, in a row."""

    _told = 0

    def set_epoch(self, epoch: int) -> None:
        self._told = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(100 * self._told + index) for index in range(LENGTH))


class ToldBatches(Told, Sampler[list[int]]):  # type: ignore[misc]  # both are torch's
    """A batch sampler that is told the epoch likewise; Lightning tells none."""

    def __len__(self) -> int:
        return LENGTH // 4

    def __iter__(self) -> Iterator[list[int]]:
        order = permutation(self._told)
        yield from (order[start : start + 4] for start in range(0, LENGTH, 4))


def by_dataset(dataset: Callable[[], Any], sampler: Callable[[Any], Any]) -> Callable[[int], Any]:
    """A loader whose sampler is made of its dataset."""

    def make(workers: int) -> Any:
        data = dataset()
        return loader(workers, dataset=data, sampler=sampler(data))

    return make


@pytest.mark.parametrize(
    ("make", "stops"),
    [
        pytest.param(of(CountsDown), {3: "exact", 6: "exact", 7: "exact", 9: "exact"}, id="len is what is left"),
        pytest.param(WithCallback(CountsDown, SetsConsumed), {2: "refused", 3: "refused"}, id="and is set"),
        pytest.param(of(HasTail), {6: "exact", 8: "exact"}, id="counts behind a tail"),
    ],
)
def test_a_sampler_counts_as_in_torch(tmp_path: Path, make: Any, stops: dict[int, str]) -> None:
    judged(tmp_path, make, stops)


def test_a_sampler_counts_as_in_torch_behind_what_workers_leave_out(tmp_path: Path) -> None:
    judged(tmp_path, of(HasTail, drop_last=True), {7: "exact"}, workers=1)


@pytest.mark.parametrize(
    ("make", "same", "stops"),
    [
        pytest.param(
            by_dataset(NotesBad, SkipsBadOf), "equal", {3: "warned", 6: "warned", 8: "refused"}, id="bad samples"
        ),
        pytest.param(
            by_dataset(NotesBad, lambda data: SkipsBad(data.bad)),
            "equal",
            {3: "warned", 8: "refused"},
            id="a shared set",
        ),
        pytest.param(of(OfSobol), "equal", dict.fromkeys((6, 8, 14), "exact"), id="an engine of torch's"),
        pytest.param(of(KeepsLate), "runs", dict.fromkeys((9, 12, 14), "exact"), id="a later pass"),
        *(
            pytest.param(
                WithCallback(kind, partial(Sets, "on_train_batch_end", set_weights)),
                "runs",
                {3: "warned", 6: "warned", 9: "refused"},
                id=f"weights, {name}",
            )
            for name, kind in (
                ("told", ByWeights),
                ("told, and counts", WeighsAndCounts),
                ("torch's", lambda: WeightedRandomSampler([1.0] * LENGTH, LENGTH)),
            )
        ),
    ],
)
def test_what_training_changes_is_warned_of(tmp_path: Path, make: Any, same: str, stops: dict[int, str]) -> None:
    judged(tmp_path, make, stops, same)


@pytest.mark.parametrize(
    ("kind", "role", "hook", "stops", "workers"),
    [
        pytest.param(Told, "dataset", "on_train_epoch_start", {3: "warned", 6: "exact"}, 0, id="dataset"),
        pytest.param(ToldIterable, "dataset", "on_train_epoch_start", {3: "refused", 6: "exact"}, 0, id="iterable"),
        pytest.param(ToldIterable, "dataset", "on_train_epoch_start", {6: "exact"}, 1, id="iterable, worker"),
        pytest.param(ToldBatches, "batch_sampler", "on_train_epoch_start", {6: "exact", 9: "refused"}, 0, id="batches"),
        pytest.param(ToldBatches, "batch_sampler", "on_train_epoch_end", {6: "exact", 12: "exact"}, 0, id="at its end"),
    ],
)
def test_set_epoch_as_a_user_calls_it_wins(
    tmp_path: Path, kind: Any, role: str, hook: str, stops: dict[int, str], workers: int
) -> None:
    judged(tmp_path, WithCallback(kind, partial(Sets, hook, tell), role), stops, workers=workers)


class Passes(Sampler[Any]):
    """Counts its passes."""

    passes = 0

    def __len__(self) -> int:
        return LENGTH // 2

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(self.drawn())

    def drawn(self) -> list[Any]:
        raise NotImplementedError


class WarmsUp(Passes):
    """Draws easy samples in two passes, and others from then on."""

    def drawn(self) -> list[int]:
        easy = range(LENGTH // 2) if self.passes <= 2 else range(LENGTH // 2, LENGTH)
        return random.sample(easy, LENGTH // 2)


class KeepsSecond(Passes):
    """Keeps the subset that its second pass draws."""

    kept: Any = None

    def drawn(self) -> list[int]:
        drawn = random.sample(range(LENGTH), LENGTH // 2)
        self.kept = drawn if self.passes == 2 else self.kept
        return self.kept or drawn


class PlansTwo(Passes):
    """Draws a plan for two passes."""

    def __init__(self) -> None:
        self.plans: dict[int, list[int]] = {}

    def drawn(self) -> list[int]:
        return self.plans.setdefault(self.passes // 2, random.sample(range(LENGTH), LENGTH // 2))


class Alternates(Passes):
    """Takes one of its samplers in turn, and is told the epoch."""

    epoch = 0

    def __init__(self) -> None:
        self.samplers = [Shuffled(), Shuffled(), RandomSampler(range(LENGTH), generator=torch.Generator())]

    def __len__(self) -> int:
        return LENGTH

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def drawn(self) -> list[int]:
        return list(self.samplers[self.passes % 3])


class Overwrites(Passes):
    """Keeps its latest permutation, under a name that each pass sets anew, and counts nothing."""

    def __iter__(self) -> Iterator[int]:
        self.kept = random.sample(range(LENGTH), LENGTH // 2)
        return iter(self.kept)


@pytest.mark.parametrize("kind", [WarmsUp, KeepsSecond, PlansTwo, Alternates, Overwrites])
def test_passes_that_show_only_in_the_third_epoch_are_begun_again_without_a_word(tmp_path: Path, kind: Any) -> None:
    stops = [3, 7, 9, 14] if kind is Alternates else [2, 5, 6, 7]
    judged(tmp_path, of(kind), dict.fromkeys(stops, "exact"), "runs")
    assert WrappedSampler(kind()).remembers is (kind is not Overwrites)
    assert not train(Entry(of(kind), "runs")).said


class HoldsData(Sampler[int]):
    """Holds the dataset for its length alone."""

    def __init__(self, dataset: NotesBad) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self)).tolist())


def test_a_dataset_that_changes_nothing_of_what_its_sampler_yields_is_not_warned_of(tmp_path: Path) -> None:
    make = by_dataset(NotesBad, HoldsData)
    judged(tmp_path, make, {3: "exact", 9: "exact"}, "multiset")
    assert not train(Entry(make, "multiset")).said


class ByAttribute(IterableDataset[torch.Tensor]):
    """Its samples follow from an attribute, and it counts its passes beside."""

    level = passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        yield from (torch.tensor(100 * self.level + index) for index in range(LENGTH))


class SetsLevel(pl.Callback):
    """Sets the attribute at the end of an epoch."""

    def __init__(self, dataset: ByAttribute) -> None:
        self.dataset = dataset

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.dataset.level = trainer.current_epoch + 1


class KeepsLevel(SetsLevel):
    """Restores it on a resume."""

    def state_dict(self) -> dict[str, int]:
        return {"level": self.dataset.level}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.dataset.level = state["level"]


@dataclass(frozen=True)
class SavedAtEnd(WithCallback):
    """And its run is saved when the callback has changed it at the end of an epoch."""

    path: Path = Path()
    epoch: int = 0

    def __call__(self, workers: int) -> Any:
        made = self.sampler()
        callback = self.callback(made)
        end = callback.on_train_epoch_end

        def ends(trainer: Any, *arguments: Any) -> None:
            end(trainer, *arguments)
            if trainer.current_epoch == self.epoch:
                trainer.save_checkpoint(self.path)

        callback.on_train_epoch_end = ends
        callback.on_train_batch_end = self._save_within
        return lambda: loader(workers, **{self.role: made}), callback

    def _save_within(self, trainer: Any, *arguments: Any) -> None:
        if (trainer.current_epoch, arguments[-1]) == (1, 2) and trainer.ckpt_path is None:
            trainer.save_checkpoint(self.path.with_name("within.ckpt"))


@pytest.mark.filterwarnings("ignore:.*were read again, and left out")
@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_hook_has_set_before_an_epoch_is_missed_within_it(tmp_path: Path, workers: int) -> None:
    for callback, is_exact in ((SetsLevel, False), (KeepsLevel, True)):
        entry = Entry(SavedAtEnd(ByAttribute, callback, "dataset", tmp_path / "end.ckpt"), "equal")
        whole = train(entry, workers=workers)
        again = train(entry, workers=workers, ckpt_path=tmp_path / "within.ckpt")
        assert (again.trained == whole.trained[6 + 3 :]) is is_exact
        assert any(text.startswith("ByAttribute.level was set between two epochs") for text in again.said) != is_exact


class SamplerByAttribute(ByAttribute, Sampler[int]):  # type: ignore[misc]  # both are torch's
    """Its samples follow from an attribute alone."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(permutation(self.level))


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(
    ("kind", "workers", "first", "on_resume"),
    [
        (ByAttribute, 0, "ByAttribute.level was changed between two epochs", "ByAttribute.level was set between"),
        (ByAttribute, 1, "ByAttribute.level was changed between two epochs", "ByAttribute.level was set between"),
        (
            SamplerByAttribute,
            0,
            "SamplerByAttribute was changed between",
            "SamplerByAttribute had been changed in training",
        ),
    ],
)
def test_what_a_hook_sets_between_epochs_is_warned_of_in_the_run_and_where_a_resume_lacks_it(
    tmp_path: Path, kind: Any, workers: int, first: str, on_resume: str, epoch: int
) -> None:
    role = "sampler" if kind is SamplerByAttribute else "dataset"
    for callback, is_exact in ((SetsLevel, False), (KeepsLevel, True)):
        entry = Entry(SavedAtEnd(kind, callback, role, tmp_path / "end.ckpt", epoch), "equal")
        whole = train(entry, workers=workers)
        assert [text.startswith(first) for text in whole.said] == [True]
        again = train(entry, workers=workers, ckpt_path=tmp_path / "end.ckpt")
        assert (again.trained == whole.trained[6 * (epoch + 1) :]) is is_exact
        assert any(text.startswith(on_resume) for text in again.said) != is_exact


class TakesOthers(pl.Callback):
    """Has a sampler of torch's draw from other samples from the second epoch on."""

    def __init__(self, sampler: SubsetRandomSampler) -> None:
        self.sampler = sampler

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.sampler.indices = range(LENGTH // 2, LENGTH)


def test_other_indices_of_a_sampler_that_a_hook_has_set_are_missed_on_a_resume(tmp_path: Path) -> None:
    half = partial(SubsetRandomSampler, range(LENGTH // 2))
    entry = Entry(SavedAtEnd(half, TakesOthers, "sampler", tmp_path / "end.ckpt"), "multiset")
    whole = train(entry)
    again = train(entry, ckpt_path=tmp_path / "end.ckpt")
    assert again.trained != whole.trained[len(whole.epoch(0)) :]
    assert any(text.startswith("SubsetRandomSampler.indices had been changed in training") for text in again.said)


class Weighted(Sampler[int]):
    """Draws by weights."""

    def __init__(self) -> None:
        self.weights = torch.linspace(1, 5, LENGTH)

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, LENGTH, replacement=True).tolist())


class SavesEpoch(pl.Callback):
    """Saves at the end of an epoch."""

    def __init__(self, sampler: Any, path: Path, epoch: int) -> None:
        self.sampler, self.path, self.epoch = sampler, path, epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.epoch and trainer.ckpt_path is None:
            trainer.save_checkpoint(self.path)


class Flattens(SavesEpoch):
    """Changes the weights before each epoch, by what they were or by the epoch; and saves at the end of one."""

    def __init__(self, *args: Any, builds: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.builds = builds

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        power = 0.5 if self.builds else 0.5 ** (trainer.current_epoch + 1)
        self.sampler.weights = (self.sampler.weights if self.builds else torch.linspace(1, 5, LENGTH)) ** power


@pytest.mark.parametrize("builds", [True, False])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_change_that_builds_on_the_one_before_is_warned_of(tmp_path: Path, epoch: int, builds: bool) -> None:
    flattens = partial(Flattens, path=tmp_path / "end.ckpt", epoch=epoch, builds=builds)
    entry = Entry(WithCallback(Weighted, flattens), "equal")
    whole = train(entry)
    again = train(entry, ckpt_path=tmp_path / "end.ckpt")
    assert (again.trained == whole.trained[6 * (epoch + 1) :]) is not builds
    found = any("a hook has then changed it to what it was in an earlier epoch" in text for text in again.said)
    assert found is builds
    assert any("was changed between two epochs by something else" in text for text in whole.said)


class InOrder(Sampler[int]):
    """Yields a list that it holds."""

    def __init__(self) -> None:
        self.order = list(range(LENGTH))

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.order))


class Shuffles(SavesEpoch):
    """Shuffles it in place before each epoch, and perhaps restores it; and saves at the end of one."""

    def __init__(self, *args: Any, restores: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.restores = restores

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        random.Random(trainer.current_epoch).shuffle(self.sampler.order)

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.sampler.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.restores:
            self.sampler.order[:] = state["order"]


@pytest.mark.parametrize("restores", [True, False])
@pytest.mark.parametrize("epoch", [0, 1])
def test_so_is_a_list_that_a_hook_shuffles_in_place(tmp_path: Path, epoch: int, restores: bool) -> None:
    shuffles = partial(Shuffles, path=tmp_path / "end.ckpt", epoch=epoch, restores=restores)
    entry = Entry(WithCallback(InOrder, shuffles), "equal")
    whole = train(entry)
    again = train(entry, ckpt_path=tmp_path / "end.ckpt")
    assert (again.trained == whole.trained[6 * (epoch + 1) :]) is restores
    found = any("InOrder.order was as built when training began here" in text for text in again.said)
    assert found is not restores


@pytest.mark.parametrize("after", [None, 6, 12])
def test_one_that_adds_up_what_it_is_told_is_told_each_epoch_once(tmp_path: Path, after: int | None) -> None:
    entry = Entry(of(ShufflesWhenTold), "equal")
    path = tmp_path / "last.ckpt"
    whole = train(entry, save=path, after=after)
    assert whole.trained == train(entry, own=False).trained
    again = train(entry, ckpt_path=path)
    assert (again.trained, again.said) == (whole.trained[whole.saved :], [])
