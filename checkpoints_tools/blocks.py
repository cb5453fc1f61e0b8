"""Packs published INT4 words into the kernel's blocks (see `ddtree_jax.pallas.int4_blocks`), in numpy.

Weights are never expanded: nibbles change places inside their words, and one gather a block row puts words where the
kernel wants them. Everything that a block row touches stays in a core's cache; calls may run in threads of their own. ::

    64 rows of words [I] ──► nibbles 0 2 4 6 1 3 5 7 ──┐
                                                       ├──► tile ──► gather ──► blocks [K, 576]
    64 rows of scales [G] ─► pairs of rows a word ─────┘
"""

import numpy as np

from ddtree_jax.pallas.int4_blocks import BLOCK_COLUMNS, BLOCK_ROWS, BLOCK_WORDS, WEIGHT_WORDS

_FEATURES = BLOCK_ROWS // 2
_WORDS_A_BLOCK_ROW = BLOCK_COLUMNS // 8
_GROUPS_A_BLOCK_ROW = BLOCK_COLUMNS // 32


class BlockPacker:
    """Packs block rows of one width. Holds scratch memory: one a thread.

    Words are uint32 [rows, columns / 8], scales the bits of bfloat16 as uint16 [rows, columns / 32].
    """

    def __init__(self, columns: int):
        self._num_columns = -(-columns // BLOCK_COLUMNS)
        self._index = _gather_index(self._num_columns)
        num_words = BLOCK_ROWS * self._num_columns * _WORDS_A_BLOCK_ROW
        # Padding is zero and stays so: only what lies inside the columns is ever written.
        self._tile = np.zeros(num_words + self._num_columns * (BLOCK_WORDS - WEIGHT_WORDS), np.uint32)
        self._words = self._tile[:num_words].reshape(4, 2, 8, -1)
        self._scales = self._tile[num_words:].reshape(4, 8, -1)
        self._blocks = np.empty((self._num_columns, BLOCK_WORDS), np.uint32)

    def pack_gate_up(self, gate: tuple, up: tuple, out_MKmw: np.ndarray) -> None:
        """Blocks of the words and scales of gate and of up, 32 features of both a block."""
        for row in range(gate[0].shape[0] // _FEATURES):
            halves = [[part[row * _FEATURES :][:_FEATURES] for part in pair] for pair in (gate, up)]
            self._pack_row(halves[0], halves[1], out_MKmw, row)

    def pack_down(self, words: np.ndarray, scale: np.ndarray, out_MKmw: np.ndarray) -> None:
        """Blocks of a projection in natural row order; missing rows of the last block are zeros."""
        for row in range(out_MKmw.shape[0] * out_MKmw.shape[2]):
            part = [_block_rows(array, row).reshape(4, 2, 8, -1) for array in (words, scale)]
            low, high = ([array[:, half] for array in part] for half in range(2))
            self._pack_row(low, high, out_MKmw, row)

    def _pack_row(self, low: list, high: list, out_MKmw: np.ndarray, row: int) -> None:
        num_words, num_groups = low[0].shape[-1], low[1].shape[-1]
        for half, (words, _) in enumerate((low, high)):
            self._words[:, half, :, :num_words] = words.reshape(4, 8, num_words)
        _reorder(self._words[..., :num_words])
        scales = self._scales[..., :num_groups]
        scales[...] = high[1].reshape(4, 8, num_groups)
        np.left_shift(scales, 16, out=scales)
        np.bitwise_or(scales, low[1].reshape(4, 8, num_groups), out=scales)
        np.take(self._tile, self._index, out=self._blocks, mode="clip")
        group, place = divmod(row, out_MKmw.shape[2])
        out_MKmw[group, :, place] = self._blocks


def _block_rows(array: np.ndarray, row: int) -> np.ndarray:
    rows = array[row * BLOCK_ROWS :][:BLOCK_ROWS]
    if len(rows) == BLOCK_ROWS:
        return rows
    return np.concatenate([rows, np.zeros((BLOCK_ROWS - len(rows), array.shape[1]), array.dtype)])


def _gather_index(num_columns: int) -> np.ndarray:
    """Place in a tile, words [warp, half, r, K, q, t] and then scales [warp, r, K, q], of every word of a block row."""
    words = np.arange(num_columns * WEIGHT_WORDS).reshape(4, 2, 8, num_columns, 2, 4)
    scales = words.size + np.arange(num_columns * (BLOCK_WORDS - WEIGHT_WORDS)).reshape(4, 8, num_columns, 2)
    return np.concatenate(
        [
            words.transpose(3, 0, 2, 5, 4, 1).reshape(num_columns, WEIGHT_WORDS),
            scales.transpose(2, 0, 1, 3).reshape(num_columns, -1),
        ],
        axis=1,
    )


def _reorder(words: np.ndarray) -> None:
    """Puts nibbles 0 1 2 3 4 5 6 7 in the order 0 2 4 6 1 3 5 7, in place: first 1 with 2 and 5 with 6, then bytes."""
    for shift, mask in ((4, 0x00F000F0), (8, 0x0000FF00)):
        swapped = words >> np.uint32(shift)
        swapped ^= words
        swapped &= np.uint32(mask)
        words ^= swapped
        swapped <<= np.uint32(shift)
        words ^= swapped
