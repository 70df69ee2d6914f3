"""Does this resume exactly? Runs what it is given with and without stops, compares, and returns data."""

from lightning_stateful.audit.compare import END, difference, identities
from lightning_stateful.audit.laws import AuditResult, check_resume
from lightning_stateful.audit.runner import Divergence, Recorder
from lightning_stateful.ledger import Finding, Ledger, read_ledger

__all__ = [
    "END",
    "AuditResult",
    "Divergence",
    "Finding",
    "Ledger",
    "Recorder",
    "check_resume",
    "difference",
    "identities",
    "read_ledger",
]
