"""Gumbel noise of a token from (seed, index of the sequence, position): Threefry-2x32 as JAX documents it.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011): 20 rounds in five groups of four, a key injected
behind each group. JAX's design notes (JEP 9263) give ``fold_in`` and, for ``jax_threefry_partitionable``, random bits: number
i of an array is the exclusive or of both words of the block with counter i.
"""

import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_MASK = 0xFFFFFFFF

Key = tuple[int, int]


def threefry2x32(key: Key, high: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both words of the blocks with counters (high, low), as uint64 below 2**32."""
    words = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x = (np.asarray(high, np.uint64) + words[0]) & _MASK
    y = (np.asarray(low, np.uint64) + words[1]) & _MASK
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = (x + y) & _MASK
            y = ((y << rotation) | (y >> (32 - rotation))) & _MASK
            y = y ^ x
        x = (x + words[(group + 1) % 3]) & _MASK
        y = (y + words[(group + 2) % 3] + group + 1) & _MASK
    return x, y


def key_of_seed(seed: int) -> Key:
    return seed >> 32, seed & _MASK


def fold_in(key: Key, data: int) -> Key:
    """The key that ``data``, a 32-bit number, makes of another one."""
    x, y = threefry2x32(key, *(np.array([word]) for word in key_of_seed(data)))
    return int(x[0]), int(y[0])


def uniform(key: Key, size: int) -> np.ndarray:
    """float32 in [tiny, 1): the upper 23 of 32 random bits are the mantissa of a number from 1 to 2, less 1."""
    x, y = threefry2x32(key, np.zeros(size, np.uint64), np.arange(size, dtype=np.uint64))
    mantissa = (x ^ y).astype(np.uint32) >> 9
    unit = (mantissa | np.float32(1).view(np.uint32)).view(np.float32) - np.float32(1)
    return np.maximum(unit, np.finfo(np.float32).tiny)


def gumbel(seed: int, sequence: int, position: int, size: int) -> np.ndarray:
    """Noise [V] on the logits that draw the token at an absolute position."""
    key = fold_in(fold_in(key_of_seed(seed), sequence), position)
    return -np.log(-np.log(uniform(key, size).astype(np.float64)))
