"""What a model, and a loader that is not dealt out, draw on real ranks: alike where they do in Lightning alone."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ddp_runs import on_ranks
from support.ledger import Numbers
from support.ranks import Ranks
from support.runs import quiet_trainer
from support.stream_cases import rank_and_ranks
from torch.utils.data import DataLoader, default_collate

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning

KINDS = ("torch", "random", "numpy")


def alike() -> None:
    pl.seed_everything(3)


def apart() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3 + rank_and_ranks()[0])


def unseeded() -> None:
    """As processes that nobody has seeded: torch's generator stands alike in all of them."""
    apart()
    torch.manual_seed(3)


def seeded_by_rank() -> None:
    pl.seed_everything(3 + rank_and_ranks()[0])


STANDS: dict[str, Callable[[], None]] = {
    "alike": alike,
    "apart": apart,
    "unseeded": unseeded,
    "seeded by rank": seeded_by_rank,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(2, tmp_path_factory.mktemp("model draws") / "2")


class Draws(pl.LightningModule):
    """Draws in each step and as each epoch starts, adds noise to gradients that all ranks share, and notes ids."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)
        self.drawn: list[tuple[float, float, float]] = []
        self.ids: list[list[int]] = []

    def draw(self) -> None:
        self.drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))

    def on_train_epoch_start(self) -> None:
        self.draw()

    def training_step(self, batch: Any) -> torch.Tensor:
        self.draw()
        self.ids.append(batch["id"].tolist())
        return self.net(batch["x"]).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.01 * torch.randn_like(parameter)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(
    stand: str, make: Callable[[], Any], *callbacks: Any, path: Any = None, save_to: Any = None, **options: Any
) -> dict[str, Any]:
    model = Draws()
    STANDS[stand]()
    trainer = quiet_trainer(*callbacks, **on_ranks(**options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, make(), ckpt_path=path)
        if save_to is not None:
            trainer.save_checkpoint(save_to)
    return {
        "words": [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)],
        "drawn": model.drawn,
        "ids": model.ids,
        "weights": model.net.weight.tolist(),
    }


def runs(stand: str, then: str, folder: Path, make: Callable[[], Any], **options: Any) -> dict[str, Any]:
    """A run without this package, one with it, and one that is stopped in its second epoch and resumed."""
    plain = run(stand, make, **options)
    whole = run(stand, make, StatefulDataCallback(seed=7), **options)
    first = run(stand, make, StatefulDataCallback(seed=7), **options, max_steps=5, save_to=folder / "x.ckpt")
    dist.barrier()
    rest = run(then, make, StatefulDataCallback(seed=7), path=folder / "x.ckpt", **options)
    return {"plain": plain, "whole": whole, "first": first, "rest": rest}


def dealt_out(folder: Path, stand: str, then: str) -> Any:
    return runs(stand, then, folder, lambda: DataLoader(Numbers(24), batch_size=4, shuffle=True))


def kinds_alike(found: list[dict[str, Any]], name: str) -> set[str]:
    """The kinds of generators from which two ranks have drawn the same numbers; from others they never have."""
    draws = [list(zip(*of[name]["drawn"], strict=True)) for of in found]
    pairs = list(zip(KINDS, *draws, strict=True))
    assert all(one == other or not set(one) & set(other) for _, one, other in pairs)
    return {kind for kind, one, other in pairs if one == other}


@pytest.mark.parametrize(
    ("stand", "then", "expected"),
    [
        ("alike", "alike", set(KINDS)),
        ("apart", "apart", set()),
        ("unseeded", "unseeded", {"torch"}),
        # A resume draws as the run did, however its own generators stand.
        ("alike", "apart", set(KINDS)),
    ],
)
def test_a_model_draws_alike_on_ranks_where_it_does_in_lightning_alone(
    ranks: Ranks, stand: str, then: str, expected: set[str]
) -> None:
    found = ranks.of(dealt_out, stand, then)
    for name in ("plain", "whole", "rest"):
        assert kinds_alike(found, name) == expected, name
    for of in found:
        # A resume begins within an epoch, and Lightning does not begin that again.
        assert of["rest"]["drawn"] == of["whole"]["drawn"][-len(of["rest"]["drawn"]) :]
        assert of["rest"]["ids"] == of["whole"]["ids"][5:]
        if "torch" in expected:
            assert of["whole"]["weights"] == found[0]["whole"]["weights"] == of["rest"]["weights"]
            assert not any("states of optimizers" in word for word in of["first"]["words"])
        elif of is found[0]:
            # The noise that each rank has added has parted their weights.
            assert any("of ranks [1] are others than those of rank 0" in word for word in of["first"]["words"])
            assert any("of ranks [1] were others than those of rank 0" in word for word in of["rest"]["words"])


def own_shuffles(folder: Path, stand: str) -> Any:
    def make() -> Any:
        return DataLoader(Numbers(24), batch_size=4, shuffle=True)

    options: dict[str, Any] = {"use_distributed_sampler": False, "max_epochs": 2}
    whole = run(stand, make, StatefulDataCallback(), **options)
    run(stand, make, StatefulDataCallback(), **options, max_steps=8, save_to=folder / "x.ckpt")
    dist.barrier()
    rest = run(stand, make, StatefulDataCallback(), path=folder / "x.ckpt", **options)
    return {"whole": whole, "rest": rest}


def test_ranks_that_are_seeded_by_rank_and_not_dealt_out_resume_exactly(ranks: Ranks) -> None:
    found = ranks.of(own_shuffles, "seeded by rank")
    assert not kinds_alike(found, "whole")
    for of in found:
        assert of["rest"]["ids"] == of["whole"]["ids"][8:]
        assert of["rest"]["drawn"] == of["whole"]["drawn"][-len(of["rest"]["drawn"]) :]
        assert sorted(one for batch in of["whole"]["ids"][:6] for one in batch) == list(range(24))
    assert found[0]["whole"]["ids"] != found[1]["whole"]["ids"]


def share(samples: Any) -> Any:
    """This rank's share of a batch that all ranks have read."""
    rank, ranks = rank_and_ranks()
    return default_collate(samples[rank::ranks])


def shared_batches(folder: Path, stand: str, kind: str) -> Any:
    def make() -> Any:
        generator = torch.Generator().manual_seed(1 + (rank_and_ranks()[0] if kind == "own, apart" else 0))
        held = {"generator": generator} if kind.startswith("own") else {}
        return DataLoader(Numbers(24), batch_size=8, shuffle=True, collate_fn=share, **held)

    return runs(stand, stand, folder, make, use_distributed_sampler=False)


@pytest.mark.parametrize(
    ("stand", "kind", "is_whole"),
    [
        ("alike", "process's", True),
        ("apart", "process's", False),
        ("apart", "own, alike", True),
        ("alike", "own, apart", False),
    ],
)
def test_a_shuffle_that_is_not_dealt_out_is_alike_on_ranks_where_it_is_in_torch(
    ranks: Ranks, stand: str, kind: str, is_whole: bool
) -> None:
    found = ranks.of(shared_batches, stand, kind)
    for name in ("plain", "whole"):
        for epoch in range(2):
            ids = sorted(number for of in found for batch in of[name]["ids"][3 * epoch :][:3] for number in batch)
            assert (ids == list(range(24))) == is_whole, (name, epoch)
    for of in found:
        assert of["rest"]["ids"] == of["whole"]["ids"][5:]


def fitted_after_a_failure(folder: Path) -> Any:
    """A fit on generators that stand apart, which fails, and another one on generators that stand alike."""

    class Fails(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise KeyError("its own")

    def make() -> Any:
        return DataLoader(Numbers(24), batch_size=4, shuffle=True)

    with pytest.raises(KeyError):
        run("apart", make, StatefulDataCallback(seed=7), Fails())
    found = run("alike", make, StatefulDataCallback(seed=7))
    return {"whole": {"drawn": found["drawn"]}}


def test_a_fit_behind_one_that_has_failed_finds_generators_as_they_stand_now(ranks: Ranks) -> None:
    assert kinds_alike(ranks.of(fitted_after_a_failure), "whole") == set(KINDS)
