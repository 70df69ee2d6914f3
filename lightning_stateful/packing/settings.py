"""Settings of packing: the length of a sequence, and how documents are put into sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_stateful.core.checks import as_int
from lightning_stateful.errors import ConfigurationError

How = Literal["split", "whole"]
TooLong = Literal["error", "drop", "truncate", "split"]

TOKENS = "input_ids"
LABELS = "labels"
# Losses leave labels of this value out: the default of torch.nn.functional.cross_entropy.
IGNORED_LABEL = -100
POSITIONS, DOCUMENTS = "position_ids", "document_ids"
# Columns that sequences have of their own.
OF_SEQUENCES = (POSITIONS, DOCUMENTS)
MOST_INT = 2**63 - 1


@dataclass(frozen=True)
class Packing:
    """Settings by which documents of tokens become sequences of one length.

    With ``how="split"`` the documents of an epoch are joined and cut every ``sequence_length`` tokens: no padding, and
    a document may go on in the next sequence. With ``how="whole"`` a sequence holds whole documents, chosen so that
    little is padded. See :class:`PackedDataset` for what a sequence has.

    Attributes:
        sequence_length: Tokens of a sequence.
        how: ``"split"`` or ``"whole"``.
        separator: A token that is put behind every document, often that of the end of a text; it counts as one of the
            document's tokens, and is learned like them. No vocabulary is asked. In other columns than ``input_ids`` and
            ``labels`` it gets the value of the document's last token. None for no separator.
        too_long: What to do about documents that are longer than a sequence, with ``how="whole"``: ``"error"`` (the
            default) names the first of them, ``"drop"`` leaves them out, ``"truncate"`` keeps their first
            ``sequence_length`` tokens, and ``"split"`` cuts them into pieces of ``sequence_length`` tokens, the last of
            which is packed like a short document.
        labels_across: Whether the first token of a document is to be predicted from the document before. By default it
            is with ``how="split"``: pretraining reads the documents as one text, in which a separator tells where
            another begins. It is not with ``how="whole"``, which keeps documents apart: there the label of the first
            token is -100, which losses leave out.
        padding: The token that fills a sequence up, with the label -100; or by column, for example
            ``{"input_ids": 2, "loss_mask": 0}``. It is 0 in columns that are not named. Where labels are named, theirs
            is below 0, which losses are told to leave out.
        open_sequences: Sequences that a stream may hold unfinished with ``how="whole"``, waiting for documents that
            fit. More of them leave less padding. Data with an index do without.

    Raises:
        ConfigurationError: A value is out of range, or has no meaning beside another.
    """

    sequence_length: int
    how: How = "split"
    separator: int | None = None
    too_long: TooLong | None = None
    labels_across: bool | None = None
    padding: int | Mapping[str, int] = 0
    open_sequences: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequence_length", as_int("sequence_length", self.sequence_length, least=1))
        if self.how not in get_args(How):
            raise ConfigurationError(f"how must be one of {get_args(How)}, got {self.how!r}.")
        if self.separator is not None:
            object.__setattr__(self, "separator", _as_int64("separator", self.separator, least=0))
        for name, default in (("too_long", "error"), ("open_sequences", 64)):
            value = getattr(self, name)
            if self.how == "split" and value is not None:
                raise ConfigurationError(
                    f'{name}={value!r} has no meaning with how="split", which cuts documents wherever a sequence is '
                    f'full. Leave {name} out, or pass how="whole".'
                )
            if self.how == "whole" and value is None:
                object.__setattr__(self, name, default)
        if self.labels_across is None:
            object.__setattr__(self, "labels_across", self.how == "split")
        self._check()

    def _check(self) -> None:
        if self.is_whole and self.too_long not in get_args(TooLong):
            raise ConfigurationError(f"too_long must be one of {get_args(TooLong)}, got {self.too_long!r}.")
        if self.is_whole:
            object.__setattr__(self, "open_sequences", as_int("open_sequences", self.open_sequences, least=1))
        if not isinstance(self.labels_across, bool):
            raise ConfigurationError(f"labels_across must be True or False, got {self.labels_across!r}.")
        object.__setattr__(self, "padding", _checked_padding(self.padding))

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def is_whole(self) -> bool:
        """Whether sequences hold whole documents."""
        return self.how == "whole"

    @property
    def num_separators(self) -> int:
        """Tokens that are put behind each document: 0 or 1."""
        return int(self.separator is not None)

    @property
    def padded_columns(self) -> set[str]:
        """The columns that ``padding`` names."""
        named: Any = self.padding
        return set(named)

    def padding_of(self, column: str) -> int:
        """The value that fills a column up: that of ``padding``, or -100 for labels and 0 for others."""
        named: Any = self.padding
        return int(named.get(column, IGNORED_LABEL if column == LABELS else 0))

    def config(self) -> dict[str, Any]:
        """All settings that decide what sequences hold, as plain data for a state.

        Left out is ``open_sequences``, which only streams add to theirs.
        """
        config: dict[str, Any] = {"sequence_length": self.sequence_length, "how": self.how, "separator": self.separator}
        if self.is_whole:
            config["too_long"] = self.too_long
        named: Any = self.padding
        return {**config, "labels_across": self.labels_across, "padding": dict(named)}


def _as_int64(name: str, value: Any, *, least: int | None = None) -> int:
    number = as_int(name, value, least=least)
    if abs(number) > MOST_INT:
        raise ConfigurationError(f"{name} must be a number that an int64 holds, got {number}.")
    return number


def _checked_padding(padding: Any) -> dict[str, int]:
    """The values of padding by column.

    Raises:
        ConfigurationError: One of them cannot be meant.
    """
    if isinstance(padding, bool):
        raise ConfigurationError(f"padding must be a token, got {padding}.")
    checked: dict[str, int] = {}
    for column, value in sorted(padding.items()) if isinstance(padding, Mapping) else [(TOKENS, padding)]:
        name = f"padding of {column!r}"
        number = _as_int64(name, value)
        if column in OF_SEQUENCES:
            raise ConfigurationError(f"{name} cannot be chosen: sequences have {' and '.join(OF_SEQUENCES)}.")
        if column == LABELS and number >= 0:
            raise ConfigurationError(
                f"{name} must be below 0, got {value!r}, which would be learned. Leave it out for {IGNORED_LABEL}, "
                "which losses leave out."
            )
        checked[str(column)] = number
    return checked
