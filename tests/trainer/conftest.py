from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import Ranks
from support.stream_runs import write_files


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Two real ranks, on which each case of a file runs once."""
    return Ranks(2, tmp_path_factory.mktemp("ddp"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of every kind that streams are read from."""
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder
