"""Compares the data of a resumed run with those that a checkpoint was trained on."""
