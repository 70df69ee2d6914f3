"""A picture of any lengths is written, of a sane size and without a word; what cannot be drawn is refused clearly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bucket_cases import in_budget
from support.quick import thinned

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.report.padding_plot import plot_padding
from lightning_stateful.samplers.batch_samplers import BucketBatchSampler

LENGTHS = np.random.default_rng(1).integers(1, 200, 600)


def size_of(path: Path) -> tuple[int, int]:
    """Width and height of a PNG file."""
    contents = path.read_bytes()
    assert contents[:8] == b"\x89PNG\r\n\x1a\n"
    assert contents[-8:-4] == b"IEND"
    return int.from_bytes(contents[16:20], "big"), int.from_bytes(contents[20:24], "big")


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "buckets": (LENGTHS, {"max_tokens": 1000}),
    "too long dropped": (LENGTHS, {"max_tokens": 100, "too_long": "drop"}),
    "one sample": ([7], {"max_tokens": 10}),
    "no tokens": ([0, 0, 0], {"max_tokens": 2}),
    "very long ones": ([1, 2**41], {"max_tokens": 2**42}),
}


@pytest.mark.parametrize("name", thinned(CASES, ["too long dropped", "one sample"]))
def test_a_picture_is_written(tmp_path: Path, name: str) -> None:
    (lengths, options), path = CASES[name], tmp_path / "padding.png"
    plot_padding(BucketBatchSampler(lengths, **in_budget(options)), path, num_replicas=2)
    width, height = size_of(path)

    assert 800 <= width <= 2000
    assert 500 <= height <= 1500
    assert path.stat().st_size > 10_000


def test_the_ending_chooses_the_format(tmp_path: Path) -> None:
    plot_padding(BucketBatchSampler(LENGTHS, max_tokens=1000), str(tmp_path / "padding.pdf"))
    assert (tmp_path / "padding.pdf").read_bytes().startswith(b"%PDF")


def test_it_says_how_much_padding_there_is_before_and_after(tmp_path: Path) -> None:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        plot_padding(BucketBatchSampler(LENGTHS, max_tokens=1000, num_buckets=12), tmp_path / "padding.svg")
    text = (tmp_path / "padding.svg").read_text()

    assert text.startswith("<?xml")
    for said in ("600 samples, 12 buckets", "before: shuffled", "after: 12 buckets", "% padding", "tokens in a batch"):
        assert said in text


def test_the_backend_of_a_notebook_stays_and_no_figure_is_left_open(tmp_path: Path) -> None:
    import matplotlib as mpl
    from matplotlib import pyplot

    before = mpl.get_backend()
    mpl.use("svg")
    open_before = pyplot.get_fignums()
    try:
        plot_padding(BucketBatchSampler(LENGTHS, max_tokens=1000), tmp_path / "padding.png")
        assert mpl.get_backend() == "svg"
    finally:
        mpl.use(before)
    assert pyplot.get_fignums() == open_before


def test_a_format_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    with pytest.raises(ConfigurationError, match=r"padding\.what' cannot be drawn: .*not supported"):
        plot_padding(BucketBatchSampler(LENGTHS, max_tokens=1000), tmp_path / "padding.what")
    assert pyplot.get_fignums() == before
