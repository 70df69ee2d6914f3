"""Signals that arrive while a batch is trained on wait for its end.

Lightning saves within its handler of SLURM's requeue signal, and Ctrl-C raises ``KeyboardInterrupt``, at whatever line
runs: inside ``optimizer.step`` the weights have moved, and the batch does not count as trained on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_stateful.loops.lightning import WeightAveraging, pl
from lightning_stateful.loops.other_callbacks import callbacks_of

Handler = Callable[[int, Any], Any]


class HeldSignals:
    """Runs the handlers of signals between batches while a trainer trains.

    In one process a handler runs at once, or at the end of the batch, of a validation's or an epoch's end hooks, or of
    a validation of averaged weights. Ranks agree at the end of every batch on what any of them has received and run
    the handlers together, because these save, and so wait for the other ranks.
    """

    def __init__(self) -> None:
        self._together = False
        self._holding = False
        self._arrived: list[int] = []
        self._signals: list[int] = []
        self._handlers: dict[int, Handler] = {}
        # Loops, names of their methods, and what somebody else had put in a method's place.
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._device: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        # What another process gets holds no signals.
        return HeldSignals, ()

    def begin(self, trainer: pl.Trainer) -> None:
        """Take the place of the present handlers, until Lightning restores what was there before its own.

        Args:
            trainer: A trainer that begins to train.
        """
        in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if trainer.world_size > 1 and not in_group:
            return  # Ranks without a process group (XLA) could not agree.
        self._together, self._device = trainer.world_size > 1, trainer.strategy.root_device
        self._signals, self._handlers = _signals_of(trainer), {}
        if threading.current_thread() is threading.main_thread():
            for signum in self._signals:
                handler = signal.getsignal(signum)
                if callable(handler) and handler != self._receive:
                    self._handlers[signum] = handler
                    signal.signal(signum, self._receive)
        self._wrap_loops(trainer)

    def hold(self) -> None:
        """Hold signals back from here on, for a batch begins."""
        self._holding = True

    def end(self, *, failed: bool = False) -> None:
        """Leave the trainer as it was.

        Args:
            failed: After an error; what arrived in its batch is of no use any more.
        """
        for loop, name, own in self._wrapped:
            vars(loop).pop(name, None)
            if own is not None:
                setattr(loop, name, own)
        self._wrapped.clear()
        self._holding = False
        arrived = [] if failed else self._arrived
        self._arrived = []
        for signum in (signal.SIGTERM, signal.SIGINT):
            if signum in arrived:
                # After the last batch of several ranks: to the handlers that Lightning has restored.
                os.kill(os.getpid(), signum)

    def _wrap_loops(self, trainer: pl.Trainer) -> None:
        fit_loop: Any = trainer.fit_loop
        epoch_loop, val_loop = fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop
        callbacks = callbacks_of(trainer)
        self._wrap(epoch_loop, "on_advance_end", self._after_batch)
        self._wrap(fit_loop, "on_advance_end", self._held)
        if not any(isinstance(callback, WeightAveraging) for callback in callbacks):
            # A resumed run repeats a validation; but this swaps the weights in it.
            self._wrap(val_loop, "run", self._let_through)
            self._wrap(val_loop, "on_run_end", self._held)
        if self._together and hasattr(epoch_loop, "_broadcast_sigterm_tensor"):
            # Lightning's own agreement on SIGTERM, of which there is no more need.
            self._replace(epoch_loop, "_broadcast_sigterm_tensor", _do_nothing)

    def _wrap(self, loop: Any, name: str, around: Callable[[Callable[[], Any]], Any]) -> None:
        """Let ``around`` run a method: it gets the method with its arguments, and returns its result."""
        # No local function: where workers are spawned, the trainer may have to be pickled.
        self._replace(loop, name, partial(_run_within, around, loop, name, vars(loop).get(name)))

    def _replace(self, loop: Any, name: str, method: Callable[..., Any]) -> None:
        self._wrapped.append((loop, name, vars(loop).get(name)))
        setattr(loop, name, method)

    def _held(self, run: Callable[[], Any]) -> Any:
        before, self._holding = self._holding, True
        result = run()
        self._holding = before
        self._run_handlers()
        return result

    def _let_through(self, run: Callable[[], Any]) -> Any:
        before, self._holding = self._holding, False
        self._run_handlers()
        result = run()
        self._holding = before
        return result

    def _after_batch(self, run: Callable[[], Any]) -> Any:
        self._holding = False
        if self._together:
            self._agree()
        self._run_handlers()
        return self._held(run)

    def _receive(self, signum: int, frame: Any) -> None:
        again = signum == signal.SIGINT and signum in self._arrived
        if again or not (self._holding or self._together):
            self._handlers[signum](signum, frame)
            return
        self._arrived.append(signum)
        remedy = " Press Ctrl-C again to stop at once, within it." if signum == signal.SIGINT else ""
        rank_zero_info(f"{signal.Signals(signum).name} waits for the end of the batch.{remedy}")

    def _run_handlers(self) -> None:
        while self._arrived and not (self._holding or self._together):
            signum = self._arrived.pop(0)
            self._handlers[signum](signum, sys._getframe())

    def _agree(self) -> None:
        arrived = [int(signum in self._arrived) for signum in self._signals]
        on_any = torch.tensor(arrived, dtype=torch.int32, device=self._device)
        torch.distributed.all_reduce(on_any, op=torch.distributed.ReduceOp.MAX)
        found = [signum for signum, flag in zip(self._signals, on_any.tolist(), strict=True) if flag]
        self._arrived = [signum for signum in self._arrived if signum not in found]
        for signum in found:
            self._handlers.get(signum, signal.default_int_handler)(signum, sys._getframe())


def _run_within(around: Callable[..., Any], loop: Any, name: str, own: Callable[..., Any] | None, *args: Any) -> Any:
    return around(partial(getattr(type(loop), name), loop, *args) if own is None else partial(own, *args))


def _do_nothing() -> None:
    pass


def _signals_of(trainer: pl.Trainer) -> list[int]:
    """Signals whose handlers save or end a run; over several ranks only those that Lightning or Python handle."""
    environment: Any = trainer._accelerator_connector.cluster_environment
    signals = [getattr(environment, "requeue_signal", None)] if getattr(environment, "auto_requeue", False) else []
    if trainer.world_size == 1:
        signals += [getattr(signal, name, None) for name in ("SIGUSR1", "SIGUSR2")]
    return list(dict.fromkeys(int(signum) for signum in [*signals, signal.SIGTERM, signal.SIGINT] if signum))
