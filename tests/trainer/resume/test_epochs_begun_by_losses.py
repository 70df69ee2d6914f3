"""Samplers that plan an epoch by what training writes: a resume within it begins it again by what there is then."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.ddp_runs import on_ranks
from support.ranks import Ranks
from support.runs import quiet_trainer
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightning_stateful import StatefulDataCallback
from lightning_stateful.errors import StatefulWarning, StateMismatchError

NUMBER, SIZE = 24, 4
STEPS = NUMBER // SIZE
WARNED = "goes on with an epoch that was begun"


class Plans(Sampler[int]):
    """Half an epoch at random, then by what training has made of something when the epoch begins."""

    def __len__(self) -> int:
        return NUMBER

    def level(self) -> int:
        return 0

    def __iter__(self) -> Iterator[int]:
        order, middle, level = torch.randperm(NUMBER).tolist(), NUMBER // 2, self.level() % (NUMBER // 2)
        yield from order[:middle]
        rest = order[middle:]
        yield from rest[level:] + rest[:level]


class ByLosses(Plans):
    def __init__(self, model: Any) -> None:
        self.losses = model.losses

    def level(self) -> int:
        return int(self.losses.sum() * 7)


class ByBuffer(ByLosses):
    """Shares the tensor with the module, which saves and restores it."""


class ByWeights(Plans):
    def __init__(self, model: Any) -> None:
        self.model = model

    def level(self) -> int:
        return int(self.model.weight.detach() * 1e5)


class BySteps(ByWeights):
    def level(self) -> int:
        return int(self.model.trainer.global_step) if self.model._trainer else 0


class ByEpoch(ByWeights):
    def level(self) -> int:
        return int(self.model.current_epoch) if self.model._trainer else 0


class Learns(pl.LightningModule):
    """Writes losses, and keeps them for the next epoch, or those that the running one has begun with, too."""

    def __init__(self, kind: Any, restores: str, folder: Path) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        losses = torch.zeros(NUMBER)
        self.losses: torch.Tensor
        if kind is ByBuffer:
            self.register_buffer("losses", losses)
        else:
            self.losses = losses
        self.begun_with, self.restores, self.folder = losses.clone(), restores, folder
        self.trained: list[list[int]] = []
        self.sampler = kind(self)

    def train_dataloader(self) -> Any:
        return DataLoader(range(NUMBER), batch_size=SIZE, sampler=self.sampler)

    def on_train_epoch_start(self) -> None:
        self.begun_with = self.losses.clone()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.trained.append(batch.tolist())
        self.losses[batch] = (self.weight * batch).detach() + batch_idx
        return (self.weight * batch).float().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.ckpt_path is None:
            self.trainer.save_checkpoint(self.folder / f"{self.trainer.global_step}.ckpt")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = {"latest": self.losses.clone(), "begun": self.begun_with.clone()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["kept"]
        if self.restores in self.kept:
            self.losses.copy_(self.kept[self.restores])

    def on_train_start(self) -> None:
        if self.restores == "latest, as training starts":
            self.losses.copy_(self.kept["latest"])
        if self.trainer.ckpt_path is not None:
            self.trainer.save_checkpoint(self.folder / "again.ckpt")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(
    kind: Any, folder: Path, step: int | str = 0, restores: str = "", *, about: str = WARNED
) -> tuple[list[list[int]], list[str]]:
    """The batches, and the warnings of the package ``about`` something, by default how the epoch was begun."""
    model = Learns(kind, restores, folder)
    trainer = quiet_trainer(StatefulDataCallback(seed=0), max_epochs=3, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, ckpt_path=folder / f"{step}.ckpt" if step else None)
    said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
    return model.trained, [one for one in said if about in one]


KINDS = [(ByLosses, "latest"), (ByBuffer, ""), (ByWeights, ""), (BySteps, "")]


@pytest.mark.parametrize(("kind", "restores"), KINDS)
@pytest.mark.parametrize("step", [2, STEPS + 2])
def test_an_epoch_that_is_begun_again_by_what_training_has_changed_since_is_warned_of(
    tmp_path: Path, kind: Any, restores: str, step: int
) -> None:
    whole, said = fit(kind, tmp_path)
    assert said == []
    resumed, said = fit(kind, tmp_path, step, restores)
    assert resumed != whole[step:]
    assert [kind.__name__ in one for one in said] == [True]


@pytest.mark.parametrize(("kind", "restores"), KINDS)
def test_one_of_which_the_rest_was_trained_on_in_part_is_refused(tmp_path: Path, kind: Any, restores: str) -> None:
    fit(kind, tmp_path)
    with pytest.raises(StateMismatchError, match=f"{kind.__name__} no longer yields what it did up to this item"):
        fit(kind, tmp_path, STEPS + 4, restores)


@pytest.mark.parametrize(("kind", "restores"), [(ByLosses, "begun"), (ByEpoch, "")])
@pytest.mark.parametrize("step", [2, STEPS + 2])
def test_nothing_is_said_where_the_epoch_is_begun_as_it_was(
    tmp_path: Path, kind: Any, restores: str, step: int
) -> None:
    whole, _ = fit(kind, tmp_path)
    resumed, said = fit(kind, tmp_path, step, restores)
    assert (resumed[: STEPS - step % STEPS], said) == (whole[step : STEPS * (step // STEPS + 1)], [])


@pytest.mark.parametrize(("kind", "restores"), KINDS)
def test_nothing_is_said_where_an_epoch_is_over(tmp_path: Path, kind: Any, restores: str) -> None:
    whole, _ = fit(kind, tmp_path)
    resumed, said = fit(kind, tmp_path, STEPS, restores)
    assert (resumed, said) == (whole[STEPS:], [])


class KeepsPlan(Sampler[int]):
    """Goes on with its plan by a state of its own, which may hold the losses too that training writes."""

    def __init__(self, model: Any) -> None:
        self.losses, self.plan, self.given = model.losses, list[int](), 0

    def __len__(self) -> int:
        return NUMBER

    def __iter__(self) -> Iterator[int]:
        if not 0 < self.given < NUMBER:
            self.plan, self.given = torch.multinomial(1 + self.losses, NUMBER, replacement=True).tolist(), 0
        while self.given < NUMBER:
            self.given += 1
            yield self.plan[self.given - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"plan": list(self.plan), "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.plan, self.given = state["plan"], state["given"]


class KeepsLosses(KeepsPlan):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "losses": self.losses.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.losses.copy_(state["losses"])


OWN_STATE = "holds something that training changes as well, such as losses"


@pytest.mark.parametrize("kind", [KeepsPlan, KeepsLosses])
def test_a_state_of_the_samplers_own_that_holds_what_training_writes_is_warned_of(tmp_path: Path, kind: Any) -> None:
    whole, _ = fit(kind, tmp_path, about=OWN_STATE)
    # Of the 16th item; training has written losses since.
    resumed, said = fit(kind, tmp_path, STEPS - 1, "latest, as training starts", about=OWN_STATE)
    assert (resumed == whole[STEPS - 1 :]) == (kind is KeepsPlan)
    assert len(said) == (kind is KeepsLosses)
    # So is a resume of what that resume has saved before its first batch.
    _, said = fit(kind, tmp_path, "again", "latest, as training starts", about=OWN_STATE)
    assert len(said) == (kind is KeepsLosses)


class CountsPasses(KeepsPlan):
    """Draws by the number of its passes, too."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        generator = torch.Generator().manual_seed(self.passes)
        return iter(torch.multinomial(1 + self.losses, NUMBER, replacement=True, generator=generator).tolist())

    state_dict = load_state_dict = None  # type: ignore[assignment]  # it has none


OTHERS = "had been changed by something else than passes of the sampler"


@pytest.mark.parametrize("restores", ["", "latest, as training starts"])
def test_what_training_has_written_into_a_sampler_that_counts_is_named_at_the_end_of_an_epoch(
    tmp_path: Path, restores: str
) -> None:
    whole, _ = fit(CountsPasses, tmp_path, about=OTHERS)
    resumed, said = fit(CountsPasses, tmp_path, STEPS, restores, about=OTHERS)
    assert (resumed == whole[STEPS:]) == bool(restores)
    assert [one.startswith(f"CountsPasses.losses {OTHERS}") for one in said] == [True] * (not restores)


LEFT = "had been changed in training when the checkpoint was written"


@pytest.mark.parametrize("kind", [KeepsPlan, KeepsLosses])
@pytest.mark.parametrize("restores", ["", "latest, as training starts"])
def test_so_is_what_is_written_into_one_whose_state_holds_a_tensor(tmp_path: Path, kind: Any, restores: str) -> None:
    whole, _ = fit(kind, tmp_path, about=LEFT)
    resumed, said = fit(kind, tmp_path, STEPS, restores, about=LEFT)
    assert (resumed == whole[STEPS:]) == bool(restores)
    assert [one.startswith(f"{kind.__name__} {LEFT}") for one in said] == [True] * (not restores)


class DealtByLevel(DistributedSampler[int]):
    """Deals its items out itself, from a level on that a hook raises."""

    level = 0

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.level) % NUMBER for index in super().__iter__()])


class RaisesLevel(Learns):
    """Raises the level behind each epoch, saves it, and sets it again before training."""

    kept = 0

    def train_dataloader(self) -> Any:
        self.sampler = DealtByLevel(range(NUMBER), seed=5)
        return DataLoader(range(NUMBER), batch_size=SIZE, sampler=self.sampler)

    def on_train_epoch_end(self) -> None:
        self.sampler.level += 5

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["level"] = self.sampler.level

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["level"]

    def on_train_start(self) -> None:
        self.sampler.level = self.kept


class DealtByBuffer(DistributedSampler[int]):
    """Deals its items out itself, and draws them by a buffer of the module."""

    model: Any = None

    def __iter__(self) -> Iterator[int]:
        level = int(self.model.losses[0])
        return iter([(index + level) % NUMBER for index in super().__iter__()])


class HoldsBuffer(Learns):
    """Has losses in a buffer, which is equal on all ranks."""

    def train_dataloader(self) -> Any:
        sampler = DealtByBuffer(range(NUMBER), seed=5)
        sampler.model = self
        return DataLoader(range(NUMBER), batch_size=SIZE, sampler=sampler)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.trained.append(batch.tolist())
        self.losses += 1
        return (self.weight * batch).float().mean()


def fit_on_ranks(folder: Path, step: int, kind: Any = RaisesLevel, of: Any = ByEpoch) -> Any:
    """What this rank trained on, and how it was warned of the beginning of an epoch."""
    model = kind(of, "", folder)
    trainer = quiet_trainer(
        StatefulDataCallback(seed=0), limit_val_batches=0, use_distributed_sampler=False, **on_ranks(max_epochs=3)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, ckpt_path=folder / f"{step}.ckpt" if step else None)
    return model.trained, [str(one.message) for one in caught if WARNED in str(one.message)]


def whole_and_resumed(folder: Path) -> list[Any]:
    return [fit_on_ranks(folder, step) for step in (0, STEPS // 2 + 1)]


def test_a_rank_that_deals_itself_goes_by_its_own_beginning(tmp_path: Path) -> None:
    for (whole, _), (resumed, said) in Ranks(2, tmp_path / "ranks").of(whole_and_resumed):
        assert (resumed, said) == (whole[STEPS // 2 + 1 :], [])


def by_buffer(folder: Path, step: int) -> list[Any]:
    return [fit_on_ranks(folder, at, HoldsBuffer, ByBuffer)[0] for at in (0, step)]


def test_ranks_that_deal_themselves_by_a_buffer_go_on_exactly_where_an_epoch_begins(tmp_path: Path) -> None:
    for whole, resumed in Ranks(2, tmp_path / "ranks").of(by_buffer, STEPS // 2):
        assert resumed == whole[STEPS // 2 :]


def test_within_an_epoch_they_are_refused(tmp_path: Path) -> None:
    for error in Ranks(2, tmp_path / "ranks").errors_of(by_buffer, STEPS // 2 + 2):
        assert "no longer yields what it did up to this item" in error


class Weighted(Sampler[int]):
    """Draws by weights that a callback sets once, and restores."""

    def __init__(self, model: Any) -> None:
        self.weights = torch.ones(NUMBER)

    def __len__(self) -> int:
        return NUMBER

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, NUMBER, replacement=True).tolist())


class SetsWeights(Learns):
    """Sets the weights of its sampler behind the first epoch; a checkpoint has them."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.save_checkpoint(self.folder / f"{self.trainer.global_step}.ckpt")

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.sampler.weights = torch.arange(NUMBER) + 1.0
            self.trainer.save_checkpoint(self.folder / "end.ckpt")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["weights_of_sampler"] = self.sampler.weights

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["weights_of_sampler"]

    def on_train_start(self) -> None:
        if self.trainer.ckpt_path is not None:
            self.sampler.weights = self.kept


def test_nothing_is_said_where_what_was_set_is_restored_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Learns", SetsWeights)
    whole, _ = fit(Weighted, tmp_path)
    first, said = fit(Weighted, tmp_path, "end")
    second, said_again = fit(Weighted, tmp_path, STEPS + 3)
    assert (first, second) == (whole[STEPS:], whole[STEPS + 3 :])
    assert said == said_again == []


class BySetEpoch(Plans):
    """Follows an attribute ``epoch``, which hooks set."""

    def __init__(self, model: Any) -> None:
        self.epoch = 0

    def level(self) -> int:
        return self.epoch


class SetsEpoch(Learns):
    """Sets the epoch of its sampler behind each epoch, and before training; saves within epochs."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 < STEPS:
            super().on_train_batch_end(outputs, batch, batch_idx)

    def on_train_start(self) -> None:
        self.sampler.epoch = self.current_epoch

    def on_train_epoch_end(self) -> None:
        self.sampler.epoch = self.current_epoch + 1


@pytest.mark.parametrize("step", [2, STEPS + 2, 2 * STEPS + 4])
def test_nothing_is_said_where_hooks_set_the_epoch_of_a_sampler_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setitem(globals(), "Learns", SetsEpoch)
    whole, said = fit(BySetEpoch, tmp_path, about="BySetEpoch")
    assert said == []
    assert fit(BySetEpoch, tmp_path, step, about="BySetEpoch") == (whole[step:], [])
