"""Run all benchmarks, or those named, each in a fresh process, and write ``results/README.md``."""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS, text_table

_HELPERS = {"__main__", "measure", "peer_loaders"}
# Run where they are named only: they take long.
_LONG = {"torture"}


def _summary(result: dict[str, Any]) -> list[str]:
    lines = [f"## {result['name']}", "", result["claim"], ""]
    for table in result["tables"]:
        lines += [f"**{table['title']}**", "", *text_table(table["rows"], markdown=True), ""]
    if result["targets"]:
        lines += ["**Targets**", "", *text_table(result["targets"], markdown=True), ""]
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    return [*lines, f"{result['date']}; {machine}; {result['seconds']:.0f} s.", ""]


def _write_readme() -> None:
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks`; every ratio is against a peer in the same run, repetitions interleaved.",
        "",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        lines += _summary(json.loads(path.read_text()))
    (RESULTS / "README.md").write_text("\n".join(lines))


def main() -> int:
    folder = Path(__file__).parent
    scripts = sorted({module.name for module in pkgutil.iter_modules([str(folder)])} - _HELPERS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"which to run, by default all but torture: {', '.join(scripts)}"
    )
    names = parser.parse_args().names or sorted(set(scripts) - _LONG)
    if unknown := sorted(set(names) - set(scripts)):
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(scripts)}")
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        began = time.perf_counter()
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        ended = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=folder.parent, env=environment)
        if ended.returncode:
            failed.append(name)
        print(f"-- {name}: {time.perf_counter() - began:.0f} s\n", flush=True)
    _write_readme()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
