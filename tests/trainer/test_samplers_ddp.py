"""Other people's samplers on two real ranks: every slot once, exact over stops, and handed over from one to two."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed
from harm.basics import LENGTH as NUM_SAMPLES
from harm.basics import num_ranks, own_rank, permutation
from harm.own_samplers import CountsAtEnd, CountsAtStart, Shuffled
from harm.runs import train as train_entry
from harm.table import Entry, WithCallback, batches, of
from support.ddp_runs import Link, assert_chains, chain_of, on_ranks
from support.ledger import LedgerModel, Numbers, samples, trained
from support.ranks import Ranks
from support.runs import Outcome, ended, quiet_trainer
from support.sampler_cases import TO_EVALUATE, PlainData, cuts_loader, evaluate, torchdatas_distributed, train_with
from support.samplers import LENGTH, LOADERS
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_stateful import StatefulDataCallback, patch_dataloader

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

# Drawn as others here are; tests/harm has them on two ranks.
IN_TABLE = ("subset", "global random", "random with replacement", "weighted without replacement", "torchdata's loader")
# Every way in which a sampler may stand in a loader, and those that ask torch for the ranks by themselves.
ON_RANKS: dict[str, Callable[[], DataLoader[Any]]] = {
    **{name: make for name, make in LOADERS.items() if name not in IN_TABLE},
    "torchdata's distributed": torchdatas_distributed,
    "lhotse's": cuts_loader,
}
DRAWN = ("weighted", "class balanced")
# How many samples there may be in the last item of an epoch, which is served to both ranks.
REPEATED = {"unbatched": 1, "unbatched, by itself": 1, "lhotse's": 1, "class balanced": 4, "batches without len": 4}
STOPS = [("on_before_backward", 0, 2), ("on_train_batch_end", 1, 1)]
# After so many steps of an epoch a run on one rank leaves the rest to two.
HANDED_OVER = 2
HANDED = ("random", "weighted", "class balanced", "batches without len", "own state", "unbatched", "lhotse's")


@cache
def alone(name: str) -> list[Any]:
    """The ledger of a run in one process."""
    return train_with(ON_RANKS[name], max_epochs=2).ledger


def seeds_differ() -> None:
    """Give every rank other global generators, as a script without ``seed_everything`` has."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(100 + rank)
    np.random.seed(100 + rank)


def made(name: str) -> Any:
    seeds_differ()
    return PlainData(ON_RANKS[name])


def chain(folder: Path, name: str) -> list[Link]:
    return chain_of(lambda: made(name), folder, STOPS, callbacks=lambda: [StatefulDataCallback(seed=5)])


def counts(runs: list[list[Any]], epoch: int) -> Counter[int]:
    return Counter(index for ledger in runs for index in samples(ledger, epoch))


@pytest.mark.parametrize("name", ON_RANKS)
@pytest.mark.slow
def test_a_chain_of_stops_on_ranks_serves_what_one_does_though_their_generators_differ(ranks: Ranks, name: str) -> None:
    runs = assert_chains(ranks.of(chain, name))
    for epoch in range(2):
        served, expected = counts([run["ledger"] for run in runs], epoch), counts([alone(name)], epoch)
        assert not expected - served
        assert (served - expected).total() <= REPEATED.get(name, 0)
        assert name in DRAWN or set(served) == set(range(LENGTH))


# Another number of ranks


def resumed_on_two_ranks(folder: Path) -> dict[str, list[Any]]:
    return {
        name: train_with(make, ckpt_path=folder.parent / f"{name}.ckpt", seed=9, **on_ranks()).ledger
        for name, make in ON_RANKS.items()
        if name in HANDED
    }


def hand_over(folder: Path, name: str, **options: Any) -> Outcome:
    """Train a few steps and leave a checkpoint for another number of ranks."""
    return ended(folder / f"{name}.ckpt", ON_RANKS[name], run=train_with, max_steps=HANDED_OVER, **options)


@pytest.fixture(scope="module")
def of_one_rank(ranks: Ranks) -> dict[str, list[Any]]:
    """The ledgers of one process, which leaves checkpoints for two."""
    return {name: hand_over(ranks.folder, name).ledger for name in HANDED}


@pytest.mark.parametrize("name", HANDED)
def test_one_rank_hands_over_to_two(ranks: Ranks, of_one_rank: dict[str, list[Any]], name: str) -> None:
    first, second = (found[name] for found in ranks.of(resumed_on_two_ranks))
    assert [event[:4] for event in trained(first)] == [event[:4] for event in trained(second)]
    for epoch in range(2):
        served, expected = counts([of_one_rank[name], first, second], epoch), counts([alone(name)], epoch)
        assert not expected - served
        assert (served - expected).total() <= REPEATED.get(name, 0)


# Evaluation


def evaluated(folder: Path) -> dict[str, Any]:
    return {name: evaluate(make, **on_ranks()) for name, make in TO_EVALUATE.items()}


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices:UserWarning")
@pytest.mark.parametrize("name", TO_EVALUATE)
def test_evaluation_gives_every_sample_once_over_the_ranks_and_predictions_their_indices(
    ranks: Ranks, name: str
) -> None:
    found, alone = [rank[name] for rank in ranks.of(evaluated)], evaluate(TO_EVALUATE[name])
    for stage in ("validate", "test", "predict"):
        served = sorted(index for rank in found for batch in rank[stage] for index in batch)
        expected = sorted(index for batch in alone[stage] for index in batch)
        # A batch is never cut: both ranks get the only one.
        assert served == (sorted(expected * 2) if name == "one batch" else expected), stage
        assert len({len(rank[stage]) for rank in found}) == 1
        assert all(batch for rank in found for batch in rank[stage])
    for rank in found:
        assert rank["predictions"] == [predicted for _, predicted in rank["written"]] == rank["predict"]
        # Lightning infers no indices for loaders without len.
        expected = [[] for _ in rank["predict"]] if "without len" in name else rank["predict"]
        assert [indices for indices, _ in rank["written"]] == expected
        assert rank["written at the end"] == ([[]] if "without len" in name else [expected])


class OtherLater(Shuffled):
    """Each rank's share; from epoch 1 on it may have other samples on a rank, or on all."""

    def __init__(self, others: tuple[int, ...] = ()) -> None:
        self.others = others

    def __len__(self) -> int:
        return NUM_SAMPLES // num_ranks()

    def __iter__(self) -> Iterator[int]:
        order = permutation(self.epoch + 7 * (self.epoch > 0 and own_rank() in self.others))
        return iter(order[own_rank() :: num_ranks()])


def resumed_with_others(folder: Path) -> list[Any]:
    """A run of each rank's own sampler that is stopped in epoch 1, and goes on with the same or with others."""
    entries = [Entry(of(lambda others=others: OtherLater(others)), "equal", deals="itself") for others in ((), (0, 1))]
    whole = train_entry(entries[0], save=folder / "middle.ckpt", after=5)
    after = [train_entry(entry, ckpt_path=folder / "middle.ckpt") for entry in entries]
    return [whole.trained[5:] == after[0].trained, after[1].trained, after[1].error]


def test_a_sampler_of_each_rank_with_other_data_in_a_later_epoch_is_refused(ranks: Ranks) -> None:
    for is_exact, trained_on, error in ranks.of(resumed_with_others):
        assert (is_exact, trained_on) == (True, [])
        assert error.startswith("StateMismatchError: The sampler's state in epoch 1")


class ByLosses(Shuffled):
    """Draws by losses, on each rank for itself."""

    def __init__(self) -> None:
        self.losses = torch.ones(NUM_SAMPLES)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(2 * self.epoch + own_rank())
        return iter(torch.multinomial(self.losses, NUM_SAMPLES, replacement=True, generator=generator).tolist())


class SetsLosses(pl.Callback):
    """Sets the losses at the end of each epoch, saves the first, and may set them again where training begins."""

    def __init__(self, path: Path, is_restored: bool, sampler: ByLosses) -> None:
        self.path, self.is_restored, self.sampler = path, is_restored, sampler

    def set_for(self, epoch: int) -> None:
        self.sampler.losses = 1 + epoch * torch.arange(NUM_SAMPLES).float()

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.set_for(trainer.current_epoch + 1)
        if trainer.current_epoch == 0 and trainer.ckpt_path is None:
            trainer.save_checkpoint(self.path)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        if self.is_restored:
            self.set_for(trainer.current_epoch)


def resumed_by_losses(folder: Path) -> list[Any]:
    """Runs that go on at their second epoch, with losses that are restored and not: if exactly, and what is said."""
    found = []
    for is_restored in (True, False):
        path = folder / f"{is_restored}.ckpt"
        entry = Entry(WithCallback(ByLosses, partial(SetsLosses, path, is_restored)), "runs", deals="itself")
        whole, again = train_entry(entry), train_entry(entry, ckpt_path=path)
        found.append([whole.trained[NUM_SAMPLES // 4 :] == again.trained, again.error, again.said])
    return found


def test_losses_that_a_sampler_of_each_rank_draws_by_are_restored_or_a_warning_says_so(ranks: Ranks) -> None:
    for rank, (restored, left) in enumerate(ranks.of(resumed_by_losses)):
        assert restored[:2] == [True, ""]
        assert left[:2] == [False, ""]
        # The first process compares for all.
        said = [sum("and nothing had changed it again" in text for text in run[2]) for run in (restored, left)]
        assert said == [0, int(rank == 0)]


class OfManyLengths:
    """Batches without a length, of which each rank has another number, or all as many."""

    def __init__(self, more: int) -> None:
        self.more = more

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([4 * number + own_rank()] for number in range(3 + self.more * own_rank()))


def ended_apart(folder: Path) -> list[list[str]]:
    """What is said where ranks end their epochs after other numbers of batches, and after as many; and on resumes."""
    entries = [
        Entry(batches(lambda more=more: OfManyLengths(more)), "runs", deals="itself", trainer={"max_steps": 5})
        for more in (1, 0)
    ]
    paths = {folder / f"{number}.ckpt": entry for number, entry in enumerate(entries)}
    found = [train_entry(entry, save=path, after=4).said for path, entry in paths.items()]
    return [*found, *(train_entry(entry, ckpt_path=path).said for path, entry in paths.items())]


def test_ranks_that_have_other_numbers_of_batches_are_warned_of(ranks: Ranks) -> None:
    apart, alike, goes_on, goes_on_alike = zip(*ranks.of(ended_apart), strict=True)
    said = "OfManyLengths has given ranks other numbers of batches in epoch 0: 3 on rank 0, 4 on rank 1"
    # The one that ends later sees both.
    assert any(one.startswith(said) for one in apart[1])
    said = "A checkpoint is written where ranks stand at other batches: rank 1 at batch 4 of epoch 0, and rank 0 at"
    assert [any(one.startswith(said) for one in of_rank) for of_rank in apart] == [True, False]
    assert any(one.startswith("The checkpoint was written where ranks [1] stood at another") for one in goes_on[0])
    assert alike == goes_on_alike == ([], [])


# Draws


class Drawn:
    """Batches of classes, drawn from a generator that it holds, or from the process's."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(4):
            drawn = np.random if self.generator is None else self.generator
            yield [int(index) for index in drawn.permutation(NUM_SAMPLES)[:4]]


GENERATORS: dict[str, tuple[Callable[[], Any], bool]] = {
    "seeded by rank": (lambda: np.random.default_rng(100 + own_rank()), True),
    "seeded alike": (lambda: np.random.RandomState(100), False),
    "by nobody": (np.random.default_rng, True),
    # As train() seeds it.
    "of the process": (lambda: None, False),
}


def drawn_on_ranks(folder: Path, name: str) -> list[Any]:
    """A run of each rank's own sampler, what it is resumed to from its second epoch, and what is trained on alone."""
    entry = Entry(batches(lambda: Drawn(GENERATORS[name][0]())), "runs", deals="itself")
    alone = train_entry(entry, own=False)
    whole = train_entry(entry, save=folder / "middle.ckpt", after=5)
    again = train_entry(entry, ckpt_path=folder / "middle.ckpt")
    return [alone.trained, whole.trained, again.trained, [*whole.said, *again.said, again.error]]


@pytest.mark.parametrize("name", GENERATORS)
def test_ranks_draw_apart_where_the_generators_of_their_samplers_do(ranks: Ranks, name: str) -> None:
    runs = ranks.of(drawn_on_ranks, name)
    for alone, whole, again, said in runs:
        assert said == [""]
        assert len(whole) == len(alone)
        assert again == whole[5:]
    differ = [runs[0][way] != runs[1][way] for way in (0, 1)]
    assert differ == [GENERATORS[name][1]] * 2


class DrawnSamples(Sampler[int]):
    """All samples, shuffled by a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(NUM_SAMPLES).tolist())


def dealt_out_though_seeded_apart(folder: Path, name: str) -> list[Any]:
    """The first epoch, by Lightning alone and with the callback."""
    entry = Entry(of(lambda: DrawnSamples(GENERATORS[name][0]())), "multiset")
    return [train_entry(entry, own=own).epoch(0) for own in (False, True)]


@pytest.mark.parametrize("name", ["seeded by rank", "by nobody"])
def test_where_lightning_deals_out_ranks_share_what_one_sampler_yields_though_theirs_differ(
    ranks: Ranks, name: str
) -> None:
    runs = ranks.of(dealt_out_though_seeded_apart, name)
    assert all(len(alone) == len(own) for alone, own in runs)
    assert sorted(index for _, own in runs for batch in own for index in batch) == list(range(NUM_SAMPLES))


def drawn_in_a_plain_loop(folder: Path, name: str) -> list[Any]:
    """Two epochs of a patched loader, and what is left of the second for one that loads a state from within it."""

    def make() -> Any:
        return patch_dataloader(batches(lambda: Drawn(GENERATORS[name][0]()))(0), seed=3)

    whole = make()
    first = [batch.tolist() for batch in whole]
    second, states = zip(*((batch.tolist(), whole.state_dict()) for batch in whole), strict=True)
    resumed = make()
    resumed.load_state_dict(states[0])
    return [first, list(second), [batch.tolist() for batch in resumed]]


def drawn_by_a_seed(folder: Path, seed: int | None) -> tuple[list[Any], list[str]]:
    """An epoch of a loader that each rank patches for itself, and what is said of that."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_stateful").addHandler(handler)
    loader = batches(lambda: Drawn(np.random.default_rng(100 + own_rank())))(0)
    patched = patch_dataloader(loader, seed=seed, num_replicas=1, rank=0)
    logging.getLogger("lightning_stateful").removeHandler(handler)
    return [batch.tolist() for batch in patched], said


def test_ranks_that_patch_a_loader_each_for_itself_are_told_that_they_draw_alike(ranks: Ranks) -> None:
    (first, (said,)), (other, _) = ranks.of(drawn_by_a_seed, None)
    assert first == other
    assert "Each of 2 ranks iterates a Drawn of its own" in said
    assert [said for _, said in ranks.of(drawn_by_a_seed, 5)] == [[], []]


@pytest.mark.parametrize("name", ["seeded by rank", "seeded alike", "by nobody"])
def test_in_a_plain_loop_each_rank_has_its_own_where_the_generators_of_a_sampler_differ(
    ranks: Ranks, name: str
) -> None:
    (first, *left), (other, *_) = runs = ranks.of(drawn_in_a_plain_loop, name)
    is_own = GENERATORS[name][1]
    # What knows of no ranks is dealt out.
    assert [len(first), len(left[0])] == [4 if is_own else 2] * 2
    assert first != other
    for _, second, resumed in runs:
        assert resumed == second[1:]


class Buffered(IterableDataset[int]):
    """Shuffles its rank's share in a buffer, by a generator of its own that goes on from pass to pass."""

    def __init__(self) -> None:
        self.generator = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        buffer = list[int]()
        for number in range(own_rank(), NUM_SAMPLES, num_ranks()):
            if len(buffer) < 4:
                buffer.append(number)
                continue
            at = self.generator.randrange(4)
            yield buffer[at]
            buffer[at] = number


def reloaded(folder: Path) -> list[Any]:
    """What is trained on where Lightning begins a pass over each new loader that it gives up behind the first batch."""
    how = {"reload_dataloaders_every_n_epochs": 1}
    entry = Entry(lambda _: DataLoader(Buffered(), batch_size=2), "equal", trainer=how)
    return [train_entry(entry, own=own).trained for own in (False, True)]


def test_of_a_pass_that_lightning_gives_up_ranks_read_no_more_than_its_first_batch(ranks: Ranks) -> None:
    for alone, own in ranks.of(reloaded):
        assert own == alone


# Ends of passes


def limited(folder: Path) -> dict[str, Any]:
    """Runs whose epochs a limit cuts, alone and with the callback, and what resumes of the latter train on."""
    of_epochs = {"limit_train_batches": 2}
    entry = Entry(of(CountsAtEnd), "multiset", trainer=of_epochs)
    plain, whole = (train_entry(entry, own=own) for own in (False, True))
    again = {}
    for stop in (1, 2, 3, 4):
        train_entry(entry, save=folder / "stop.ckpt", after=stop)
        torch.distributed.barrier()
        again[stop] = train_entry(entry, ckpt_path=folder / "stop.ckpt")
    return {
        "plain": plain.trained,
        "whole": whole.trained,
        "error": whole.error,
        "said": [said for run in (whole, *again.values()) for said in run.said],
        "again": {stop: run.trained for stop, run in again.items()},
    }


def test_a_limit_leaves_a_sampler_that_is_dealt_out_where_lightning_does_behind_its_last_item(ranks: Ranks) -> None:
    runs = ranks.of(limited)
    for run in runs:
        assert (run["error"], run["said"]) == ("", [])
        assert run["again"] == {stop: run["whole"][stop:] for stop in run["again"]}
    for epoch in range(3):
        served = sorted(index for run in runs for at, batch in run["whole"] if at == epoch for index in batch)
        assert served == sorted(permutation(epoch)[:16])
    # Lightning deals out the list in an order of its own.
    assert len({str(batch) for _, batch in runs[0]["plain"]}) == len(runs[0]["plain"])


# Samplers that call collectives


class Broadcasts(Sampler[int]):
    """Rank 0 draws the order of an epoch, and tells the others."""

    def __init__(self) -> None:
        self.rank, self.num_replicas, self.weights = own_rank(), num_ranks(), torch.ones(NUM_SAMPLES)

    def __len__(self) -> int:
        return NUM_SAMPLES // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        drawn = torch.multinomial(self.weights, NUM_SAMPLES)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(drawn, 0)
        return iter(drawn[self.rank :: self.num_replicas].tolist())


class Gathers(Broadcasts):
    """Weighs samples by counts of all ranks, which a hook raises in training."""

    epoch = 0

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.ones(NUM_SAMPLES)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.weights = epoch, self.counts.clone()
        torch.distributed.all_reduce(self.weights)


class Counts(pl.Callback):
    """Counts what was trained on."""

    def __init__(self, sampler: Gathers) -> None:
        self.sampler = sampler

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sampler.counts[batch.flatten()] += 4 * batch.flatten()


class BroadcastsAll(Broadcasts):
    """Gives every rank the whole order, for others to deal out."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.num_replicas = 0, 1


class CutsToLeast(Broadcasts):
    """Gives every rank as many samples as the one has that planned least, which ``len()`` asks of all."""

    def __len__(self) -> int:
        least = torch.tensor(super().__len__())
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        return int(least)


ENTRIES = {
    "deals itself": Entry(of(Broadcasts), "multiset", deals="itself"),
    "meets in len": Entry(of(CutsToLeast), "multiset", deals="itself"),
    "is dealt out": Entry(of(BroadcastsAll), "multiset"),
    "counts": Entry(WithCallback(Gathers, Counts), "multiset", deals="itself"),
}


def stopped_everywhere(folder: Path, name: str) -> list[Any]:
    """A run, and of stops within epochs and at an end what the resume did."""
    entry = ENTRIES[name]
    whole, again = train_entry(entry), []
    for stop in (1, len(whole.epoch(0)), len(whole.epoch(0)) + 1):
        train_entry(entry, save=folder / "stop.ckpt", after=stop)
        torch.distributed.barrier()
        resumed = train_entry(entry, ckpt_path=folder / "stop.ckpt")
        again.append((resumed.trained == whole.trained[stop:], resumed.said, resumed.error))
    return [whole.trained, whole.said, again]


@pytest.mark.parametrize("name", ["deals itself", "is dealt out", "meets in len"])
def test_a_sampler_that_broadcasts_its_order_is_exact_and_no_rank_waits_for_others(ranks: Ranks, name: str) -> None:
    for batches_of_rank, said, again in ranks.of(stopped_everywhere, name):
        assert len(batches_of_rank) == 3 * NUM_SAMPLES // 8
        assert (said, again) == ([], [(True, [], "")] * 3)


def test_where_it_gathers_what_training_changes_a_resume_says_so(ranks: Ranks) -> None:
    for rank, (_, said, again) in enumerate(ranks.of(stopped_everywhere, "counts")):
        assert "Gathers may yield other items than before training" in said[0]
        for is_exact, said_again, error in again:
            assert not is_exact
            assert error or rank or "Gathers had been changed in training" in said_again[0]


def longest(samples: list[int]) -> torch.Tensor:
    """Pads to the longest batch of all ranks."""
    length = torch.tensor(len(samples))
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(length, torch.distributed.ReduceOp.MAX)
    return torch.tensor(samples + [-1] * (int(length) - len(samples)))


class SharesSeed(IterableDataset[int]):
    """Shuffles by a seed of rank 0, and takes its share."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        shared = torch.tensor(epoch)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(shared, 0)
        self.epoch = int(shared)

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(NUM_SAMPLES), NUM_SAMPLES)[own_rank() :: num_ranks()])


ENTRIES |= {
    "collate_fn": Entry(lambda _: DataLoader(range(NUM_SAMPLES), 4, shuffle=True, collate_fn=longest), "multiset"),
    "iterable": Entry(lambda _: DataLoader(SharesSeed(), 4), "same"),
}


@pytest.mark.parametrize("name", ["collate_fn", "iterable"])
def test_no_rank_reads_a_batch_again_by_itself_where_reading_calls_collectives(ranks: Ranks, name: str) -> None:
    for batches_of_rank, _, again in ranks.of(stopped_everywhere, name):
        assert batches_of_rank
        assert [(is_exact, error) for is_exact, _, error in again] == [(True, "")] * 3


def asked_by_rank_0(folder: Path) -> list[Any]:
    """What is left of an epoch of a plain loop in which rank 0 alone looks at the state, and that of a resume."""

    def make() -> Any:
        pl.seed_everything(7, verbose=False)
        return patch_dataloader(of(CutsToLeast)(0), num_replicas=1, rank=0)

    whole, batches_of_epoch, states = make(), [], []
    for number, batch in enumerate(whole):
        batches_of_epoch.append(batch.tolist())
        if number == 0 and own_rank() == 0:
            assert whole.state_dict()
        if number == 1:
            states.append(whole.state_dict())
    resumed = make()
    resumed.load_state_dict(states[0])
    return [batches_of_epoch[2:], [batch.tolist() for batch in resumed]]


def test_rank_0_looks_at_the_state_of_such_a_sampler_by_itself(ranks: Ranks) -> None:
    for left, resumed in ranks.of(asked_by_rank_0):
        assert left == resumed != []


def steps_beside_validation(folder: Path) -> int:
    sampler = CountsAtStart()
    trainer = quiet_trainer(StatefulDataCallback(seed=0), **on_ranks(max_epochs=1), val_check_interval=1)
    data = [DataLoader(Numbers(NUM_SAMPLES), batch_size=4, sampler=sampler) for _ in range(2)]
    trainer.fit(LedgerModel(), *data)
    return trainer.global_step


def test_a_validation_within_an_epoch_leaves_the_rest_of_a_shared_sampler_to_training(ranks: Ranks) -> None:
    assert ranks.of(steps_beside_validation) == [NUM_SAMPLES // 8] * 2
