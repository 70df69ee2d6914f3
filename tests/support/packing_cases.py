"""Documents of tokens that know where they come from, and packers in plain Python."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_stateful.packing import Packing

# Tokens of a document have its number before them.
APART = 1000
Tokens = list[int]
Sequences = list[dict[str, Tokens]]


def tokens_of(number: int, size: int) -> Tokens:
    """The tokens of a document, each of which is found nowhere else."""
    return [number * APART + token for token in range(size)]


def documents(rng: random.Random, count: int, most: int) -> list[Tokens]:
    """Documents of any lengths up to ``most``, short ones more often."""
    return [tokens_of(number, 1 + int(most * rng.random() ** 3)) for number in range(count)]


def plain(sequence: dict[str, Any]) -> dict[str, Tokens]:
    """A sequence as lists."""
    return {name: column.tolist() for name, column in sequence.items()}


def real(sequences: Iterable[dict[str, Any]]) -> Tokens:
    """The tokens in sequences but for padding, sorted."""
    return sorted(
        int(token)
        for sequence in sequences
        for token, document in zip(sequence["input_ids"], sequence["document_ids"], strict=True)
        if document >= 0
    )


def packed(given: Sequence[Tokens], packing: Packing) -> Sequences:
    """The sequences of a stream of documents, in their order."""
    ended = [[*document, *([] if packing.separator is None else [packing.separator])] for document in given]
    cut = _whole(ended, packing) if packing.is_whole else _split(ended, packing.sequence_length)
    return [_sequence(parts, packing) for parts in cut]


def _split(given: Iterable[Tokens], length: int) -> list[list[tuple[Tokens, bool]]]:
    """The parts of documents in each sequence, and whether each begins its document."""
    cut: list[list[tuple[Tokens, bool]]] = [[]]
    for document in given:
        for at, token in enumerate(document):
            if sum(len(part) for part, _ in cut[-1]) == length:
                cut.append([])
            if not cut[-1] or not at:
                cut[-1].append(([], not at))
            cut[-1][-1][0].append(token)
    return cut if cut[-1] else []


def _whole(given: Iterable[Tokens], packing: Packing) -> list[list[tuple[Tokens, bool]]]:
    length, most = packing.sequence_length, packing.open_sequences or 0
    closed: list[list[tuple[Tokens, bool]]] = []
    is_open: list[list[tuple[Tokens, bool]]] = []
    waited = 0

    def room(sequence: list[tuple[Tokens, bool]]) -> int:
        return length - sum(len(part) for part, _ in sequence)

    def close(sequence: list[tuple[Tokens, bool]]) -> None:
        nonlocal waited
        waited = 0 if sequence is is_open[0] else waited + 1
        closed.append(sequence)
        is_open[:] = [other for other in is_open if other is not sequence]
        if waited == 2 * most:
            waited = 0
            closed.append(is_open.pop(0))

    for document in given:
        parts = [(document[at : at + length], not at) for at in range(0, len(document), length)]
        if len(parts) > 1 and packing.too_long != "split":
            parts = parts[: packing.too_long == "truncate"]
        for part in parts:
            fitting = [sequence for sequence in is_open if room(sequence) >= len(part[0])]
            if not fitting and len(is_open) == most and len(part[0]) < length:
                close(min(is_open, key=room))
            if not fitting:
                is_open.append([])
                fitting = is_open[-1:]
            best = min(fitting, key=room)
            best.append(part)
            if not room(best):
                close(best)
    return closed + is_open


def _sequence(parts: Sequence[tuple[Tokens, bool]], packing: Packing) -> dict[str, Tokens]:
    """One sequence of parts of documents, each with whether it begins its document."""
    tokens = [token for part, _ in parts for token in part]
    labels = list(tokens)
    if not packing.labels_across:
        labels = [
            token if at or not begins else -100 for part, begins in parts for at, token in enumerate(part)
        ]  # fmt: skip
    room = packing.sequence_length - len(tokens)
    return {
        "input_ids": tokens + [packing.padding_of("input_ids")] * room,
        "labels": labels + [-100] * room,
        "position_ids": [at for part, _ in parts for at in range(len(part))] + list(range(room)),
        "document_ids": [which for which, (part, _) in enumerate(parts) for _ in part] + [-1] * room,
    }
