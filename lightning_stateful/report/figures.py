"""Figures of matplotlib, made without pyplot, and as SVG in a page: lines and text in the page's own colours."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from typing import Any

from lightning_stateful.errors import ConfigurationError

# Colours that can be told apart on white and on black, also by most people who are colour-blind.
PALETTE = ("#3b82c4", "#d9902f", "#3f9e77", "#9a6fc0", "#c2649a", "#2f9fb0", "#8c7a4f")
GREY, RED = "#8a8a8a", "#e03131"
# Stands for the page's colour of text, which is another on a dark screen.
TEXT = "#010203"
# Inches: beside the page's text at full width, and on a phone.
_WIDE, _NARROW = (10.2, 3.9), (4.9, 3.3)


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(
            "Pictures need matplotlib; install it with: pip install 'lightning-stateful[plots]'"
        ) from None
    # Not by pyplot, which would keep the figure and choose a backend for the user's own.
    return Figure(figsize=(width, height), layout="constrained")


def in_page(draw: Callable[[Any, bool], None], name: str, label: str) -> str:
    """A picture as HTML, drawn twice: for wide screens and for narrow ones, of which a page shows one.

    Args:
        draw: Gets axes, and whether the picture is narrow.
        name: A name that no other picture of the page has.
        label: What it shows, for those who cannot see it.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    shown = ""
    for kind, size in (("wide", _WIDE), ("narrow", _NARROW)):
        figure = new_figure(*size)
        axis = figure.subplots()
        _style(axis)
        draw(axis, kind == "narrow")
        shown += f'<div class="picture {kind}">{_svg(figure, f"{name} {kind}", label)}</div>'
    return shown


def legend(entries: list[tuple[str, str, str]]) -> str:
    """A legend as HTML, which wraps on narrow screens.

    Args:
        entries: Of each the kind of mark (``"area"``, ``"dot"``, ``"line"`` or ``"dashed"``), its colour, and the text.
    """
    lines = (
        f'<li><i class="{kind}" style="color:{"inherit" if colour == TEXT else colour}"></i>{escape(text)}</li>'
        for kind, colour, text in entries
    )
    return f'<ul class="legend">{"".join(lines)}</ul>'


def _style(axis: Any) -> None:
    axis.tick_params(colors=TEXT, length=3, width=0.6)
    for name, spine in axis.spines.items():
        spine.set(visible=name in ("left", "bottom"), color=TEXT, linewidth=0.6)
    for one in (axis.xaxis, axis.yaxis):
        one.label.set_color(TEXT)
    axis.grid(axis="y", color=TEXT, alpha=0.12, linewidth=0.6)
    axis.set_axisbelow(True)


def _svg(figure: Any, name: str, label: str) -> str:
    from matplotlib import rc_context

    written = io.StringIO()
    # Text stays text, in the page's font. By the salt, parts of two pictures have different names.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(written, format="svg", transparent=True, dpi=120, metadata={"Date": None})
    text = written.getvalue()
    text = text[text.index("<svg") :].replace(TEXT, "currentColor")
    text = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text)
    # Names of groups, which are the same in every picture.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
