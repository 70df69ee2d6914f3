"""The command ``lightning-stateful``: looks at data and checkpoints, before, between and after runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The command line; by default that of the process.

    Returns:
        0 where all is right, 1 where something was found, and 2 where the command cannot do what was asked; the reason
        is on standard error.
    """
    try:
        from lightning_stateful.cli.commands import run
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        print("lightning-stateful: the command needs click: pip install 'lightning-stateful[cli]'", file=sys.stderr)
        return 2
    return run(arguments)
