"""The command ``verify``: tries a user's data in real processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from lightning_stateful.cli.flags import Command, as_json, in_flags, json_option
from lightning_stateful.cli.words import printable

_WIDTH = 30


@click.command(
    cls=Command,
    epilog="""lightning-stateful verify my_project.data:make_datamodule
    lightning-stateful verify my_project.data:make_datamodule --devices 1 2 4 --workers 0 2 --seed 42
    lightning-stateful verify --config config.yaml --devices 1 2
    lightning-stateful verify my_project/data.py:MyData --devices 1 2 --json""",
)
@click.argument("factory", required=False)
@click.option("--devices", type=click.IntRange(min=1), multiple=True, default=[1], help="Numbers of ranks: 1 2 4.")
@click.option(
    "--workers", type=click.IntRange(min=0), multiple=True, help="Workers of each loader: 0 2; by default its."
)
@click.option("--config", type=click.Path(path_type=Path), help="A LightningCLI's YAML file, for its section data:.")
@click.option("--seed", type=click.IntRange(min=0), help="What your script passes to seed_everything.")
@click.option("--batches", type=click.IntRange(min=3), default=30, help="The most batches of an epoch, 30 by default.")
@click.option("--epochs", type=click.IntRange(min=2), default=2, help="Epochs of each run, 2 by default.")
@click.option("--key", metavar="NAME", help="A function from a batch of a stream to the names of its samples.")
@click.option("--no-callback", is_flag=True, help="Train without StatefulDataCallback, as a script that lacks it.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=300.0, help="Seconds without a batch: hung. 300 by default."
)
@json_option
def verify(
    factory: str | None,
    devices: tuple[int, ...],
    workers: tuple[int, ...],
    no_callback: bool,
    json_: bool,
    **options: Any,
) -> int:
    """Train on your data in real processes, stop, resume, and compare every sample.

    FACTORY, package.module:name, makes or is a data module, a LightningModule with loaders, or a DataLoader. A model
    that only records is trained on it, stopped in the middle and at the end of an epoch, in and after a validation,
    and by SIGKILL, and resumed in new processes; from the middle of an epoch also on the other numbers of ranks and
    workers. The first batch that differs is printed, with its cause.

    Exits with 1 if a batch differs, or a resume is refused.
    """
    from lightning_stateful.verify.trials import verify as try_all

    progress = _Progress()
    try:
        found = try_all(
            factory,
            devices=devices,
            workers=workers or (None,),
            callback=not no_callback,
            progress=progress.show,
            **options,
        )
    finally:
        progress.clear()
    text = in_flags(str(found), click.get_current_context().command.params)
    click.echo(as_json(found.to_dict()) if json_ else "\n".join(map(printable, text.splitlines())))
    return 0 if found.ok else 1


class _Progress:
    """A bar on standard error, if that is a terminal."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()

    def show(self, done: int, total: int) -> None:
        """Show how many runs have ended, of how many."""
        if self._is_shown:
            filled = _WIDTH * done // max(total, 1)
            word = "starting" if done == 0 else f"{done} of {total} runs"
            click.echo(f"\r[{'#' * filled}{'.' * (_WIDTH - filled)}] {word:<20}", err=True, nl=False)

    def clear(self) -> None:
        """Take the bar away."""
        if self._is_shown:
            click.echo(f"\r{' ' * (_WIDTH + 24)}\r", err=True, nl=False)
