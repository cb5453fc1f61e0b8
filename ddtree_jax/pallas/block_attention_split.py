"""How the slots of a block's attention are split."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """What is read of ``num_slots`` slots, in tiles of ``tile``, a power of two, and by how many blocks for a tile of rows.

    The block's own rows are one tile behind those of the slots. ::

        slots     0 1 2 3  4 5 6 7  8 9 a b  . . . .        length 10, window 5, tiles of 4: tiles 1 and 2, then the block's
        tiles              0        1          2
        splits             0        0          1            3 tiles among 2 splits
    """

    num_slots: int
    window: int | None
    tile: int
    num_splits: int

    @staticmethod
    def most(num_slots: int, window: int | None, tile: int) -> int:
        """Tiles that there can be."""
        seen = num_slots if window is None else min(num_slots, window - 1 + tile)
        return -(-seen // tile) + 1

    def lowest_slot(self, length: Any, maximum: Any) -> Any:
        """That any row sees."""
        return maximum(length - ((self.window or self.num_slots + 1) - 1), 0)

    def tiles(self, length: Any, maximum: Any) -> tuple[Any, Any]:
        """Number of the first tile of slots, and how many are read."""
        shift = self.tile.bit_length() - 1
        first = self.lowest_slot(length, maximum) >> shift
        return first, ((length + (self.tile - 1)) >> shift) - first
