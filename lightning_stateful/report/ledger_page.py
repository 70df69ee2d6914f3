"""A page of a ledger: findings, starts and epochs in tables, and pictures of data, mixture, padding and waiting."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightning_stateful.ledger import Ledger
from lightning_stateful.ledger.over_time import Shares, Waiting, coverage_of, padding_of, shares_of, waiting_of
from lightning_stateful.report.ledger_plots import coverage_picture, padding_picture, shares_picture, waiting_picture

_STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 58rem; margin: 0 auto; padding: 1rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 0; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 42rem; }
.lead { opacity: .75; margin-top: .25rem; }
.note { font-size: .9rem; opacity: .8; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th { font-size: .85rem; font-weight: 600; vertical-align: bottom; }
th, td { text-align: left; padding: .3rem 1.1rem .3rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.number, th.number { text-align: right; }
.wrong, .right { padding: .6rem .9rem; margin: 1rem 0; background: var(--soft); border-radius: 0 .3rem .3rem 0; }
.wrong { border-left: .3rem solid #e03131; } .right { border-left: .3rem solid #3f9e77; }
.wrong p, .right p, .wrong ul { margin: 0; } .wrong li { overflow-wrap: anywhere; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; padding: 0; margin: .7rem 0 .3rem;
  font-size: .9rem; }
.legend li { display: flex; align-items: center; gap: .4rem; }
.legend i { width: 1.1rem; flex: none; border-top: 2px solid; }
.legend .dashed { border-top-style: dashed; }
.legend .dot { width: .6rem; height: .6rem; border: 0; border-radius: 50%; background: currentColor; }
.legend .area { width: .8rem; height: .8rem; border: 0; background: currentColor; opacity: .75; }
.picture svg { width: 100%; height: auto; display: block; } .narrow { display: none; }
summary { cursor: pointer; }
@media (max-width: 40rem) {
  .wide { display: none; } .narrow { display: block; }
  .cards tr:first-child { display: none; }
  .cards, .cards tbody, .cards tr { display: block; }
  .cards tr { border: 1px solid var(--line); border-radius: .4rem; padding: .3rem .7rem; margin: .6rem 0; }
  .cards td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0; text-align: right;
    overflow-wrap: anywhere; white-space: normal; }
  .cards td::before { content: attr(data-title); opacity: .75; text-align: left; overflow-wrap: normal; }
  td, th { padding-right: .8rem; }
}
"""
_TITLE = "What a run was trained on"
_FEW_ROWS, _FEW_CARDS = 16, 6


def write_page(ledger: Ledger, path: str | Path) -> None:
    """Write a page of HTML that needs no network, for light and dark screens, wide and narrow ones.

    Args:
        ledger: What was trained on.
        path: The file to write.

    Raises:
        ConfigurationError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    body = "\n".join(
        [
            f"<h1>{_TITLE}</h1>",
            f'<p class="lead">{escape(_in_short(ledger))}</p>',
            _verdict([finding.text for finding in ledger.findings()], ledger.verdict()),
            *(f'<p class="note">{escape(note)}</p>' for note in ledger.notes()),
            *_starts(ledger),
            *_epochs(ledger),
            *(part for path in ledger.rows for part in _of_loader(ledger, path)),
            *_waiting(waiting_of(ledger)),
        ]
    )
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    style = f"<title>{_TITLE}</title><style>{_STYLE}</style>"
    text = f'<!doctype html><html lang="en"><head>{head}{style}</head>\n<body>\n{body}\n</body></html>\n'
    Path(path).write_text(text, encoding="utf-8")


def _in_short(ledger: Ledger) -> str:
    starts, epochs = len(ledger.starts), ledger.epochs()
    kept, lost = (sum(getattr(one, name) for one in ledger.starts) for name in ("num_kept", "num_lost"))
    passes = f"{len(epochs)} epoch{'s' * (len(epochs) != 1)}, " if epochs else ""
    return (
        f"{starts} start{'s' * (starts != 1)}, {passes}{kept:,} batches of all ranks in the latest weights"
        f"{f', {lost:,} lost with earlier ones' if lost else ''}."
    )


def _verdict(findings: Sequence[str], right: Sequence[str]) -> str:
    if not findings:
        return "".join(f'<div class="right"><p>{escape(text)}</p></div>' for text in right)
    lines = "".join(f"<li>{escape(text)}</li>" for text in findings)
    return f'<div class="wrong"><p>An uninterrupted run would not have done this:</p><ul>{lines}</ul></div>'


def _starts(ledger: Ledger) -> list[str]:
    titles = ("number", "start", "ranks", "from epoch", "from batch", "batches kept", "lost")
    rows = [
        (number, one.header.start, one.header.num_replicas, *one.header.begins, one.num_kept, one.num_lost)
        for number, one in enumerate(ledger.starts, 1)
    ]
    table = _folded_table(titles, rows, are_cards=len(rows) <= _FEW_CARDS)
    lost = '<p class="note">Lost: trained on in vain, because a later start went on before them.</p>'
    return ["<h2>Starts</h2>", table, *([lost] if any(one.num_lost for one in ledger.starts) else [])]


def _epochs(ledger: Ledger) -> list[str]:
    rows = [_cells(row) for row in ledger.epochs()]
    return ["<h2>Epochs</h2>", _folded_table(("epoch", "items", "distinct", "of", "state"), rows)]


def _folded_table(titles: Sequence[str], rows: Sequence[Sequence[Any]], are_cards: bool = False) -> str:
    """A table, folded away where it is long."""
    table = _table(titles, rows, are_cards)
    return f"<details><summary>{len(rows)} rows</summary>{table}</details>" if len(rows) > _FEW_ROWS else table


def _cells(row: dict[str, Any]) -> tuple[Any, ...]:
    again = f", pass {row['cycle'] + 1}" if row["cycle"] else ""
    epoch = f"{row['epoch']}{again} of {row['path']}" if row["path"] else f"{row['epoch']}{again}"
    return epoch, row["items"], row["distinct"], row["length"], "over" if row["over"] else "not over"


_COVERAGE = (
    "Each dot is a sample, at the step of the run in which it was trained on. Steps are counted over all starts, those "
    "that were lost among them."
)
_SHARES = (
    "Shares of {unit} in windows of steps; dashed, what was asked for. Steps are those that the latest weights were "
    "trained on."
)
_PADDING = "{share:.2%} of all {padded:,} tokens in batches are padding, over all ranks."
_NO_PADDING = (
    "Padding is not known: this loader has no lengths of samples. It is known of buckets over data with an index, and "
    "of packed documents."
)


def _of_loader(ledger: Ledger, path: str) -> list[str]:
    """Which samples of a loader came when, its mixture if it is one, and its padding."""
    of = f" of loader {escape(repr(path))}" if path else ""
    mixture: dict[str, Any] = ledger.starts[-1].header.loaders[path].get("mixture", {})
    parts = [f"<h2>Which samples{of} came when</h2>"]
    if coverage := coverage_of(ledger, path):
        sources = list(zip(mixture["names"], mixture["lengths"], strict=True)) if "lengths" in mixture else []
        parts += [f"<p>{_COVERAGE}</p>", coverage_picture(coverage, f"coverage {path}", sources)]
    else:
        parts.append(
            '<p class="note">There is no picture: the batches of this loader were written without indices.</p>'
        )
    if shares := shares_of(ledger, path):
        parts += [f"<h2>Mixture{of}, and what was asked for</h2>", f"<p>{_SHARES.format(unit=shares.unit)}</p>"]
        parts += [shares_picture(shares, f"shares {path}"), _table(*_rows_of_shares(shares))]
    parts.append(f"<h2>Padding{of}</h2>")
    if padding := padding_of(ledger, path):
        said = _PADDING.format(share=padding.share_in_all, padded=padding.padded)
        return [*parts, f"<p>{said}</p>", padding_picture(padding, f"padding {path}")]
    return [*parts, f'<p class="note">{_NO_PADDING}</p>']


def _rows_of_shares(found: Shares) -> tuple[Sequence[str], list[Sequence[Any]]]:
    rows: list[Sequence[Any]] = [
        (name, samples, f"{got:.2%}", "not known" if asked != asked else f"{asked:.2%}")
        for name, samples, got, asked in zip(
            found.names, found.samples, found.got_in_all, found.asked_in_all, strict=True
        )
    ]
    return ("source", "samples", f"share of {found.unit}", "asked for"), rows


def _waiting(found: Waiting | None) -> list[str]:
    title = "<h2>Time that ranks waited</h2>"
    if found is None:
        return [title, '<p class="note">Not known: too few batches, or a ledger of an earlier version.</p>']
    are_many = any(one.rank for one in found.ranks)
    said = "The share of the ranks' time, from step to step, in which the training loop waited for its next batch"
    said += ", and in which it had begun a step that another rank had not." if are_many else "."
    said += _last_of_all(found) if are_many else ""
    titles = ["start", "rank", "host", "first batch, s", "time, s", "for its batch, s", "share"]
    rows = [
        [one.start + 1, one.rank, one.host, f"{one.first:.2f}", f"{one.seconds:,.1f}", f"{one.own:,.2f}",
         f"{_part(one.own, one.seconds):.1%}"]
        for one in found.ranks
    ]  # fmt: skip
    if are_many:
        titles += ["for the last rank, s", "share", "was last"]
        for row, one in zip(rows, found.ranks, strict=True):
            row += [f"{one.others:,.2f}", f"{_part(one.others, one.seconds):.1%}", f"{_part(one.last, one.steps):.0%}"]
    table = _folded_table(titles, rows, are_cards=len(rows) <= _FEW_CARDS)
    notes = ["What a start waited for its very first batch stands in the table alone."]
    if are_many:
        notes.append(
            "Ranks of DDP wait for the last one in each backward pass. Where gradients are accumulated they do so less "
            "often, and this is the most that they waited. A stream gives a batch once all ranks have one."
        )
    if found.num_hosts > 1:
        notes.append(
            f"The ranks ran on {found.num_hosts} hosts, whose clocks are compared as they are: what they differ by "
            "looks like waiting for the last rank."
        )
    if beyond := sum(one.beyond for one in found.ranks):
        steps = sum(one.steps for one in found.ranks)
        notes.append(
            f"In {_part(beyond, steps):.1%} of their steps, ranks were a step ahead of the last one: clocks differ, or "
            "ranks do not wait for each other in each step. No more than the whole step counts as waiting."
        )
    words = [f'<p class="note">{escape(" ".join(notes))}</p>']
    return [title, f"<p>{escape(said)}</p>", waiting_picture(found, "waiting"), table, *words]


def _last_of_all(found: Waiting) -> str:
    """A sentence on the rank that was waited for most often."""
    counts: Counter[tuple[int, str]] = Counter()
    for one in found.ranks:
        counts[one.rank, one.host] += one.last
    [((rank, host), number)] = counts.most_common(1)
    steps = sum(one.steps for one in found.ranks if (one.rank, one.host) == (rank, host))
    return f" Most often the last was rank {rank} on {host}: in {_part(number, steps):.0%} of its steps."


def _part(some: float, of: float) -> float:
    return some / of if of else 0.0


def _table(titles: Sequence[str], rows: Iterable[Sequence[Any]], are_cards: bool = False) -> str:
    """A table, without columns that have nothing; as cards, a row becomes a list where the screen is narrow."""
    listed = [list(row) for row in rows]
    shown = [at for at in range(len(titles)) if any(row[at] is not None for row in listed)]
    titles, listed = [titles[at] for at in shown], [[row[at] for at in shown] for row in listed]
    numeric = [all(_is_number(row[at]) for row in listed) for at in range(len(titles))]

    def line(cells: Sequence[Any], tag: str) -> str:
        found = ""
        for title, cell, is_number in zip(titles, cells, numeric, strict=True):
            text = "" if cell is None else f"{cell:,}" if isinstance(cell, int) else escape(str(cell))
            kind = ' class="number"' if is_number else ""
            titled = f' data-title="{escape(title)}"' if are_cards and tag == "td" else ""
            found += f"<{tag}{kind}{titled}>{text}</{tag}>"
        return f"<tr>{found}</tr>"

    body = "".join(line(row, "td") for row in listed)
    kind = ' class="cards"' if are_cards else ""
    return f'<div class="scroll"><table{kind}><tbody>{line(titles, "th")}{body}</tbody></table></div>'


def _is_number(cell: Any) -> bool:
    return cell is None or isinstance(cell, int) or re.fullmatch(r"[\d,.]+%?", str(cell)) is not None
