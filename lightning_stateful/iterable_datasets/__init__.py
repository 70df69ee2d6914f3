"""Iterable datasets that divide themselves, and iterables of batches, read as torch reads them."""
