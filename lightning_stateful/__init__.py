"""Stop a PyTorch Lightning run anywhere and resume it exactly.

Plug a :class:`StatefulDataModule` into ``Trainer.fit``, or add a :class:`StatefulDataCallback` to a Trainer whose
loaders come from anywhere, and resume with ``ckpt_path``. Without Lightning, :class:`StatefulLoader` and
:class:`StatefulDistributedSampler` are ordinary PyTorch objects with ``state_dict`` and ``load_state_dict``.

Orders of samples or batches, and the protocol for your own, are in :mod:`lightning_stateful.core`; checks and tests
of your own samplers and orders are :func:`check_resume` and :mod:`lightning_stateful.testing`. ``docs/architecture.md``
has the layers, the files that a batch passes, and a glossary.

Names are resolved when they are first used: importing the package imports neither lightning nor datasets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_stateful.audit import AuditResult, check_resume
    from lightning_stateful.bucketing import Budget, QuadraticCost
    from lightning_stateful.data_modules import (
        BucketDataModule,
        MixtureDataModule,
        PackedDataModule,
        RoundRobinDataModule,
        StatefulDataModule,
        StreamDataModule,
    )
    from lightning_stateful.loaders import PackedDataset, StatefulLoader, is_patched, patch_dataloader
    from lightning_stateful.mixture import WeightSchedule
    from lightning_stateful.packing import Packing
    from lightning_stateful.samplers import (
        BucketBatchSampler,
        MixtureBatchSampler,
        RoundRobinBatchSampler,
        StatefulDistributedSampler,
    )
    from lightning_stateful.streams import ChunkedDataset, MixedStream
    from lightning_stateful.trainer import StatefulDataCallback
    from lightning_stateful.user_samplers import DDPSamplerWrapper

__version__ = "0.2.0"

# The public names of each folder, which is imported when one of them is first used.
_FOLDERS = {
    "audit": ("AuditResult", "check_resume"),
    "bucketing": ("Budget", "QuadraticCost"),
    "data_modules": (
        "BucketDataModule", "MixtureDataModule", "PackedDataModule", "RoundRobinDataModule", "StatefulDataModule",
        "StreamDataModule",
    ),
    "loaders": ("PackedDataset", "StatefulLoader", "is_patched", "patch_dataloader"),
    "mixture": ("WeightSchedule",),
    "packing": ("Packing",),
    "samplers": (
        "BucketBatchSampler", "MixtureBatchSampler", "RoundRobinBatchSampler", "StatefulDistributedSampler",
    ),
    "streams": ("ChunkedDataset", "MixedStream"),
    "trainer": ("StatefulDataCallback",),
    "user_samplers": ("DDPSamplerWrapper",),
}  # fmt: skip

__all__ = [
    "AuditResult",
    "BucketBatchSampler",
    "BucketDataModule",
    "Budget",
    "ChunkedDataset",
    "DDPSamplerWrapper",
    "MixedStream",
    "MixtureBatchSampler",
    "MixtureDataModule",
    "PackedDataModule",
    "PackedDataset",
    "Packing",
    "QuadraticCost",
    "RoundRobinBatchSampler",
    "RoundRobinDataModule",
    "StatefulDataCallback",
    "StatefulDataModule",
    "StatefulDistributedSampler",
    "StatefulLoader",
    "StreamDataModule",
    "WeightSchedule",
    "check_resume",
    "is_patched",
    "patch_dataloader",
]


def __getattr__(name: str) -> Any:
    for folder, names in _FOLDERS.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{folder}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
