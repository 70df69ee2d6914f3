"""What a dataset shows of its samples is digested without reading one, and other samples are refused on a resume."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from lightning_stateful import MixtureBatchSampler, StatefulLoader
from lightning_stateful.contents.dataset_content import content_of
from lightning_stateful.errors import StatefulWarning, StateMismatchError


class Shows(Dataset[int]):
    """Holds what it is given as attributes; a sample is not to be read, nor a property asked for."""

    def __init__(self, length: int = 6, **shown: Any) -> None:
        self.length = length
        vars(self).update(shown)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        raise AssertionError("a sample was read")

    @property
    def expensive(self) -> Any:
        raise AssertionError("a property was asked for")


NAMES = [f"/data/pets/{kind}/{number}.png" for kind in ("cat", "dog") for number in range(3)]
LARGE = torch.arange(6).repeat_interleave(2**21).view(6, -1)
PERMUTED = [NAMES[number] for number in (3, 0, 5, 1, 4, 2)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Shows(paths=NAMES), Shows(paths=PERMUTED)),
        (Shows(paths=[*map(Path, NAMES)]), Shows(paths=[*map(Path, PERMUTED)])),
        (Shows(samples=[(name, 0) for name in NAMES]), Shows(samples=[(name, 0) for name in PERMUTED])),
        (Shows(files=[(name, 0) for name in NAMES]), Shows(files=[(name, 0) for name in PERMUTED])),
        (Shows(files=[*range(6)]), Shows(files=[*range(6)][::-1])),
        (Shows(targets=[0, 0, 1, 1, 0, 1]), Shows(targets=[0, 1, 0, 1, 0, 1])),
        (Shows(rows=[{"text": name} for name in NAMES]), Shows(rows=[{"text": name} for name in PERMUTED])),
        (Shows(data={"x": np.arange(6.0)}), Shows(data={"x": np.arange(6.0)[::-1]})),
        (Shows(names=np.array(NAMES)), Shows(names=np.array(PERMUTED))),
        (Shows(frame=pandas.DataFrame({"name": NAMES})), Shows(frame=pandas.DataFrame({"name": PERMUTED}))),
        (TensorDataset(torch.arange(6)), TensorDataset(torch.arange(6).flip(0))),
        (TensorDataset(torch.eye(6, dtype=torch.bfloat16)), TensorDataset(torch.eye(6, dtype=torch.bfloat16).flip(0))),
        (Subset(Shows(paths=NAMES), [0, 1]), Subset(Shows(paths=PERMUTED), [0, 1])),
        (ConcatDataset([Shows(), Shows(paths=NAMES)]), ConcatDataset([Shows(), Shows(paths=PERMUTED)])),
        (ConcatDataset([Subset(NAMES, [0, 1, 2])]), ConcatDataset([Subset(NAMES, [0, 1, 3])])),
        (Shows(base=Shows(paths=NAMES)), Shows(base=Shows(paths=PERMUTED))),
        (NAMES, PERMUTED),
        (Shows(2**20 + 8, x=[*range(2**20 + 8)]), Shows(2**20 + 8, x=[*range(2**20 + 8)][::-1])),
        (Shows(x=LARGE), Shows(x=LARGE.flip(0))),
    ],
    ids=lambda dataset: ",".join(vars(dataset)) if isinstance(dataset, Dataset) else "list",
)
def test_samples_in_another_order_are_another_content(one: Any, other: Any) -> None:
    assert content_of(one)
    assert content_of(one) == content_of(one)
    assert content_of(one).keys() == content_of(other).keys()
    assert content_of(one) != content_of(other)


def test_the_same_paths_below_another_folder_are_the_same() -> None:
    there = [name.replace("/data/pets", "/mnt/b/pets") for name in NAMES]
    for kind in (str, Path):
        assert content_of(Shows(paths=[*map(kind, NAMES)])) == content_of(Shows(paths=[*map(kind, there)]))
    assert content_of(Shows(samples=[(n, 1) for n in NAMES])) == content_of(Shows(samples=[(n, 1) for n in there]))
    assert content_of(Shows(paths=there)) != content_of(Shows(paths=[name.replace("cat", "cow") for name in there]))


def test_what_may_be_a_cache_or_is_no_list_of_samples_is_left_out(tmp_path: Path) -> None:
    on_disk = np.memmap(tmp_path / "cache", dtype=np.float32, mode="w+", shape=(6, 2))
    on_disk[:] = np.arange(12).reshape(6, 2)
    caches = {"a": [None] * 5 + [1], "b": [0] * 6, "c": torch.zeros(6, 2), "d": on_disk, "e": {}, "size": [3, 4]}
    assert content_of(Shows(**caches)) == {}
    on_disk.flush()
    read_only = np.memmap(tmp_path / "cache", dtype=np.float32, mode="r", shape=(6, 2))
    assert list(content_of(Shows(d=read_only))) == ["d"]


def test_what_changes_in_the_same_process_is_not_compared_any_more() -> None:
    base = Shows(weights=[0.5, *[1.0] * 5], paths=list(NAMES))
    before, within = content_of(base), content_of(Subset(base, [0, 1]))
    assert list(before) == list(within) == ["paths", "weights"]
    base.weights[3] = 0.1  # type: ignore[attr-defined]
    assert list(content_of(base)) == list(content_of(ConcatDataset([base]))) == ["paths"]
    base.weights[3] = 1.0  # type: ignore[attr-defined]
    assert content_of(base) == {"paths": before["paths"]}


def loader_of(dataset: Any, **options: Any) -> StatefulLoader:
    return StatefulLoader(dataset, batch_size=2, shuffle=True, seed=0, **options)


def test_other_samples_are_refused_by_name_and_pass_where_they_are_accepted() -> None:
    saved = loader_of(Shows(paths=NAMES, cache=[1, 2, 3, 4, 5, 6])).state_dict()
    assert list(saved["config"]["dataset"]["content"]) == ["cache", "paths"]
    with pytest.raises(
        StateMismatchError, match=r"sort the files, pass a seed.*accept=\('dataset.content',\)"
    ) as error:
        loader_of(Shows(paths=PERMUTED)).load_state_dict(saved)
    assert [one.path for one in error.value.differences] == ["dataset.content.paths"]
    # What one side alone shows may be a cache.
    loader_of(Shows(paths=NAMES)).load_state_dict(saved)
    # One of another length has another content for that.
    loader_of(Shows(7, paths=["new", *NAMES]), accept="dataset.length").load_state_dict(saved)
    loader = loader_of(Shows(paths=PERMUTED), accept="dataset.content")
    loader.load_state_dict(saved)
    assert loader.state_dict()["progress"] == saved["progress"]


def test_an_accepted_change_within_an_epoch_is_warned_of() -> None:
    before = loader_of(list(range(6)))
    next(iter(before))
    with pytest.warns(StatefulWarning, match="goes on with another dataset.content.items, as was accepted"):
        loader_of(list(range(6))[::-1], accept="dataset.content").load_state_dict(before.state_dict())


def test_samples_of_each_source_are_compared() -> None:
    def mixed(names: list[str]) -> StatefulLoader:
        parts = {"a": Shows(paths=NAMES), "b": Shows(paths=names)}
        sampler = MixtureBatchSampler({"a": 6, "b": 6}, batch_size=2, seed=0)
        return StatefulLoader(ConcatDataset(parts.values()), batch_sampler=sampler)

    saved = mixed(NAMES).state_dict()
    mixed(NAMES).load_state_dict(saved)
    with pytest.raises(StateMismatchError) as error:
        mixed(PERMUTED).load_state_dict(saved)
    assert [one.path for one in error.value.differences] == ["dataset.content.b.paths"]


def test_a_split_without_a_seed_is_refused() -> None:
    data = TensorDataset(torch.arange(40))
    train, _ = random_split(data, [30, 10])
    again, _ = random_split(data, [30, 10])
    with pytest.raises(StateMismatchError, match=r"dataset.indices.*pass a seed"):
        loader_of(again).load_state_dict(loader_of(train).state_dict())


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from lightning_stateful import StatefulLoader
class Files:
    def __init__(self): self.names = list(set({names!r}))
    def __len__(self): return len(self.names)
    def __getitem__(self, index): return self.names[index]
print(StatefulLoader(Files(), batch_size=2, seed=0).state_dict()["config"]["dataset"]["content"]["names"])
"""


def test_a_list_of_a_set_is_another_under_another_hash_seed() -> None:
    script = SCRIPT.format(path=sys.path, names=[f"{number}.png" for number in range(40)])
    # Another than that of this process, whose order of a set of 40 is another too.
    environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    other = subprocess.run([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True).stdout
    namespace: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(script, namespace)
    assert len(here.getvalue()) == len(other) == 13
    assert here.getvalue() != other
