"""A ledger: files that say what every rank trained on, and what they show over all starts of a run."""

from lightning_stateful.ledger.files import Batch, FileHeader, LedgerFile, Part, read_file
from lightning_stateful.ledger.history import Finding, Ledger, read_ledger

__all__ = ["Batch", "FileHeader", "Finding", "Ledger", "LedgerFile", "Part", "read_file", "read_ledger"]
