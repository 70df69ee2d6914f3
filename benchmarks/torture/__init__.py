"""Runs that are killed, starved and damaged at moments drawn from a seed, resumed, and audited."""
