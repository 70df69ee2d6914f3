"""The one place that asks torch how many ranks there are."""

from __future__ import annotations

import torch.distributed

from lightning_stateful.core.topology import Topology


def detect_topology(num_replicas: int | None = None, rank: int | None = None) -> Topology:
    """The topology given, or else that of the default process group; one replica where there is none.

    Raises:
        ConfigurationError: A value is out of range.
    """
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    if num_replicas is None:
        num_replicas = torch.distributed.get_world_size() if running else 1
    if rank is None:
        rank = torch.distributed.get_rank() if running else 0
    return Topology(num_replicas=num_replicas, rank=rank)
