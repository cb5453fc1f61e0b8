"""Lossless tree-speculative decoding of Kimi K2.6 with DFlash and DDTree."""

from ddtree_jax.completion import Completion, RoundTrace, Stats
from ddtree_jax.decode import DecodeConfig
from ddtree_jax.generate import Engine
from ddtree_jax.sampling_params import SamplingParams

__all__ = ["Completion", "DecodeConfig", "Engine", "RoundTrace", "SamplingParams", "Stats"]
