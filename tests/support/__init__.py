"""Helpers of tests on real trainers: a ledger of what was trained on, and runs that are stopped and resumed."""
