"""Finds the cause of a divergence by further runs, in which one condition is held or changed at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lightning_stateful.verify.comparison import Divergence, first_divergence, form_of, rows_of
from lightning_stateful.verify.conditions import Conditions
from lightning_stateful.verify.records import Record, Run
from lightning_stateful.verify.result import Cause
from lightning_stateful.verify.runs import Runs, failure_of

_CLOCK = (
    "What is read depends on the time: on time.time() or datetime.now(). Draw from torch's, NumPy's or Python's global "
    "generators instead, which are seeded for each batch, or take the time once and keep it in a setting."
)
_GLOBAL = (
    "Something is drawn from torch's, NumPy's or Python's global generators while the data are made, and nobody seeds "
    "them: a split, a permutation, a list of files. Call seed_everything in your script and pass the same seed here, "
    "or give it a generator with a seed."
)
_GENERATOR = (
    "Something is drawn from a generator that is not seeded, made anew each time (np.random.default_rng(), "
    "random.Random(), torch.Generator().seed()) or of the system's entropy (secrets, os.urandom). Give it a seed, or "
    "draw from torch's, NumPy's or Python's global generators, which are seeded for each batch."
)
_SETS = (
    "The order of a set of strings, or of what hash() gives, is another in each process: PYTHONHASHSEED. Sort what is "
    "made from it: sorted(...)."
)
_FILES = (
    "Folders are read in the order in which the file system lists them (os.listdir, os.scandir, glob, iterdir), which "
    "is another on another machine. Sort it: sorted(path.iterdir())."
)
_CALLBACK = (
    "The training loader is a plain one, so Lightning begins its epoch anew: the StatefulDataCallback is missing. Pass "
    "Trainer(callbacks=[StatefulDataCallback()]), or subclass StatefulDataModule."
)
_LEARNS = (
    "{names} changes while it is trained on, as of a sampler that learns from losses, and a resume begins with it as "
    "it is made. Keep what it has learnt in a checkpoint (state_dict and load_state_dict of the data module), so that "
    "it is back before the first batch."
)
_ITER = (
    "{names} gives other samples when it is begun a second time: its __iter__ moves on what it keeps. Let __iter__ "
    "begin where the state says and change nothing; let each sample that is handed over change it."
)
_HELD = (
    "{names} is no DataLoader: it iterates one and hands batches on by itself. Batches that it has read and holds at a "
    "stop are in no checkpoint. Let it hold nothing beyond the end of an epoch, or give it state_dict and "
    "load_state_dict that count what it has handed over."
)
_STATE = "{form} Test it by itself with check_resume."
_UNKNOWN = (
    "Data are the same in every process, and differ only once they are resumed. Something else than the loaders is "
    "remembered from batch to batch: a cache or counter in the dataset, collate_fn or a hook."
)
_OTHER_SETS, _OTHER_FILES = Conditions(hash_seed=1), Conditions(reversed_files=True)


class Causes:
    """Finds causes of what one user's data do.

    Args:
        runs: Starts runs of these data.
        workers: Workers of each loader; None to leave them as they are.
    """

    def __init__(self, runs: Runs, workers: int | None) -> None:
        self._runs, self._workers = runs, workers

    def _under(self, ranks: int, *conditions: Conditions) -> list[list[Record]]:
        """Do runs without a stop, each under conditions that are the same on all ranks."""
        return self._runs(*(Run(ranks=ranks, workers=self._workers, alike=one) for one in conditions))

    def of_unlike_runs(self, ranks: int) -> Cause:
        """Two runs without a stop, under the same conditions, were not alike."""
        clock, seed = Conditions(held_clock=float(int(time.time()))), Conditions(seed=0)
        with_clock, again_clock, with_seed, again_seed = self._under(ranks, clock, clock, seed, seed)
        if not all(of["patched"] for of in with_clock[0].facts.values()):
            return Cause(name="callback", said=_CALLBACK)
        tried = ["two runs without a stop, under the same conditions: not alike"]
        if _alike(with_clock, again_clock):
            return Cause(name="clock", said=_CLOCK, tried=(*tried, "the same with a clock that stands: alike"))
        tried.append("the same with a clock that stands: not alike")
        if self._runs.job.conditions.seed is None:
            if _alike(with_seed, again_seed):
                return Cause(name="global generators", said=_GLOBAL, tried=(*tried, "the same with a seed: alike"))
            tried.append("the same with a seed: not alike")
        return Cause(name="generator", said=_GENERATOR, tried=tuple(tried))

    def of_refused_start(self, ranks: int) -> Cause | None:
        """A run was refused before its first step, as ranks have other data; None if that has other reasons."""
        if ranks == 1:
            return None
        plain, sets, files, seeded = self._under(ranks, Conditions(), _OTHER_SETS, _OTHER_FILES, Conditions(seed=0))
        if not failure_of(plain)[0]:
            return _of_process(plain, sets, files)
        if failure_of(seeded)[0]:
            return None
        return Cause(name="global generators", said=_GLOBAL, tried=("the same with a seed on all ranks: it trains",))

    def of_resume(
        self,
        whole: Sequence[Record],
        came: Sequence[Record],
        divergence: Divergence | None,
        start: int | None,
    ) -> Cause:
        """A resumed run was not as the rest of that without a stop, or was refused.

        Args:
            whole: The records of the run without a stop.
            came: Those of the resumed run.
            divergence: The first difference; None if the resume was refused or failed.
            start: Batches that were trained on before it; None where these need not go on as without the stop.
        """
        ranks = len(whole)
        plain, sets, files, again = self._under(ranks, Conditions(), _OTHER_SETS, _OTHER_FILES, Conditions())
        if not _alike(plain, again):
            return self.of_unlike_runs(ranks)
        if of_process := _of_process(plain, sets, files):
            return of_process
        [twice] = self._runs(Run(ranks=1, workers=self._workers, begins_twice=True))
        return _of_resuming(whole, came, divergence, start, twice[0].changes)


def _of_process(plain: Sequence[Record], sets: Sequence[Record], files: Sequence[Record]) -> Cause | None:
    if not _alike(plain, sets):
        return Cause(name="sets", said=_SETS, tried=("a run with another PYTHONHASHSEED: not alike",))
    if not _alike(plain, files):
        return Cause(name="files", said=_FILES, tried=("a run in which folders are listed in reverse: not alike",))
    return None


def _of_resuming(
    whole: Sequence[Record],
    came: Sequence[Record],
    divergence: Divergence | None,
    start: int | None,
    changing: Sequence[str],
) -> Cause:
    """The cause in what data do over a stop, where all processes have the same."""
    tried = ("runs with another PYTHONHASHSEED, and with folders listed in reverse: alike",)
    facts = {path: {**of, **came[0].facts.get(path, {})} for path, of in whole[0].facts.items()}
    if not all(of["patched"] for of in facts.values()):
        return Cause(name="callback", said=_CALLBACK, tried=tried)
    if learning := [name for of in whole[0].facts.values() for name in of["changed"]]:
        return Cause(name="learns", said=_LEARNS.format(names=" and ".join(learning)), tried=tried)
    wrappers = [of["class"] for of in facts.values() if of["wrapper"]]
    if moving := [name for name in changing if name not in wrappers]:
        said = _ITER.format(names=" and ".join(moving))
        return Cause(name="iter", said=said, tried=(*tried, "begun twice in one process: other samples"))
    if wrappers:
        return Cause(name="held batches", said=_HELD.format(names=" and ".join(wrappers)), tried=tried)
    form = "" if divergence is None or start is None else form_of(whole, start, divergence, rows_of(came))
    return Cause(name="state" if form else "", said=_STATE.format(form=form) if form else _UNKNOWN, tried=tried)


def _alike(one: Sequence[Record], other: Sequence[Record]) -> bool:
    failures = failure_of(one)[0], failure_of(other)[0]
    return failures == ("", "") and first_divergence(rows_of(one), rows_of(other)) is None
