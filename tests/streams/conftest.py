from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_stateful.generators.rng import keep_randomness


@pytest.fixture(autouse=True)
def randomness_as_it_was() -> Iterator[None]:
    """Put the generators of the process back: other tests draw from them too."""
    with keep_randomness():
        yield
