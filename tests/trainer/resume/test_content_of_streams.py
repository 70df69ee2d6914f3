"""The first batch of a pass over a stream is read again on a resume: another tokenizer is refused by what it gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any

import datasets
import pytest
import torch
from support.ledger import LedgerModel, batches
from support.runs import BEGINS_TWICE, assert_goes_on_from_every_moment, quiet_trainer, stopped, train_alone, training
from support.sampler_cases import PlainData
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_stateful import StatefulDataCallback, patch_dataloader
from lightning_stateful.errors import StatefulWarning, StateMismatchError

WORDS = ["low", "tide", "salt", "gull", "rope", "sand"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*were read again:lightning_stateful.errors.StatefulWarning"),
]


class Vocabulary:
    """Numbers words, and shows them nowhere but in what it gives."""

    def __init__(self, words: list[str]) -> None:
        self._number = {word: number for number, word in enumerate(words)}.__getitem__
        self.calls = 0

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        return {"ids": list(map(self._number, row["text"].split())), "id": row["id"]}


def kept(kind: type[Vocabulary]) -> tuple[list[Any], Callable[[list[str]], Vocabulary]]:
    """The vocabularies that a function has made, and the function."""
    made: list[Vocabulary] = []

    def encoder(words: list[str]) -> Vocabulary:
        made.append(kind(words))
        return made[-1]

    return made, encoder


def rows(parts: list[int]) -> Iterator[dict[str, Any]]:
    for part in parts:
        for number in range(part * 11, part * 11 + 11):
            yield {"id": number, "text": " ".join((WORDS * 3)[number % 5 : number % 5 + 4])}


def collated(samples: list[Any], encode: Callable[[Any], Any] = dict) -> dict[str, torch.Tensor]:
    samples = [encode(sample) for sample in samples]
    x = torch.tensor([sample["ids"] for sample in samples]) / 100
    return {"id": torch.tensor([sample["id"] for sample in samples]), "x": x + torch.rand(len(samples), 1) / 100}


encoded = partial(collated, encode=Vocabulary(WORDS))


def texts(words: list[str] = WORDS, *, in_collate: bool = False, encoder: Any = Vocabulary, **options: Any) -> Any:
    """A Hugging Face stream of four shards, whose words are numbered in its ``map`` or in the ``collate_fn``."""
    stream: Any = datasets.IterableDataset.from_generator(rows, gen_kwargs={"parts": [0, 1, 2, 3]})
    if in_collate:
        how: Any = partial(collated, encode=encoder(words))
    else:
        stream, how = stream.map(encoder(words)), collated
    return PlainData(lambda: DataLoader(stream, batch_size=2, collate_fn=how, **options))


SLOW = pytest.mark.slow
WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}
REFUSED = r"dataset\.content: .*The first batch of pass \d over .* is not what it was.*sorted\(words\)"


@pytest.mark.parametrize(
    ("in_collate", "options"),
    [(False, {}), (True, WORKERS), pytest.param(True, {}, marks=SLOW), pytest.param(False, WORKERS, marks=SLOW)],
)
def test_another_vocabulary_is_refused_and_the_same_one_is_not(
    tmp_path: Path, in_collate: bool, options: dict[str, Any]
) -> None:
    make = partial(texts, in_collate=in_collate, **options)
    moments = [("on_train_batch_end", 1, 4), ("on_train_epoch_end", 0, 0)]
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone)
    paths = sorted(tmp_path.glob("*.ckpt"))
    for path in paths:
        model = LedgerModel()
        with pytest.raises(StateMismatchError, match=REFUSED):
            train_alone(partial(make, WORDS[::-1]), model=model, ckpt_path=path)
        assert batches(model.ledger) == []
    settings = {"accept": "dataset.content"} if in_collate else {"check_content": False}
    train_alone(partial(make, WORDS[::-1]), ckpt_path=paths[0], settings=settings)


class Lines(IterableDataset[Any]):
    """Divides the rows among workers itself."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        all_rows = [*rows([0, 1])][first::step]
        while self.next < len(all_rows):
            self.next += 1
            yield all_rows[self.next - 1]
        self.next = 0


class LinesWithState(Lines):
    """Goes on at its state."""

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Shared(Lines):
    """Counts what it gives, over all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.given = torch.multiprocessing.get_context("fork").Value("i", 0)

    def __iter__(self) -> Iterator[Any]:
        for row in super().__iter__():
            self.given.value += 1
            yield row


class SharedTensor(Shared):
    def __init__(self) -> None:
        super().__init__()
        self.given = torch.zeros(3).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        for row in Lines.__iter__(self):
            self.given[0] += 1
            yield row


class Opened(Shared):
    """Reads on in a file that it has opened, as all processes do that have the same one."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.write_text("".join(f"{number:07}\n" for number in range(20000)))
        self.file = path.open()

    def __iter__(self) -> Iterator[Any]:
        for number in range(22):
            self.given.value = int(self.file.readline())
            yield {"id": number, "text": "low low low low"}


@pytest.mark.parametrize("options", [{}, {**WORKERS, "num_workers": 1}], ids=["here", "worker"])
@pytest.mark.parametrize("kind", [Shared, SharedTensor, Opened])
def test_a_resume_reads_nothing_of_what_processes_share(tmp_path: Path, kind: Any, options: dict[str, Any]) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(kind(tmp_path / "rows.txt") if kind is Opened else kind())
        return PlainData(lambda: DataLoader(made[-1], batch_size=2, collate_fn=encoded, **options))

    stopped(tmp_path / "x.ckpt", make, run=train_alone, batch=4)
    for check_content in (True, False):
        settings = {"check_content": check_content, "accept": "nondeterministic"}
        train_alone(make, ckpt_path=tmp_path / "x.ckpt", settings=settings)
    *_, checked, unchecked = made
    given = [one.given[0].item() if kind is SharedTensor else one.given.value for one in (checked, unchecked)]
    for one in made if kind is Opened else ():
        one.file.close()
    assert given[0] == given[1]


@pytest.mark.skipif(BEGINS_TWICE, reason="begins the first pass of a resume twice")
@pytest.mark.parametrize(
    ("kind", "options"), [(Lines, {}), (LinesWithState, {}), (LinesWithState, WORKERS)], ids=["none", "own", "workers"]
)
def test_of_an_iterable_that_divides_itself_another_vocabulary_is_warned_of(
    tmp_path: Path, kind: Any, options: dict[str, Any]
) -> None:
    def make(words: list[str] = WORDS) -> Any:
        how = partial(collated, encode=Vocabulary(words))
        return PlainData(lambda: DataLoader(kind(), batch_size=2, collate_fn=how, **options))

    moments = [("on_train_batch_end", 1, 4), ("on_train_epoch_end", 0, 0)]
    assert_goes_on_from_every_moment(tmp_path, make, moments, train_alone)
    words = r"The first batch of pass 0 over Lines.* is not what it was.*sorted\(words\)"
    for path in sorted(tmp_path.glob("*.ckpt")):
        with pytest.warns(StatefulWarning, match=words):
            train_alone(partial(make, WORDS[::-1]), ckpt_path=path)


def test_without_workers_functions_are_as_if_nothing_had_been_read(tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    made, encoder = kept(Vocabulary)
    stopped(path, partial(texts, encoder=encoder), run=train_alone, epoch=1, batch=3)
    for check_content in (True, False):
        train_alone(partial(texts, encoder=encoder), ckpt_path=path, settings={"check_content": check_content})
    *_, checked, unchecked = made
    assert checked.calls == unchecked.calls


def test_content_that_differs_whenever_it_is_read_is_warned_of(tmp_path: Path) -> None:
    class Entropic(Vocabulary):
        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            row = super().__call__(row)
            return {**row, "ids": [one + SystemRandom().random() for one in row["ids"]]}

    path = tmp_path / "stop.ckpt"
    make = partial(texts, encoder=Entropic)
    stopped(path, make, run=train_alone, epoch=1, batch=3)
    with pytest.warns(StatefulWarning, match="The first batch of pass 0 .* has another content whenever it is read"):
        train_alone(make, ckpt_path=path)


class Scaled(Vocabulary):
    """Adds what a hook has set."""

    added = 0

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        row, self.calls = super().__call__(row), 0
        return {**row, "ids": [one + self.added for one in row["ids"]]}


@pytest.mark.filterwarnings("ignore:.*was changed between two epochs:lightning_stateful.errors.StatefulWarning")
@pytest.mark.parametrize("restores", [True, False])
def test_what_hooks_have_set_is_no_other_tokenizer(tmp_path: Path, restores: bool) -> None:
    made, encoder = kept(Scaled)

    class Model(LedgerModel):
        def on_train_epoch_start(self) -> None:
            made[-1].added = 10 * self.current_epoch

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["added"] = made[-1].added

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if restores:
                made[-1].added = checkpoint["added"]

    make = partial(texts, encoder=encoder)
    run = training(Model, lambda: [StatefulDataCallback(seed=7)])
    if restores:
        moments = [("on_train_batch_end", 1, 4), ("on_train_epoch_end", 0, 0)]
        assert_goes_on_from_every_moment(tmp_path, make, moments, run, max_epochs=3)
        return
    path = tmp_path / "stop.ckpt"
    stopped(path, make, run=run, epoch=1, batch=3)
    with pytest.warns(StatefulWarning, match="added was set .* in the run that wrote"):
        run(make, ckpt_path=path)


class ByTrainer(Scaled):
    """Adds what follows from the trainer's epoch."""

    trainer: Any = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.added = 10 * self.trainer.current_epoch
        return super().__call__(row)


@pytest.mark.parametrize("options", [{}, pytest.param(WORKERS, marks=SLOW)], ids=["here", "workers"])
def test_what_follows_from_the_trainers_epoch_is_no_other_tokenizer(tmp_path: Path, options: dict[str, Any]) -> None:
    made, encoder = kept(ByTrainer)

    class Model(LedgerModel):
        def on_fit_start(self) -> None:
            made[-1].trainer = self.trainer

    run = training(Model, lambda: [StatefulDataCallback(seed=7)])
    moments = [("on_train_batch_end", 1, 4), ("on_train_epoch_end", 0, 0)]
    assert_goes_on_from_every_moment(tmp_path, partial(texts, encoder=encoder, **options), moments, run, max_epochs=3)


class ByStep(LedgerModel):
    """Collates by the step at which it is."""

    def collate(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        batch = encoded(samples)
        return {**batch, "x": batch["x"] + self.trainer.global_step}


@pytest.mark.parametrize("is_shards", [False, True])
def test_a_collate_fn_that_goes_by_the_step_is_warned_of_on_a_resume(tmp_path: Path, is_shards: bool) -> None:
    def fit(path: Path | None, max_steps: int) -> Any:
        model = ByStep()
        data = datasets.IterableDataset.from_generator(rows, gen_kwargs={"parts": [0, 1]}) if is_shards else Lines()
        trainer = quiet_trainer(StatefulDataCallback(seed=7), max_steps=max_steps, limit_val_batches=0)
        trainer.fit(model, DataLoader(data, batch_size=2, collate_fn=model.collate), ckpt_path=path)
        return trainer

    fit(None, 4).save_checkpoint(tmp_path / "x.ckpt")
    with pytest.warns(StatefulWarning, match=r"holds a ByStep, and Lightning reads its loader one batch ahead"):
        fit(tmp_path / "x.ckpt", 6)


class Overwrites(IterableDataset[Any]):
    """Gives the same tensor each time, with other numbers in it."""

    def __iter__(self) -> Iterator[Any]:
        held = torch.zeros(4)
        for number in range(200):
            held += 1
            held[0] = number
            yield held


def test_the_first_batch_is_not_overwritten_while_it_is_compared() -> None:
    loader: Any = patch_dataloader(DataLoader(Overwrites(), batch_size=None))
    for _ in range(5):
        batch = loader.order.read_first(0)
        time.sleep(0.05)
        assert batch.tolist() == [0, 1, 1, 1]
