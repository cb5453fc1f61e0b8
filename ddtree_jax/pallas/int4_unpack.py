"""INT4 weights in registers: from nibbles and scales to 2^-32 times the weights that `quant.dequantize` defines.

A nibble in the lowest byte of a bfloat16 stands for that byte times 2^-133, whether subnormal or not: times a factor, minus 8
times the scale, is one instruction and one rounding. With 2^-32 the factors are finite; sums are multiplied with
`WEIGHT_SCALE` in the end, which is exact.

Weights are bit for bit those of scales that are 0, or 2^-94 and more but less than 2^27. Smaller scales make weights that are
off by 2^-101 (4e-31) at most, since 2^-32 times them is subnormal; larger ones make infinities and NaN.
"""

from collections.abc import Sequence

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ddtree_jax.pallas import warps as w

_NIBBLE_MASK, _MINUS_ZERO = 0x000F000F, 0x80008000
_FACTORS = (0x72007200, 0x70007000, 0xB100B100)
"""Pairs of bfloat16 2^101, 2^97, -2^-29: what scales are multiplied with."""
WEIGHT_SCALE = 2.0**32
"""What sums of such weights are multiplied with in the end."""


def widen_scales(scales: ir.Value) -> tuple[ir.Value, ...]:
    """Of a word of scales: factors of nibbles 0 and 1 of a byte, and the zero point."""
    return tuple(_multiply(scales, w.i32(number)) for number in _FACTORS)


def expand_pair(word: ir.Value, i: int, widened: Sequence[ir.Value], half: int) -> ir.Value:
    """Weights that nibbles i and i + 4 of a word stand for, as two bfloat16; their scale is one half of the scales' word."""
    shifted = arith.shrui(word, w.i32(8)) if i >= 2 else word
    nibbles = arith.andi(shifted, w.i32(_NIBBLE_MASK << 4 * (i % 2)))
    return _scale_half(nibbles, widened[i % 2], widened[2], half)


def _multiply(a: ir.Value, b: ir.Value) -> ir.Value:
    return mgpu.utils.inline_ptx("fma.rn.bf16x2 $0, $1, $2, $3;", a, b, w.i32(_MINUS_ZERO), result_types=w.i32())


def _scale_half(pair: ir.Value, factors: ir.Value, terms: ir.Value, half: int) -> ir.Value:
    """``pair * factor + term`` by the half ``half`` of two words.

    Taken apart and put together this way, the choice is a modifier of the multiplication and no instruction.
    """
    name = ("l", "h")[half]
    spread = (
        f"mov.b32 {{l, h}}, $2; mov.b32 s, {{{name}, {name}}}; mov.b32 {{l, h}}, $3; mov.b32 t, {{{name}, {name}}};"
    )
    return mgpu.utils.inline_ptx(
        f"{{ .reg .b16 l, h; .reg .b32 s, t; {spread} fma.rn.bf16x2 $0, $1, s, t; }}",
        pair,
        factors,
        terms,
        result_types=w.i32(),
    )
