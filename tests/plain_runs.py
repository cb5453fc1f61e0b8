"""Benchmarks' runs without a GPU: plain JAX in the place of kernels, zeros in the place of drawn weights."""

from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from ddtree_jax import decode, kimi, latent_attention
from ddtree_jax.pallas import simt
from ddtree_jax.pallas.attend_and_project import attend_and_project_reference
from ddtree_jax.pallas.int4_moe import int4_moe_reference
from ddtree_jax.pallas.tree_mla import tree_mla_reference


def _zeros_like(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)


def allow_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are traced over shapes, which annotations do not know."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def leave_out_kernels(monkeypatch: pytest.MonkeyPatch, drawing: Any) -> None:
    """Plain JAX alone, and nothing drawn: kernels are traced even where they are not compiled, and draws compile long.

    ``drawing`` is the module whose weights become zeros.
    """
    monkeypatch.setattr(decode, "_draw", lambda logits_BNV, *_: jnp.zeros(logits_BNV.shape[:2], jnp.int32))
    monkeypatch.setattr(drawing, "draw_arrays", lambda described, *_: jax.tree.map(_zeros_like, described))
    monkeypatch.setattr(kimi, "check_kernels", lambda *_: None)
    monkeypatch.setattr(kimi, "_int4_moe", int4_moe_reference)
    monkeypatch.setattr(latent_attention, "_tree_mla", tree_mla_reference)
    monkeypatch.setattr(latent_attention, "_attend_and_project", attend_and_project_reference)
    monkeypatch.setattr(simt, "choose", lambda kernel, reference, *arrays, has_kernels=True: reference(*arrays))
