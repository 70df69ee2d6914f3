"""What is written to a file of a ledger is read again, up to the byte at which a process was killed."""

from __future__ import annotations

import itertools
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.handlers import HandlerError, handler_raises_at

from lightning_stateful.errors import DamagedStateError, StateVersionError
from lightning_stateful.ledger import Batch, FileHeader, LedgerFile, Part, files, read_file
from lightning_stateful.ledger.files import as_items

HEADER = FileHeader(
    "a start", 1, 4, {"": {"length": 10}, "b.0": {"length": None}}, (2, 5), None, {"torch": "2"}, 1e9, "node"
)


def part(items: Any, path: str = "", epoch: int = 2) -> Part:
    return Part(path, epoch, *as_items(items))


BATCHES = [
    Batch(2, 5, (part([3, 0, 255]), part(["a", "ä"], "b.0", 7))),
    Batch(2, 6, (part([256, 70_000]), Part("b.0", 7, None, 0, 0, ((0, 3), (300, 2**20)), 50, 64)), 0.5, 0.25),
    Batch(2, 7, (part([2**40])._replace(tokens=7, padded=7), part([], "b.0")), 0.51, 0.0),
    Batch(2, 8, ()),
]


def plain(batch: Batch) -> Any:
    parts = [(*one._replace(items=None), one.listed()) for one in batch.parts]
    return batch.epoch, batch.batch, parts, batch.began, batch.waited


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a start" / "rank-1.ledger"
    file = LedgerFile(path, HEADER)
    for batch in BATCHES:
        file.add(batch)
    file.close()
    return path


def test_what_was_written_is_read(path: Path) -> None:
    header, batches, left = read_file(path)
    assert (header, left) == (HEADER, 0)
    assert list(map(plain, batches)) == list(map(plain, BATCHES))


def test_of_a_file_that_breaks_off_anywhere_the_whole_batches_are_read(path: Path) -> None:
    content = path.read_bytes()
    begin = content.index(b"\n") + 1
    lengths = []
    for size in range(begin, len(content) + 1):
        path.write_bytes(content[:size])
        _, batches, left = read_file(path)
        assert list(map(plain, batches)) == list(map(plain, BATCHES[: len(batches)]))
        lengths.append((len(batches), left))
    assert [number for number, left in lengths if not left] == [0, 1, 2, 3, 4]
    assert sorted(lengths) == lengths


def test_a_signal_that_raises_at_any_instruction_leaves_every_batch_once(tmp_path: Path) -> None:
    first, second = ((batch.epoch, batch.batch) for batch in BATCHES[:2])
    for number in itertools.count():
        file, error = LedgerFile(path := tmp_path / f"{number}.ledger", HEADER), None
        file.add(BATCHES[0])
        try:
            with handler_raises_at(number, files):
                file.add(BATCHES[1])
                file.flush()
                file.take_back(BATCHES[1])
                file.flush()
        except HandlerError as raised:
            error = raised
        file.close()
        _, batches, left = read_file(path)
        found = [(batch.epoch, batch.batch) for batch in batches]
        assert left == 0, error
        assert found == [first] or (error and found == [first, second]), error
        if error is None:
            break
    assert number > 100


def test_a_batch_that_was_not_added_takes_no_other_back(path: Path) -> None:
    file = LedgerFile(path.with_name("another.ledger"), HEADER)
    file.add(BATCHES[0])
    file.take_back(BATCHES[1])
    file.close()
    assert [plain(batch) for batch in read_file(path.with_name("another.ledger"))[1]] == [plain(BATCHES[0])]


def test_reading_ends_at_a_byte_that_has_changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for at in range(content.index(b"\n") + 1, len(content)):
        content[at] ^= 64
        path.write_bytes(content)
        content[at] ^= 64
        _, batches, left = read_file(path)
        assert left
        assert list(map(plain, batches)) == list(map(plain, BATCHES[: len(batches)]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no file of a ledger"),
        (b"{}\n", "no file of a ledger"),
        (b'{"version": 1}\n', "no file of a ledger"),
        (
            b'{"version": 2, "start": "a", "rank": 0, "num_replicas": 1, "loaders": {}, "resumed": {"stert": ""}}',
            "no file of a ledger",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DamagedStateError, match=message):
        read_file(tmp_path / "a")


def test_a_later_version_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"version": 2', b'"version": 3'))
    with pytest.raises(StateVersionError, match="version 3 of the ledger; this package reads 1 and 2"):
        read_file(path)


# One batch and the end of an epoch, as version 1 wrote them.
OF_VERSION_1 = (
    b'{"version": 1, "start": "a", "rank": 0, "num_replicas": 1, "loaders": {"": {"length": 4}}, "begins": [0, 0], '
    b'"resumed": null, "versions": {}}\n\x19\x00\x00\x00z\xdcp\xc6\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x01\x00'
    b"\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x03\x01\t\x00\x00\x00\x1e=i\xdb\x00\x00\x00\x00\x01\x00\x00\x00\x00"
)


def test_a_file_of_version_1_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(OF_VERSION_1)
    header, batches, left = read_file(tmp_path / "a")
    assert (header, left) == (FileHeader("a", 0, 1, {"": {"length": 4}}), 0)
    assert list(map(plain, batches)) == list(map(plain, [Batch(0, 0, (part([3, 1], epoch=0),)), Batch(0, 1, ())]))


def test_a_record_of_an_unknown_kind_is_damage_and_no_guess(path: Path) -> None:
    content = path.read_bytes()
    begin = content.index(b"\n") + 1
    record = struct.pack("<IIB", 2, 5, 0) + b"\x07"
    path.write_bytes(content[:begin] + struct.pack("<II", len(record), zlib.crc32(record)) + record)
    with pytest.raises(DamagedStateError, match=f"none of version 2, at byte {begin}"):
        read_file(path)


def test_times_are_exact_to_ten_microseconds_over_many_batches_and_long_pauses(tmp_path: Path) -> None:
    began = [number * 0.003_333_7 for number in range(3000)] + [200_000.0 + number / 7 for number in range(10)]
    file = LedgerFile(tmp_path / "a", HEADER)
    for number, at in enumerate(began):
        file.add(Batch(0, number, (part([1]),), at, 2 * at))
    file.close()
    _, batches, _ = read_file(tmp_path / "a")
    found = [batch.began for batch in batches]
    # Of a pause of over eleven hours, the batches behind it take what does not fit into one number.
    assert found[:3000] == pytest.approx(began[:3000], abs=1e-5)
    assert found[-5:] == pytest.approx(began[-5:], abs=1e-5)
    assert [batch.waited for batch in batches[:3000]] == pytest.approx([2 * at for at in began[:3000]], abs=1e-5)


def test_a_file_is_never_written_again(path: Path) -> None:
    with pytest.raises(FileExistsError):
        LedgerFile(path, HEADER)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (7, [7]),
        ("seven", ["seven"]),
        (np.array([[1], [2]]), [1, 2]),
        (np.int64(3), [3]),
        (torch.tensor([[4], [5]]), [4, 5]),
        ((1, "a"), ["1", "a"]),
        ([-1, 2], ["-1", "2"]),
        (np.array([-1]), ["-1"]),
        ([(3, True)], ["(3, True)"]),
        ([True, False], ["True", "False"]),
        ({5: "a"}, [5]),
        (range(3), [0, 1, 2]),
        ([2**70], [str(2**70)]),
    ],
)
def test_indices_are_integers_and_all_else_is_text(given: Any, expected: list[Any]) -> None:
    items, number = as_items(given)
    assert Part("", 0, items, number).listed() == expected
    assert number == len(expected)


def test_a_sample_takes_few_bytes(tmp_path: Path) -> None:
    indices = np.random.default_rng(0).integers(0, 10**6, (1000, 32))
    file = LedgerFile(tmp_path / "a", HEADER)
    for number, batch in enumerate(indices):
        file.add(Batch(0, number, (part(batch),)))
    file.close()
    assert (tmp_path / "a").stat().st_size < 5.1 * indices.size
