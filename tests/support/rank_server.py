"""Imports of the process that ranks are forked from, once for all of them; nothing here starts a thread."""

import gc
from importlib import import_module

from support.quick import shorten_waits

for _name in ("datasets", "lhotse", "pytest", "torch.distributed.fsdp", "support.ddp_runs", "support.stream_runs"):
    import_module(_name)
shorten_waits()
# A collection of garbage in a rank would copy the pages that it shares with the others.
gc.collect()
gc.freeze()
