"""INT4 weights in registers: from nibbles and scales to the weights that `quant.dequantize` defines, bit for bit.

Either nibbles become 128 + nibble, exact in bfloat16, of which 136 is taken off before the scale is multiplied. Or they stay
where they are in the lowest byte of a bfloat16, which stands for that byte times 2^-133, whether subnormal or not: times a
factor, minus 8 times the scale, is one instruction and one rounding. The weights are then 2^-32 times what they should be, so
that factors are finite; that needs scales below 2^27, and loses bits of those below 2^-94: times 2^-32 they are subnormal.
"""

from collections.abc import Sequence

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ddtree_jax.pallas import warps as w

_NIBBLE_MASK, _BF16_128 = 0x000F000F, 0x43004300
_BF16_ONE, _BF16_MINUS_136, _MINUS_ZERO = 0x3F803F80, 0xC308C308, 0x80008000
SUBNORMAL_FACTORS = (0x72007200, 0x70007000, 0xB100B100)
"""Pairs of bfloat16 2^101, 2^97, -2^-29: a scale times them makes weights times 2^-32 of subnormal nibbles."""
SUBNORMAL_SCALE = 2.0**32
"""What sums of such weights are multiplied with in the end."""


def widen_scales(scales: ir.Value, reads_subnormals: bool) -> tuple[ir.Value, ...]:
    """What `expand_pair` needs of a word of scales: itself, or factors of nibbles 0 and 1 of a byte, and the zero point."""
    if not reads_subnormals:
        return (scales,)
    return tuple(_multiply_add(scales, w.i32(number), w.i32(_MINUS_ZERO)) for number in SUBNORMAL_FACTORS)


def expand_pair(word: ir.Value, i: int, scales: Sequence[ir.Value], half: int) -> ir.Value:
    """Weights that nibbles i and i + 4 of a word stand for, as two bfloat16; their scale is one half of the scales' word."""
    if len(scales) == 1:
        shifted = arith.shrui(word, w.i32(4 * i)) if i else word
        pair = mgpu.utils.inline_ptx(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", shifted, w.i32(_NIBBLE_MASK), w.i32(_BF16_128), result_types=w.i32()
        )
        integers = _multiply_add(pair, w.i32(_BF16_ONE), w.i32(_BF16_MINUS_136))
        return _scale_half(integers, scales[0], half)
    shifted = arith.shrui(word, w.i32(8)) if i >= 2 else word
    nibbles = arith.andi(shifted, w.i32(_NIBBLE_MASK << 4 * (i % 2)))
    return _scale_half(nibbles, scales[i % 2], half, scales[2])


def _multiply_add(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return mgpu.utils.inline_ptx("fma.rn.bf16x2 $0, $1, $2, $3;", a, b, c, result_types=w.i32())


def _scale_half(pair: ir.Value, factors: ir.Value, half: int, terms: ir.Value | None = None) -> ir.Value:
    """``pair * factor + term`` by the half ``half`` of two words; without the second word, the product.

    Taken apart and put together this way, the choice is a modifier of the multiplication and no instruction.
    """
    name = ("l", "h")[half]
    spread = f"mov.b32 {{l, h}}, $2; mov.b32 s, {{{name}, {name}}};"
    term, constant = "$3", w.i32(_MINUS_ZERO)
    if terms is not None:
        spread += f" mov.b32 {{l, h}}, $3; mov.b32 t, {{{name}, {name}}};"
        term, constant = "t", terms
    return mgpu.utils.inline_ptx(
        f"{{ .reg .b16 l, h; .reg .b32 s, t; {spread} fma.rn.bf16x2 $0, $1, s, {term}; }}",
        pair,
        factors,
        constant,
        result_types=w.i32(),
    )
