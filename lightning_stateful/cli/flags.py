"""Options of the command: several numbers after one flag, JSON, and errors that name flags."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from typing import Any

import click

from lightning_stateful.cli.words import error_in_words
from lightning_stateful.errors import StatefulError

json_option = click.option("--json", "json_", is_flag=True, help="JSON in place of words.")


class Command(click.Command):
    """A command of which some options take several numbers: ``--ranks 1 8`` is read as ``--ranks 1 --ranks 8``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments."""
        several = {flag for option in self.params if getattr(option, "multiple", False) for flag in option.opts}
        found: list[str] = []
        latest = ""
        for number, argument in enumerate(args):
            if argument.isdigit() and latest in several and args[number - 1] != latest:
                found.append(latest)
            elif not argument.isdigit():
                latest = argument
            found.append(argument)
        return super().parse_args(ctx, found)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; errors of the package and of files name flags."""
        try:
            return super().invoke(ctx)
        except (StatefulError, OSError) as error:
            raise click.ClickException(in_flags(error_in_words(error), self.params)) from error

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they stand."""
        if self.epilog:
            formatter.write_paragraph()
            formatter.write_text("Examples:")
            with formatter.indentation():
                for line in self.epilog.strip().splitlines():
                    formatter.write(f"{' ' * formatter.current_indent}{line.strip()}\n")


def as_json(value: Any) -> str:
    """Plain data as JSON; what is none by its repr."""
    return json.dumps(value, indent=2, default=repr)


def in_flags(text: str, options: Iterable[click.Parameter]) -> str:
    """An error in which the arguments of Python that a command's options stand for are written as flags."""
    for option in options:
        name = option.name or ""
        flag = max(option.opts, key=len)
        if flag.startswith("--"):
            # A tuple of one name, as a remedy in Python has it.
            for one in re.findall(rf"\b{name}=\('([^']*)',\)", text):
                text = text.replace(f"{name}=('{one}',)", f"{flag} {shlex.quote(one)}")
            text = re.sub(rf"\b{name}=(?=\S)", f"{flag} ", text)
            text = re.sub(rf"\b{name}\b", flag, text) if "_" in name else text
    return text


def numbers_or_name(text: str) -> Any:
    """Numbers with commas between them, or a name.

    Raises:
        click.BadParameter: It is neither.
    """
    if text.replace("_", "").isalpha():
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no number, and no numbers with commas between them") from None
