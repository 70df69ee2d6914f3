"""Whose a loader or sampler is, told by where its class stands: this floor does not import Lightning."""

from __future__ import annotations

from typing import Any


def is_lightnings(value: Any) -> bool:
    """Whether the class of ``value`` is one of Lightning's."""
    return type(value).__module__.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric")


def is_torchdatas(value: Any) -> bool:
    """Whether the class of ``value`` is one of torchdata's, which add a state and nothing else; it is kept here."""
    return type(value).__module__.startswith("torchdata.")
