"""What tests of real trainers share: a ledger of what was trained on, and runs that are stopped and resumed."""
