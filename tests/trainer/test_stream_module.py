"""`StreamDataModule`, and the callback alone, on streams of any kind, and their epochs: one process."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.ledger import LedgerModel, Numbers, batches, parts, samples, trained
from support.runs import assert_goes_on_from_every_moment, ended, quiet_trainer, seeded, train, train_alone, training
from support.stream_runs import (
    EVERY_SAMPLE,
    MODULES,
    OF_OTHERS,
    OTHER_FIRST,
    OTHER_SIZES,
    SIZES,
    VAL_FIRST,
    VAL_SAMPLES,
    VAL_SIZES,
    Own,
    chunks,
    document,
    files_of,
    length_of,
    mapped,
    module,
    packed,
    tokens_in,
)
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torchdata.nodes import Batcher, Loader, Mapper, SamplerWrapper

from lightning_stateful import (
    ChunkedDataset,
    MixedStream,
    Packing,
    StatefulDataCallback,
    StreamDataModule,
    patch_dataloader,
)
from lightning_stateful.bucketing import Budget
from lightning_stateful.errors import ConfigurationError, ShardError, StatefulWarning, StateMismatchError
from lightning_stateful.stream_loader.loader import IterableLoader, of_batches
from lightning_stateful.stream_loader.options import StreamOptions

MOMENTS = [("on_before_backward", 0, 2), ("on_train_batch_end", 0, 3), ("on_train_batch_end", 1, 1)]
# More workers than this machine has processors.
MANY = "ignore:This DataLoader will create:UserWarning"
pytestmark = pytest.mark.filterwarnings(MANY)


# Several streams beside one another


def side_by_side(files: Path, **options: Any) -> StreamDataModule:
    streams = {"a": chunks(), "b": chunks(OTHER_SIZES, OTHER_FIRST), "c": mapped(files_of("json", files, "other"))}
    return module(streams, **{"steps_per_epoch": 4, **options})


def test_streams_side_by_side_go_each_through_whole_passes(files: Path) -> None:
    run = train(partial(side_by_side, files, val=None), max_epochs=6)
    assert len(trained(run.ledger)) == 24
    for name, every in (("a", EVERY_SAMPLE), ("b", OF_OTHERS)):
        found = [index for batch in parts(run.ledger, name) for index in batch]
        for start in range(0, len(found) - len(every) + 1, len(every)):
            assert sorted(found[start : start + len(every)]) == every


def test_streams_side_by_side_of_unknown_length_are_refused_with_the_remedy(files: Path) -> None:
    with pytest.raises(ConfigurationError, match="do not say where they end") as error:
        train(partial(side_by_side, files, steps_per_epoch=None))
    assert "steps_per_epoch" in str(error.value)


# Wherever loaders come from


def test_a_plain_loader_that_is_passed_to_fit_goes_on_exactly(tmp_path: Path) -> None:
    assert_goes_on_from_every_moment(tmp_path, partial(DataLoader, chunks(), batch_size=2), MOMENTS, train_alone)


# Fitting again


def test_validation_between_fits_changes_nothing() -> None:
    data = module(chunks())
    trainer = train(lambda: data, max_steps=15).trainer
    model: Any = trainer.lightning_module
    before = len(model.ledger)
    trainer.validate(model, datamodule=data, verbose=False)
    assert samples(model.ledger[before:], stage="val") == VAL_SAMPLES
    trainer.fit_loop.epoch_loop.max_steps = -1
    trainer.fit(model, datamodule=data)
    assert trained(model.ledger) == trained(train(lambda: module(chunks())).ledger)


# Evaluation


@pytest.mark.parametrize(("kind", "workers"), [("one chunk", 0), ("parquet", 0), ("mixed", 3)])
def test_every_stage_of_evaluation_gives_every_sample_once(files: Path, kind: str, workers: int) -> None:
    more = {"a": chunks(VAL_SIZES, VAL_FIRST), "b": chunks((1, 2), 600)}
    stream, expected = {
        "one chunk": (chunks((6,), VAL_FIRST), VAL_SAMPLES),
        "parquet": (mapped(files_of("parquet", files, "val")), VAL_SAMPLES),
        "mixed": (MixedStream(more), [*VAL_SAMPLES, 600, 601, 602]),
    }[kind]
    data = StreamDataModule(None, stream, stream, stream, batch_size=4, eval_batch_size=2, num_workers=workers)
    model, trainer = seeded(), quiet_trainer()
    trainer.test(model, datamodule=data, verbose=False)
    predictions = trainer.predict(model, datamodule=data)
    for stage in ("test", "predict"):
        batches = [event[2] for event in model.ledger if event[0] == stage]
        assert sorted(index for batch in batches for index in batch) == expected
        assert max(map(len, batches)) == 2
        if not workers:
            assert [index for batch in batches for index in batch] == expected
    assert [tuple(batch.tolist()) for batch in predictions] == batches


# What is drawn


def values_of(make: Any, **options: Any) -> dict[tuple[int, int], Any]:
    """The values drawn at every sample, by epoch."""
    found = {}

    class Keeps(LedgerModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rows = zip(batch["id"].tolist(), batch["x"].tolist(), strict=True)
            found.update({(self.current_epoch, index): drawn for index, drawn in rows})
            return super().training_step(batch, batch_idx)

    training(Keeps)(make, max_epochs=2, **options)
    return found


@pytest.mark.parametrize("kind", ["chunks", "interleave"])
def test_what_a_transform_draws_is_the_same_in_every_run_and_no_two_samples_draw_alike(files: Path, kind: str) -> None:
    alone = values_of(partial(MODULES[kind], files))
    assert alone == values_of(partial(MODULES[kind], files, num_workers=1))
    assert len({str(drawn) for drawn in alone.values()}) == len(alone) >= 42


# Lengths of epochs


def test_steps_per_epoch_is_the_length_of_an_epoch() -> None:
    data = module(chunks(), steps_per_epoch=7)
    assert len(data.train_dataloader()) == 7
    run = train(lambda: data, max_epochs=2)
    assert run.trainer.num_training_batches == 7
    assert [event[2] for event in trained(run.ledger)] == [*range(7)] * 2


def test_a_stream_without_steps_has_no_length() -> None:
    run = train(lambda: module(chunks()), max_epochs=1)
    assert run.trainer.num_training_batches == float("inf")
    with pytest.raises(TypeError, match="is a stream"):
        len(module(chunks()).train_dataloader())


def test_overfitting_trains_on_the_same_batches_in_every_epoch() -> None:
    run = train(lambda: module(chunks()), overfit_batches=2, max_epochs=3)
    first, second, third = (batches(run.ledger, epoch) for epoch in range(3))
    assert len(first) == 2
    assert first == second == third


# Arguments that cannot be


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: module(Numbers(10)), "StatefulDataModule serves it faster"),
        (lambda: module(chunks(), max_tokens=9, length=length_of, val=Numbers(10)), "pass eval_batch_size"),
        (lambda: module(chunks(), boundary_key=len), "boundary_key: for batches of like lengths only"),
        (lambda: module(chunks(), max_tokens=9, length=length_of, drop_last=True), "drop_last"),
        (lambda: module([1, 2, 3]), "list has an index"),
        (lambda: StreamDataModule(chunks(), batch_size=2, max_tokens=10), "batch_size"),
        (lambda: StreamDataModule(chunks(), batch_size=0), "batch_size"),
        (lambda: StreamDataModule(chunks(), batch_size=2, budget=Budget(max_tokens=3)), "The budget says"),
        (lambda: module(chunks(), replay="never"), "replay must be one of"),
        (lambda: module(chunks(), on_error="ignore"), "on_error must be one of"),
        (lambda: module(chunks(), steps_per_epoch=0), "steps_per_epoch must be at least 1, got 0"),
        (lambda: module(chunks(), buffer_size=-1), "buffer_size"),
        (lambda: module(Own(), max_tokens=10, length=len), "Make a ChunkedDataset"),
        (lambda: module(Own(), packing=Packing(9)), "so it cannot be packed exactly. Make a ChunkedDataset"),
        (lambda: module(chunks(), packing=Packing(9), max_tokens=9), "With packing, all sequences have the same"),
        (lambda: module(chunks(), packing=Packing(9), boundary_key=len), "in a batch, and leave out boundary_key."),
        (
            lambda: module(chunks(), packing=Packing(9), length="n", shuffle_batches=False, read_ahead=3),
            "tokens are counted .* leave out read_ahead, length, shuffle_batches.",
        ),
        (lambda: module(chunks(), packing=9), "packing must be a Packing, got 9"),
        (lambda: StreamDataModule(val=chunks()), "no dataset for this stage"),
        (lambda: module(chunks(), timeout=0), "timeout"),
        (lambda: module(chunks(), batch_size=None, max_tokens=9, read_ahead=0), "read_ahead must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        train(make)


# Other configurations, ranks and workers


def test_a_changed_configuration_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "stop.ckpt"
    ended(path, lambda: module(chunks()), max_steps=4)
    with pytest.raises(StateMismatchError) as error:
        train(lambda: module(chunks(seed=9, buffer_size=9, shuffle=False), batch_size=9), ckpt_path=path)
    for word in ("batch_size: saved 2, now 9", "seed: saved 3, now 9", "shuffle: saved True, now False", "buffer_size"):
        assert word in str(error.value)
    with pytest.raises(StateMismatchError, match="dataset"):
        train(lambda: module(Own()), ckpt_path=path)


@pytest.mark.parametrize(
    ("accept", "options"),
    [
        (("batch_size",), {"batch_size": 3}),
        (("drop_last",), {"drop_last": True}),
    ],
)
def test_an_accepted_change_loses_nothing_of_the_epoch(tmp_path: Path, accept: Any, options: Any) -> None:
    path = tmp_path / "stop.ckpt"
    before = ended(path, lambda: module(chunks(), val=None), max_steps=4)
    run = train(lambda: module(chunks(), val=None, accept=accept, **options), ckpt_path=path, max_epochs=3)
    found = Counter(samples(before.ledger + run.ledger))
    # Of three passes, drop_last may leave one to a fourth.
    assert set(found) == set(EVERY_SAMPLE)
    assert max(found.values()) == 3
    assert 3 * len(EVERY_SAMPLE) - found.total() <= ("drop_last" in options)


# Reading again


@pytest.mark.parametrize(("kind", "what"), [("own", "Own"), ("shuffle", r"part\d.parquet")])
@pytest.mark.filterwarnings("ignore:.*Hugging Face's state:lightning_stateful.errors.StatefulWarning")
def test_a_stream_that_has_to_be_read_again_says_so_or_refuses(
    tmp_path: Path, files: Path, kind: str, what: str
) -> None:
    path = tmp_path / "stop.ckpt"
    ended(path, partial(MODULES[kind], files), max_steps=4)
    with pytest.warns(StatefulWarning, match=rf"samples of .*{what}.* were read again.*took .* s, because"):
        train(partial(MODULES[kind], files), ckpt_path=path, max_epochs=1)
    with pytest.raises(StateMismatchError, match="replay"):
        train(partial(MODULES[kind], files, replay="refuse"), ckpt_path=path)


# Graphs of torchdata's nodes


@pytest.mark.parametrize("train_data", [SequentialSampler, RandomSampler])
def test_a_graph_of_nodes_is_no_data_with_an_index(train_data: Any) -> None:
    graph = Mapper(SamplerWrapper(train_data(range(12))), torch.tensor)
    loader = StreamDataModule(graph, batch_size=4, seed=0).train_dataloader()
    assert isinstance(loader.dataset, IterableDataset)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(12))


def test_a_loader_of_nodes_whose_state_does_not_say_its_order_warns() -> None:
    sampler = RandomSampler(range(12), generator=torch.Generator())
    loader = Loader(Batcher(SamplerWrapper(sampler), 4))
    with pytest.warns(StatefulWarning, match="draws its order from a generator"):
        IterableLoader(of_batches(loader), StreamOptions())


# Where epochs begin and end when limits, loaders or trainers change


def plain_module(**options: Any) -> StreamDataModule:
    return module(chunks(), val=None, **options)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"limit_train_batches": 9}, {"limit_train_batches": 5}),
        ({"limit_train_batches": 5}, {}),
    ],
    ids=str,
)
def test_another_limit_on_a_resume_loses_nothing(tmp_path: Path, before: Any, after: Any) -> None:
    first = ended(tmp_path / "stop.ckpt", plain_module, max_steps=8, max_epochs=-1, **before)
    resumed = train(plain_module, ckpt_path=tmp_path / "stop.ckpt", max_steps=22, max_epochs=-1, **after)
    # Two passes of eleven batches.
    assert Counter(samples(first.ledger + resumed.ledger)) == Counter(EVERY_SAMPLE * 2)


class Grows(StreamDataModule):
    """Has other chunks in its second epoch."""

    sizes = (SIZES[:4], SIZES)

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        self.train = chunks(self.sizes[min(self.trainer.current_epoch, 1)])
        return super().train_dataloader()


@pytest.mark.parametrize("turned", [False, True])
def test_other_chunks_in_a_loader_made_anew_are_all_read(turned: bool) -> None:
    class Shrinks(Grows):
        sizes = Grows.sizes[::-1]

    kind = Shrinks if turned else Grows
    with pytest.warns(StatefulWarning, match="is another than before, so it begins anew with epoch 1: dataset.chunks"):
        run = train(
            lambda: kind(batch_size=2, seed=7, train=chunks()), reload_dataloaders_every_n_epochs=1, max_epochs=2
        )
    for epoch, sizes in enumerate(kind.sizes):
        assert sorted(samples(run.ledger, epoch)) == list(range(sum(sizes)))


def test_a_trainer_leaves_no_limit_behind() -> None:
    loader = patch_dataloader(DataLoader(chunks(), batch_size=2), seed=7)
    quiet_trainer(fast_dev_run=True).fit(seeded(), loader)
    model = seeded()
    quiet_trainer(limit_val_batches=0).fit(model, loader)
    assert sorted(samples(model.ledger)) == EVERY_SAMPLE
    assert len(list(loader)) == 11


def test_a_stream_too_short_for_the_epoch_of_others_is_refused_with_the_remedy() -> None:
    class Both(StreamDataModule):
        def train_dataloader(self) -> Any:
            return {"stream": super().train_dataloader(), "index": DataLoader(Numbers(16), batch_size=2)}

    with pytest.raises(ConfigurationError, match=r"5 steps an epoch, and the epoch has 8.*steps_per_epoch=8"):
        train(lambda: Both(chunks(), batch_size=2, steps_per_epoch=5))


def test_of_streams_that_end_with_the_shortest_the_others_go_on_in_the_next_epoch(tmp_path: Path) -> None:
    class Shortest(StreamDataModule):
        def train_dataloader(self) -> Any:
            return pl.utilities.CombinedLoader(super().train_dataloader(), "min_size")

    def make() -> Any:
        return Shortest({"long": chunks(), "short": chunks(OTHER_SIZES, OTHER_FIRST)}, batch_size=2, seed=7)

    whole = train(make, max_epochs=6)
    for name, every in (("long", EVERY_SAMPLE), ("short", OF_OTHERS)):
        found = Counter(index for batch in parts(whole.ledger, name) for index in batch)
        assert set(found) == set(every)
        assert max(found.values()) - min(found.values()) <= 1, name
    first = ended(tmp_path / "stop.ckpt", make, max_epochs=2)
    resumed = train(make, max_epochs=6, seed=9, ckpt_path=tmp_path / "stop.ckpt")
    assert [*trained(first.ledger), *trained(resumed.ledger)] == trained(whole.ledger)


@pytest.mark.parametrize(("stop", "alone"), [("first_exhausted", True), ("cycle", False)])
def test_evaluation_of_a_mixture_gives_each_sample_once_whatever_stops_its_passes(stop: Any, alone: bool) -> None:
    mixed = MixedStream({"one": chunks(VAL_SIZES, VAL_FIRST), "two": chunks((9, 9), 600)}, stop=stop)
    model = seeded()
    if alone:
        quiet_trainer(StatefulDataCallback()).validate(model, DataLoader(mixed, batch_size=2), verbose=False)
    else:
        quiet_trainer().validate(model, datamodule=module(chunks(), val=mixed), verbose=False)
    assert sorted(samples(model.ledger, stage="val")) == [*VAL_SAMPLES, *range(600, 618)]


# Sequences of fixed length


@pytest.mark.parametrize("how", ["split", "whole"])
def test_an_epoch_of_sequences_has_every_token_once_as_validation_has(how: str) -> None:
    make = partial(packed, how, chunks(transform=document))
    run = train(lambda: make(num_workers=2, eval_batch_size=3), max_epochs=2)
    for epoch in range(2):
        assert sorted(samples(run.ledger, epoch)) == tokens_in(EVERY_SAMPLE)
        assert sorted(samples(run.ledger, epoch, "val")) == tokens_in(VAL_SAMPLES)
    assert len(make(steps_per_epoch=7).train_dataloader()) == 7


def test_batches_of_sequences_are_tensors_of_one_shape() -> None:
    data = StreamDataModule(chunks(transform=document), packing=Packing(8, separator=5), batch_size=3)
    *full, _ = data.train_dataloader()
    assert len(full) > 4
    for batch in full:
        assert list(batch) == ["input_ids", "labels", "position_ids", "document_ids"]
        assert {(column.shape, column.dtype) for column in batch.values()} == {((3, 8), torch.int64)}


def test_a_graph_of_nodes_is_packed_as_any_stream_is() -> None:
    graph = Mapper(SamplerWrapper(SequentialSampler(range(22))), document)
    run = train(lambda: packed("whole", graph, val=None), max_epochs=2)
    assert sorted(samples(run.ledger)) == sorted(tokens_in(range(22)) * 2)


def test_a_stream_whose_documents_are_all_left_out_is_warned_of() -> None:
    packing = Packing(8, how="whole", too_long="drop")
    make = partial(module, ChunkedDataset([0, 1], lambda ref: iter([[1] * 9] * 20)), packing=packing, val=None)
    with pytest.warns(StatefulWarning, match="has given no batch in an epoch, so nothing was trained on"):
        assert trained(train(make, max_epochs=1).ledger) == []


def test_a_limit_of_tokens_goes_on_from_a_save_at_the_last_batch_of_an_epoch(tmp_path: Path) -> None:
    def make() -> StreamDataModule:
        return packed("split", chunks(transform=document), steps_per_epoch=3, max_tokens_total=200, val=None)

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 6:
                trainer.save_checkpoint(tmp_path / "last.ckpt")

    whole = train(make, max_epochs=9, callbacks=[Save()])
    rest = train(make, ckpt_path=tmp_path / "last.ckpt", max_epochs=9)
    assert 6 < whole.trainer.global_step < 27
    assert trained(rest.ledger) == trained(whole.ledger)[6:]


@pytest.mark.parametrize("how", ["split", "whole"])
def test_another_packing_is_refused_by_name_or_accepted_and_loses_nothing(tmp_path: Path, how: str) -> None:
    for kind, path in (("packed " + how, "packing"), ("packed mixture", "sources.news.packing")):
        make, stop = partial(MODULES[kind], tmp_path), tmp_path / f"{kind}.ckpt"
        begun = ended(stop, make, max_steps=3)
        changed: dict[str, Packing] = {"sequence_length": Packing(17), "separator": Packing(12, separator=9**9)}
        if kind == "packed whole":
            changed = {"open_sequences": Packing(12, how="whole", too_long="split", open_sequences=2)}
        for field, packing in changed.items():
            with pytest.raises(StateMismatchError, match=f"  - {path}.{field}: saved .*, now ") as caught:
                train(partial(make, packing=packing), ckpt_path=stop)
            found = {difference.path: difference.remedy for difference in caught.value.differences}
            remedy = "Pass a Packing with the saved value, or accept the change with accept=('packing',)."
            assert found[f"{path}.{field}"] == remedy
            assert all("packing" in name for name in found)
            accepted = partial(make, packing=packing, accept=("packing",))
            # In other sequences what is held comes again; of the next pass every token comes once.
            with pytest.warns(StatefulWarning, match=f"another .*{path}.{field}"):
                rest = train(accepted, ckpt_path=stop, max_epochs=2)
            expected = tokens_in(EVERY_SAMPLE if kind != "packed mixture" else [*EVERY_SAMPLE, *OF_OTHERS])
            separator = [packing.separator] * (packing.separator is not None)
            assert set(samples(begun.ledger, 0) + samples(rest.ledger, 0)) - set(separator) == set(expected)
            assert sorted(set(samples(rest.ledger, 1)) - set(separator)) == expected


def test_a_run_that_broke_off_goes_on_with_what_is_broken_left_out(tmp_path: Path) -> None:
    def read(ref: int) -> Any:
        return iter([[] if (ref, at) == (1, 20) else [ref * 1000 + at * 10, 7] for at in range(30)])

    def make(**options: Any) -> StreamDataModule:
        return StreamDataModule(ChunkedDataset(range(3), read), packing=Packing(4), batch_size=2, **options)

    stop = tmp_path / "stop.ckpt"

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            trainer.save_checkpoint(stop)

    class Remembers(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.served = torch.nn.Linear(1, 1), Counter[int]()

        def training_step(self, batch: Any) -> Any:
            self.served.update(batch["input_ids"].flatten().tolist())
            return self.layer.weight.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    model = Remembers()
    with pytest.raises(ShardError, match=r'has no tokens(.|\n)*on_error="skip"'):
        quiet_trainer(Save(), max_epochs=1).fit(model, datamodule=make())
    data, again = make(on_error="skip"), Remembers()
    quiet_trainer(max_epochs=1).fit(again, datamodule=data, ckpt_path=stop)
    assert data.position_report()["samples_skipped"] == 1
    saved = torch.load(stop, weights_only=False)["global_step"]
    assert saved > 0
    assert sum(again.served.values()) == 89 * 2 - saved * 8 + 2


def test_a_map_style_dataset_is_evaluated_beside_a_stream() -> None:
    run = train(lambda: module(chunks(), val=Numbers(5, first=VAL_FIRST)), max_epochs=1)
    assert sorted(samples(run.ledger, stage="val")) == list(range(500, 505))
