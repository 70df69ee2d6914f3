"""Batches of like lengths, within a budget of tokens: buckets, steps and padding. NumPy only."""

from lightning_stateful.bucketing.buckets import Boundaries, Buckets
from lightning_stateful.bucketing.budget import Budget, QuadraticCost, TooLong
from lightning_stateful.bucketing.order import BucketEpochPlan, BucketOrder
from lightning_stateful.bucketing.padding import StepPadding, measure

__all__ = [
    "Boundaries",
    "BucketEpochPlan",
    "BucketOrder",
    "Buckets",
    "Budget",
    "QuadraticCost",
    "StepPadding",
    "TooLong",
    "measure",
]
