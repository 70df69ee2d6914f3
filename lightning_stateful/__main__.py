"""``python -m lightning_stateful`` is the command ``lightning-stateful``."""

import sys

from lightning_stateful.cli import main

if __name__ == "__main__":
    sys.exit(main())
