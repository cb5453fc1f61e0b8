"""The Gumbel noise of `jax.random`, bit for bit, for single tokens."""

from typing import Any

from ddtree_jax.pallas.simt import FLOAT, UINT

_TINY = 1.1754943508222875e-38
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def key_at(t: Any, noise_key: Any, sequence: Any, position: Any) -> tuple[Any, Any]:
    """The key of a position, as ``jax.random.fold_in`` makes it of the sequence's; noise_key [B, 2] in global memory."""
    key = t.load(noise_key, sequence * 2), t.load(noise_key, sequence * 2 + 1)
    return threefry(t, key, t.value(UINT, 0), t.bits(position, UINT))


def gumbel(t: Any, key: tuple[Any, Any], index: Any) -> Any:
    """Element ``index`` of ``jax.random.gumbel`` with a threefry key."""
    first, second = threefry(t, key, t.value(UINT, 0), t.bits(index, UINT))
    unit = t.bits(((first ^ second) >> 9) | 0x3F800000, FLOAT) - 1.0
    return t.value(FLOAT, 0.0) - t.log(t.value(FLOAT, 0.0) - t.log(t.maximum(unit + _TINY, _TINY)))


def threefry(t: Any, key: tuple[Any, Any], x: Any, y: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011)."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = x + keys[0], y + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + (group + 1)
    return x, y
