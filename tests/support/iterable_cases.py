"""Iterable datasets by what they remember from pass to pass, each with and without a state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

LENGTH = 7


class Numbers(IterableDataset[Any]):
    """Numbers of each worker, the same in every pass."""

    def share(self) -> list[int]:
        """The numbers of this worker, 7 or 10."""
        info = get_worker_info()
        first = 0 if info is None else 100 * (info.id + 1)
        return list(range(first, first + LENGTH + (3 if info is not None and info.id else 0)))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.share())


class Counts(Numbers):
    """Shuffles two files by the number of passes begun, so that several passes begin with the same file."""

    num_passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_passes += 1
        share, keep = self.share(), random.Random(self.num_passes // 2).sample(range(4), 4)
        tail = random.Random(self.num_passes).sample(share[2:], len(share) - 2)
        return iter([*share[:2], *tail, *keep])


class CountsAtEnd(Numbers):
    """Counts the passes that were read to their end."""

    num_passes = 0

    def __iter__(self) -> Iterator[Any]:
        for number in self.share():
            yield self.num_passes, number
        self.num_passes += 1


class Two(Numbers):
    """Gives one dataset's numbers and then those of another, which counts its passes."""

    def __init__(self) -> None:
        self.parts = [Numbers(), Numbers(), Counts()]

    def __iter__(self) -> Iterator[Any]:
        for part in self.parts:
            yield from part


class GoesOn(Numbers):
    """An endless source, which goes on where it stands."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.at += 1
            yield self.share()[0] + self.at - 1


class Ends(GoesOn):
    """Goes on too, but ends a pass after every 5 numbers."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.at += 1
            yield self.share()[0] + self.at - 1
            if self.at % 5 == 0:
                return


class Told(Numbers):
    """Shuffles by the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        share = self.share()
        return iter(random.Random(self.epoch).sample(share, len(share)))


class Itself(Numbers):
    """Its own iterator, which begins anew at ``iter()``."""

    def __iter__(self) -> Iterator[Any]:
        self.left = self.share()
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


class CountsWithState(Numbers):
    """As torchdata's GeneratorIterable, and counts its passes: a loaded position is used up by the next pass."""

    passes = at = 0
    resume: int | None = None

    def __iter__(self) -> Iterator[Any]:
        first, self.resume = self.resume, None
        if first is None:
            self.passes, first = self.passes + 1, 0
        numbers = random.Random(self.passes).sample(self.share(), len(self.share()))
        for number in numbers[first:]:
            first += 1
            self.at = first
            yield self.passes, number

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes, self.resume = state["passes"], state["at"]


class GoesOnWithState(GoesOn):
    """The endless source with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class ToldWithState(Told):
    """Is told its epoch, and knows where it stands."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        share = self.share()
        for number in random.Random(self.epoch).sample(share, len(share))[self.at :]:
            self.at += 1
            yield number
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    load_state_dict = GoesOnWithState.load_state_dict


class ItselfWithState(Itself):
    """Its own iterator, whose state is there once it was begun."""

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left[:] = state["left"]


class _Position:
    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> _Position:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class OnIterator(Counts):
    """Counts its passes, and its iterator has a state."""

    def __iter__(self) -> Iterator[Any]:
        return _Position(list(super().__iter__()))


class Tokens(Numbers):
    """As torchtitan's HuggingFaceTextDataset: packs the tokens of texts, whose rest stays for the next sequence."""

    infinite = False

    def __init__(self) -> None:
        self.at, self.buffer = 0, list[int]()

    def __iter__(self) -> Iterator[Any]:
        texts = self.share()
        while True:
            for text in texts[self.at :]:
                self.buffer.extend([text] * (1 + text % 3))
                self.at += 1
                while len(self.buffer) >= 2:
                    found, self.buffer = self.buffer[:2], self.buffer[2:]
                    yield found
            if not self.infinite:
                break
            self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": self.buffer, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer, self.at = state["buffer"], state["at"]


class EndlessTokens(Tokens):
    """The same without an end."""

    infinite = True


class Sized(Numbers):
    """Says how many numbers it has, over all workers."""

    def __len__(self) -> int:
        info = get_worker_info()
        assert info is None, "asked in a worker"
        return LENGTH


ENDLESS = (GoesOn, GoesOnWithState, EndlessTokens)
KINDS = (
    Numbers,
    Counts,
    CountsAtEnd,
    Two,
    GoesOn,
    Ends,
    Told,
    Itself,
    CountsWithState,
    GoesOnWithState,
    ToldWithState,
    ItselfWithState,
    OnIterator,
    Tokens,
    EndlessTokens,
    Sized,
)
