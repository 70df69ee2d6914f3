"""Words and pictures of what the toolkit does with data: of a ledger, and of buckets before any training."""

from lightning_stateful.report.padding import PaddingReport, padding_report

__all__ = ["PaddingReport", "padding_report"]
