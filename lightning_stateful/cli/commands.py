"""The commands of ``lightning-stateful``, with their options."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from lightning_stateful.cli.comparison import compared, comparison_in_words
from lightning_stateful.cli.flags import Command, as_json, in_flags, json_option, numbers_or_name
from lightning_stateful.cli.reading import Checkpoint, read_checkpoint, refuse_damaged, refusing_odd_states
from lightning_stateful.cli.verify_command import verify
from lightning_stateful.cli.words import described, error_in_words, in_words, printable, rest_in_words
from lightning_stateful.errors import ConfigurationError, StateError, StatefulError, StatefulWarning

RIGHT, FOUND, CANNOT = 0, 1, 2

_path = click.argument("checkpoint", type=click.Path(path_type=Path))
_devices = click.option("--devices", type=click.IntRange(min=1), help="Ranks on each node; by default as saved.")
_nodes = click.option("--nodes", type=click.IntRange(min=1), default=1, help="Nodes, 1 by default.")
_seed = click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="The seed of loaders without one of their own, as seed_everything sets it; by default the saved one, "
    "unless the data module has a seed.",
)
_accept = click.option(
    "--accept", multiple=True, metavar="NAME", help="Name of a difference to let pass, as in accept=; may be repeated."
)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Look at data and checkpoints before, between and after runs.\n\nExit codes: 0 where all is right, 1 where "
    "something was found, 2 where the command cannot do what was asked; the reason is on standard error.",
    invoke_without_command=True,
)
@click.version_option(package_name="lightning-stateful", message="%(prog)s %(version)s")
@click.pass_context
def group(context: click.Context) -> int:
    """The command without a subcommand: its help."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
    return CANNOT


group.add_command(verify)


def run(arguments: Sequence[str] | None) -> int:
    """Run a command; where it cannot be done, the reason is written in a line on standard error.

    Args:
        arguments: The command line; None for that of the process.

    Returns:
        The exit code.
    """
    try:
        code = group.main(arguments, prog_name="lightning-stateful", standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"lightning-stateful: {error.format_message()}", err=True)
        return CANNOT
    except click.Abort:
        return CANNOT
    return code if isinstance(code, int) else RIGHT


@group.command(
    cls=Command,
    epilog="""lightning-stateful inspect last.ckpt
    lightning-stateful inspect --json checkpoints/epoch=2.ckpt | jq .position
    lightning-stateful inspect fsdp_folder/""",
)
@_path
@json_option
def inspect(checkpoint: Path, json_: bool) -> int:
    """Say where a checkpoint stands, and what a resume from it refuses.

    CHECKPOINT is a file or folder of a Trainer's (FSDPStrategy, ModelParallelStrategy and DeepSpeedStrategy write
    folders), or a state_dict() in JSON or of torch.save. Nothing in it is run, and its tensors are not read.

    Exits with 1 if a resume from it would be refused, or would not be exact.
    """
    with refusing_odd_states(checkpoint):
        found = described(read_checkpoint(checkpoint))
        text = as_json(found) if json_ else in_words(found)
    click.echo(text)
    return FOUND if found["problems"] else RIGHT


@group.command(cls=Command, epilog="lightning-stateful diff monday.ckpt tuesday.ckpt")
@_path
@click.argument("other", type=click.Path(path_type=Path))
@json_option
def diff(checkpoint: Path, other: Path, json_: bool) -> int:
    """Say what differs between two checkpoints, by path, with the remedy that a resume would name.

    Exits with 1 if their settings differ, so that a resume would be refused; positions and ranks may differ.
    """
    with refusing_odd_states(checkpoint, other):
        found = compared(read_checkpoint(checkpoint), read_checkpoint(other))
    click.echo(as_json(found) if json_ else comparison_in_words(found))
    return FOUND if found["settings"] else RIGHT


@group.command(
    cls=Command,
    epilog="""lightning-stateful plan last.ckpt --devices 6
    lightning-stateful plan last.ckpt --devices 8 --nodes 2 --batch-size 16
    lightning-stateful plan last.ckpt my_project.data:make_datamodule --devices 6""",
)
@_path
@click.argument("factory", required=False)
@_devices
@_nodes
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples in a batch of one rank; by default as saved.")
@_seed
@_accept
@json_option
def plan(batch_size: int | None, json_: bool, **options: Any) -> int:
    """Say what is left of the epoch on other ranks: steps, the last step, samples repeated, shards shared.

    Of all samples of a dataset, and of mixtures, this follows from the checkpoint. Batches of like lengths, samplers
    and streams need FACTORY, package.module:function, which makes the data module or the loaders; with it the batch
    size is that of its loaders. limit_train_batches is not known here, and not counted.

    Exits with 1 if samples are served twice or dropped at the end of the epoch.
    """
    asked = _Resume(**options)
    found, ranks = asked.found, asked.ranks
    from lightning_stateful.cli import orders

    if asked.factory is None:
        with refusing_odd_states(asked.checkpoint):
            rests = orders.rests_from_states(found, ranks, batch_size)
            left, notes = orders.steps_left(rests, found), orders.notes_on(found, batch_size)
    elif batch_size is not None:
        raise click.UsageError("--batch-size is for a plan without FACTORY, whose loaders have a batch size.")
    else:
        with asked.data() as (users_data, data, notes):
            epoch, step = users_data.resumed(found, data)
            rests = users_data.rests_of(data, epoch, step)
        total = data.combined.num_batches(epoch)
        left = total - step if data.combined.is_sized else None
    answer = {"ranks": ranks, "steps_left": left, "loaders": {path: rest._asdict() for path, rest in rests.items()}}
    click.echo(as_json({**answer, "notes": notes}) if json_ else rest_in_words(answer, notes))
    return FOUND if any(rest.repeated or rest.dropped or rest.note for rest in rests.values()) else RIGHT


@group.command(
    cls=Command,
    epilog="""lightning-stateful check last.ckpt my_project.data:make_datamodule
    lightning-stateful check last.ckpt my_project.data:make_datamodule --devices 6 && sbatch train.sh""",
)
@_path
@click.argument("factory")
@_devices
@_nodes
@_seed
@_accept
@json_option
def check(json_: bool, **options: Any) -> int:
    """Say whether a checkpoint will resume with the data of FACTORY, package.module:function; nothing is trained.

    The whole file is read: of each tensor the checksum is compared, which torch does not do.

    Exits with 1 if the resume would be refused, or would not be exact, and with 2 if the file is damaged.
    """
    from lightning_stateful.cli.training_changes import not_restored

    asked = _Resume(**options)
    found = asked.found
    refuse_damaged(asked.checkpoint)
    if found.problems or found.data is None:
        problems = described(found)["problems"]
        return _refused(problems, "\n".join(map(printable, problems)), json_)
    ranks = asked.ranks
    notes: list[str] = []
    try:
        with asked.data() as (users_data, data, notes):
            epoch, step = users_data.resumed_if_restored(found, data)
            limit = users_data.limit_of(found, data)
            left = not_restored(found, data.made, data.combined)
        is_otherwise = bool(data.combined.refused)
        is_known = data.combined.is_sized and not is_otherwise
        total = data.combined.num_batches(epoch) if is_known else None
        if total is not None and limit is not None and limit < total:
            taken = f"{limit:,} of {total:,} steps of an epoch (limit_train_batches)"
            notes.append(f"The run took {taken}, and a resume is taken to do so too.")
            total = limit
    except StatefulError as error:
        if type(error) is ConfigurationError:
            raise
        said = in_flags(error_in_words(error), click.get_current_context().command.params)
        return _refused([str(error)], f"refused: {said}", json_)
    if left:
        notes.append(
            f"Training had changed {', '.join(left)} when the checkpoint was written, which is not so in the data of "
            f"{asked.factory}. A resume may be refused, or not be exact, unless your code sets it again: in "
            "load_state_dict, on_load_checkpoint or on_train_start. What a callback restores is not known here."
        )
    # Of data that were not compared the step is that of the ranks that wrote the checkpoint.
    batch = step + 1 if not (is_otherwise and step) or ranks == found.written.get("ranks") else None
    answer = {"resumes": True, "ranks": ranks, "epoch": epoch, "next_batch": batch, "batches": total}
    of = f" of {total:,}" if total is not None else ""
    known = ", if your code sets again what training had changed" * (
        bool(left) or (is_otherwise and not data.is_restored)
    )
    at = f"next is batch {batch:,}{of} of epoch {epoch}" if batch is not None else f"it goes on in epoch {epoch}"
    said = f"resumes on {ranks} rank{'s' * (ranks != 1)}{known}: {at}"
    click.echo(as_json({**answer, "notes": notes}) if json_ else "\n".join([said, *_noted(notes)]))
    return RIGHT


@group.command(
    cls=Command,
    epilog="""lightning-stateful trained last.ckpt my_project.data:make_datamodule --epoch 3
    lightning-stateful trained last.ckpt my_project.data:make_datamodule --epoch 3 --first 100 --last 120""",
)
@_path
@click.argument("factory")
@click.option("--epoch", type=click.IntRange(min=0), required=True, help="The epoch, from 0.")
@click.option("--devices", type=click.IntRange(min=1), help="Ranks that trained it; by default as saved.")
@_nodes
@click.option("--first", type=click.IntRange(min=0), default=0, help="The first step to list, from 0.")
@click.option("--last", type=click.IntRange(min=0), help="The last step to list.")
@_seed
@_accept
@json_option
def trained(epoch: int, first: int, last: int | None, json_: bool, **options: Any) -> int:
    """List the indices of the dataset that each rank was trained on in each step of an epoch, up to the checkpoint.

    Of packed data they are numbers of sequences, not of documents.

    They are computed: an order is a function of the epoch, the ranks, the batch size and the seed. So they are those of
    an epoch that was trained with the present ones from its beginning to its end, or to the checkpoint. A note says so,
    and another where the checkpoint shows that they were others.
    """
    asked = _Resume(**options)
    found, ranks = asked.found, asked.ranks
    with asked.data() as (users_data, data, notes):
        users_data.refuse_changed_samplers(found, data, epoch, *users_data.resumed(found, data))
        data = users_data.from_the_beginning(data)
        steps = _steps_trained(found, epoch, data.combined.num_batches(epoch) if data.combined.is_sized else None)
        rows = {
            path: [list(users_data.batches_of(data, path, epoch, rank, steps)) for rank in range(ranks)]
            for path in data.combined.loaders
        }
        notes_on_epoch = users_data.notes_on_epoch(found, data, epoch, steps)
    notes += [*notes_on_epoch, *users_data.notes_on_indices(data)]
    shown = range(first, steps if last is None else min(last + 1, steps))
    if not shown:
        said = f"{steps:,} step{'s were' if steps != 1 else ' was'} trained"
        notes.append(f"no step is listed: by the checkpoint {said} of epoch {epoch}, and steps count from 0.")
    if json_:
        listed = {path: [[of[step] for step in shown] for of in by_rank] for path, by_rank in rows.items()}
        click.echo(as_json({"epoch": epoch, "ranks": ranks, "first_step": first, "loaders": listed, "notes": notes}))
        return RIGHT
    for step in shown:
        for path, by_rank in rows.items():
            loader = f", {printable(path)}" if path else ""
            for rank, batches in enumerate(by_rank):
                indices = batches[step]
                said = " ".join(map(str, indices)) if isinstance(indices, list) else str(indices)
                click.echo(f"epoch {epoch}, step {step}{loader}, rank {rank}: {said}")
    for note in _noted(notes):
        click.echo(note, err=True)
    return RIGHT


@group.command(
    cls=Command,
    epilog="""lightning-stateful report ledger/ -o report.html
    lightning-stateful report ledger/ --start 2026-11-23T14-03-29-988931-b086e9 --json""",
)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--start", metavar="NAME", help="The start whose weights are asked about; by default the latest.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a page of HTML with pictures, too.")
@json_option
def report(folder: Path, start: str | None, output: Path | None, json_: bool) -> int:
    """Say what a run was trained on, over all restarts: what came twice, what never came, what was lost.

    FOLDER is the ledger's, of StatefulDataCallback(ledger=...). A page, and JSON, say as well which shares of a mixture
    came and were asked for, how much was padding, and how long ranks waited.

    Exits with 1 if something was trained on twice, left out, or is missing in the ledger.
    """
    from lightning_stateful.ledger import read_ledger

    try:
        found = read_ledger(folder, start=start)
    except FileNotFoundError as error:
        raise click.ClickException(str(error)) from error
    if output is not None:
        from lightning_stateful.report.ledger_page import write_page

        write_page(found, output)
    if json_:
        from lightning_stateful.ledger.over_time import in_numbers

        click.echo(as_json({**found.to_dict(), **in_numbers(found)}))
    else:
        click.echo(str(found))
    return FOUND if found.findings() else RIGHT


_BOUNDARIES = '"least_padding", "equal_counts", or the longest length of each bucket: 16,64,512.'


@group.command(
    cls=Command,
    epilog="""lightning-stateful padding --lengths lengths.npy --max-tokens 16384 --ranks 1 8 64
    lightning-stateful padding --lengths lengths.npy --batch-size 32 --buckets --picture padding.png""",
)
@click.option("--lengths", required=True, help="A .npy file with one integer a sample.")
@click.option("--max-tokens", type=int, help="What a batch may hold, padding included.")
@click.option("--batch-size", type=int, help="In place of --max-tokens: samples in a batch.")
@click.option("--max-samples", type=int, help="Samples that a batch never exceeds, beside --max-tokens.")
@click.option("--multiple", type=int, default=1, help="Batches have a multiple of so many samples.")
@click.option("--quadratic-length", type=int, help="Length at which attention costs as much as all the rest.")
@click.option("--num-buckets", type=int, help="Number of buckets; by default up to 128.")
@click.option("--boundaries", default="least_padding", help=_BOUNDARIES)
@click.option("--too-long", type=click.Choice(["error", "drop"]), default="error", help="What becomes of long samples.")
@click.option("--drop-last", is_flag=True, help="Leave out the last step if it is not full.")
@click.option("--seed", type=int, default=0, help="Chooses the orders.")
@click.option("--ranks", type=click.IntRange(min=1), multiple=True, default=[1], help="Numbers of ranks: 1 8 64.")
@click.option("--buckets", is_flag=True, help="A line for each bucket, too.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw lengths and batches to this file (matplotlib).")
@json_option
def padding(json_: bool, **options: Any) -> int:
    """Measure padding, budget use and straggling of batches of like lengths on some numbers of ranks."""
    from lightning_stateful.bucketing.budget import Budget, QuadraticCost
    from lightning_stateful.report.padding import padding_report, summary
    from lightning_stateful.samplers.batch_samplers import BucketBatchSampler

    quadratic, boundaries = options["quadratic_length"], numbers_or_name(options["boundaries"])
    of_budget = {name: options[name] for name in ("max_tokens", "batch_size", "max_samples", "multiple", "too_long")}
    of_sampler = {name: options[name] for name in ("num_buckets", "drop_last", "seed")}
    batches = BucketBatchSampler(
        options["lengths"],
        budget=Budget(**of_budget, cost=None if quadratic is None else QuadraticCost(quadratic)),
        boundaries=boundaries,
        **of_sampler,
    )
    reports = [padding_report(batches, num_replicas=ranks) for ranks in options["ranks"]]
    if options["picture"] is not None:
        from lightning_stateful.report.padding_plot import plot_padding

        plot_padding(batches, options["picture"], num_replicas=options["ranks"][0])
    if json_:
        click.echo(as_json([report.to_dict() for report in reports]))
        return RIGHT
    tables = [str(report) for report in reports] if options["buckets"] else []
    dropped = batches.num_dropped
    notes = [f"{dropped} samples are longer than the budget: left out"] if dropped else []
    click.echo("\n\n".join([*tables, summary(reports), *notes]))
    return RIGHT


@dataclass(frozen=True)
class _Resume:
    """A resume that a command is asked about: a checkpoint, data and ranks.

    Attributes:
        checkpoint: The checkpoint's path.
        factory: The factory of the data; None where there is none.
        devices: Ranks on each node; None for those that wrote the checkpoint.
        nodes: Nodes.
        seed: The seed of loaders without one of their own; None for the saved one.
        accept: Names of differences to let pass.
    """

    checkpoint: Path
    factory: str | None
    devices: int | None
    nodes: int
    seed: int | None
    accept: tuple[str, ...]

    @cached_property
    def found(self) -> Checkpoint:
        """The states in the checkpoint."""
        return read_checkpoint(self.checkpoint)

    @cached_property
    def ranks(self) -> int:
        """The ranks that are asked about: those that wrote the checkpoint, unless others are given.

        Raises:
            StateError: It has no state of training data, on any ranks.
            click.UsageError: It does not say which wrote it, and none are given.
        """
        self.found.needed()
        if self.devices is not None:
            return self.devices * self.nodes
        saved = self.found.written.get("ranks")
        if not isinstance(saved, int):
            raise click.UsageError(f"{self.found.path} does not say on how many ranks it was written: pass --devices.")
        return saved

    @contextmanager
    def data(self) -> Iterator[tuple[Any, Any, list[str]]]:
        """The module that builds a user's data, these data, and warnings that come up; for a block that uses them."""
        from lightning_stateful.cli import users_data

        notes: list[str] = []
        callback = self.found.callback or {}
        saved = callback.get("seed")
        if len(seeds := set((callback.get("seeds") or {}).values())) == 1:
            (saved,) = seeds
        default = self.seed if self.seed is not None else saved if isinstance(saved, int) else None
        seeded = users_data.seeded_by_default(default, is_saved=self.seed is None)
        overfits = bool(self.found.written.get("overfits"))
        with warnings.catch_warnings(record=True) as caught, seeded:
            warnings.simplefilter("always")
            try:
                data = users_data.build_data(
                    str(self.factory), ranks=self.ranks, accept=self.accept, overfits=overfits, checkpoint=self.found
                )
                yield users_data, data, notes
            except StatefulError:
                # The reason may be a name in --accept that is misspelled.
                said = [str(warning.message) for warning in caught if issubclass(warning.category, StatefulWarning)]
                click.echo("".join(f"{note}\n" for note in _noted(said)), err=True, nl=False)
                raise
        notes += dict.fromkeys(str(warning.message) for warning in caught if issubclass(warning.category, UserWarning))


def _steps_trained(checkpoint: Checkpoint, epoch: int, length: int | None) -> int:
    """The steps of an epoch that a run had trained by its checkpoint."""
    progress, limit = checkpoint.progress, checkpoint.written.get("steps")
    if progress is None:
        raise StateError(f"{checkpoint.path} has no loops, so it does not say how many steps were trained.")
    if epoch > progress.epoch or (epoch == progress.epoch and not progress.running):
        raise click.UsageError(
            f"--epoch {epoch} has not been trained: {checkpoint.path} stands in epoch {progress.epoch}."
        )
    if epoch == progress.epoch:
        return progress.batch
    known = [steps for steps in (length, limit) if steps is not None]
    if not known:
        raise StateError(f"{checkpoint.path} does not say how many steps epoch {epoch} had.")
    return min(known)


def _refused(problems: Sequence[str], said: str, json_: bool) -> int:
    click.echo(as_json({"resumes": False, "problems": problems}) if json_ else said)
    return FOUND


def _noted(notes: Sequence[str]) -> list[str]:
    return [printable(f"note: {note}") for note in notes]
