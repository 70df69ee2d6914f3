"""Envelopes are written whole, checked before they are read, and compared by name."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.errors import (
    DamagedStateError,
    StateError,
    StatefulWarning,
    StateMismatchError,
    StateVersionError,
)
from lightning_stateful.state import check, copy_plain, differences, pack, pack_combined, refuse_differences, sealed

State = dict[str, Any]
CONFIG = {"shuffle": True, "seed": 7, "drop_last": False, "dataset": {"length": 100, "fingerprint": "abc"}}
PROGRESS = {"epoch": 2, "cycle": 0, "consumed": 48}
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def one(kind: str = "shuffled", order_version: int = 1, progress: State = PROGRESS, **changes: Any) -> State:
    return pack(kind, order_version, {**CONFIG, **changes}, progress)


def two(mode: str = "max_size_cycle", first: State | None = None, second: State | None = None) -> State:
    return pack_combined(mode, {"0": first or one(), "1": second or one(seed=8)})


both = pytest.mark.parametrize("state", [one(), two()], ids=["one", "two"])
GONE = object()


def replaced(state: State, value: Any, *path: str) -> State:
    """A state with one value changed, or gone, under a checksum that fits."""
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return sealed(state)


def told(found: Any) -> list[tuple[str, Any, Any]]:
    return [(difference.path, difference.saved, difference.present) for difference in found]


class TestPacking:
    def test_an_envelope_has_the_documented_keys_in_order(self) -> None:
        *rest, (last, checksum) = one().items()

        assert rest == [
            ("version", 1),
            ("kind", "shuffled"),
            ("order_version", 1),
            ("config", CONFIG),
            ("progress", PROGRESS),
        ]
        assert (last, len(checksum)) == ("checksum", 8)

    def test_a_combined_envelope_holds_those_of_its_loaders(self) -> None:
        *rest, (last, _) = two().items()

        assert rest == [
            ("version", 1),
            ("kind", "combined"),
            ("config", {"mode": "max_size_cycle"}),
            ("loaders", {"0": one(), "1": one(seed=8)}),
        ]
        assert last == "checksum"

    def test_the_checksum_follows_every_value_and_no_order_of_keys(self) -> None:
        states = [one(), one(seed=8), one(progress={**PROGRESS, "epoch": 3}), one(order_version=2), one("other")]

        assert len({state["checksum"] for state in states}) == len(states)
        assert one(progress=dict(reversed(PROGRESS.items())))["checksum"] == one()["checksum"]


class TestChecking:
    @both
    def test_a_whole_envelope_passes_and_is_left_as_it_was(self, state: State) -> None:
        before = copy.deepcopy(state)
        check(state)
        check(OrderedDict(state))
        check(MappingProxyType(state))
        check(sealed({**state, "comment": "of a later version"}))

        assert state == before

    @both
    @pytest.mark.parametrize("checksum", ["00000000", GONE])
    def test_an_envelope_without_the_checksum_of_its_contents_is_damaged(self, state: State, checksum: Any) -> None:
        changed = {**state, "checksum": checksum} if checksum is not GONE else {**state}
        if checksum is GONE:
            del changed["checksum"]

        with pytest.raises(DamagedStateError, match=f"checksum of its contents, {state['checksum']}, but"):
            check(changed)

    def test_a_changed_loader_is_found_beside_others(self) -> None:
        state = two()
        state["loaders"]["1"]["progress"]["consumed"] += 1

        with pytest.raises(DamagedStateError, match="the state does not have the checksum"):
            check(state)
        with pytest.raises(DamagedStateError, match="the state, loader '1', does not have the checksum"):
            check(sealed(state))

    @pytest.mark.parametrize(("state", "kind"), [(None, "NoneType"), ([], "list"), (torch.ones(1), "Tensor")])
    def test_what_is_no_dict_is_damaged(self, state: Any, kind: str) -> None:
        with pytest.raises(DamagedStateError, match=f"the state must be a dict, got {kind}"):
            check(state)

    @pytest.mark.parametrize("state", [{}, replaced(one(), GONE, "version"), {1: 2}, replaced(one(), True, "version")])
    def test_a_state_without_a_version_is_damaged_and_its_keys_are_told(self, state: Any) -> None:
        with pytest.raises(DamagedStateError) as caught:
            check(state)
        assert f"has no version; its keys are {sorted(map(str, state))}" in str(caught.value)
        assert "Resume from another checkpoint" in str(caught.value)

    @pytest.mark.parametrize("version", [0, 2])
    def test_another_version_is_refused_for_its_version_whatever_else_it_holds(self, version: int) -> None:
        with pytest.raises(StateVersionError, match=f"version {version}, this installation reads version 1. Install"):
            check({"version": version, "layout": []})
        with pytest.raises(StateVersionError, match=f"the state, loader '1', has version {version}"):
            check(replaced(two(), version, "loaders", "1", "version"))

    @pytest.mark.parametrize(
        ("state", "key", "value", "kind"),
        [
            (one(), "kind", 3, "str"),
            (one(), "order_version", True, "int"),
            (one(), "config", [("seed", 1)], "dict"),
            (one(), "progress", GONE, "dict"),
            (two(), "loaders", [one()], "dict"),
        ],
    )
    def test_a_key_that_is_missing_or_of_the_wrong_type_is_named(
        self, state: State, key: str, value: Any, kind: str
    ) -> None:
        with pytest.raises(DamagedStateError) as caught:
            check(replaced(state, value, key))
        found = "nothing" if value is GONE else repr(value)
        assert f"the state must hold a {kind} under {key!r}, got {found}." in str(caught.value)

    def test_several_loaders_within_several_are_damaged(self) -> None:
        with pytest.raises(DamagedStateError, match="where one belongs"):
            check(pack_combined("a", {"0": pack_combined("b", {})}))

    @given(PLAIN, st.sampled_from(["version", "kind", "config", "progress", "loaders", "checksum"]))
    def test_no_plain_data_crashes_the_check(self, value: Any, key: str) -> None:
        for state in (value, {**one(), key: value}, {**two(), key: value}):
            with contextlib.suppress(DamagedStateError, StateVersionError):
                check(state)


class TestDifferences:
    @pytest.mark.parametrize(
        ("saved", "present", "expected"),
        [
            (one(), one(), []),
            (one(shuffle=True), one(shuffle=1), [("shuffle", True, 1)]),
            (one("sequential", 1), one("shuffled", 2), [("kind", "sequential", "shuffled"), ("order_version", 1, 2)]),
            (one(), one(block=50), [("block", "<nothing>", 50)]),
            (
                one(seed=1, dataset={"length": 5, "fingerprint": "old"}),
                one(seed=2, dataset={"length": 6, "fingerprint": "new"}),
                [("seed", 1, 2), ("dataset.length", 5, 6), ("dataset.fingerprint", "old", "new")],
            ),
            (two("min_size"), two("sequential"), [("mode", "min_size", "sequential")]),
            (
                two(),
                pack_combined("max_size_cycle", {"0": one(seed=9)}),
                [("loaders", ["0", "1"], ["0"]), ("0.seed", 7, 9)],
            ),
            (
                pack_combined("sequential", {"a": one(), "b": one()}),
                pack_combined("sequential", {"b": one(), "a": one()}),
                [("loaders", ["a", "b"], ["b", "a"])],
            ),
            (one(), two(), [("loaders", "one loader", ["0", "1"])]),
        ],
    )
    def test_all_that_decides_about_the_sequence_is_compared(self, saved: State, present: State, expected: Any) -> None:
        before = copy.deepcopy((saved, present))
        prefixed = [(f"train.{path}", *values) for path, *values in expected]

        assert told(differences(saved, present)) == expected
        assert told(differences(saved, present, path="train")) == prefixed
        assert (saved, present) == before

    @pytest.mark.parametrize(
        ("saved", "remedy"),
        [
            (one(seed=1), "Pass the saved seed"),
            (one(something=1), "Restore the saved value"),
        ],
    )
    def test_a_difference_comes_with_a_remedy_that_names_what_would_accept_it(self, saved: State, remedy: str) -> None:
        (found,) = differences(saved, one())
        name = found.remedy.split("accept=('")[1].split("',)")[0]

        assert found.remedy.startswith(remedy)
        assert differences(saved, one(), accept=(name,)) == []

    @pytest.mark.parametrize(
        ("name", "is_accepted"),
        [
            ("train.1.dataset.length", True),
            ("dataset.length", True),
            ("dataset", True),
            ("length", False),
            ("", False),
        ],
    )
    def test_a_difference_is_accepted_in_full_without_its_loader_or_by_a_name_above(
        self, name: str, is_accepted: bool
    ) -> None:
        saved, present = (two(second=one(dataset={"length": n, "fingerprint": "abc"})) for n in (100, 99))

        for accept in (name, [name, "unused"]):
            assert (differences(saved, present, accept=accept, path="train") == []) == is_accepted


class TestRefusing:
    def test_equal_and_accepted_envelopes_are_not_refused(self) -> None:
        refuse_differences(two(), two())
        refuse_differences(one(seed=1), one(seed=2), accept=("seed",))

    def test_a_refusal_reports_all_that_was_not_accepted_with_values_and_remedies(self) -> None:
        saved = one(seed=1, drop_last=True, dataset={"length": 5, "fingerprint": "abc"})
        with pytest.raises(StateMismatchError) as caught:
            refuse_differences(saved, one(seed=2), where="The state of 'train'", accept="drop_last")
        lines = str(caught.value).splitlines()

        assert lines[0].startswith("The state of 'train' does not fit the present configuration (2 differences)")
        assert lines[1].startswith("  - seed: saved 1, now 2. Pass the saved seed, or accept")
        assert lines[2].startswith("  - dataset.length: saved 5, now 100. Train on the dataset that")
        assert told(caught.value.differences) == [("seed", 1, 2), ("dataset.length", 5, 100)]

    def test_another_fingerprint_alone_is_a_warning(self) -> None:
        saved = one(dataset={"length": 100, "fingerprint": "old"})

        with pytest.warns(StatefulWarning, match=r"data of another fingerprint: dataset.fingerprint \(saved 'old'"):
            refuse_differences(saved, one())
        refuse_differences(saved, one(), accept="dataset.fingerprint")
        assert differences(saved, one(), fingerprints=False) == []


class TestPlainCopies:
    def test_a_copy_is_deep_and_made_of_lists_and_dicts(self) -> None:
        inner = OrderedDict(b=2)
        copied = copy_plain(MappingProxyType({"a": (1, inner)}))
        inner["b"] = 3

        assert copied == {"a": [1, {"b": 2}]}
        assert (type(copied), type(copied["a"][1])) == (dict, dict)

    @pytest.mark.parametrize("value", [np.int64(1), torch.ones(2), {1}, object()])
    def test_a_value_that_is_no_plain_data_is_refused_with_its_type_and_path(self, value: Any) -> None:
        with pytest.raises(StateError) as caught:
            copy_plain({"a": [0, {"b": value}]})
        assert str(caught.value).startswith(f"state.a[1].b is a {type(value).__name__};")

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_floats_that_json_has_no_word_for_are_refused(self, value: float) -> None:
        with pytest.raises(StateError, match="finite"):
            copy_plain({"a": value})

    @pytest.mark.parametrize("key", [1, None])
    def test_a_key_that_is_no_string_is_refused_with_its_path(self, key: Any) -> None:
        with pytest.raises(StateError, match=r"config\.a has keys that are not strings"):
            copy_plain({"a": {key: 1}}, "config")
