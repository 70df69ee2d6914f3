"""A training script of several ranks on batches of like lengths that is killed."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from support.text_cases import killed_run

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    killed_run(Path(sys.argv[1]))
