"""Imports of the process that ranks are forked from, once for all of them; nothing here starts a thread."""

import gc
from importlib import import_module

for _name in ("click", "datasets", "lightning_stateful.cli.commands", "benchmarks.torture.rank"):
    import_module(_name)
# A collection of garbage in a rank would copy the pages that it shares with the others.
gc.collect()
gc.freeze()
