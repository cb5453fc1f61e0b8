"""Muon for matrices and Adam for the rest, and a schedule that ends on time.

Muon (Jordan et al. 2024; scaled as in arXiv 2502.16982, section 2.2) replaces a matrix's momentum by the nearest
orthogonal matrix, times 0.2 * sqrt(larger side), so that its entries move as far as Adam's would.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_ADAM_NAMES = ("embedding", "unembedding", "router")


def make_optimizer(adam_scale: float, weight_decay: float = 0.1, beta: float = 0.95) -> optax.GradientTransformation:
    """Updates for a learning rate of 1: `apply_updates` multiplies by the step's rate.

    ``adam_scale`` is Adam's learning rate relative to Muon's. Only Muon's matrices decay.
    """
    muon = optax.chain(_scale_by_muon(beta), optax.add_decayed_weights(weight_decay))
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(0.9, 0.95, 1e-8), optax.scale(adam_scale))
    return optax.partition({"muon": muon, "adam": adam}, _labels)


def apply_updates(masters: optax.Params, updates: optax.Updates, rate: Float[Array, ""]) -> optax.Params:
    return jax.tree.map(lambda master, update: master - rate * update, masters, updates)


def _labels(masters: optax.Params) -> optax.Params:
    return {
        part: {name: "adam" if "norm" in name or name.startswith(_ADAM_NAMES) else "muon" for name in table}
        for part, table in masters.items()
    }


class _MuonState(NamedTuple):
    momentum: optax.Updates


def _scale_by_muon(beta: float) -> optax.GradientTransformation:
    def init(masters: optax.Params) -> _MuonState:
        return _MuonState(jax.tree.map(jnp.zeros_like, masters))

    def update(gradients: optax.Updates, state: _MuonState, masters: optax.Params | None = None):
        del masters
        momentum = jax.tree.map(lambda m, g: beta * m + g, state.momentum, gradients)
        nesterov = jax.tree.map(lambda m, g: beta * m + g, momentum, gradients)
        return _orthogonalize_all(nesterov), _MuonState(momentum)

    return optax.GradientTransformation(init, update)


def _orthogonalize_all(updates: optax.Updates) -> optax.Updates:
    """Orthogonalizes every leaf; matrices of one size go through the iteration as one batch."""
    paths, structure = jax.tree_util.tree_flatten_with_path(updates)
    leaves = [leaf for _, leaf in paths]
    batches = [_as_matrices(path[-1].key, leaf) for path, leaf in paths]
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, batch in enumerate(batches):
        groups[batch.shape[1:]].append(index)
    for indices in groups.values():
        together = _orthogonalize(jnp.concatenate([batches[index] for index in indices]))
        ends = [sum(batches[index].shape[0] for index in indices[: count + 1]) for count in range(len(indices) - 1)]
        for index, part in zip(indices, jnp.split(together, ends), strict=True):
            leaves[index] = part.reshape(leaves[index].shape).astype(leaves[index].dtype)
    return structure.unflatten(leaves)


def _as_matrices(name: str, leaf: Array) -> Array:
    """A batch of matrices [batch, rows, columns] out of a parameter, by the axis letters of its name.

    Experts (E, and Z for gate and up) are a batch; where the model width or a query latent comes first it is the
    input, else the last axis is.
    """
    axes = name.rsplit("_", 1)[-1]
    if axes.startswith("E"):
        return leaf.reshape(-1, *leaf.shape[-2:])
    if axes[0] in "DA":
        return leaf.reshape(1, leaf.shape[0], -1)
    return leaf.reshape(1, -1, leaf.shape[-1])


def _orthogonalize(x: Float[Array, "batch rows columns"]) -> Float[Array, "batch rows columns"]:
    a, b, c = _NEWTON_SCHULZ
    rows, columns = x.shape[1:]
    is_tall = rows > columns
    x = jnp.swapaxes(x, 1, 2) if is_tall else x
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-12)
    x = x.astype(jnp.bfloat16)
    for _ in range(_NUM_ITERATIONS):
        gram = jnp.einsum("brc,bsc->brs", x, x)
        polynomial = b * gram + c * jnp.einsum("brs,bst->brt", gram, gram)
        x = a * x + jnp.einsum("brs,bsc->brc", polynomial, x)
    x = jnp.swapaxes(x, 1, 2) if is_tall else x
    return x.astype(jnp.float32) * (0.2 * math.sqrt(max(rows, columns)))


class Clock:
    """How far training has come, by steps where their number is given, else by time.

    By steps a run is a function of its seed alone; by time it ends on time whatever the machine.
    """

    def __init__(self, minutes: float, num_steps: int | None, now: Callable[[], float] = time.monotonic):
        self._seconds, self._num_steps, self._now = 60 * minutes, num_steps, now
        self._start: float | None = None
        self.step = 0

    def start(self) -> None:
        self._start = self._now()

    @property
    def elapsed(self) -> float:
        return 0.0 if self._start is None else self._now() - self._start

    def progress(self, num_ahead: int) -> tuple[float, float]:
        """Progress now and after ``num_ahead`` more steps, each 0 to 1."""
        if self._num_steps:
            return self.step / self._num_steps, min(1.0, (self.step + num_ahead) / self._num_steps)
        now = self.elapsed / self._seconds
        ahead = now * num_ahead / self.step if self.step else 0.0
        return min(1.0, now), min(1.0, now + ahead)

    @property
    def is_over(self) -> bool:
        return self.progress(0)[0] >= 1.0


def learning_rate(peak: float, progress: float, step: int, num_warmup: int = 100, decay_from: float = 0.35) -> float:
    """Linear warm-up, constant, then linear to 0."""
    warm = min(1.0, (step + 1) / num_warmup)
    return peak * warm * min(1.0, (1.0 - progress) / (1.0 - decay_from))
