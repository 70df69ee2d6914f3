"""A sampler's data are put back in place, as they were when it was wrapped."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stateful.samplers.pristine import Pristine


class Bag:
    """Holds whatever it is given."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


CHANGES: dict[str, tuple[Any, Any]] = {
    "list": ([1, 2, 3], lambda held: held.reverse()),
    "list in list": ([[1, 2], [3]], lambda held: (held[0].reverse(), held.pop())),
    "lists in a dict": ({"a": [1, 2]}, lambda held: (held["a"].clear(), held.update(b=1))),
    "dict order": ({"a": 1, "b": 2}, lambda held: held.update(a=held.pop("a"))),
    "set": ({1, 2}, lambda held: held.pop()),
    "deque": (deque([1, 2], maxlen=2), lambda held: held.append(3)),
    "bytearray": (bytearray(b"ab"), lambda held: held.reverse()),
    "array": (np.arange(4), lambda held: held.__setitem__(slice(None), 9)),
    "array in a list": ([np.arange(4)], lambda held: held[0].fill(1)),
    "tensor": (torch.arange(4), lambda held: held.zero_()),
    "tensor with a gradient": (torch.ones(2, requires_grad=True), lambda held: held.data.zero_()),
    "defaultdict": (defaultdict(list, a=[1]), lambda held: held["b"].append(1)),
    "OrderedDict": (OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
    "Counter": (Counter(a=2), lambda held: held.update(a=1)),
    "nothing in it": ([], lambda held: held.append(1)),
}


def plain(value: Any) -> Any:
    return [type(value).__name__, list(value.items()) if isinstance(value, dict) else value]


class TestContainers:
    @pytest.mark.parametrize(("held", "change"), CHANGES.values(), ids=CHANGES)
    def test_contents_are_put_back_in_the_same_object(self, held: Any, change: Any) -> None:
        before = repr(plain(held))
        sampler = Bag(held=held)
        pristine = Pristine([sampler])
        for _ in range(2):
            change(held)
            assert repr(plain(held)) != before
            pristine.restore()

            assert sampler.held is held  # type: ignore[attr-defined]
            assert repr(plain(held)) == before

    @pytest.mark.parametrize("held", [{}, Counter(), defaultdict(int), OrderedDict()], ids=lambda v: type(v).__name__)
    def test_a_dict_that_was_empty_is_emptied(self, held: Any) -> None:
        pristine = Pristine([Bag(held=held)])
        held["a"] = 1
        pristine.restore()

        assert not held

    @pytest.mark.parametrize("count", [1024, 1025, 3000])
    def test_many_lists_in_a_list_are_put_back_however_they_were_changed(self, count: int) -> None:
        sampler = Bag(batches=[[number, -number] for number in range(count)])
        outer, inner = sampler.batches, list(sampler.batches)  # type: ignore[attr-defined]
        pristine = Pristine([sampler])
        for change in (list.reverse, list.clear, list.pop):
            for batch in outer:
                change(batch)
            change(outer)
            pristine.restore()

            assert sampler.batches is outer  # type: ignore[attr-defined]
            assert all(mine is yours for mine, yours in zip(outer, inner, strict=True))
            assert outer == [[number, -number] for number in range(count)]

    @pytest.mark.parametrize("odd", [[[1], [2]], (1, 2), [1, [2]], None], ids=str)
    def test_one_item_of_another_kind_among_many_lists_is_put_back_as_well(self, odd: Any) -> None:
        sampler = Bag(items=[*([number] for number in range(2000)), odd])
        before = repr(sampler.items)  # type: ignore[attr-defined]
        pristine = Pristine([sampler])
        for item in sampler.items:  # type: ignore[attr-defined]
            if isinstance(item, list):
                item[-1].append(3) if isinstance(item[-1], list) else item.append(3)
        pristine.restore()

        assert repr(sampler.items) == before  # type: ignore[attr-defined]

    def test_lists_within_stay_the_same_objects(self) -> None:
        inner = [1, 2]
        sampler = Bag(batches=[inner, [3]])
        pristine = Pristine([sampler])
        random.Random(3).shuffle(sampler.batches)  # type: ignore[attr-defined]
        inner.reverse()
        pristine.restore()

        assert sampler.batches[0] is inner  # type: ignore[attr-defined]
        assert sampler.batches == [[1, 2], [3]]  # type: ignore[attr-defined]

    def test_a_container_under_two_names_is_put_back_for_both(self) -> None:
        shared = [1, 2]
        sampler = Bag(a=shared, b=[shared, shared])
        pristine = Pristine([sampler])
        shared.append(3)
        pristine.restore()

        assert (sampler.a, sampler.b) == ([1, 2], [[1, 2], [1, 2]])  # type: ignore[attr-defined]

    def test_a_read_only_array_is_left_as_it_is(self) -> None:
        array = np.arange(3)
        array.flags.writeable = False
        sampler = Bag(array=array, other=np.broadcast_to(np.ones(1), (4,)))
        Pristine([sampler]).restore()

        assert sampler.array is array  # type: ignore[attr-defined]

    def test_lists_in_a_tuple_are_put_back(self) -> None:
        pools = ([1, 2], [3])
        pristine = Pristine([Bag(pools=pools)])
        pools[0].reverse()
        pristine.restore()

        assert pools == ([1, 2], [3])

    def test_a_list_that_holds_itself_ends(self) -> None:
        items: list[Any] = [1]
        items.append(items)
        Pristine([Bag(items=items)]).restore()

        assert items[1] is items

    def test_an_expanded_tensor_is_put_up_with(self) -> None:
        Pristine([Bag(weights=torch.ones(1).expand(3))]).restore()

    def test_a_sparse_tensor_is_put_up_with(self) -> None:
        Pristine([Bag(weights=torch.eye(3).to_sparse())]).restore()

    def test_a_tensor_made_in_inference_mode_is_put_up_with(self) -> None:
        with torch.inference_mode():
            weights = torch.ones(3)
        Pristine([Bag(weights=weights)]).restore()


class TestAttributes:
    def test_numbers_and_texts_are_put_back(self) -> None:
        sampler = Bag(epoch=0, name="a", start=None, rate=0.5, flag=True)
        pristine = Pristine([sampler])
        vars(sampler).update(epoch=3, name="b", start=4, rate=0.1, flag=False)
        pristine.restore()

        assert vars(sampler) == {"epoch": 0, "name": "a", "start": None, "rate": 0.5, "flag": True}

    def test_a_container_that_was_replaced_is_put_back_with_its_contents(self) -> None:
        sampler = Bag(order=[1, 2])
        pristine = Pristine([sampler])
        sampler.order.append(3)  # type: ignore[attr-defined]
        sampler.order = [9]  # type: ignore[attr-defined]
        pristine.restore()

        assert sampler.order == [1, 2]  # type: ignore[attr-defined]

    def test_other_objects_are_left_as_they_are(self) -> None:
        first, second = object(), object()
        sampler = Bag(helper=first)
        pristine = Pristine([sampler])
        sampler.helper = second  # type: ignore[attr-defined]
        pristine.restore()

        assert sampler.helper is second  # type: ignore[attr-defined]

    def test_what_is_set_between_is_remembered_from_then_on(self) -> None:
        sampler = Bag(count=5, order=[1, 2])
        pristine = Pristine([sampler])
        pristine.restore()
        sampler.count, sampler.order = 9, [3, 4]  # type: ignore[attr-defined]
        pristine.restore()
        sampler.order.reverse()  # type: ignore[attr-defined]
        pristine.leave()
        pristine.restore()

        assert vars(sampler) == {"count": 9, "order": [3, 4]}

    def test_what_the_sampler_left_by_itself_is_put_back(self) -> None:
        sampler = Bag(count=5, order=[1, 2])
        pristine = Pristine([sampler])
        sampler.count, sampler.order = 9, [3, 4]  # type: ignore[attr-defined]
        pristine.leave()
        pristine.restore()

        assert vars(sampler) == {"count": 5, "order": [1, 2]}

    def test_samplers_without_attributes_are_put_up_with(self) -> None:
        class Slotted:
            __slots__ = ("n",)

        Pristine([Slotted(), range(3), [1, 2]]).restore()
