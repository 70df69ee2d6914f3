"""``python -m tests.harm`` tries the whole table and writes docs/others.md."""

import sys
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests), str(tests.parent)]
    # Processes that are started find the package and `support` as they do in tests.
    import conftest  # noqa: F401

    from harm.page import write

    write()
