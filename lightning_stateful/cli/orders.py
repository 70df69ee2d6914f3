"""The rest of an epoch on other ranks: from a state alone, where that says all that the order follows from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lightning_stateful.cli.reading import COUNTS_SAMPLES, Checkpoint, source_lengths
from lightning_stateful.core.order import UNKNOWN, BatchOrder, EpochPlan, Progress
from lightning_stateful.core.samples import SampleBatchOrder, SampleEpochPlan, SequentialOrder
from lightning_stateful.core.skip import Gaps, plan_without
from lightning_stateful.errors import ConfigurationError
from lightning_stateful.mixture.order import MixtureOrder
from lightning_stateful.mixture.sources import Sources

_WHY_NOT = {
    "buckets": "the lengths of the samples",
    "sampler": "the sampler",
    "batch_sampler": "the batch sampler",
    "stream": "the shards",
    "iterable": "the dataset",
}


class RestOfEpoch(NamedTuple):
    """The rest of an epoch of one loader on some ranks.

    Attributes:
        epoch: The epoch.
        steps_left: Steps to its end; None where its end is not known beforehand.
        steps_of_epoch: Steps of a whole epoch; None likewise.
        samples_left: Samples to its end; None where the order does not count them.
        last_step: The fewest and the most samples that a rank has in the last step; None likewise.
        repeated: Samples that are served twice at its end, to keep ranks in step; None likewise.
        dropped: Samples that ``drop_last`` leaves out at its end; None likewise.
        note: What the order says of repeats.
        shards: Of a stream: shards that are left, and how many of them several ranks read together.
    """

    epoch: int
    steps_left: int | None
    steps_of_epoch: int | None
    samples_left: int | None = None
    last_step: tuple[int, int] | None = None
    repeated: int | None = None
    dropped: int | None = None
    note: str = ""
    shards: dict[str, int] | None = None

    @classmethod
    def of(cls, plan: EpochPlan, steps_of_epoch: int) -> RestOfEpoch:
        """Count what a plan of the rest of an epoch serves, which has so many steps in all."""
        counted: dict[str, Any] = {}
        if isinstance(plan, SampleEpochPlan):
            rule, left = plan.rule, plan.remaining
            shares = [list(rule.last_shares(left, rank)) for rank in range(rule.num_replicas)]
            sizes = [last[-1].size for last in shares if last]
            counted = {
                "samples_left": left,
                "last_step": (min(sizes), max(sizes)) if sizes else None,
                "repeated": rule.num_repeated(left),
                "dropped": rule.num_dropped(left),
            }
        return cls(
            epoch=plan.epoch,
            steps_left=_known(plan.num_steps),
            steps_of_epoch=_known(steps_of_epoch),
            note=plan.repeats(),
            **counted,
        )


def rests_from_states(checkpoint: Checkpoint, ranks: int, batch_size: int | None) -> dict[str, RestOfEpoch]:
    """The rest of the epoch for each loader of a checkpoint, by path.

    Args:
        checkpoint: The checkpoint.
        ranks: Ranks that are to go on.
        batch_size: Samples in a batch of one rank; None for as many as before.

    Raises:
        ConfigurationError: The states do not say all that is needed.
        StateError: There is no state, or its position is outside its data.
    """
    checkpoint.needed()
    rests = {}
    for path, state in checkpoint.loaders.items():
        saved = checkpoint.written.get("batch_size", {}).get(path)
        order = _order_of(state, saved if batch_size is None else batch_size, path)
        progress = Progress.from_dict(state["progress"])
        if order.config().get("batch_size") != state["config"].get("batch_size"):
            progress = order.convert(progress, state["config"])
        whole = _without_skipped(order.plan(progress.epoch, ranks), state, Progress(epoch=progress.epoch))
        rest = _without_skipped(order.plan(progress.epoch, ranks, progress), state, progress)
        rests[path] = RestOfEpoch.of(rest, whole.num_steps)
    return rests


def _without_skipped(plan: EpochPlan, state: Mapping[str, Any], progress: Progress) -> EpochPlan:
    """A plan without the batches that its state says were left out, or were to be."""
    ranges = () if progress.cycle else state.get("skip", {}).get("ranges", ())
    gaps = Gaps.of((begin, end) for epoch, _, _, begin, end in ranges if epoch == progress.epoch)
    found: EpochPlan = plan_without(plan, gaps, progress.consumed)
    return found


def steps_left(rests: Mapping[str, RestOfEpoch], checkpoint: Checkpoint) -> int | None:
    """Steps to the end of the epoch, of all loaders together; None where that is not known."""
    left = []
    for path, rest in rests.items():
        if rest.steps_left is None:
            return None
        # A loader in a later pass within the epoch has been seen once.
        left.append(0 if checkpoint.loaders[path]["progress"]["cycle"] else rest.steps_left)
    mode = checkpoint.needed()["config"].get("mode")
    return min(left) if mode == "min_size" else max(left)


def notes_on(checkpoint: Checkpoint, batch_size: int | None) -> list[str]:
    """Notes on what a plan does not count: a batch size that a resume refuses, and a limit that has cut epochs."""
    notes = [*_refused_batch_sizes(checkpoint, batch_size), *_limits(checkpoint)]
    if any("samples" in state.get("skip", {}) for state in checkpoint.loaders.values()):
        notes.append("Samples that skip= leaves out by their index are counted as if they were served.")
    return notes


def _limits(checkpoint: Checkpoint) -> Iterator[str]:
    written, state = checkpoint.written, checkpoint.loaders.get("")
    if not written or state is None or written["steps"] is None:
        return
    order = _order_of(state, written["batch_size"].get(""), "")
    epoch = state["progress"]["epoch"]
    whole = _without_skipped(order.plan(epoch, written["ranks"]), state, Progress(epoch=epoch)).num_steps
    if written["steps"] < whole:
        taken = f"{written['steps']:,} of the {whole:,} steps of an epoch"
        yield f"The run took {taken} (limit_train_batches), which is not counted here."


def _refused_batch_sizes(checkpoint: Checkpoint, batch_size: int | None) -> list[str]:
    """A note on loaders that another batch size than the saved one would be refused for."""
    saved = {path: state["config"].get("batch_size", batch_size) for path, state in checkpoint.loaders.items()}
    if batch_size is None or all(size == batch_size for size in saved.values()):
        return []
    sizes = ", ".join(map(str, saved.values()))
    return [f"A resume refuses another batch size than the saved {sizes}, unless accept=('batch_size',) is passed."]


def _known(steps: int) -> int | None:
    return steps if steps < UNKNOWN else None


def _order_of(state: Mapping[str, Any], batch_size: int | None, path: str) -> BatchOrder:
    """The order of a state, as far as the number of its steps goes.

    Raises:
        ConfigurationError: It does not follow from the state.
    """
    kind, config = state["kind"], state["config"]
    loader = f"loader {path!r}" if path else "the loader"
    dataset = config.get("dataset")
    if kind in COUNTS_SAMPLES and isinstance(dataset, Mapping) and isinstance(dataset.get("length"), int):
        if batch_size is None:
            raise ConfigurationError(f"The checkpoint does not say the batch size of {loader}: pass --batch-size.")
        # Which samples these are makes no difference to how many.
        samples = SequentialOrder(dataset["length"])
        return SampleBatchOrder(samples=samples, batch_size=batch_size, drop_last=config["drop_last"])
    if kind in ("mixture", "round_robin"):
        return _mixture_of(kind, config, batch_size)
    why = _WHY_NOT.get(kind, f"the order {kind!r}, which is not one of this package's")
    raise ConfigurationError(f"How {loader} goes on depends on {why}: name its factory too, as module:function.")


def _mixture_of(kind: str, config: Mapping[str, Any], batch_size: int | None) -> MixtureOrder:
    lengths = source_lengths(config)
    names = tuple(lengths)
    sizes = config["batch_size"] if batch_size is None else batch_size
    draws, stop = config.get("weights", [1] * len(names)), str(config["stop"])
    if not isinstance(draws, list):
        raise ConfigurationError(
            f"The state has a digest of the weights alone ({draws}): name the factory too, as module:function."
        )
    is_counted = stop.endswith(" steps")
    return MixtureOrder(
        sources=Sources(
            names, tuple(lengths.values()), tuple(sizes if isinstance(sizes, list) else [sizes] * len(names))
        ),
        draws=tuple(draws),
        stop=None if is_counted else config["stop"],
        num_steps=int(stop.split(" ")[0]) if is_counted else None,
        seed=config["seed"],
        shuffle=config["shuffle"],
        drop_last=config["drop_last"],
        in_turn=kind == "round_robin",
        by=config.get("by", "batch"),
    )
