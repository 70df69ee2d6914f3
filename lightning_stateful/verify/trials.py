"""Trains a user's data in real processes, stops and resumes, and compares: what is tried, and in which turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_stateful.errors import ConfigurationError
from lightning_stateful.verify.causes import Causes
from lightning_stateful.verify.comparison import (
    Divergence,
    count_samples,
    first_divergence,
    of_epoch,
    rows_of,
    step_size,
)
from lightning_stateful.verify.conditions import Conditions
from lightning_stateful.verify.factory import CommandLineConfig, path_of
from lightning_stateful.verify.records import Job, Moment, Record, Run
from lightning_stateful.verify.result import Outcome, Trial, Verification, counted
from lightning_stateful.verify.runs import Runs, failure_of

# Of the moments, the one whose checkpoint is resumed on other ranks and workers.
_MIDDLE = "stopped in the middle of epoch 0"
_NO_NAMES = (
    "The samples have no index, and other content there than here, as of augmentation. Pass a key, a function from a "
    "batch to the names of its samples."
)


def verify(
    factory: Any = None,
    *,
    config: str | Path | None = None,
    devices: Sequence[int] = (1,),
    workers: Sequence[int | None] = (None,),
    epochs: int = 2,
    batches: int = 30,
    seed: int | None = None,
    key: Any = None,
    callback: bool = True,
    timeout: float = 300.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verification:
    """Train, stop and resume a user's data in new processes, and compare sample by sample.

    On each number of ranks a run without a stop is compared with one that writes checkpoints in the middle and at the
    end of an epoch and in and after a validation, and is then killed with SIGKILL; and with runs from these checkpoints
    on as many ranks and workers, on other workers, and on other ranks. The first difference ends it, and is explained
    by further runs. A new process has another ``PYTHONHASHSEED`` and lists folders in another order.

    Args:
        factory: ``"package.module:name"``, or a function or class at the level of a module: what makes, or is, a
            LightningDataModule, a LightningModule with loaders, or a DataLoader or a list or dict of them.
        config: A YAML file of the LightningCLI, whose ``data:`` section has the arguments, and maybe the class.
        devices: Numbers of ranks.
        workers: Numbers of workers of each loader; None leaves them as they are.
        epochs: Epochs of each run, at least 2.
        batches: The most batches of an epoch.
        seed: Passed to ``seed_everything``, as your script does; by default that of ``config``.
        key: ``"package.module:name"`` of a function from a batch to integers or strings, one for each sample, for
            streams whose samples are augmented; what has an index needs none.
        callback: Whether StatefulDataCallback is added where the data module brings none.
        timeout: Seconds without a new batch after which a run counts as hung.
        progress: Is told how many runs have ended, and of how many.

    Returns:
        What was found: true if all was right.

    Raises:
        ConfigurationError: An argument is wrong, or the data cannot be trained on at all.
    """
    arguments: dict[str, Any] = {}
    if config is not None:
        read = CommandLineConfig.read(config)
        factory, arguments = factory or read.factory, read.arguments
        seed = read.seed if seed is None else seed
    if factory is None:
        raise ConfigurationError("Pass a factory, package.module:function, or a config whose data: has a class_path.")
    for name, numbers, least in (("devices", devices, 1), ("workers", workers, 0)):
        if not numbers or any(number is not None and number < least for number in numbers):
            raise ConfigurationError(f"{name} must be numbers from {least}, got {list(numbers)}.")
    if epochs < 2 or batches < 3:
        raise ConfigurationError(f"epochs must be at least 2 and batches at least 3, got {epochs} and {batches}.")
    job = Job(
        factory=path_of(factory),
        arguments=arguments,
        search=(*sys.path, str(Path.cwd())),
        package="pytorch_lightning" if _imported_first("pytorch_lightning") else "lightning.pytorch",
        epochs=epochs,
        batches=batches,
        validate_every=max(2, batches // 6),
        callback=callback,
        key=None if key is None else path_of(key),
        conditions=Conditions(seed=seed),
    )
    return _Trials(job, list(dict.fromkeys(devices)), list(dict.fromkeys(workers)), timeout, progress).result()


def _imported_first(package: str) -> bool:
    return next((name for name in sys.modules if name in ("lightning.pytorch", "pytorch_lightning")), "") == package


class _Trials:
    """Everything that is tried of one user's data."""

    def __init__(
        self,
        job: Job,
        devices: list[int],
        workers: list[int | None],
        timeout: float,
        progress: Callable[[int, int], None],
    ) -> None:
        self._devices, self._workers, self._progress = devices, workers, progress
        self._runs = Runs(job, timeout, self._note_run)
        self._causes = Causes(self._runs, workers[0])
        self._found = Verification(factory=job.factory)
        # By number of ranks, the run without a stop.
        self._whole: dict[int, list[Record]] = {}
        self._num_runs = 0
        self._total = len(devices) * (1 + 6 + len(workers) + len(devices) - 2)

    def result(self) -> Verification:
        """Do it all, up to the first divergence."""
        self._progress(0, self._total)
        try:
            self._train_whole()
            for ranks in self._whole:
                if self._found.divergence is None and not self._found.faults:
                    self._stop_and_resume(ranks)
        finally:
            self._runs.clear()
        return self._found

    def _note_run(self) -> None:
        self._num_runs += 1
        self._progress(min(self._num_runs, self._total), self._total)

    def _train_whole(self) -> None:
        """The run without a stop, on each number of ranks."""
        for ranks in self._devices:
            records = self._runs(Run(ranks=ranks, workers=self._workers[0]))[0]
            kind, said = failure_of(records)
            if kind == "failed" and not self._whole:
                name, _, text = said.partition(": ")
                if name == "ConfigurationError":
                    raise ConfigurationError(text)
                raise ConfigurationError(f"The run without a stop has failed: {said}\n{records[0].log.strip()}")
            if kind:
                self._add("begun", records, records, kind, said)
                if self._found.cause is None and kind == "refused":
                    self._found.cause = self._causes.of_refused_start(ranks)
            elif not records[0].of_epoch(1):
                raise ConfigurationError("The data have no batch in the second epoch, so nothing can be compared.")
            else:
                self._whole[ranks] = records
                length = len(records[0].of_epoch(0))
                self._found.lengths[ranks] = length
                self._found.is_cut = self._found.is_cut or length >= self._runs.job.batches

    def _stop_and_resume(self, ranks: int) -> None:
        """Stop a run on so many ranks, and resume it everywhere."""
        whole, workers = self._whole[ranks], self._workers[0]
        moments = tuple((moment, self._runs.checkpoint()) for moment in self._moments(whole))
        stopped = self._runs(Run(ranks=ranks, workers=workers, moments=moments, kill_after=moments[-1][0].after + 1))[0]
        if set(stopped[0].saved) == {moment.name for moment, _ in moments}:
            # It was killed, and maybe one rank a moment before another.
            for record in stopped:
                record.refused = record.failed = ""
        if not self._compare("another run without a stop", "equal", whole, stopped, is_cut=True):
            return
        paths = {moment.name: path for moment, path in moments if moment.name in stopped[0].saved}
        starts = {name: stopped[0].saved[name] for name in paths}
        resumed = self._runs(
            *(Run(ranks=ranks, workers=workers, resumed=True, checkpoint=path) for path in paths.values())
        )
        for (name, start), records in zip(starts.items(), resumed, strict=True):
            if not self._compare(name, "exact", whole, records, start=start):
                return
        if _MIDDLE not in paths:
            return
        path, start = paths[_MIDDLE], starts[_MIDDLE]
        for others in self._workers[1:]:
            if not self._found.faults:
                self._resume_with_workers(ranks, path, start, others)
        for number, there in self._whole.items():
            if number != ranks and not self._found.faults:
                records = self._runs(Run(ranks=number, workers=workers, resumed=True, checkpoint=path))[0]
                self._count(f"resumed on {counted(number, 'rank')}", whole, there, records, start, workers)

    def _resume_with_workers(self, ranks: int, path: Path, start: int, workers: int | None) -> None:
        of_workers = "the workers it has" if workers is None else counted(workers, "worker")
        name, whole = f"resumed with {of_workers}", self._whole[ranks]
        resumed = Run(ranks=ranks, workers=workers, resumed=True, checkpoint=path)
        if all(of["map_style"] for of in whole[0].facts.values()):
            self._compare(name, "exact", whole, self._runs(resumed)[0], start=start, workers=workers)
            return
        # Of a stream each worker reads a part, so batches are others.
        there, records = self._runs(Run(ranks=ranks, workers=workers), resumed)
        self._count(name, whole, there, records, start, workers)

    def _moments(self, whole: Sequence[Record]) -> list[Moment]:
        """When checkpoints are written, in turn."""
        first, second = len(whole[0].of_epoch(0)), len(whole[0].of_epoch(1))
        found = [
            Moment(name=_MIDDLE, hook="on_train_batch_end", after=max(first // 2, 1)),
            Moment(name="stopped at the end of epoch 0", hook="on_train_epoch_end", after=first),
        ]
        if whole[0].validates:
            every = self._runs.job.validate_every
            in_first = max(first // 3 // every, 1) * every
            found.append(Moment(name="stopped in a validation", hook="on_validation_batch_start", after=in_first))
            later = in_first + every
            if later < first + second:
                found.append(Moment(name="stopped after a validation", hook="on_validation_end", after=later))
        if first == 1:
            del found[0]
        found.sort(key=lambda moment: moment.after)
        killed = first + max(second // 2, 1)
        return [*found, Moment(name="killed by SIGKILL in epoch 1", hook="on_train_batch_end", after=killed)]

    def _compare(
        self,
        name: str,
        right: Outcome,
        whole: Sequence[Record],
        records: Sequence[Record],
        *,
        start: int = 0,
        workers: int | None = None,
        is_cut: bool = False,
    ) -> bool:
        """Compare a run with the rest of that without a stop, on as many ranks.

        Args:
            name: Of the trial.
            right: The outcome if nothing differs.
            whole: The run without a stop.
            records: The other run.
            start: Batches that were trained on before it.
            workers: Its workers, where they are others.
            is_cut: Whether it may end earlier.
        """
        kind, said = failure_of(records)
        came = rows_of(records)
        expected = rows_of(whole, start, start + min(map(len, came)) if is_cut else None)
        came = [batches[: len(expected[0])] for batches in came] if is_cut else came
        divergence = None if kind else first_divergence(expected, came)
        outcome = kind or ("differs" if divergence else right)
        self._add(name, whole, records, outcome, said, workers=workers, num_batches=sum(map(len, came)))
        if divergence is None and not kind:
            return True
        if kind == "failed":
            return False
        self._explain(whole, records, divergence, start, is_resumed=not is_cut)
        return kind == "refused"

    def _count(
        self,
        name: str,
        whole: Sequence[Record],
        there: Sequence[Record],
        records: Sequence[Record],
        start: int,
        workers: int | None,
    ) -> None:
        """Count the samples of an epoch that was ended on other ranks or workers.

        Args:
            name: Of the trial.
            whole: The run without a stop where the epoch was begun.
            there: The run without a stop where it was ended.
            records: The run that ended it.
            start: Batches of each rank before the stop.
            workers: Workers of the run that ended it.
        """
        kind, said = failure_of([*there, *records])
        if kind:
            self._add(name, whole, records, kind, said, workers=workers)
            return
        epochs = [of_epoch(run, 0) for run in (whole, there)]
        # What a stream has left for less than a step comes first in the next epoch.
        is_stream = not all(of["map_style"] for of in whole[0].facts.values())
        spare = max(map(step_size, (whole, there))) - 1 if is_stream and len(records) > 1 else 0
        before, after = rows_of(whole, 0, start), of_epoch(records, 0)
        tally = count_samples(0, before, after, *epochs, spare=None if self._found.is_cut else spare)
        outcome: Outcome = "differs" if tally.fault else "once" if tally.compared else "not compared"
        num_batches = sum(len(record.of_epoch(0)) for record in records)
        said = "" if tally.compared else _NO_NAMES
        self._add(name, whole, records, outcome, said, workers=workers, num_batches=num_batches)
        if tally.fault:
            self._explain(whole, records, tally.fault, None)

    def _explain(
        self,
        whole: Sequence[Record],
        records: Sequence[Record],
        divergence: Divergence | None,
        start: int | None,
        *,
        is_resumed: bool = True,
    ) -> None:
        if self._found.cause is not None:
            return
        self._found.divergence = divergence
        self._found.warned = list(dict.fromkeys(text for record in records for text in record.warned))
        if not is_resumed:
            self._found.cause = self._causes.of_unlike_runs(len(whole))
        else:
            self._found.cause = self._causes.of_resume(whole, records, divergence, start)

    def _add(
        self,
        name: str,
        whole: Sequence[Record],
        records: Sequence[Record],
        outcome: Outcome,
        said: str,
        *,
        workers: int | None = None,
        num_batches: int = 0,
    ) -> None:
        own = self._workers[0]
        self._found.trials.append(
            Trial(
                name=name,
                ranks=len(whole),
                workers=own,
                resumed_on=len(records),
                resumed_workers=own if workers is None else workers,
                outcome=outcome,
                said=said,
                num_batches=num_batches,
            )
        )
