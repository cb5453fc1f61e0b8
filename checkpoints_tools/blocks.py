"""Packs published INT4 words into the kernel's blocks (see `ddtree_jax.pallas.int4_blocks`), in numpy.

Weights are never expanded: nibbles change places inside their words, and one gather puts words where the kernel wants
them, for one or a few block rows at a time. All that they touch stays in a core's cache; calls may run in threads of their
own. ::

    rows of words, low and high halves of blocks ──► word by word in turn ──► nibbles 0 2 4 6 1 3 5 7 ──┐
    rows of scales ────────────────────────────────► pairs of rows a word ──────────────────────────────┴► gather ──► blocks
"""

import numpy as np

from ddtree_jax.pallas.int4_blocks import BLOCK_COLUMNS, BLOCK_ROWS, BLOCK_WORDS, WEIGHT_WORDS

_FEATURES = BLOCK_ROWS // 2
_TILE_WORDS = 1 << 16


class BlockPacker:
    """Packs block rows of one width, in groups of so many. Holds scratch memory: one a thread.

    Words are uint32 [rows, columns / 8], scales the bits of bfloat16 as uint16 [rows, columns / 32]. Blocks [M, K, m, 576]
    lie in chunks of their first two axes: [chunks of M, chunks of K, M of a chunk, K of a chunk, m, 576].
    """

    def __init__(self, columns: int, group: int):
        num_columns = -(-columns // BLOCK_COLUMNS)
        num_words = num_columns * WEIGHT_WORDS
        fitting = max(_TILE_WORDS // num_words, 1)
        self._num_rows = max(rows for rows in range(1, group + 1) if group % rows == 0 and rows <= fitting)
        # Padding is zero and stays so: only what lies inside the columns is ever written.
        self._tile = np.zeros(self._num_rows * num_columns * BLOCK_WORDS, np.uint32)
        words, scales = np.split(self._tile, [self._num_rows * num_words])
        self._words = words.reshape(self._num_rows, 4, 8, -1, 2)
        self._scales = scales.view(np.uint16).reshape(self._num_rows, 4, 8, -1, 2)
        self._scratch = np.zeros_like(words)
        self._index = _gather_index(self._num_rows, num_columns)
        self._blocks = np.empty((num_columns, self._num_rows, BLOCK_WORDS), np.uint32)

    def pack_gate_up(self, gate: tuple, up: tuple, out: np.ndarray) -> None:
        """Blocks of the words and scales of gate and of up, 32 features of both a block."""
        size = self._num_rows * _FEATURES
        for start in range(0, len(gate[0]), size):
            low, high = ([part[start:][:size].reshape(-1, 4, 8, part.shape[1]) for part in pair] for pair in (gate, up))
            self._pack(low, high, out, start // _FEATURES)

    def pack_down(self, words: np.ndarray, scale: np.ndarray, out: np.ndarray) -> None:
        """Blocks of a projection in natural row order; missing rows of the last block are zeros."""
        size = self._num_rows * BLOCK_ROWS
        for start in range(0, len(words), size):
            parts = [
                _fill_up(array[start:][:size], size).reshape(-1, 4, 2, 8, array.shape[1]) for array in (words, scale)
            ]
            low, high = ([part[:, :, half] for part in parts] for half in range(2))
            self._pack(low, high, out, start // BLOCK_ROWS)

    def _pack(self, low: list, high: list, out: np.ndarray, row: int) -> None:
        """Packs block rows from ``row`` on, of words and scales [rows, 4, 8, ...] of the halves of each."""
        for half, (words, scales) in enumerate((low, high)):
            self._words[..., : words.shape[-1], half] = words
            self._scales[..., : scales.shape[-1], half] = scales
        _reorder(self._words.reshape(-1), self._scratch)
        np.take(self._tile.view(np.uint64), self._index, out=self._blocks.view(np.uint64), mode="clip")
        num_chunks, column_chunks, num_groups, num_columns, group, _ = out.shape
        chunk, place, first = np.unravel_index(row, (num_chunks, num_groups, group))
        blocks = self._blocks.reshape(column_chunks, num_columns, self._num_rows, BLOCK_WORDS)
        out[chunk, :, place, :, first : first + self._num_rows] = blocks


def _fill_up(rows: np.ndarray, size: int) -> np.ndarray:
    if len(rows) == size:
        return rows
    return np.concatenate([rows, np.zeros((size - len(rows), rows.shape[1]), rows.dtype)])


def _gather_index(num_rows: int, num_columns: int) -> np.ndarray:
    """Place in a tile of every two words [K, rows, 288]: of words [rows, warp, r, K, q, t] by halves, of scales by q."""
    words = np.arange(num_rows * num_columns * WEIGHT_WORDS // 2).reshape(num_rows, 4, 8, num_columns, 2, 4)
    scales = np.arange(num_rows * num_columns * (BLOCK_WORDS - WEIGHT_WORDS) // 2).reshape(num_rows, 4, 8, num_columns)
    return np.concatenate(
        [
            words.transpose(3, 0, 1, 2, 5, 4).reshape(num_columns, num_rows, -1),
            words.size + scales.transpose(3, 0, 1, 2).reshape(num_columns, num_rows, -1),
        ],
        axis=-1,
    )


def _reorder(words: np.ndarray, scratch: np.ndarray) -> None:
    """Nibbles 0 1 2 3 4 5 6 7 in the order 0 2 4 6 1 3 5 7, in place; ``scratch`` is as large.

    First 1 changes with 2 and 5 with 6, then the inner bytes, each time by what the two differ in, added to both.
    """
    np.right_shift(words, np.uint32(4), out=scratch)
    np.bitwise_xor(scratch, words, out=scratch)
    np.bitwise_and(scratch, np.uint32(0x00F000F0), out=scratch)
    np.multiply(scratch, np.uint32(1 + (1 << 4)), out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    bytes_, differences = words.view(np.uint8), scratch.view(np.uint8)
    np.bitwise_xor(bytes_[1:], bytes_[:-1], out=differences[:-1])  # a shift by a byte that takes no pass
    np.bitwise_and(scratch, np.uint32(0x0000FF00), out=scratch)
    np.multiply(scratch, np.uint32(1 + (1 << 8)), out=scratch)
    np.bitwise_xor(words, scratch, out=words)
