"""Floor 2: does this resume exactly? Runs what it is given, compares, and returns data."""

from lightning_stateful.audit.compare import difference
from lightning_stateful.audit.result import END, AuditResult, Divergence
from lightning_stateful.audit.resume import check_resume
from lightning_stateful.audit.samples import identities

__all__ = ["END", "AuditResult", "Divergence", "check_resume", "difference", "identities"]
