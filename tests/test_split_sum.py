"""The sum of the splits of an attention: the kernel's own code on numpy, and plain JAX, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from simt_numpy import launch, shared

from ddtree_jax.pallas import split_sum

# Heads of the drafter are 128 wide, latents 256 or 512: few rows, divided among blocks, and many; few splits and many.
CASES = [
    (np.float32, 128, {"rows": 2, "splits": 132, "most": 132}, [100]),
    (np.float32, 512, {"rows": 3, "splits": 5, "most": 33}, [2, 5]),
    (np.float32, 512, {"rows": 67, "splits": 9, "most": 33}, [17]),
    (jnp.bfloat16, 512, {"rows": 2, "splits": 66, "most": 66}, [66]),
    (jnp.bfloat16, 512, {"rows": 67, "splits": 66, "most": 66}, [17]),
    (jnp.bfloat16, 512, {"rows": 34, "splits": 8, "most": 8}, [70, 3]),
    (jnp.bfloat16, 256, {"rows": 67, "splits": 16, "most": 16}, [33]),
]


def random_parts(dtype, width, rows, splits, totals, copies=8):
    """Splits that had no tiles hold NaN; a row has a split in which it sees nothing, and one row sees nothing at all."""
    rng = np.random.default_rng(splits)
    part = rng.standard_normal((len(totals), rows, splits, width), np.float32).astype(dtype)
    lse = 5 * rng.standard_normal((len(totals), rows, splits), np.float32)
    lse[:, 1, 0] = split_sum.LOWEST
    part[:, 0], lse[:, 0] = 0, split_sum.LOWEST
    used = [-(-total // -(-total // splits)) for total in totals]
    for b, count in enumerate(used):
        part[b, :, count:], lse[b, :, count:] = np.nan, np.nan
    return part, np.repeat(lse[..., None], copies, axis=-1), used


def in_float64(part, lse, used):
    out = np.empty((*part.shape[:2], part.shape[3]))
    for b, count in enumerate(used):
        log = lse[b, :, :count, 0].astype(np.float64)
        weight = np.exp2(log - log.max(-1, keepdims=True))
        out[b] = np.einsum("ns,nsC->nC", weight / weight.sum(-1, keepdims=True), part[b, :, :count].astype(np.float64))
    return out


def add_up(part, lse, totals, most, config=split_sum.Config()):
    """The kernel's own code, which checks for races."""
    batch, rows, splits, width = part.shape
    shape = split_sum.Shape.of(part, lse.shape[-1], most, config)

    def block(t, part_number, row, b, *memories):
        total = totals[int(b[0])]
        numbers = (t.value(np.int32, x) for x in (total, -(-total // splits)))
        scratch = (shared(size, np.float32) for size in shape.scratch)
        split_sum.add_splits(t, b * rows + row, part_number, *numbers, *memories, *scratch, shape=shape)

    grid, outs = (shape.parts, rows, batch), [((batch, rows, width), jnp.bfloat16)]
    (out,) = launch(block, shape.num_threads, grid, [part, lse], outs)
    return out


def errors(out, expected):
    """Of each row but the one that sees nothing, whose sum is zero."""
    out = np.asarray(out, np.float64)
    assert (out[:, 0] == 0).all()
    return np.linalg.norm(out - expected, axis=-1)[:, 1:] / np.linalg.norm(expected, axis=-1)[:, 1:]


@pytest.mark.parametrize(("dtype", "width", "sizes", "totals"), CASES)
def test_splits_add_up(dtype, width, sizes, totals):
    part, lse, used = random_parts(dtype, width, sizes["rows"], sizes["splits"], totals)
    expected = in_float64(part, lse, used)
    assert errors(add_up(part, lse, totals, sizes["most"]), expected).max() < 4e-3
    arrays = (jnp.asarray(x) for x in (part, lse, np.asarray(totals, np.int32)))
    plain = split_sum.sum_splits_reference(*arrays, num_tiles=lambda length: length)
    assert errors(plain, expected).max() < 4e-3


def test_splits_that_have_no_tiles_change_no_bit():
    """Their number is that of a longer cache's tiles."""
    part, lse, (used,) = random_parts(jnp.bfloat16, 512, 3, 66, [17])
    assert used == 17
    fewer = (np.ascontiguousarray(x[:, :, :used]) for x in (part, lse))
    np.testing.assert_array_equal(add_up(*fewer, [17], most=66), add_up(part, lse, [17], most=66))
