"""Loaders come from anywhere and in any structure: each resumes exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.ledger import LedgerModel, Numbers, batches, parts
from support.runs import (
    assert_goes_on_from_every_moment,
    assert_resumes,
    numbers_module,
    quiet_trainer,
    stopped,
    train,
    train_alone,
    training,
)
from support.samplers import WithoutLen
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_stateful import StatefulDataCallback, StatefulDataModule, StatefulLoader
from lightning_stateful.core import BlockShuffledOrder
from lightning_stateful.errors import (
    ConfigurationError,
    PositionError,
    StatefulWarning,
    StateMismatchError,
    UnsupportedLoaderError,
)


def plain(length: int, first: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(length, first=first), **{"batch_size": 2, "shuffle": True, **options})


STRUCTURES: dict[str, Any] = {
    "a list": lambda: [plain(10), plain(14, 100)],
    "a dict": lambda: {"a": plain(10), "b": plain(14, 100)},
    "nested": lambda: {"a": plain(10), "b": [plain(14, 100), plain(6, 200)]},
    "min_size": lambda: CombinedLoader({"a": plain(10), "b": plain(14, 100)}, "min_size"),
    "max_size": lambda: CombinedLoader({"a": plain(10), "b": plain(14, 100)}, "max_size"),
    "a seed of its own": lambda: CombinedLoader(
        [plain(14), StatefulLoader(Numbers(10), batch_size=2, seed=9)], "max_size"
    ),
    "max_size_cycle": lambda: CombinedLoader({"a": plain(5), "b": plain(14, 100)}, "max_size_cycle"),
    "cycle with a tail dropped": lambda: CombinedLoader([plain(7, drop_last=True), plain(20, 100)], "max_size_cycle"),
    "a CombinedLoader of one": lambda: CombinedLoader(plain(14), "max_size"),
}


class Returning(StatefulDataModule):
    def __init__(self, make: Any) -> None:
        super().__init__(seed=5)
        self.make = make

    def train_dataloader(self) -> Any:
        return self.make()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_any_structure_of_loaders_resumes_exactly(tmp_path: Path, structure: str) -> None:
    moments = [("on_train_batch_end", 0, 4), ("on_before_backward", 1, 3)]
    assert_goes_on_from_every_moment(tmp_path, lambda: Returning(STRUCTURES[structure]), moments)


class CountsPasses(Sampler[int], IterableDataset[Any]):  # type: ignore[misc]  # both are torch's
    """Begins each pass with another sample; counts a pass at its beginning or behind its last sample."""

    def __init__(self, *, at_end: bool) -> None:
        self.passes, self.at_end = 0, at_end

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        self.passes += not self.at_end
        yield from ((index + self.passes) % 6 for index in range(6))
        self.passes += self.at_end


class ReadsPasses(CountsPasses):
    def __iter__(self) -> Iterator[Any]:
        return (Numbers(6)[index] for index in super().__iter__())


@pytest.mark.filterwarnings("ignore:.*samples of ReadsPasses .* were read again")
@pytest.mark.parametrize("at_end", [False, True])
def test_a_shorter_loader_that_counts_its_passes_goes_on_from_where_it_has_ended(tmp_path: Path, at_end: bool) -> None:
    def loaders() -> Any:
        sampler, dataset = CountsPasses(at_end=at_end), ReadsPasses(at_end=at_end)
        short = {"sampler": plain(6, shuffle=False, sampler=sampler), "iterable": DataLoader(dataset, batch_size=2)}
        return CombinedLoader({"long": plain(10), **short}, "max_size")

    moments = [("on_train_batch_end", 0, 2), ("on_train_batch_end", 0, 3), ("on_train_batch_end", 1, 3)]
    assert_goes_on_from_every_moment(tmp_path, loaders, moments, train_alone, max_epochs=3)


def sharing(*, twice: bool) -> Any:
    sampler = CountsPasses(at_end=False)
    loaders = [plain(6, shuffle=False, sampler=sampler) for _ in range(2)]
    return [loaders[0], loaders[0]] if twice else loaders


@pytest.mark.parametrize("twice", [False, True])
def test_loaders_that_share_a_sampler_that_counts_its_passes_are_warned_of_at_the_start(twice: bool) -> None:
    with pytest.warns(StatefulWarning, match=r"'0' and '1' share one CountsPasses object.*a sampler of its own"):
        train_alone(lambda: sharing(twice=twice), max_epochs=1)


@pytest.mark.filterwarnings("ignore:The loaders '0' and '1' share one")
@pytest.mark.parametrize(("steps", "said"), [(2, "no longer yields .* up to"), (3, "cannot be brought to epoch 1:")])
def test_a_resume_of_such_loaders_that_is_refused_says_that_they_share_it(
    tmp_path: Path, steps: int, said: str
) -> None:
    def fit(path: Path | None = None, max_steps: int = -1) -> Any:
        trainer = quiet_trainer(StatefulDataCallback(seed=0), max_epochs=2, max_steps=max_steps, limit_val_batches=0)
        trainer.fit(LedgerModel(), sharing(twice=False), ckpt_path=path)
        return trainer

    fit(max_steps=steps).save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises((PositionError, StateMismatchError), match=f"CountsPasses {said}.*everal loaders share it"):
        fit(tmp_path / "x.ckpt")


def test_loaders_may_share_a_sampler_that_yields_the_same_in_each_pass() -> None:
    sampler = WithoutLen()
    loaders = [plain(22, shuffle=False, sampler=sampler) for _ in range(2)]
    train_alone(lambda: CombinedLoader(loaders, "min_size"), max_epochs=1)


def test_a_loader_that_starts_over_within_an_epoch_is_shuffled_anew() -> None:
    whole = train(lambda: Returning(STRUCTURES["max_size_cycle"]), max_epochs=1)
    served = parts(whole.ledger, "a")
    first, second = served[:3], served[3:6]
    assert sorted(index for part in first for index in part) == list(range(5))
    assert sorted(index for part in second for index in part) == list(range(5))
    assert first != second


@pytest.mark.parametrize(
    "loaders", [[plain(10), plain(6)], [plain(10), plain(22, shuffle=False, sampler=WithoutLen())]]
)
def test_sequential_loaders_are_refused_by_the_mode_that_was_given(loaders: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"of Returning.train_dataloader\(\) .*mode 'sequential'.*'min_size'"):
        train(lambda: Returning(lambda: CombinedLoader(loaders, "sequential")))


@pytest.mark.parametrize("datasets", [[Numbers(10), Numbers(14, first=100)], {"a": Numbers(10), "b": Numbers(14)}])
def test_lists_and_dicts_of_datasets_give_loaders_in_the_same_structure(datasets: Any) -> None:
    module = StatefulDataModule(datasets, batch_size=2)
    loaders = module.train_dataloader()
    assert type(loaders) is type(datasets)
    assert {type(loader) for loader in (loaders.values() if isinstance(loaders, dict) else loaders)} == {StatefulLoader}


def test_a_list_of_plain_samples_is_one_dataset() -> None:
    loader = StatefulDataModule([3, 4, 5], batch_size=3, shuffle=False).train_dataloader()
    assert [batch.tolist() for batch in loader] == [[3, 4, 5]]


class Hooks:
    """Loaders of a model, or of a plain data module."""

    def train_dataloader(self) -> Any:
        return plain(22)

    def val_dataloader(self) -> Any:
        return plain(5, 100, shuffle=False)


class HookedModel(Hooks, LedgerModel):
    pass


class PlainModule(Hooks, pl.LightningDataModule):
    pass


SOURCES: dict[str, Any] = {
    "hooks of the model": lambda: None,
    "a plain data module": PlainModule,
    "a loader passed to fit": lambda: plain(22),
    "a loader with a sampler without len": lambda: plain(22, shuffle=False, sampler=WithoutLen()),
    "9 a loader with torch's distributed sampler": lambda: plain(
        22, shuffle=False, sampler=DistributedSampler(Numbers(22), num_replicas=1, rank=0)
    ),
    "loaders passed to fit": lambda: [plain(22), plain(30)],
    "a stateful loader passed to fit": lambda: StatefulLoader(
        Numbers(22), batch_size=2, sampler=BlockShuffledOrder(22, 4, 3, 2), seed=4
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_callback_alone_resumes_loaders_from_anywhere_exactly(tmp_path: Path, source: str) -> None:
    model = HookedModel if source == "hooks of the model" else LedgerModel
    run = training(model, lambda: [StatefulDataCallback(seed=6)])
    moments = [("on_train_batch_end", 1, 4)]
    assert_goes_on_from_every_moment(tmp_path, SOURCES[source], moments, run, served_again=0)


def test_a_checkpoint_moves_from_the_callback_alone_to_a_data_module(tmp_path: Path) -> None:
    before = stopped(tmp_path / "stop.ckpt", lambda: plain(22), run=train_alone, epoch=1, batch=4)
    assert_resumes(tmp_path / "stop.ckpt", before, 0, make=lambda: numbers_module(val=None))


def test_datasets_set_in_setup_are_served() -> None:
    class InSetup(StatefulDataModule):
        def setup(self, stage: str) -> None:
            self.train, self.val = Numbers(8), Numbers(3, first=100)

    run = train(lambda: InSetup(batch_size=2), max_epochs=1)
    assert [event[0] for event in run.ledger].count("val") == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (StatefulDataModule, "StatefulDataModule has no dataset for this stage"),
        (lambda: StatefulDataModule(plain(10)), "takes datasets, got a DataLoader"),
        (lambda: Returning(lambda: plain(10, in_order=False, num_workers=2)), "in_order=False"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedLoaderError), match=words):
        train(make)


def test_evaluation_loaders_that_cannot_be_patched_are_left_to_lightning() -> None:
    class OutOfOrder(StatefulDataModule):
        def val_dataloader(self) -> Any:
            return plain(10, shuffle=False, in_order=False)

    run = train(lambda: OutOfOrder(Numbers(8), batch_size=2), max_epochs=1)
    assert batches(run.ledger, stage="val")[0] == (0, 1)


def test_a_shuffled_list_of_loaders_under_overfitting_warns_by_the_loaders_path() -> None:
    with pytest.warns(StatefulWarning, match="the training loader '1' is not shuffled"):
        train(lambda: Returning(lambda: [plain(10, shuffle=False), plain(14)]), overfit_batches=2, max_epochs=1)
