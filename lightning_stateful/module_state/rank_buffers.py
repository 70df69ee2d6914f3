"""Buffers of the module that each rank has for itself, of a checkpoint whose ``state_dict`` has those of one rank.

DDP gives all ranks those of rank 0 before a forward pass, but not before the first one behind a validation, nor under
manual optimization, nor with ``broadcast_buffers=False``, nor those that the module tells it to ignore. Of weights,
which DDP keeps alike, a checkpoint is warned of where ranks have come to others all the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.parallel import DistributedDataParallel

from lightning_stateful.errors import StatefulWarning, some_of
from lightning_stateful.generators.attributes import is_users
from lightning_stateful.loops.lightning import WeightAveraging, pl
from lightning_stateful.loops.loop_progress import num_started
from lightning_stateful.loops.other_callbacks import callbacks_of
from lightning_stateful.loops.saved_progress import LoopProgress
from lightning_stateful.module_state.optimizer_steps import states_of
from lightning_stateful.samplers.fingerprint import digest_of_some, digest_of_tensor, hex_digest, is_plain_tensor
from lightning_stateful.samplers.rank_exchange import post, posted
from lightning_stateful.samplers.state_codec import from_plain, to_plain

# Under what name ranks show each other their buffers.
_POSTED = "buffers of the module"
# Bytes of the buffers of a rank up to which they are kept, the smallest first, and of those of all ranks.
_MOST, _MOST_OF_ALL = 2**20, 2**26
_REMEDY = (
    "Let them be equal on all ranks: BatchNorm by Trainer(sync_batchnorm=True), a queue by what self.all_gather gives "
    "of all ranks."
)
_NO_HOOKS = "It is not exact. Save and restore it in a callback's state_dict, by rank, or do without such a hook."
# By rank the buffers, as plain data, that are others than in state_dict, None for those that are not kept; None of a
# rank of which that is not known.
OfRanks = list[dict[str, Any] | None]


class RankBuffers:
    """Compares the module's buffers over all ranks as a checkpoint is written.

    Attributes:
        hooks: Names of communication hooks of DDP that have a state, which no checkpoint holds.
        is_held_back: Whether DDP does not broadcast buffers before the next forward pass.
    """

    def __init__(self) -> None:
        self.hooks: list[str] = []
        self.is_held_back = False
        self._has_warned_of_hooks = False
        self._digests: dict[str, str] = {}
        self._has_warned = False
        self._has_warned_of_weights = self._has_warned_of_positions = False
        self._broadcast: _Broadcast | None = None

    def note(self, trainer: pl.Trainer) -> None:
        """Note how DDP broadcasts buffers: when training is over, Lightning has taken it off the module."""
        self._broadcast = _broadcast_of(trainer) or self._broadcast
        self.hooks = _hooks_with_state(trainer.strategy.model) or self.hooks

    def show(self, trainer: pl.Trainer, progress: LoopProgress) -> str:
        """Show other ranks the buffers of this one that DDP does not overwrite before the next batch.

        Returns:
            A digest of them; empty where there are none.
        """
        self.note(trainer)
        if self.hooks and not self._has_warned_of_hooks:
            self._has_warned_of_hooks = True
            rank_zero_warn(f"{_said_of_hooks(self.hooks)} {_NO_HOOKS}", category=StatefulWarning)
        known = self._broadcast
        buffers = {} if known is None else _own_buffers(trainer, progress, known)
        self.is_held_back = known is not None and not (
            known.is_next or (known.is_on and _begins_again(trainer, progress))
        )
        self._digests = {name: digest_of_tensor(one) for name, one in buffers.items()}
        if not buffers:
            return ""
        if trainer.global_rank:
            left, values = _most_bytes(trainer.world_size), {}
            for name, one in sorted(buffers.items(), key=lambda item: item[1].nbytes):
                if (left := left - one.nbytes) < 0:
                    break
                values[name] = to_plain(one, name, "module")
            post(_POSTED, [self._digests, values])
        return _digest_of_all(self._digests)

    def of_ranks(self, trainer: pl.Trainer, digests: Sequence[str | None]) -> OfRanks:
        """The buffers of each rank that are others than those of this one; nothing where there are none.

        Args:
            trainer: The trainer.
            digests: What :meth:`show` has returned on each rank; None where that is not known.

        Warns:
            StatefulWarning: There are more of them than a checkpoint keeps, for the first time.
        """
        own = digests[trainer.global_rank]
        if not own or set(digests) == {own}:
            return []
        shown = posted(_POSTED) if trainer.global_rank == 0 else [None] * len(digests)
        found = [
            {} if digest == own else self._unlike_own(digest, of_rank)
            for digest, of_rank in zip(digests, shown, strict=True)
        ]
        if (large := _not_kept(found)) and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"Buffers of the module ({some_of(large)}) differ between ranks, and are more than the "
                f"{_most_bytes(trainer.world_size)} bytes a rank that a checkpoint keeps. Its state_dict has those of "
                f"rank 0, with which a resume goes on, inexactly, on all ranks. {_REMEDY} This is said once a run, of "
                "the first such checkpoint.",
                category=StatefulWarning,
            )
        return found

    def digest_of_weights(self, trainer: pl.Trainer) -> str:
        """A digest of some numbers of what DDP keeps alike on ranks: parameters, and states of optimizers.

        Empty without DDP on several; of an optimizer that divides its state among ranks that is left out.
        """
        if self._broadcast is None:
            return ""
        parameters = dict(trainer.lightning_module.named_parameters())
        read: list[torch.Tensor] = [one for name, one in parameters.items() if name not in self._broadcast.ignored]
        optimizers = [getattr(one, "optimizer", one) for one in trainer.optimizers]
        for one in optimizers:
            read += [] if type(one).__name__ == "ZeroRedundancyOptimizer" else states_of(one)
        return digest_of_some(read)

    def parted(self, trainer: pl.Trainer, digests: Sequence[str | None]) -> list[int]:
        """Ranks whose weights, or states of optimizers, are others than those of this one.

        Args:
            trainer: The trainer.
            digests: What :meth:`digest_of_weights` has returned on each rank; None where that is not known.

        Warns:
            StatefulWarning: There are such, for the first time.
        """
        own = digests[trainer.global_rank]
        found = [rank for rank, digest in enumerate(digests) if digest is not None and digest != own]
        if found and not self._has_warned_of_weights:
            self._has_warned_of_weights = True
            rank_zero_warn(
                f"Weights, or states of optimizers, of ranks {found[:8]} are others than those of rank "
                f"{trainer.global_rank}, which a checkpoint holds. A resume goes on with these on all ranks, and is "
                "not exact. DDP adds up gradients alone: let what changes them or the weights draw the same on all "
                "ranks (pl.seed_everything with one seed, no torch.Generator of each rank's own). Where weights are "
                "averaged now and then, save at such a step, and average momentum too.",
                category=StatefulWarning,
            )
        return found

    def apart(self, positions: Mapping[int, Sequence[int]], progress: LoopProgress) -> list[int]:
        """Ranks that stand at another batch than this one, whose position a checkpoint holds.

        Args:
            positions: Their epochs and batches.
            progress: That of this one.

        Warns:
            StatefulWarning: There are such, for the first time.
        """
        if positions and not self._has_warned_of_positions:
            self._has_warned_of_positions = True
            shown = ", ".join(f"rank {rank} at batch {at[1]} of epoch {at[0]}" for rank, at in positions.items())
            rank_zero_warn(
                f"A checkpoint is written where ranks stand at other batches: {shown}, and rank 0 at batch "
                f"{progress.batch} of epoch {progress.epoch}. It holds the position of rank 0 alone, so a resume from "
                "it is not exact. Let every rank have as many batches in an epoch.",
                category=StatefulWarning,
            )
        return list(positions)

    def _unlike_own(self, digest: str | None, shown: Any) -> dict[str, Any] | None:
        """What another rank has shown, where it is of this save, without what is as on this rank."""
        if shown is None or _digest_of_all(shown[0]) != digest:
            return None
        digests, values = shown
        return {name: values.get(name) for name, one in digests.items() if self._digests.get(name) != one}


def warn_of_parted(ranks: Sequence[int], hooks: Sequence[str], apart: Sequence[int]) -> None:
    """Warn of a resume from a checkpoint that was written where ranks differed, or DDP's hooks had a state.

    Args:
        ranks: Ranks that had other weights than rank 0.
        hooks: See :class:`RankBuffers`.
        apart: Ranks that stood at another batch.

    Warns:
        StatefulWarning: There were such.
    """
    if apart:
        rank_zero_warn(
            f"The checkpoint was written where ranks {list(apart)[:8]} stood at another batch than rank 0. All ranks "
            "go on at that of rank 0, so the resume is not exact. Let every rank have as many batches in an epoch.",
            category=StatefulWarning,
        )
    if hooks:
        rank_zero_warn(f"{_said_of_hooks(hooks)} So this resume is not exact.", category=StatefulWarning)
    if ranks:
        rank_zero_warn(
            f"The checkpoint was written where weights, or states of optimizers, of ranks {list(ranks)[:8]} were "
            "others than those of rank 0, which it holds. All ranks go on with these: the resume is not exact.",
            category=StatefulWarning,
        )


def put_back(trainer: pl.Trainer, saved: OfRanks, *, is_held_back: bool) -> None:
    """Give this rank the buffers that it had, once the module has those of ``state_dict``.

    Args:
        trainer: The trainer.
        saved: What :meth:`RankBuffers.of_ranks` has returned.
        is_held_back: See :class:`RankBuffers`. A hook may set buffers, by rank, before that forward pass.

    Warns:
        StatefulWarning: Some are not kept, or not those of this module, or the ranks are others.
    """
    ddp: Any = trainer.strategy.model
    names = sorted({name for of_rank in saved for name in of_rank or ()})
    if saved and (len(saved) != trainer.world_size or not isinstance(ddp, DistributedDataParallel)):
        if names or None in saved:
            written, now = f"{len(saved)} ranks under DDP", f"{trainer.world_size} under {_strategy(trainer)}"
            _warn_of_lost(some_of(names), f"it was written on {written}, and this run has {now}", rank_zero=True)
        return
    _warn_of_unknown(trainer, saved)
    if is_held_back and isinstance(ddp, DistributedDataParallel):
        # A new DDP gives all ranks those of rank 0 before its first forward pass.
        ddp.require_forward_param_sync = False
    if not names:
        return
    buffers = _buffers(trainer)
    kept = {name: from_plain(one) for name, one in (saved[trainer.global_rank] or {}).items() if one is not None}
    fitting = {name for name, one in kept.items() if name in buffers and buffers[name].shape == one.shape}
    with torch.no_grad():
        for name in fitting:
            buffers[name].copy_(kept[name])
    if unfitting := sorted(kept.keys() - fitting):
        _warn_of_lost(some_of(unfitting), "the module has none of this name and shape")


class _Broadcast(NamedTuple):
    """Whether DDP broadcasts buffers before the next forward pass, before others, and which it leaves alone."""

    is_next: bool
    is_on: bool
    ignored: frozenset[str]


def _broadcast_of(trainer: pl.Trainer) -> _Broadcast | None:
    """How DDP broadcasts buffers; None of a single rank, and of other strategies."""
    ddp = trainer.strategy.model
    if trainer.world_size == 1 or not isinstance(ddp, DistributedDataParallel):
        return None
    # Under manual optimization Lightning lets it do so before the first batch of all.
    is_on = bool(ddp.broadcast_buffers and trainer.lightning_module.automatic_optimization)
    return _Broadcast(is_on and ddp.require_forward_param_sync, is_on, frozenset(ddp.parameters_to_ignore))


def _own_buffers(trainer: pl.Trainer, progress: LoopProgress, broadcast: _Broadcast) -> dict[str, torch.Tensor]:
    """The saved buffers of this rank that DDP does not overwrite with those of rank 0 before the next batch."""
    buffers = _buffers(trainer)
    # Others may be in the module in the validation, before which DDP broadcasts them, and then these again.
    is_swapped = progress.validate and _changes_for_validation(trainer)
    if (broadcast.is_next and not is_swapped) or (broadcast.is_on and _begins_again(trainer, progress)):
        # DDP broadcasts those of averages, too, while a validation has them in the module.
        buffers = {name: one for name, one in buffers.items() if name in broadcast.ignored}
    saved = {prefix + name for prefix, one in _modules(trainer).items() for name in one.state_dict()} if buffers else ()
    return {name: one for name, one in buffers.items() if name in saved and is_plain_tensor(one)}


def _begins_again(trainer: pl.Trainer, progress: LoopProgress) -> bool:
    """Whether a resume begins an open window again, with a forward pass that DDP broadcasts before."""
    return progress.running and not progress.ended and num_started(trainer) > progress.batch


def _changes_for_validation(trainer: pl.Trainer) -> bool:
    """Whether a callback, or the module, has hooks before and behind a validation, which may put averages into it."""
    owners = [*callbacks_of(trainer), trainer.lightning_module]
    held = [kind for one in owners for kind in type(one).__mro__ if is_users(kind.__module__)]
    starts = ("on_validation_start", "on_validation_epoch_start", "on_validation_model_eval")
    is_users_own = any(hook in vars(kind) for kind in held for hook in starts)
    return is_users_own or any(isinstance(one, WeightAveraging) for one in owners)


def _buffers(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """All buffers by name, those of averages too."""
    return {prefix + name: one for prefix, of in _modules(trainer).items() for name, one in of.named_buffers()}


def _modules(trainer: pl.Trainer) -> dict[str, torch.nn.Module]:
    """The module, and its averages that WeightAveraging callbacks hold, by what stands before names of buffers."""
    callbacks = callbacks_of(trainer)
    averages = {
        f"{type(one).__name__}.": one._average_model.module
        for one in callbacks
        if isinstance(one, WeightAveraging) and one._average_model is not None
    }
    return {"": trainer.lightning_module, **averages}


def _hooks_with_state(ddp: Any) -> list[str]:
    held = vars(ddp).get("_comm_hooks", ()) if isinstance(ddp, DistributedDataParallel) else ()
    # A group of processes alone decides nothing, and that of mixed precision is what DDP sets up by itself.
    names = [(hook.__qualname__, type(state)) for hook, state in held if state is not None]
    is_left_out = ("ProcessGroup", "_AllreduceUpcastHookState")
    return [name for name, kind in names if kind.__name__ not in is_left_out]


def _said_of_hooks(names: Sequence[str]) -> str:
    return (
        f"A communication hook of DDP ({some_of(list(names))}) has a state, such as PowerSGD's errors and iteration, "
        "which no checkpoint holds: a resume begins it anew."
    )


def _digest_of_all(digests: dict[str, str]) -> str:
    return hex_digest(repr(digests).encode())


def _most_bytes(num_ranks: int) -> int:
    """Bytes of its buffers that a checkpoint keeps of each rank."""
    return min(_MOST, _MOST_OF_ALL // num_ranks)


def _not_kept(of_ranks: OfRanks) -> list[str]:
    """Names of the buffers that differ and are not kept."""
    return sorted({name for of_rank in of_ranks for name, one in (of_rank or {}).items() if one is None})


def _warn_of_unknown(trainer: pl.Trainer, saved: OfRanks) -> None:
    """Warn of buffers that the checkpoint does not have of each of these ranks."""
    if large := _not_kept(saved):
        size = _most_bytes(trainer.world_size)
        _warn_of_lost(some_of(large), f"they were more than the {size} bytes a rank that it keeps", rank_zero=True)
    if unknown := [rank for rank, of_rank in enumerate(saved) if of_rank is None]:
        _warn_of_lost("", f"ranks {unknown[:8]} have not shown theirs to the rank that wrote it", rank_zero=True)


def _warn_of_lost(names: str, why: str, *, rank_zero: bool = False) -> None:
    """Warn of buffers that a resume does not give back to each rank."""
    warn = rank_zero_warn if rank_zero else partial(warnings.warn, stacklevel=2)
    warn(
        f"Buffers of the module{names and f' ({names})'} differed between ranks where the checkpoint was written, or "
        f"may have, and it does not have those of each of these ranks: {why}. The resume goes on with those in its "
        f"state_dict, and is not exact. {_REMEDY}",
        category=StatefulWarning,
    )


def _strategy(trainer: pl.Trainer) -> str:
    return type(trainer.strategy).__name__
