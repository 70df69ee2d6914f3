"""Sequences of one length, made of documents: split anywhere, or packed whole. NumPy only."""

from lightning_stateful.packing.documents import Document, DocumentReader
from lightning_stateful.packing.sequences import Piece, make_sequence
from lightning_stateful.packing.settings import Packing

__all__ = ["Document", "DocumentReader", "Packing", "Piece", "make_sequence"]
