"""Proof on this machine: train in two DDP processes, kill them in the middle of an epoch, resume, compare.

Four runs of ``train_bytes.py``: one that nobody interrupts; one that is killed by SIGKILL in its second epoch; that one
resumed on two processes; and resumed on one. What counts of a killed run is what its last checkpoint contains. Exits
with 1 if a sample was replayed or skipped, or if the weights differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

Step = tuple[int, int, list[int]]  # epoch, batch, samples
SCRIPT = Path(__file__).with_name("train_bytes.py")


@dataclass(frozen=True)
class Setting:
    """Size of the proof."""

    samples: int
    batch_size: int
    epochs: int
    kill_at: int

    def steps(self, processes: int) -> int:
        """Steps of an uninterrupted run."""
        return self.epochs * -(-self.samples // (self.batch_size * processes))


def launch(folder: Path, processes: int, setting: Setting) -> subprocess.Popen[bytes]:
    """Start the training script in a process group of its own."""
    command = [
        sys.executable, str(SCRIPT), str(folder), "--quiet",
        f"--processes={processes}", f"--samples={setting.samples}",
        f"--batch-size={setting.batch_size}", f"--epochs={setting.epochs}",
    ]  # fmt: skip
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(command, start_new_session=True, stdout=output, stderr=output)


def run(folder: Path, processes: int, setting: Setting, title: str, total: int, kill_at: int | None = None) -> None:
    """Run the script under a progress bar until it ends, or until it is killed at a step."""
    steps = folder / f"rank0-{len(list(folder.glob('rank0-*.jsonl')))}.jsonl"
    process = launch(folder, processes, setting)
    with tqdm(total=total, desc=f"{title:<28}", unit="batch", ncols=100) as bar:
        while process.poll() is None:
            time.sleep(0.02)
            show_progress(bar, steps)
            if kill_at is not None and bar.n >= kill_at:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                bar.set_postfix_str("killed")
                return
        show_progress(bar, steps)
    if process.returncode or kill_at is not None:
        print((folder / "output.txt").read_text()[-3000:], file=sys.stderr)
        raise SystemExit(f"{title}: the run ended with {process.returncode}")


def show_progress(bar: tqdm[None], steps: Path) -> None:
    """Move the bar to the number of steps written so far."""
    if steps.exists():
        bar.update(len(steps.read_bytes().splitlines()) - bar.n)


def ledger(folder: Path, number: int, *, before_step: int | None = None) -> list[list[Step]]:
    """What each rank trained on in one run of a folder, up to a step."""
    ranks = []
    for path in sorted(folder.glob(f"rank*-{number}.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        ranks.append([tuple(line[1:]) for line in lines if before_step is None or line[0] < before_step])
    return ranks


def counted(runs: list[list[list[Step]]], setting: Setting) -> tuple[int, int, int]:
    """Batches over all ranks, samples replayed and samples skipped within their epochs."""
    seen: Counter[tuple[int, int]] = Counter()
    batches = 0
    for ranks in runs:
        for steps in ranks:
            batches += len(steps)
            seen.update((epoch, sample) for epoch, _, samples in steps for sample in samples)
    everything = {(epoch, sample) for epoch in range(setting.epochs) for sample in range(setting.samples)}
    return batches, sum(count - 1 for count in seen.values()), len(everything - seen.keys())


def same_weights(first: Path, second: Path) -> bool:
    """Whether two runs ended with the same weights, bit by bit."""
    ours, theirs = (torch.load(folder / "weights.pt", weights_only=True) for folder in (first, second))
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def prove(folder: Path, setting: Setting) -> bool:
    """Run everything, print the table, and say whether the proof holds."""
    whole, two, one = (folder / name for name in ("uninterrupted", "resumed_on_two", "resumed_on_one"))
    for path in (whole, two):
        path.mkdir(parents=True)
    run(whole, 2, setting, "uninterrupted, 2 processes", setting.steps(2))
    run(two, 2, setting, "to be killed, 2 processes", setting.steps(2), setting.kill_at)
    saved = torch.load(two / "last.ckpt", weights_only=True)["global_step"]
    shutil.copytree(two, one)
    run(two, 2, setting, "resumed on 2 processes", setting.steps(2) - saved)
    left = setting.samples - (saved - setting.steps(2) // 2) * 2 * setting.batch_size
    run(one, 1, setting, "resumed on 1 process", -(-left // setting.batch_size))

    before = ledger(two, 0, before_step=saved)
    reference = ledger(whole, 0)
    stitched = [first + second for first, second in zip(before, ledger(two, 1), strict=True)]
    in_order = stitched == reference
    rows = [
        ("uninterrupted, 2 processes", counted([reference], setting), "reference"),
        ("killed, resumed on 2", counted([before, ledger(two, 1)], setting), same_weights(two, whole) and in_order),
        ("killed, resumed on 1", counted([before, ledger(one, 1)], setting), "other steps"),
    ]
    print(f"\nkilled after batch {setting.kill_at}, checkpoint of batch {saved}, in the middle of epoch 1\n")
    print(f"{'run':<28}{'batches':>9}{'replayed':>10}{'skipped':>9}   weights equal")
    for name, (batches, replayed, skipped), equal in rows:
        verdict = {True: "yes, bit by bit", False: "NO"}.get(equal, equal)  # type: ignore[call-overload]
        print(f"{name:<28}{batches:>9}{replayed:>10}{skipped:>9}   {verdict}")
    exact = all(replayed == skipped == 0 for _, (_, replayed, skipped), _ in rows)
    return exact and rows[1][2] is True


def main() -> None:
    """Parse the size and run the proof."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    steps = -(-options.samples // (2 * options.batch_size))
    setting = Setting(options.samples, options.batch_size, epochs=2, kill_at=steps + steps // 2)
    with tempfile.TemporaryDirectory() as folder:
        held = prove(Path(folder), setting)
    print("\nThe proof holds: nothing replayed, nothing skipped." if held else "\nTHE PROOF FAILS.")
    raise SystemExit(not held)


if __name__ == "__main__":
    main()
