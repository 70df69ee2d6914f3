"""Any iterable that a trainer trains on and that is no DataLoader: torchdata.nodes, WebDataset, DALI, a user's own."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lightning_stateful.loaders.stream_loader import StreamLoader
from lightning_stateful.streams.own_loader import IterableBatches


class IterableLoader(StreamLoader):
    """Serves the batches of an iterable, each rank its own, and goes on at what the model was trained on.

    Every epoch begins the iterable anew. If it, or what ``iter()`` makes of it, has ``state_dict`` and
    ``load_state_dict``, a resume goes on by the state that it had after the very batch; otherwise it is read again up
    to there. What it draws is not seeded. Attributes are those of the iterable.

    Args:
        loader: What :func:`of_batches` made of the iterable.
        **how: Arguments of :class:`StreamLoader`; ``accept=("replay",)`` begins the iterable anew on a resume within an
            epoch where it would have to be read again.
    """

    def __init__(self, loader: DataLoader[Any], **how: Any) -> None:
        dataset: Any = loader.dataset
        self.__dict__["iterable"] = dataset.iterable
        super().__init__(loader, **{**how, "seed_samples": False})

    @property
    def is_sized(self) -> bool:
        """Whether the iterable says how many batches it has."""
        try:
            len(self.iterable)
        except (TypeError, NotImplementedError):
            return False
        return True

    def __len__(self) -> int:
        return len(self.iterable)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(iterable := vars(self).get("iterable"), name):
            return getattr(iterable, name)
        return super().__getattr__(name)


def of_batches(iterable: Any) -> DataLoader[Any]:
    """A DataLoader that hands over the batches of an iterable as they are.

    Args:
        iterable: The iterable.
    """
    return DataLoader(IterableBatches(iterable), batch_size=None, collate_fn=_same)


def _same(batch: Any) -> Any:
    return batch
