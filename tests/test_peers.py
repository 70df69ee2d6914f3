"""Figures beside other packages are measured on the same work, and drawn from what was measured."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

from benchmarks import packing_streams, peer_loaders, peers
from benchmarks.measure import report
from benchmarks.peer_loaders import BUCKETED, SHUFFLED, Peer

SCRIPT = Path(__file__).parents[1] / "docs" / "pictures" / "peers.py"
ALL = [
    pytest.param(peer, data, id=name)
    for peers_of, data in ((SHUFFLED, range(6_400)), (BUCKETED, np.random.default_rng(0).integers(4, 512, 9_000)))
    for name, peer in peers_of.items()
    if not peer.missing
]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("peer", "data"), ALL)
@pytest.mark.filterwarnings("ignore")
def test_each_resumes_from_its_state_in_the_middle_of_its_own_epoch(
    peer: Peer, data: Any, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_loaders, "READ_AHEAD", 1_000)
    batches = [tuple(map(int, batch)) for batch in peer.batches(data, ranks, None)]
    resumed = tuple(map(int, next(peer.batches(data, ranks, peer.middle(data, ranks)))))
    assert 0.3 < batches.index(resumed) / len(batches) < 0.8


@pytest.mark.slow
def test_figures_of_small_sizes_are_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "in_child", lambda task, *arguments: task(*arguments))
    monkeypatch.setattr(packing_streams, "DOCUMENTS", 300)
    few = {"shuffled": ("torch DataLoader", "StatefulLoader"), "like lengths": ("BucketBatchSampler",)}
    monkeypatch.setattr(peers, "KINDS", {k: {n: peers.KINDS[k][n] for n in names} for k, names in few.items()})
    # A whole permutation of the larger size takes more than is allowed here.
    monkeypatch.setattr(peers, "LIMIT_BYTES", 30 * 10**6)
    plans: dict[str, Any] = {
        "shuffled": {"samples": [(10**3, 1), (10**7, 1)], "ranks": [(10**3, 2)]},
        "like lengths": {"samples": [(10**3, 1)], "ranks": [(10**3, 2)]},
    }
    tables = {
        title: rows for kind, plan in plans.items() for title, rows in peers.tables_of(kind, plan, 500, 1).items()
    }
    torchs, ours = tables["shuffled, start: MB, by samples, 1 rank"]
    assert torchs["1e7"] == "> 2 GB"
    assert 0 < torchs["1e3"] < 30
    assert 0 < ours["1e7"] < 30
    report("peers", "", {**tables, "whole documents": peers.packings()}, folder=tmp_path)
    assert json.loads((tmp_path / "peers.json").read_text())["name"] == "peers"

    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path), str(tmp_path / "peers.json")])
    with mpl.rc_context():
        runpy.run_path(str(SCRIPT), run_name="__main__")
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert drawn == {f"peers_{name}.svg" for name in ("samples", "ranks", "lengths", "rates")}
