"""The training loaders of a run: built from what the user returns, and read from where Lightning's counters stand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_stateful.core.order import UNKNOWN, EpochPlan
from lightning_stateful.core.skip import as_skip, left_out_at, without_gaps
from lightning_stateful.data_checks import odd_datasets
from lightning_stateful.data_checks.batch_content import BatchContent
from lightning_stateful.data_checks.ended_epochs import build_as_of
from lightning_stateful.errors import ConfigurationError, DamagedStateError, StatefulWarning, StateMismatchError
from lightning_stateful.generators.rng import seed_or_default
from lightning_stateful.loaders.combined_loaders import CombinedLoaders, name_of
from lightning_stateful.loaders.loaders_beside import held_loader
from lightning_stateful.loaders.patching import (
    AnyLoader,
    build_patched,
    dealt_otherwise,
    drawn_as,
    is_patched,
    is_shuffled,
    length_of,
)
from lightning_stateful.loops import loop_progress
from lightning_stateful.loops.checkpoint import warn_of_missing_state
from lightning_stateful.loops.lightning import is_param_in_hook_signature, pl
from lightning_stateful.loops.other_callbacks import longest_accumulation
from lightning_stateful.loops.ranks import build_alike, deals_out, gathered, own_rank, topology_of
from lightning_stateful.loops.run_notes import say_at_start, say_cut, say_what_is_exact
from lightning_stateful.loops.saved_progress import LoopProgress
from lightning_stateful.state import accepted_names, warning_of_unknown
from lightning_stateful.trainer import run_seeds
from lightning_stateful.trainer.ledger import LedgerWriter
from lightning_stateful.trainer.loader_proxy import (
    LoaderProxy,
    Structure,
    discard_training_loaders,
    in_hook,
    is_iterated_by_loop,
    refuse_no_loaders,
    request_training_loaders,
)
from lightning_stateful.trainer.token_limit import checked_limit
from lightning_stateful.user_samplers.user_sampler import TAILS, Tail, UserSampler


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings by which loaders are patched and the model is seeded.

    Attributes:
        seed: Chooses orders and randomness; None for the seed of ``seed_everything``, or 0.
        seed_samples: Seed the samples' randomness.
        seed_model: Seed the model's randomness.
        tail: What becomes of the last items of a sampler that are fewer than a step takes; None for the default.
        accept: Names of differences to let pass on load.
        log_data: Log what has been served and how it was padded.
        check_content: Compare a batch now and then with what a resume reads in its place.
        ledger: Writes what is trained on.
        max_tokens_total: Tokens after which training stops.
        skip: What training leaves out.
    """

    seed: int | None = None
    seed_samples: bool = True
    seed_model: bool = True
    tail: Tail | None = None
    accept: Collection[str] = ()
    log_data: bool = False
    check_content: bool = True
    ledger: LedgerWriter = field(default_factory=LedgerWriter)
    max_tokens_total: int | None = None
    skip: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", as_skip(self.skip))
        object.__setattr__(self, "accept", accepted_names(self.accept))
        object.__setattr__(self, "max_tokens_total", checked_limit(self.max_tokens_total))
        if self.seed is not None:
            seed_or_default(self.seed)
        if self.tail not in (None, *TAILS):
            raise ConfigurationError(f"tail must be one of {TAILS}, got {self.tail!r}.")

    def build_patched(
        self, trainer: pl.Trainer, loader: Any, path: str, stage: str, *, drawn_as: str | None = None
    ) -> AnyLoader:
        """Patch a loader for the ranks of a trainer; see ``build_patched`` in ``loaders/patching.py``.

        Args:
            trainer: The trainer.
            loader: The loader.
            path: Where it stands among others.
            stage: ``"training"``, ``"val"``, ``"test"`` or ``"predict"``.
            drawn_as: As there.
        """
        topology = topology_of(trainer)
        return build_patched(
            loader,
            seed=self.seed,
            path=path,
            drawn_as=drawn_as,
            num_replicas=topology.num_replicas,
            rank=topology.rank,
            own_rank=own_rank(trainer, loader),
            seed_samples=self.seed_samples,
            tail=self.tail,
            shuffle=not loop_progress.overfits(trainer),
            exact=stage != "training",
            # As Lightning does.
            keeps_last=stage == "predict",
            accept=self.accept,
            where=name_of(stage, path),
        )


class TrainLoaders:
    """The loaders that a ``train_dataloader`` gave, patched, and the proxies of them that Lightning gets.

    Args:
        trainer: The trainer.
        raw: A loader, a list, tuple or dict of them, or a CombinedLoader.
        settings: How to patch them.

    Attributes:
        seed: Chooses their orders and the randomness.
        combined: The patched loaders, by path.
        structure: Their proxies, in the structure that the loaders came in.
    """

    def __init__(self, trainer: pl.Trainer, raw: Any, settings: Settings) -> None:
        self._trainer = trainer
        self._settings, self.seed, self._ledger = settings, seed_or_default(settings.seed), settings.ledger
        self._notes_content = settings.check_content
        training_step = trainer.lightning_module.training_step
        self._step_fetches = is_param_in_hook_signature(training_step, "dataloader_iter", explicit=True)
        structure = Structure.of(raw)
        refuse_no_loaders(trainer, structure)
        if settings.skip is not None:
            settings.skip.refuse_several(structure.loaders)
        # Pairs of samples may depend on it.
        self._drawn_as = drawn_as(structure.loaders)
        self.combined = CombinedLoaders(
            {path: self._build_patched(loader, path) for path, loader in structure.loaders.items()},
            structure.mode or "max_size_cycle",
        )
        # By path: batches of an epoch, as last said, and the step at which the latest pass over the loader began.
        self._said_lengths: dict[str, int] = {}
        self._first_steps: dict[str, int] = {}
        # Where a resume goes on. Until training begins, Lightning may ask for a batch before it restores its counters.
        self._resumed_at: LoopProgress | None = None
        self._training_began = False
        self._pass_seeds = run_seeds.PassSeeds(trainer, self.seed, self.combined, seeds_model=settings.seed_model)
        self.content = BatchContent(self.combined.loaders, trainer)
        # Compares the content of a checkpoint's batches, before the first one of a resume is read.
        self._compare: Callable[[], None] | None = None
        self._proxies = {path: self._proxy(path, original) for path, original in structure.loaders.items()}
        self.structure: Any = structure.rebuilt(self._proxies)
        odd_datasets.refuse_own_length(trainer, self.combined)
        self.combined.refuse_short_sources(self.num_batches(self._next_step()[0]))
        self._prepare()
        dealt = dealt_otherwise(structure.loaders, self.combined.loaders)
        say_what_is_exact(self.combined, self.seed if settings.seed_model else None, settings.seed_samples, dealt)
        epoch = self._next_step()[0]
        odd_datasets.warn_of_cut_epochs(self.combined, epoch, self.num_batches(epoch))
        odd_datasets.warn_of_shared_datasets(self.combined)
        odd_datasets.warn_of_shared_samplers(self.combined, trainer, is_dealt_out=deals_out(trainer))
        configs = [{path: loader.tracker.config} for path, loader in self.combined.loaders.items()]
        if unknown := warning_of_unknown(settings.accept, configs):
            rank_zero_warn(unknown, category=StatefulWarning)

    @classmethod
    def build(cls, trainer: pl.Trainer, request: Callable[[], Any], settings: Settings) -> TrainLoaders:
        """Ask for the loaders and patch them, alike on all ranks; they begin with an epoch. See :meth:`build_at`.

        Raises:
            RankMismatchError: The ranks disagree.
            UnsupportedLoaderError: A loader cannot be patched.
        """
        seed = run_seeds.seed_of_run(trainer, settings.seed)
        request = partial(run_seeds.request_by_epoch, trainer, request, seed if settings.seed_model else None)
        data = build_alike(
            trainer,
            lambda: cls(trainer, request(), replace(settings, seed=seed)),
            lambda data: data.describe(),
            "the training data",
            accept=settings.accept,
        )
        if own := data.combined.configs_of_this_rank():
            data.combined.note_ranks(gathered(own))
        if (own := data.combined.iterables_of_this_rank()) and trainer.world_size > 1:
            data.combined.note_iterables(gathered(own))
        return data

    @classmethod
    def build_at(
        cls,
        trainer: pl.Trainer,
        settings: Settings,
        state: Mapping[str, Any] | None,
        progress: LoopProgress,
        saved: Mapping[str, Any] | None = None,
    ) -> tuple[TrainLoaders, LoopProgress]:
        """Build the loaders where a run goes on, and discard what Lightning has built before; the loops ask again.

        Lightning builds them before it restores a checkpoint where ``trainer.estimated_stepping_batches`` is asked for
        in ``setup``, ``configure_model`` or, if a strategy restores late, ``configure_optimizers``, to train on them.

        Args:
            trainer: The trainer.
            settings: How to patch the loaders.
            state: The data's state; None to go on as the progress alone says.
            progress: How far the run had got.
            saved: The callback's state in the checkpoint, if there is one.

        Returns:
            The loaders, and the progress in steps of the present ranks and batch sizes.

        Raises:
            StateError: The state does not fit the data; nothing changes then.
        """
        request = partial(request_training_loaders, trainer)
        build = partial(cls.build, trainer, settings=settings)
        loaders, is_restored, undo = build_as_of(trainer, progress, request, build, saved or {})
        with run_seeds.naming_remedies(trainer, settings.seed):
            progress = loaders._go_on_without_state(progress) if state is None else loaders._load(state, progress)
        if loaders.combined.refused or is_restored:
            undo()
            # What is compared with the checkpoint is as it was before.
            loaders.content = BatchContent(loaders.combined.loaders, trainer)
        loaders._resumed_at = progress
        discard_training_loaders(trainer)
        return loaders, progress

    def continue_from(self, before: TrainLoaders) -> None:
        """Begin where the loaders have ended in whose place Lightning builds these."""
        self.combined.continue_from(before.combined, loop_progress.next_step(self._trainer)[0])
        self.content.settings.continue_from(before.content.settings)

    def expect(self, saved: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
        """Compare batches of a checkpoint with what is read in their place, before the first one is trained on.

        Args:
            saved: The callback's state in it.
            state: The data's state in it.
        """
        if self._settings.check_content:
            # Behind the last batch of an epoch: the beginning of the next.
            epoch, step = (self._resumed_at or LoopProgress()).epoch_and_step
            states, accept = (state, partial(self.combined.state_at, epoch, step)), self._settings.accept
            self._compare = self.content.expect(self._trainer, saved, states, accept, epoch if step else -1)
            self.combined.is_build_followed = self.content.settings.follows_build

    def begin(self) -> None:
        """Training begins: from now on the loop's counters say where it is."""
        self._training_began = True
        self.content.settings.note_early_workers()
        loop_progress.follow_lengths(self._trainer)
        loop_progress.call_before_epochs(self._trainer, partial(self.content.note_before_epoch, self._trainer))
        loop_progress.call_before_epochs(self._trainer, self.combined.end_awaiting)
        loop_progress.call_before_epochs(self._trainer, self._follow_lengths)
        say_at_start(self._trainer, self.combined, self._next_step()[0])
        odd_datasets.warn_of_old_copies(self.combined)
        odd_datasets.warn_of_reading_ahead(self._trainer, self.combined, self._next_step()[1])

    def _follow_lengths(self) -> None:
        if self._training_began and self._next_step()[1] == 0 and self.combined.follow_lengths():
            loop_progress.take_over_lengths(self._trainer)

    def describe(self) -> dict[str, dict[str, Any]]:
        """The settings that have to be equal on all ranks, by the path of the loader."""
        of_group: dict[str, Any] = {"mode": self.combined.mode, "order of loaders": list(self.combined.loaders)}
        described, of_this_rank = {"": of_group}, self.combined.configs_of_this_rank()
        for path, loader in self.combined.loaders.items():
            own = {"length": length_of(loader), "batch_size": loader.batch_size, "kind": loader.order.kind}
            # Of loaders that are not dealt out, ranks only have to take the same steps.
            may_differ = path in of_this_rank and not loader.description.is_planned
            described.setdefault(path, {}).update(own if may_differ else {**own, **loader.config_of_ranks()})
        return described

    def num_batches(self, epoch: int) -> int:
        """Steps of an epoch under the trainer's limit."""
        limit, length = self._trainer.limit_train_batches, self.combined.num_batches(epoch)
        return min(length, limit) if isinstance(limit, int) else int(length * limit)

    def _load(self, state: Mapping[str, Any], progress: LoopProgress) -> LoopProgress:
        """Load the data's state into the loaders; the progress in steps of the present ranks and batch sizes."""
        where, next_epoch = "The checkpoint's data state", progress.epoch_and_step[0]
        try:
            epoch, step = self.combined.load(state, accept=self._settings.accept, where=where)
        except StateMismatchError as error:
            if not loop_progress.is_rebuilt_next(self._trainer, progress):
                raise
            self.combined.refused = error.differences
            self.combined.begin_in(next_epoch)
            return progress
        if progress.running and (epoch, step) == (progress.epoch + 1, 0):
            # Of the epoch that the checkpoint was taken in, accepted changes have left nothing.
            epoch, step = next_epoch, self.num_batches(next_epoch)
        if epoch != next_epoch:
            raise DamagedStateError(
                f"{where} lies in epoch {epoch}, but the loops of the same checkpoint go on in epoch {next_epoch}. "
                "Resume from another checkpoint."
            )
        if progress.running and not progress.ended:
            progress = progress.at_step(step, ended=step >= self.num_batches(epoch))
            if progress.ended:
                self.combined.end_epoch(progress.epoch)
        if progress.ended and self.combined.is_sized:
            self.combined.await_lengths(state, of_ended=progress.epoch)
            return replace(progress, batch=self.num_batches(progress.epoch))
        return progress

    def _go_on_without_state(self, progress: LoopProgress) -> LoopProgress:
        """Go on at a batch that the loop counters name, of a checkpoint that says nothing about the data."""
        is_within = progress.batch and not progress.ended
        begun_anew = self.combined.begin_streams_at(progress.epoch, progress.batch) if is_within else []
        if progress.epoch_and_step != (0, 0):
            warn_of_missing_state(progress, begun_anew)
        return progress

    def check_one_batch_a_step(self) -> None:
        """Refuse a training step that took several batches, or fetched ahead, through ``dataloader_iter``.

        Raises:
            ConfigurationError: Lightning's counters do not say what the model was trained on.
        """
        if not self._step_fetches:
            return
        path, proxy = next(iter(self._proxies.items()))
        handed, counted = proxy.num_handed, loop_progress.next_step(self._trainer)[1] - self._first_steps[path]
        if handed != counted:
            steps = "1 step" if counted == 1 else f"{counted} steps"
            raise ConfigurationError(
                f"training_step(dataloader_iter) has taken {handed} batches in {steps}. Lightning counts one "
                "a step, so a checkpoint could not say what was trained on. Take one batch a step, or let "
                "training_step receive the batch."
            )

    def _build_patched(self, loader: Any, path: str) -> AnyLoader:
        patched = self._settings.build_patched(self._trainer, loader, path, "training", drawn_as=self._drawn_as[path])
        patched.leave_out(self._settings.skip)
        loader = getattr(loader, held) if (held := held_loader(loader)) else loader
        if loop_progress.overfits(self._trainer) and patched.is_map_style and is_shuffled(loader):
            rank_zero_warn(
                "overfit_batches trains on the same batches in every epoch, so "
                f"{name_of('training', path)} is not shuffled.",
                category=StatefulWarning,
            )
        return patched

    def _prepare(self) -> None:
        steps = self.num_batches(epoch := self._next_step()[0])
        for path, loader in self.combined.loaders.items():
            is_cut = loader.goes_on_behind_limit and steps < self.combined.num_batches(epoch)
            if is_cut and not loop_progress.overfits(self._trainer):
                say_cut(loader, name_of("training", path), steps)
            loader.prepare(
                f"training data {path}",
                limit=steps if steps < UNKNOWN else None,
                # A window of accumulated gradients that is open is served again from its first batch.
                lag=longest_accumulation(self._trainer) - 1,
                repeats=loop_progress.overfits(self._trainer),
            )

    # No local functions: where workers are spawned, proxies may have to be pickled.

    def _proxy(self, path: str, original: Any) -> LoaderProxy:
        loader = self.combined.loaders[path]
        self._ledger.prepare(loader)
        # One seed for all: which of several loaders is asked last depends on which of them have ended.
        proxy = LoaderProxy(
            loader,
            partial(self._locate, path),
            self._seed_batch,
            isolated=not self._settings.seed_model,
            original=original,
            overfits=loop_progress.overfits(self._trainer),
            is_dealt_out=deals_out(self._trainer),
            length=partial(self._length, path),
            at_end=self._note_end,
            starts_early=partial(self._starts_early, path),
            note=partial(self._note_batch, path) if self._notes_content or self._ledger.is_on else None,
            aside=partial(self._aside, path),
        )
        proxy.restarts.note = partial(self.content.settings.note_restart, path)
        return proxy

    def _starts_early(self, path: str) -> bool:
        """Whether workers start before ``on_train_start``, as in Lightning: in a first epoch that is not resumed."""
        # On a resume, that hook may set again what training has changed.
        is_fresh = self._resumed_at is None and not self._training_began and self._trainer.ckpt_path is None
        loader = self.combined.loaders[path]
        has_workers = loader.is_map_style and loader.num_workers > 0
        return is_fresh and has_workers and self._next_step() == (0, 0)

    def _note_batch(self, path: str, plan: EpochPlan, step: int, batch: Any) -> None:
        if self._notes_content:
            self.content.note(path, plan, step, batch, self._next_step)
        if self._ledger.is_on:
            loader, waited = self.combined.loaders[path], self._proxies[path].seconds_waited
            # Of what is left out on all ranks one writes.
            left_out = None if topology_of(self._trainer).rank else left_out_at(plan, step)
            self._ledger.note(path, loader, plan.progress_after(0), batch, waited, left_out)

    def _note_end(self) -> None:
        # Of several, one may end before the others.
        if len(self._proxies) == 1 or self.combined.mode == "min_size":
            loop_progress.note_early_end(self._trainer)

    def _length(self, path: str) -> int:
        epoch, _ = self._next_step()
        if not self._training_began:
            # For estimated_stepping_batches: the first epoch, of which nothing is left out, on a resume too.
            loader, plans = self.combined.loaders[path], in_hook(self._trainer, "configure_optimizers")
            epoch = 0 if plans and loader.is_map_style else epoch
            return int(without_gaps(loader.plan(epoch)).num_steps)
        length = self.combined.length(path, epoch)
        if length != self._said_lengths.setdefault(path, length) and epoch != self._trainer.max_epochs:
            self._said_lengths[path] = length
            rank_zero_info(
                f"Epoch {epoch} has {length} batches of {name_of('training', path)}, as its len() says now. Lightning "
                "alone would keep the number of the first epoch."
            )
        return length

    def _locate(self, path: str) -> tuple[EpochPlan, int] | None:
        """The plan of a loader and the step of it that come next; None where its epoch has no further step."""
        odd_datasets.warn_of_changed_arguments(self._proxies[path].changed_arguments(), name_of("training", path))
        if self._training_began and self._compare is not None:
            compare, self._compare = self._compare, None
            compare()
        # Lightning reads the first batch of a loader without a length before it begins training.
        self.content.streams.compare(self._trainer)
        if self._notes_content:
            self.content.note_begin(path)
        epoch, step = self._next_step()
        self._first_steps[path], resumed = step, self._resumed_at
        # An epoch that had ended before it was resumed has no further batch, even if its length is not known. The rest
        # of a limited epoch is not read, even where Lightning asks for one batch too many.
        if (resumed and resumed.has_ended(epoch)) or loop_progress.step_is_beyond_epoch(self._trainer, step):
            return None
        begun = resumed is None or (self._training_began and not (resumed.running and resumed.epoch == epoch))
        self._pass_seeds.begin(path, epoch, begun=begun)
        self._follow_lengths()
        plan, step = self.combined.begin_at(path, epoch, step)
        return (plan, step) if step < plan.num_steps or self.combined.asks_behind_end(path) else None

    def _aside(self, path: str, iterator: Any) -> Any:
        loader, (epoch, step), resumed = self.combined.loaders[path], self._next_step(), self._resumed_at
        again = resumed is not None and in_hook(self._trainer, "on_train_start")
        if is_iterated_by_loop(self._trainer, iterator):
            early = None if self._training_began or not epoch > 0 == step else resumed
            return None if early is None else loop_progress.read_later(self._trainer, early)
        if not (step or again):
            if isinstance(loader.order, UserSampler) and not in_hook(self._trainer, "on_train_epoch_start"):
                # That hook looks again on a resume.
                loader.order.memory.note_look()
            return None
        next_epoch = epoch + (again and resumed is not None and resumed.has_ended(epoch))
        beside = loader.plan_aside(next_epoch, of_copy=again)
        return self.combined.begin_at(path, next_epoch, 0) if beside is None and next_epoch > epoch else beside

    def _next_step(self) -> tuple[int, int]:
        """Epoch and step of the next batch: where the run was resumed, until Lightning has restored its counters."""
        if self._resumed_at is None or self._training_began:
            return loop_progress.next_step(self._trainer)
        return self._resumed_at.epoch, self._resumed_at.batch

    @cached_property
    def _draws_of_model(self) -> tuple[int, frozenset[str]]:
        return topology_of(self._trainer).rank, run_seeds.kinds_of_model(self.combined)

    def _seed_batch(self) -> None:
        if self._settings.seed_model:
            run_seeds.seed_model(self.seed, *self._draws_of_model, "batch", *self._next_step())
        self._pass_seeds.end()


def refuse_other_loaders(trainer: pl.Trainer, loaders: TrainLoaders | None) -> None:
    """Make sure that the fit loop's loaders are these, and not others that something put in their place.

    Raises:
        ConfigurationError: They are not.
    """
    in_use = trainer.train_dataloader
    found = [] if in_use is None else list(Structure.of(in_use).loaders.values())
    expected = None if loaders is None else list(loaders.combined.loaders.values())
    if not is_patched(found) or [proxy.stateful_loader for proxy in found] != expected:
        names = ", ".join(type(loader).__qualname__ for loader in found) or "nothing"
        raise ConfigurationError(
            f"Lightning is about to train on loaders that are not the callback's ({names}): something has replaced "
            "them, or where they come from, after they were set up, and a resume would not be exact. Leave "
            "trainer.fit_loop's loaders alone, and let train_dataloader return what is to be trained on."
        )
