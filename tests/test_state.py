import contextlib
import copy
import io
import json
import math
from collections import OrderedDict
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_stateful.errors import DamagedStateError, StateError, StateMismatchError, StateVersionError
from lightning_stateful.state import (
    check,
    copy_plain,
    differences,
    pack,
    pack_combined,
    refuse_differences,
    walk,
)

CONFIG = {"shuffle": True, "seed": 7, "drop_last": False, "dataset": {"length": 100, "fingerprint": "abc"}}
POSITION = {"epoch": 2, "consumed": 48, "width": 4}
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def one(kind="shuffled", order_version=1, position=POSITION, **changes):
    return pack(kind, order_version, {**CONFIG, **changes}, position)


def two(mode="max_size_cycle", first=None, second=None):
    return pack_combined(mode, {"0": first or one(), "1": second or one(seed=8)})


def without(state, *path):
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return state


def replaced(state, value, *path):
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return state


def through_json(state):
    return json.loads(json.dumps(state))


def through_torch(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def told(found):
    return [(difference.path, difference.saved, difference.present) for difference in found]


def test_an_envelope_has_the_documented_keys_in_order():
    assert list(one().items()) == [
        ("version", 1),
        ("kind", "shuffled"),
        ("order_version", 1),
        ("config", CONFIG),
        ("progress", POSITION),
    ]


def test_a_combined_envelope_has_the_documented_keys_in_order():
    assert list(two().items()) == [
        ("version", 1),
        ("kind", "combined"),
        ("config", {"mode": "max_size_cycle"}),
        ("loaders", {"0": one(), "1": one(seed=8)}),
    ]


@pytest.mark.parametrize("through", [through_json, through_torch, copy.deepcopy], ids=["json", "torch", "deepcopy"])
@pytest.mark.parametrize("state", [one(), two(), two(first=one(note=None, rate=0.5, parts=[1, [2]]))])
def test_an_envelope_survives_being_written_and_read(through, state):
    read = through(state)
    assert read == state
    check(read)
    assert differences(read, state) == []


def test_one_loaders_envelope_takes_less_than_a_kilobyte():
    assert len(json.dumps(one())) < 1024


def test_an_envelope_shares_nothing_with_what_it_was_made_of():
    config, position = copy.deepcopy(CONFIG), dict(POSITION)
    state = pack("shuffled", 1, config, position)
    config["dataset"]["length"] = 5
    position["epoch"] = 9
    assert state == one()


def test_a_combined_envelope_shares_nothing_with_its_parts():
    first = one()
    state = two(first=first)
    first["config"]["seed"] = first["progress"]["epoch"] = 99
    assert state == two()


def test_packing_leaves_its_arguments_as_they_were():
    config, position = copy.deepcopy(CONFIG), dict(POSITION)
    pack("shuffled", 1, config, position)
    assert (config, position) == (CONFIG, POSITION)


def test_a_config_that_is_no_plain_data_is_refused_when_packing():
    with pytest.raises(StateError, match="ndarray"):
        one(weights=np.ones(3))


@pytest.mark.parametrize("state", [one(), two()], ids=["one", "two"])
def test_a_whole_envelope_passes_the_check(state):
    check(state)


def test_a_combined_envelope_without_loaders_passes_the_check():
    check(pack_combined("sequential", {}))


@pytest.mark.parametrize("state", [one(), two()], ids=["one", "two"])
def test_keys_that_this_version_does_not_know_pass_the_check(state):
    check({**state, "comment": "later"})


def test_a_mapping_that_is_no_dict_passes_the_check():
    check(MappingProxyType(one()))
    check(OrderedDict(one()))


@pytest.mark.parametrize("state", [one(), two()], ids=["one", "two"])
def test_checking_leaves_the_state_as_it_was(state):
    before = copy.deepcopy(state)
    check(state)
    assert state == before


@pytest.mark.parametrize(
    ("state", "kind"), [(None, "NoneType"), ([], "list"), ("x", "str"), (1, "int"), (torch.ones(1), "Tensor")]
)
def test_what_is_no_dict_is_damaged(state, kind):
    with pytest.raises(DamagedStateError, match=f"the state must be a dict, got {kind}"):
        check(state)


@pytest.mark.parametrize("state", [{}, without(one(), "version"), {1: 2}], ids=["empty", "one", "foreign"])
def test_a_state_without_a_version_is_damaged_and_its_keys_are_told(state):
    with pytest.raises(DamagedStateError) as caught:
        check(state)
    assert f"has no version; its keys are {sorted(map(str, state))}" in str(caught.value)


@pytest.mark.parametrize("version", ["1", 1.0, None, True, [1]])
def test_a_version_that_is_no_int_is_damaged(version):
    with pytest.raises(DamagedStateError, match="has no version"):
        check(replaced(one(), version, "version"))


@pytest.mark.parametrize("version", [0, 2, 99, -1])
def test_another_version_is_refused_with_both_versions(version):
    with pytest.raises(StateVersionError, match=f"has version {version}, this installation reads version 1"):
        check(replaced(one(), version, "version"))


def test_a_future_version_is_refused_for_its_version_whatever_else_it_holds():
    with pytest.raises(StateVersionError, match="Install the version of lightning-stateful that wrote it"):
        check({"version": 2, "layout": []})


def test_a_future_version_inside_a_combined_envelope_is_refused_by_its_loader():
    with pytest.raises(StateVersionError, match="the state, loader '1', has version 2"):
        check(replaced(two(), 2, "loaders", "1", "version"))


@pytest.mark.parametrize(
    ("key", "kind"), [("kind", "str"), ("order_version", "int"), ("config", "dict"), ("progress", "dict")]
)
def test_a_missing_key_is_damaged_and_named(key, kind):
    with pytest.raises(DamagedStateError, match=f"the state must hold a {kind} under '{key}', got nothing"):
        check(without(one(), key))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", 3),
        ("kind", None),
        ("order_version", "1"),
        ("order_version", 1.0),
        ("order_version", True),
        ("config", None),
        ("config", [("seed", 1)]),
        ("progress", [2, 48, 4]),
        ("progress", 48),
    ],
)
def test_a_value_of_the_wrong_type_is_damaged_and_shown(key, value):
    with pytest.raises(DamagedStateError) as caught:
        check(replaced(one(), value, key))
    assert f"under {key!r}, got {value!r}." in str(caught.value)


@pytest.mark.parametrize("key", ["config", "loaders"])
def test_a_combined_envelope_with_a_missing_key_is_damaged(key):
    with pytest.raises(DamagedStateError, match=f"the state must hold a dict under '{key}', got nothing"):
        check(without(two(), key))


@pytest.mark.parametrize("loaders", [None, [one()], "0"])
def test_a_combined_envelope_whose_loaders_are_no_dict_is_damaged(loaders):
    with pytest.raises(DamagedStateError, match="must hold a dict under 'loaders'"):
        check(replaced(two(), loaders, "loaders"))


@pytest.mark.parametrize("key", ["version", "kind", "order_version", "config", "progress"])
def test_damage_in_a_loader_of_a_combined_envelope_is_reported_with_its_path(key):
    with pytest.raises(DamagedStateError, match="the state, loader '1',"):
        check(without(two(), "loaders", "1", key))


def test_a_loader_of_a_combined_envelope_that_is_no_dict_is_damaged():
    with pytest.raises(DamagedStateError, match="the state, loader '0', must be a dict, got NoneType"):
        check(replaced(two(), None, "loaders", "0"))


def test_damage_is_reported_with_the_place_and_what_to_do():
    with pytest.raises(DamagedStateError) as caught:
        check({}, where="The state of 'train'")
    assert str(caught.value).startswith("The state of 'train' has no version")
    assert "Resume from another checkpoint" in str(caught.value)


@given(PLAIN)
def test_no_plain_data_crashes_the_check(state):
    with contextlib.suppress(DamagedStateError, StateVersionError):
        check(state)


@pytest.mark.parametrize("state", [one(), two()], ids=["one", "two"])
def test_equal_envelopes_do_not_differ(state):
    assert differences(copy.deepcopy(state), state) == []


def test_another_position_is_no_difference():
    assert differences(one(position={"epoch": 0, "consumed": 0, "width": 1}), one()) == []


def test_the_order_of_keys_is_no_difference():
    saved = one()
    saved["config"] = dict(reversed(saved["config"].items()))
    assert differences(saved, one()) == []


def test_a_changed_value_is_told_with_its_path_and_both_values():
    assert told(differences(one(seed=7), one(seed=8))) == [("seed", 7, 8)]


def test_a_nested_value_is_told_with_dots():
    assert told(differences(one(dataset={"length": 100}), one(dataset={"length": 99}))) == [("dataset.length", 100, 99)]


def test_another_kind_of_order_is_a_difference():
    assert told(differences(one("sequential"), one("shuffled"))) == [("kind", "sequential", "shuffled")]


def test_another_order_version_is_a_difference():
    assert told(differences(one(order_version=1), one(order_version=2))) == [("order_version", 1, 2)]


def test_a_value_only_in_the_saved_state_is_a_difference():
    saved = one(block_size=4)
    assert told(differences(saved, one())) == [("block_size", 4, "<nothing>")]


def test_a_value_only_in_the_present_configuration_is_a_difference():
    assert told(differences(one(), one(num_samples=50))) == [("num_samples", "<nothing>", 50)]


def test_none_is_a_value_and_not_a_missing_one():
    assert told(differences(one(note=None), one())) == [("note", None, "<nothing>")]


def test_a_dict_in_place_of_a_value_is_one_difference():
    found = differences(one(dataset="abc"), one(dataset={"length": 99}))
    assert told(found) == [("dataset", "abc", {"length": 99})]


def test_every_difference_is_found_at_once():
    saved = one("sequential", 1, seed=1, dataset={"length": 5, "fingerprint": "old"})
    present = one("shuffled", 2, seed=2, dataset={"length": 6, "fingerprint": "new"})
    assert [difference.path for difference in differences(saved, present)] == [
        "kind",
        "order_version",
        "seed",
        "dataset.length",
        "dataset.fingerprint",
    ]


@pytest.mark.parametrize(
    ("saved", "remedy"),
    [
        (one(seed=1), "Pass the saved seed"),
        (one(shuffle=False), "Pass the saved shuffle"),
        (one(drop_last=True), "Pass the saved drop_last"),
        (one(dataset={"length": 1, "fingerprint": "abc"}), "Train on the dataset that the checkpoint was made with"),
        (one(order_version=9), "Install the version of lightning-stateful that wrote the checkpoint"),
        (one(kind="other"), "Use the order or sampler that the checkpoint was made with"),
        (one(something=1), "Restore the saved value"),
    ],
)
def test_a_difference_comes_with_its_own_remedy(saved, remedy):
    (found,) = differences(saved, one())
    assert found.remedy.startswith(remedy)


@pytest.mark.parametrize("saved", [one(seed=1), one(dataset={"length": 1, "fingerprint": "abc"}), one(extra=1)])
def test_the_remedy_names_what_would_accept_the_difference(saved):
    (found,) = differences(saved, one())
    name = found.remedy.split("accept=('")[1].split("',)")[0]
    assert differences(saved, one(), accept=(name,)) == []


def test_a_prefix_stands_before_every_path():
    assert told(differences(one(seed=7), one(seed=8), path="train")) == [("train.seed", 7, 8)]


LONGER = one(dataset={"length": 100, "fingerprint": "abc"}), one(dataset={"length": 99, "fingerprint": "abc"})


@pytest.mark.parametrize("name", ["train.dataset.length", "dataset.length", "dataset", "train.dataset", "train"])
def test_a_difference_is_accepted_in_full_without_its_prefix_or_by_a_name_above(name):
    assert differences(*LONGER, accept=(name,), path="train") == []


@pytest.mark.parametrize("name", ["length", "data", "dataset.len", "val.dataset.length", "rain.dataset.length", ""])
def test_a_part_of_a_name_accepts_nothing(name):
    assert len(differences(*LONGER, accept=(name,), path="train")) == 1


def test_accepting_one_difference_leaves_the_others():
    saved, present = one(seed=1, drop_last=True), one(seed=2)
    assert [difference.path for difference in differences(saved, present, accept={"seed"})] == ["drop_last"]


def test_several_names_are_accepted_together():
    saved, present = one(seed=1, drop_last=True), one(seed=2)
    assert differences(saved, present, accept=["drop_last", "seed", "unused"]) == []


def test_differences_of_combined_loaders_carry_the_loaders_path():
    assert told(differences(two(second=one(seed=1)), two(second=one(seed=2)))) == [("1.seed", 1, 2)]


def test_a_combined_difference_carries_prefix_and_loader():
    found = differences(two(second=one(seed=1)), two(second=one(seed=2)), path="train")
    assert told(found) == [("train.1.seed", 1, 2)]


@pytest.mark.parametrize("name", ["train.1.seed", "seed", "train.1", "train"])
def test_a_combined_difference_is_accepted_in_full_bare_or_by_a_name_above(name):
    saved, present = two(second=one(seed=1)), two(second=one(seed=2))
    assert differences(saved, present, accept=(name,), path="train") == []


def test_a_difference_of_one_loader_can_be_accepted_alone():
    saved = two(first=one(seed=1), second=one(seed=1))
    present = two(first=one(seed=2), second=one(seed=2))
    assert told(differences(saved, present, accept=("0.seed",))) == [("1.seed", 1, 2)]


def test_another_mode_of_combining_is_a_difference():
    assert told(differences(two("min_size"), two("sequential"))) == [("mode", "min_size", "sequential")]


def test_a_loader_missing_from_the_present_configuration_is_a_difference():
    present = pack_combined("max_size_cycle", {"0": one()})
    assert told(differences(two(), present)) == [("loaders", ["0", "1"], ["0"])]


def test_a_loader_missing_from_the_saved_state_is_a_difference():
    saved = pack_combined("max_size_cycle", {"0": one()})
    assert told(differences(saved, two())) == [("loaders", ["0"], ["0", "1"])]


def test_loaders_in_another_order_are_a_difference():
    saved = pack_combined("sequential", {"a": one(), "b": one()})
    present = pack_combined("sequential", {"b": one(), "a": one()})
    assert told(differences(saved, present)) == [("loaders", ["a", "b"], ["b", "a"])]


def test_loaders_that_both_have_are_compared_beside_missing_ones():
    present = pack_combined("max_size_cycle", {"0": one(seed=9)})
    assert [difference.path for difference in differences(two(), present)] == ["loaders", "0.seed"]


def test_one_loader_in_place_of_several_is_one_difference():
    assert told(differences(two(), one())) == [("loaders", ["0", "1"], "one loader")]


def test_several_loaders_in_place_of_one_are_one_difference():
    assert told(differences(one(), two(), path="train")) == [("train.loaders", "one loader", ["0", "1"])]


def test_comparing_leaves_both_states_as_they_were():
    saved, present = two(second=one(seed=1)), two(second=one(seed=2))
    before = copy.deepcopy((saved, present))
    differences(saved, present)
    assert (saved, present) == before


@given(st.dictionaries(st.text(max_size=4), PLAIN, max_size=5))
def test_no_configuration_differs_from_itself(config):
    state = pack("shuffled", 1, config, POSITION)
    assert differences(through_json(state), state) == []


def test_equal_envelopes_are_not_refused():
    refuse_differences(two(), two())


def test_accepted_differences_are_not_refused():
    refuse_differences(one(seed=1), one(seed=2), accept=("seed",))


def test_a_refusal_reports_every_difference_at_once_with_both_values_and_remedy():
    saved = one(seed=1, drop_last=True, dataset={"length": 5, "fingerprint": "abc"})
    with pytest.raises(StateMismatchError) as caught:
        refuse_differences(saved, one(seed=2), where="The state of 'train'")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("The state of 'train' does not fit the present configuration (3 differences)")
    assert lines[1].startswith("  - seed: saved 1, now 2. Pass the saved seed, or accept")
    assert lines[2].startswith("  - drop_last: saved True, now False. Pass the saved drop_last, or accept")
    assert lines[3].startswith("  - dataset.length: saved 5, now 100. Train on the dataset that")


def test_a_refusal_keeps_what_was_not_accepted_as_data():
    with pytest.raises(StateMismatchError) as caught:
        refuse_differences(one(seed=1, drop_last=True), one(seed=2), accept=("seed",))
    assert told(caught.value.differences) == [("drop_last", True, False)]


def test_walking_one_loaders_envelope_yields_it_without_a_path():
    state = one()
    assert list(walk(state)) == [("", state)]


def test_walking_a_combined_envelope_yields_each_loader_with_its_path():
    state = two()
    assert list(walk(state)) == [("0", one()), ("1", one(seed=8))]


@given(PLAIN)
def test_a_plain_copy_is_equal(value):
    assert copy_plain(value) == value


def test_a_plain_copy_is_deep():
    value = {"a": [{"b": 1}]}
    copied = copy_plain(value)
    value["a"][0]["b"] = 2
    assert copied == {"a": [{"b": 1}]}


def test_a_plain_copy_turns_tuples_and_mappings_into_lists_and_dicts():
    copied = copy_plain(MappingProxyType({"a": (1, OrderedDict(b=2))}))
    assert copied == {"a": [1, {"b": 2}]}
    assert (type(copied), type(copied["a"][1])) == (dict, dict)


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        np.int64(1),
        np.float64(1.0),
        np.bool_(True),
        np.ones(2),
        torch.ones(2),
        {1},
        b"a",
        1j,
        object(),
        Text("a"),
        range(3),
        int,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_no_plain_data_is_refused_with_its_type_and_path(value):
    with pytest.raises(StateError) as caught:
        copy_plain({"a": [0, {"b": value}]})
    assert str(caught.value).startswith(f"state.a[1].b is a {type(value).__name__};")


@pytest.mark.parametrize("key", [1, None, ("a",), 1.5, True, Text("a")])
def test_a_key_that_is_no_string_is_refused_with_its_path(key):
    with pytest.raises(StateError, match=r"config\.a has keys that are not strings"):
        copy_plain({"a": {key: 1}}, "config")


def test_one_loader_against_several_cannot_be_accepted() -> None:
    one = pack("sequential", 1, {}, {})
    found = differences(pack_combined("max_size", {"0": one}), one, accept=("loaders",))
    assert [difference.path for difference in found] == ["loaders"]
    assert "accept" not in found[0].remedy


def test_several_loaders_within_several_are_damaged() -> None:
    with pytest.raises(DamagedStateError, match="where one belongs"):
        check(pack_combined("a", {"0": pack_combined("b", {})}))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_floats_that_json_has_no_word_for_are_refused(value: float) -> None:
    with pytest.raises(StateError, match="finite"):
        copy_plain({"a": value})


def test_a_config_with_keys_that_are_no_strings_is_damaged() -> None:
    with pytest.raises(DamagedStateError, match="not strings"):
        check({**pack("a", 1, {}, {}), "config": {1: 2}})


def test_a_single_name_is_accepted_without_a_tuple_around_it() -> None:
    one, two = (pack("a", 1, {"seed": seed}, {}) for seed in (1, 2))
    assert differences(one, two, accept="seed") == []


def test_true_and_one_are_a_difference() -> None:
    one, two = (pack("a", 1, {"shuffle": value}, {}) for value in (True, 1))
    assert [difference.path for difference in differences(one, two)] == ["shuffle"]
