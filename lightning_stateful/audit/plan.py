"""What an audit is to do."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_stateful.audit.runs import Factory, Reference, Run, observe
from lightning_stateful.audit.samples import Key, identities
from lightning_stateful.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The arguments of :func:`~lightning_stateful.audit.resume.check_resume`.

    Raises:
        ConfigurationError: A number is out of range.
    """

    factory: Factory
    num_replicas: int = 1
    num_epochs: int = 2
    chain: tuple[int, ...] | None = None
    resize: tuple[int, ...] = ()
    key: Key = identities
    drop_last: bool = False
    set_epoch: bool = False
    shared_state: bool = True
    max_items: int | None = None

    def __post_init__(self) -> None:
        limits = {
            "num_replicas": self.num_replicas,
            "num_epochs": self.num_epochs,
            "resize": min(self.resize, default=1),
        }
        for name, value in {**limits, "max_items": 1 if self.max_items is None else self.max_items}.items():
            if value < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {value}.")
        if min(self.chain or (), default=0) < 0:
            raise ConfigurationError(f"chain must be numbers from 0, got {[n for n in self.chain or () if n < 0]}.")
        if self.resize and self.max_items is not None:
            raise ConfigurationError("resize compares whole epochs; leave max_items out, or resize=().")

    def run(self, num_replicas: int, rank: int) -> Run:
        """A fresh object of one rank."""
        return Run(self.factory, num_replicas, rank, set_epoch=self.set_epoch)

    def runs(self, num_replicas: int) -> list[Run]:
        """Fresh objects of all ranks."""
        return [self.run(num_replicas, rank) for rank in range(num_replicas)]

    def observe(self, num_replicas: int) -> list[Reference]:
        """The uninterrupted run of every rank."""
        return [observe(run, self.num_epochs, self.max_items) for run in self.runs(num_replicas)]
