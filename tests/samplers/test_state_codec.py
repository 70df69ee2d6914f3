"""A state that is not the toolkit's survives a checkpoint: to plain data, through JSON, and back."""

from __future__ import annotations

import json
import math
from collections import ChainMap, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stateful.errors import DamagedStateError, StateError
from lightning_stateful.samplers.state_codec import from_plain, to_plain

Pair = namedtuple("Pair", "left right")


class Level(IntEnum):
    """A number with a name."""

    HARD = 3


def round_trip(value: Any) -> Any:
    return from_plain(json.loads(json.dumps(to_plain(value), allow_nan=False)))


PLAIN: dict[str, Any] = {
    "a huge int": 2**128 + 1,
    "floats": [0.1, -0.0, math.inf, -math.inf],
    "nested lists": [[1, [2, []]], {"a": [None, {}]}],
    "sets": [{1, 5, 3}, {(1, 2), (0, 3)}, frozenset({frozenset({1}), frozenset()})],
    "deques": [deque([1, (2,)]), deque([1, 2], maxlen=2)],
    "bytes": [b"\x00\xff", b"", bytearray(b"ab")],
    "keys of all kinds": {(1, 2): 1, None: 2, True: 3, "1": 4, 1.5: 5, frozenset({1}): 6, 3: "a"},
    "the tag as a key": [{"__of__": ["tuple", [1]]}, {"a": {"__of__": {"__of__": 1}}}],
    "ordered dicts": [OrderedDict(b=1, a=2), OrderedDict({2: 1, 1: 2})],
    "a state of a NumPy generator": np.random.default_rng(3).bit_generator.state,
    "NumPy scalars": [np.float32(0.5), np.int64(3), np.bool_(True), np.float64("inf")],
}
ARRAYS: dict[str, Any] = {
    **{dtype: np.ones((2, 2), dtype="i8").astype(dtype) for dtype in ("?", ">i4", "M8[s]")},
    "a number": np.ones((), dtype="i8"),
    "empty": np.ones((0,)),
    "not contiguous": np.arange(24).reshape(4, 6)[::2, ::-3].T,
    "structured": np.array([(1, 2.0)], dtype=[("index", "i8"), ("loss", "f8")]),
}


class TestRoundTrips:
    @pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN)
    def test_plain_values_come_back_as_they_were(self, value: Any) -> None:
        found = round_trip(value)

        assert found == value
        assert repr(found) == repr(value)

    @pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
    def test_arrays_come_back_with_dtype_and_shape(self, array: Any) -> None:
        found = round_trip(array)

        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
    def test_tensors_come_back_with_dtype_and_shape(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = torch.ones(shape).to(dtype)
        found = round_trip(tensor)

        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)

    def test_equal_sets_give_equal_data(self) -> None:
        assert to_plain({9, 1}) == to_plain({1, 9})

    def test_neither_way_hands_out_what_it_was_given(self) -> None:
        state: dict[str, Any] = {"a": [1], "b": {"c": [2]}, "d": np.zeros(1)}
        plain = to_plain(state)
        from_plain(plain)["b"]["c"].append(3)
        from_plain(plain)["d"][0] = 1
        state["a"].append(3)

        assert from_plain(plain) == {"a": [1], "b": {"c": [2]}, "d": 0}


class TestRefusals:
    @pytest.mark.parametrize(
        ("value", "path"),
        [
            (object(), "state_dict()"),
            ({"a": [1, {"b": object()}]}, "state_dict()['a'][1]['b']"),
            ([(0, object())], "state_dict()[0][1]"),
        ],
        ids=["itself", "in dicts and lists", "in a tuple"],
    )
    def test_an_error_names_the_place(self, value: Any, path: str) -> None:
        with pytest.raises(StateError) as caught:
            to_plain(value)
        assert f"The sampler's {path} is a object, which" in str(caught.value)

    @pytest.mark.parametrize(
        "value",
        [
            *(1j, Pair(1, 2), torch.Size([1]), Level.HARD, range(3), torch.float32, torch.Generator()),
            *(np.array([object()]), defaultdict(int, a=1), ChainMap({"a": 1})),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_what_would_not_come_back_is_refused(self, value: Any) -> None:
        with pytest.raises(StateError, match=r"is a \w+, which cannot be kept in a checkpoint. Return numbers"):
            to_plain({"seen": value})

    @pytest.mark.parametrize(
        "tagged",
        [
            *([], ["unheard of", 1], ["tuple"], ["float", "x"], ["bytes", '"'], ["ndarray", "AAAA"]),
            *(["dict", [[1]]], ["set", [[1]]], ["Tensor", 3]),
        ],
        ids=str,
    )
    def test_damaged_data_are_refused(self, tagged: Any) -> None:
        with pytest.raises(DamagedStateError, match="which nothing can be made of"):
            from_plain({"a": [{"__of__": tagged}]})
