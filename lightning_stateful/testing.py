"""Tests of your own data: of a whole data module in real processes, and of samplers and loaders by their contract.

:func:`verify_datamodule` trains on a data module, stops, resumes, and compares every sample.

An object that resumes exactly has ``state_dict()``, ``load_state_dict(state)`` and ``__iter__``, and obeys eight laws
(:data:`LAWS`). With pytest, subclass :class:`ResumeContract`; each law is also a function of its own that raises
:class:`ContractError`. States are always loaded into fresh objects.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

from lightning_stateful.audit.compare import identities
from lightning_stateful.audit.laws import (
    LAWS,
    check_echo,
    check_fresh,
    check_not_configuration,
    check_plain,
    check_rank_free,
    check_snapshot,
    check_steady,
    check_suffix,
    read_settings,
)
from lightning_stateful.audit.runner import ContractError, Recorder, Stops
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.verify.result import Verification
from lightning_stateful.verify.trials import verify

__all__ = [
    "LAWS",
    "ContractError",
    "Recorder",
    "ResumeContract",
    "check_echo",
    "check_fresh",
    "check_not_configuration",
    "check_plain",
    "check_rank_free",
    "check_snapshot",
    "check_steady",
    "check_suffix",
    "read_settings",
    "verify_datamodule",
]


def verify_datamodule(factory: Any = None, *, allow_refused: bool = False, **options: Any) -> Verification:
    """Train on a data module in new processes, stop, resume, and compare every sample.

    Args:
        factory: A function or class at the level of a module, or ``"package.module:name"``: what makes, or is, a
            LightningDataModule, a LightningModule with loaders, or a DataLoader.
        allow_refused: Let pass what is refused by name, as other numbers of ranks of a dataset that divides itself.
        **options: ``devices``, ``workers``, ``config``, ``seed`` and so on, as of
            :func:`~lightning_stateful.verify.trials.verify`.

    Returns:
        What was tried.

    Raises:
        AssertionError: A batch differs, or a resume was refused; with the first difference and its cause.
        ConfigurationError: An argument is wrong, or the data cannot be trained on at all.

    Example:
        ::

            from lightning_stateful.testing import verify_datamodule

            def test_my_data_resume_exactly():
                verify_datamodule("my_project.data:make_datamodule", devices=(1, 2), workers=(0, 2))
    """
    found = verify(factory, **options)
    if found.faults or (found.refused and not allow_refused):
        raise AssertionError(f"\n{found}")
    return found


class ResumeContract:
    """One pytest test a law, for a sampler or loader of your own; all read one recording of its runs.

    Attributes:
        num_epochs: Passes over the object that are compared.
        stops: When states are taken; ``"spread"`` or numbers where a run has many items or starts processes.
        num_replicas: Ranks of the run that is stopped, for the law on ranks.
        resize: Numbers of ranks to resume on, for the same law.
        drop_last: Whether less than a step's samples may be left out on another number of ranks.

    Example:
        ::

            from lightning_stateful.testing import ResumeContract

            class TestMySampler(ResumeContract):
                def make(self, num_replicas=1, rank=0):
                    return MySampler(100, num_replicas=num_replicas, rank=rank, seed=0)

                def make_other(self):
                    return MySampler(100, num_replicas=1, rank=0, seed=1)
    """

    num_epochs: int = 2
    stops: Stops = "every"
    num_replicas: int = 2
    resize: Sequence[int] = (1, 3)
    drop_last: bool = False
    _recorder: ClassVar[Recorder]

    def make(self, num_replicas: int = 1, rank: int = 0) -> Any:
        """A fresh object for one rank, always of the same configuration."""
        raise ConfigurationError(f"{type(self).__name__} must define make(self, num_replicas=1, rank=0).")

    def make_other(self) -> Any:
        """A fresh object of another configuration, such as another seed; None leaves this out.

        It must refuse the states of :meth:`make`. Nothing else shows a setting that is missing in the state.
        """
        return None

    def key(self, item: Any) -> list[Hashable]:
        """The identities of an item's samples; by default the integers and strings in it."""
        return identities(item)

    def settings(self, source: Any) -> Any:
        """An object's settings; by default its length and the constructor arguments it keeps under their names."""
        return read_settings(source)

    def test_fresh(self) -> None:
        """A state loads into a new object, before ``iter()`` or after it."""
        self._check(check_fresh)

    def test_suffix(self) -> None:
        """A fresh object with a state yields exactly the rest."""
        self._check(check_suffix)

    def test_echo(self) -> None:
        """An object gives back the state it has loaded."""
        self._check(check_echo)

    def test_plain(self) -> None:
        """A state survives a JSON round trip."""
        self._check(check_plain)

    def test_steady(self) -> None:
        """A state has the same keys at every step."""
        self._check(check_steady)

    def test_snapshot(self) -> None:
        """A state does not change after it was taken or loaded."""
        self._check(check_snapshot)

    def test_rank_free(self) -> None:
        """States are equal on all ranks and serve any number of ranks."""
        self._check(
            check_rank_free,
            num_replicas=self.num_replicas,
            resize=self.resize,
            key=self.key,
            drop_last=self.drop_last,
        )

    def test_not_configuration(self) -> None:
        """Loading a state never alters a setting."""
        other = self.make_other if self.make_other() is not None else None
        self._check(check_not_configuration, make_other=other, settings=self.settings)

    def _check(self, law: Callable[..., None], **options: Any) -> None:
        cls = type(self)  # pytest makes an object for each test
        if "_recorder" not in vars(cls):
            cls._recorder = Recorder(self.make)
        cls._recorder.factory = self.make
        law(cls._recorder, num_epochs=self.num_epochs, stops=self.stops, **options)
