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


class BlockPacker:
    """Packs block rows of one width. Holds scratch memory: one a thread.

    Words are uint32 [rows, columns / 8], scales the bits of bfloat16 as uint16 [rows, columns / 32].
    """

    def __init__(self, columns: int):
        num_columns = -(-columns // BLOCK_COLUMNS)
        num_words = num_columns * WEIGHT_WORDS
        # Padding is zero and stays so: only what lies inside the columns is ever written.
        self._tile = np.zeros(num_columns * BLOCK_WORDS, np.uint32)
        self._words = self._tile[:num_words].reshape(4, 8, -1, 2)
        self._scales = self._tile[num_words:].reshape(4, 8, -1)
        self._scratch = np.empty((2, *self._words.shape[:3]), np.uint32)
        self._index = _gather_index(num_columns)
        self._blocks = np.empty((num_columns, BLOCK_WORDS), np.uint32)

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
            _reorder(words.reshape(4, 8, -1), self._scratch[..., :num_words], self._words[:, :, :num_words, half])
        scales = self._scales[..., :num_groups]
        np.left_shift(high[1].reshape(4, 8, -1), 16, out=scales, dtype=np.uint32, casting="unsafe")
        np.bitwise_or(scales, low[1].reshape(4, 8, -1), out=scales)
        np.take(self._tile.view(np.uint64), self._index, out=self._blocks.view(np.uint64), mode="clip")
        group, place = divmod(row, out_MKmw.shape[2])
        out_MKmw[group, :, place] = self._blocks


def _block_rows(array: np.ndarray, row: int) -> np.ndarray:
    rows = array[row * BLOCK_ROWS :][:BLOCK_ROWS]
    if len(rows) == BLOCK_ROWS:
        return rows
    return np.concatenate([rows, np.zeros((BLOCK_ROWS - len(rows), array.shape[1]), array.dtype)])


def _gather_index(num_columns: int) -> np.ndarray:
    """Place in a tile of every two words [K, 288]: of words [warp, r, K, q, t] by halves, of scales [warp, r, K] by q."""
    words = np.arange(num_columns * WEIGHT_WORDS // 2).reshape(4, 8, num_columns, 2, 4)
    scales = words.size + np.arange(num_columns * (BLOCK_WORDS - WEIGHT_WORDS) // 2).reshape(4, 8, num_columns)
    return np.concatenate(
        [
            words.transpose(2, 0, 1, 4, 3).reshape(num_columns, -1),
            scales.transpose(2, 0, 1).reshape(num_columns, -1),
        ],
        axis=1,
    )


def _reorder(words: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """Nibbles 0 1 2 3 4 5 6 7 in the order 0 2 4 6 1 3 5 7: first 1 changes with 2 and 5 with 6, then the inner bytes.

    ``scratch`` has room for the words twice. ``out`` has gaps, and is written to once.
    """
    swapped, half_way = scratch
    for shift, mask, target in ((4, 0x00F000F0, half_way), (8, 0x0000FF00, out)):
        np.right_shift(words, np.uint32(shift), out=swapped)
        np.bitwise_xor(swapped, words, out=swapped)
        np.bitwise_and(swapped, np.uint32(mask), out=swapped)
        np.multiply(swapped, np.uint32(1 + (1 << shift)), out=swapped)  # itself, and itself shifted back
        np.bitwise_xor(words, swapped, out=target)
        words = target
