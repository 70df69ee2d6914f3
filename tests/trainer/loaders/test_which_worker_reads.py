"""Samples that follow from the worker that reads them: a resumed epoch gives each batch to the worker it had."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import stopped, train_alone
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_stateful import patch_dataloader
from lightning_stateful.errors import StatefulWarning

NUMBER = 22


class ByWorker(Dataset[dict[str, Any]]):
    """Samples with the worker's number, and noise that each worker draws as it starts."""

    noise = torch.zeros(4)

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> dict[str, Any]:
        worker = get_worker_info()
        assert worker is not None
        return {"id": index + 100 * worker.id, "x": torch.full((4,), index / NUMBER) + self.noise}


class ByIndex(ByWorker):
    """Samples that are the same, whatever reads them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "x": torch.full((4,), index / NUMBER) + torch.rand(4)}


def draw_noise(number: int) -> None:
    worker = get_worker_info()
    assert worker is not None
    worker.dataset.noise = number + torch.randn(4)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("workers", [2, 3])
def test_each_batch_of_a_resumed_epoch_is_read_by_the_worker_that_it_had(
    tmp_path: Path, workers: int, persistent: bool
) -> None:
    def make() -> Any:
        how: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent, "worker_init_fn": draw_noise}
        return DataLoader(ByWorker(), batch_size=2, shuffle=True, **how)

    whole = train_alone(make, max_epochs=2)
    for epoch, batch in ((0, 0), (0, 3), (1, 4)):
        before = stopped(tmp_path / "a.ckpt", make, epoch=epoch, batch=batch, run=train_alone, max_epochs=2)
        rest = train_alone(make, ckpt_path=tmp_path / "a.ckpt", max_epochs=2)
        assert before + rest.ledger == whole.ledger, (epoch, batch)
        assert all(torch.equal(value, whole.weights[name]) for name, value in rest.weights.items()), (epoch, batch)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_plain_loop_goes_on_with_the_worker_whose_turn_it_is() -> None:
    def loader() -> Any:
        return patch_dataloader(DataLoader(ByWorker(), batch_size=2, num_workers=3, worker_init_fn=draw_noise), seed=0)

    whole, first = [[batch["id"].tolist() for batch in one] for one in (loader(), loader())]
    assert [batch[0] // 100 for batch in whole] == [number % 3 for number in range(NUMBER // 2)]
    assert first == whole
    stopped_at: Any = loader()
    batches = iter(stopped_at)
    before = [next(batches)["id"].tolist() for _ in range(4)]
    resumed: Any = loader()
    resumed.load_state_dict(stopped_at.state_dict())
    assert before + [batch["id"].tolist() for batch in resumed] == whole


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("kind", [ByWorker, ByIndex])
def test_another_number_of_workers_is_named_where_samples_follow_from_them(tmp_path: Path, kind: Any) -> None:
    def make(workers: int) -> Any:
        return DataLoader(kind(), batch_size=2, shuffle=True, num_workers=workers)

    for epoch, batch in ((0, 3), (0, NUMBER // 2 - 1)):
        stopped(tmp_path / "a.ckpt", partial(make, 2), epoch=epoch, batch=batch, run=train_alone, max_epochs=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_alone(partial(make, 3), ckpt_path=tmp_path / "a.ckpt", max_epochs=2)
        said = [str(one.message) for one in caught if issubclass(one.category, StatefulWarning)]
        assert ["num_workers was 2" in one for one in said] == [True] * (kind is ByWorker), said
