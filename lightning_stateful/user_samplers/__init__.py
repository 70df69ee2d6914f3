"""Samplers of users and other packages: iterated as torch does, dealt out to ranks, and resumed."""

from lightning_stateful.user_samplers.ddp_wrapper import DDPSamplerWrapper

__all__ = ["DDPSamplerWrapper"]
