"""Does this resume exactly? Runs what it is given with and without stops, compares, and returns data."""

from lightning_stateful.audit.compare import END, difference, identities
from lightning_stateful.audit.laws import AuditResult, check_resume
from lightning_stateful.audit.runner import Divergence, Recorder

__all__ = ["END", "AuditResult", "Divergence", "Recorder", "check_resume", "difference", "identities"]
