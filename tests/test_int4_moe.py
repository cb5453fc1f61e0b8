"""INT4 experts: the kernels' weight layout, the plain reference, how work is split, and lowering for GPUs."""

import collections
import dataclasses
import functools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import kimi
from ddtree_jax.config import KimiConfig
from ddtree_jax.pallas import int4_kernel, int4_moe, int4_spans
from ddtree_jax.pallas.int4_blocks import BLOCK_WORDS, pack_down, pack_gate_up, split_halves, unpack_blocks
from ddtree_jax.pallas.int4_moe import ExpertBlocks, ExpertWeights, pack_experts
from ddtree_jax.quant import dequantize, pack_int4, unpack_int4
from ddtree_jax.sharding import initialize, make_mesh, sharding_of
from experiments import check_int4_moe

TINY_TARGET = Path(__file__).parents[1] / "experiments/tiny_kimi/target"
FORMS = {
    "hopper": int4_spans.HOPPER,
    "small": int4_spans.SMALL,
    "ampere": int4_spans.AMPERE,
}
LOWERED = [
    *((form, (16, 8, 384, 7168, 256)) for form in ("hopper", "small", "ampere")),
    # Hopper's form at this width is the small one with more memory.
    *((form, (5, 3, 8, 96, 96)) for form in ("small", "ampere")),
    # The least memory for the ring.
    ("small", (64, 8, 48, 7168, 2048)),
]


def draw(rng: np.random.Generator, *shape: int) -> tuple[jax.Array, jax.Array]:
    """Packed words and scales of random weights."""
    words = pack_int4(jnp.asarray(rng.integers(-8, 8, shape), jnp.int32))
    return words, jnp.asarray(rng.normal(0.0, 0.05, (*shape[:-1], shape[-1] // 32)), jnp.bfloat16)


def draw_experts(rng: np.random.Generator, E: int, D: int, F: int) -> tuple[ExpertWeights, np.ndarray, np.ndarray]:
    """Random experts, and their weights in float64."""
    experts = ExpertWeights(*draw(rng, E, 2, F, D), *draw(rng, E, D, F))
    dense = (np.asarray(dequantize(*part, jnp.float32), np.float64) for part in (experts[:2], experts[2:]))
    return experts, *dense


def compute_float64(x_TD, expert_TX, weight_TX, gate_up_E2FD, down_EDF) -> np.ndarray:
    y_TD = np.zeros(x_TD.shape)
    for (t, x), expert in np.ndenumerate(expert_TX):
        if 0 <= expert < len(down_EDF):
            gate_F, up_F = gate_up_E2FD[expert] @ x_TD[t].astype(np.float64)
            y_TD[t] += weight_TX[t, x] * (down_EDF[expert] @ (gate_F / (1 + np.exp(-gate_F)) * up_F))
    return y_TD


def relative_error(y: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(y, np.float64) - reference) / np.linalg.norm(reference))


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (96, 160), (512, 192)])
def test_down_blocks_hold_the_weights(rows: int, columns: int) -> None:
    words, scale = draw(np.random.default_rng(0), 3, rows, columns)
    integers, unpacked_scale = map(np.asarray, jax.jit(lambda *a: unpack_blocks(pack_down(*a)))(words, scale))
    np.testing.assert_array_equal(integers[:, :rows, :columns], unpack_int4(words))
    np.testing.assert_array_equal(unpacked_scale[:, :rows, : columns // 32], scale)
    assert not unpacked_scale[:, rows:].any() and not unpacked_scale[:, :, columns // 32 :].any()


@pytest.mark.parametrize("features", [32, 96, 256])
def test_gate_up_blocks_hold_the_weights(features: int) -> None:
    words, scale = draw(np.random.default_rng(1), 2, 2, features, 192)
    integers, unpacked_scale = jax.jit(lambda *a: unpack_blocks(pack_gate_up(*a)))(words, scale)
    np.testing.assert_array_equal(split_halves(integers), unpack_int4(words))
    np.testing.assert_array_equal(split_halves(unpacked_scale), scale)


def test_a_threads_words_lie_together_as_documented() -> None:
    """The order that the kernel's registers rely on, spelled out: word 128 w + 4 l + 2 q + h, columns 0 2 4 6 1 3 5 7."""
    words, scale = draw(np.random.default_rng(2), 64, 64)
    values, block, scale = map(np.asarray, (unpack_int4(words), pack_down(words, scale)[0, 0, 0], scale))
    for w, lane, q, h in np.ndindex(4, 32, 2, 2):
        r, t = divmod(lane, 4)
        nibbles = (block.view(np.uint32)[128 * w + 4 * lane + 2 * q + h] >> (4 * np.arange(8, dtype=np.uint32))) & 15
        row = values[16 * w + 8 * h + r, 32 * q + 8 * t :][:8]
        np.testing.assert_array_equal(nibbles.astype(np.int32) - 8, row[[0, 2, 4, 6, 1, 3, 5, 7]])
        pair = block[512 + 16 * w + 2 * r + q : 512 + 16 * w + 2 * r + q + 1].view(jnp.bfloat16)
        assert pair[h] == scale[16 * w + 8 * h + r, q]


@pytest.mark.parametrize("has_blocks", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_reference_agrees_with_float64(dtype, has_blocks: bool) -> None:
    rng = np.random.default_rng(4)
    T, X, E, D, F = 7, 3, 5, 96, 160
    experts, gate_up_E2FD, down_EDF = draw_experts(rng, E, D, F)
    x_TD = jnp.asarray(rng.normal(size=(T, D)), dtype)
    expert_TX = rng.integers(-2, E + 2, (T, X)).astype(np.int32)
    expert_TX[0], expert_TX[1] = -1, 2
    weight_TX = rng.normal(size=(T, X)).astype(np.float32)
    experts = jax.jit(pack_experts)(experts) if has_blocks else experts
    y_TD = int4_moe.int4_moe(x_TD, jnp.asarray(expert_TX), jnp.asarray(weight_TX), experts)
    expected_TD = compute_float64(np.asarray(x_TD, np.float32), expert_TX, weight_TX, gate_up_E2FD, down_EDF)
    assert y_TD.dtype == dtype
    assert relative_error(np.asarray(y_TD, np.float32), expected_TD) < (1e-6 if dtype == jnp.float32 else 8e-3)
    assert not np.asarray(y_TD, np.float32)[0].any()
    added_TD = jnp.asarray(rng.normal(size=(T, D)), dtype)
    y_TD = int4_moe.int4_moe(x_TD, jnp.asarray(expert_TX), jnp.asarray(weight_TX), experts, added_TD, dtype=jnp.float32)
    expected_TD += np.asarray(added_TD, np.float64)
    assert y_TD.dtype == jnp.float32
    assert relative_error(y_TD, expected_TD) < (1e-6 if dtype == jnp.float32 else 8e-3)


def test_what_no_token_chose_never_matters() -> None:
    rng = np.random.default_rng(5)
    experts = jax.jit(pack_experts)(draw_experts(rng, 4, 64, 64)[0])
    x_TD, weight_TX = jnp.asarray(rng.normal(size=(3, 64)), jnp.float32), jnp.ones((3, 2), jnp.float32)
    expert_TX = jnp.asarray([[0, 2], [2, 0], [-1, 4]], jnp.int32)
    clean_TD = int4_moe.int4_moe(x_TD, expert_TX, weight_TX, experts)
    poison = jnp.full_like(experts.down_EMKmw[1], 0x7FC07FC0)
    poisoned = ExpertBlocks(
        *(blocks.at[jnp.asarray([1, 3])].set(jnp.resize(poison, blocks.shape[1:])) for blocks in experts)
    )
    poisoned_TD = int4_moe.int4_moe(x_TD.at[2].set(jnp.nan), expert_TX, weight_TX, poisoned)
    np.testing.assert_array_equal(poisoned_TD, clean_TD)


@pytest.mark.parametrize("num_blocks", [1, 7, 132])
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 56, 5), (14, 4, 285), (2, 4, 11)])
def test_spans_share_all_steps_equally(num_blocks: int, shape: tuple[int, int, int]) -> None:
    """Spans follow each other and differ by a step at most; `owner` names the span that a step is in."""
    num_tiles, num_steps, num_units = shape
    config = dataclasses.replace(int4_spans.HOPPER, num_blocks=num_blocks)
    blocks = jax.ShapeDtypeStruct((1, num_tiles, num_steps * config.step_blocks, 8, BLOCK_WORDS), jnp.int32)
    product = int4_spans.Product(blocks, config)
    start, end = map(np.asarray, product.span(jnp.int32(num_units), jnp.arange(num_blocks)))
    assert start[0] == 0 and end[-1] == num_units * num_tiles * num_steps
    np.testing.assert_array_equal(start[1:], end[:-1])
    used = min(num_blocks, end[-1])
    assert np.ptp((end - start)[:used]) <= 1 and (start < end)[:used].all() and (start == end)[used:].all()
    step = np.arange(end[-1], dtype=np.int32)
    owner = np.asarray(product.owner(jnp.int32(num_units), jnp.asarray(step)))
    assert (start[owner] <= step).all() and (step < end[owner]).all()


def test_quotients_are_exact_though_floats_round() -> None:
    """Around multiples of divisors, where a float32 quotient is too small (49 / 49) or, of large numbers, too large."""
    divisors, quotients = np.meshgrid([1, 2, 3, 49, 3_080, 123_457, 16_000_003], np.arange(132))
    for offset in (-1, 0, 1):
        values = np.maximum(divisors * quotients + offset, 0).astype(np.int32)
        found = int4_spans.divide(jnp.asarray(values), jnp.asarray(divisors, jnp.int32))
        np.testing.assert_array_equal(found, values // divisors)


@pytest.mark.parametrize("num_free", [0, 1])
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 2, 64), (3, 8, 11), (3, 4, 11), (2, 56, 110), (14, 2, 8)])
def test_every_part_that_is_added_was_written(shape: tuple[int, int, int], num_free: int) -> None:
    """Plays the kernel's bookkeeping: who writes the beginning of a tile, who a later part, and who reads which."""
    num_tiles, num_steps, num_units = shape
    config = int4_spans.HOPPER
    blocks = jax.ShapeDtypeStruct((1, num_tiles, num_steps * config.step_blocks, 8, BLOCK_WORDS), jnp.int32)
    product = int4_spans.Product(blocks, config, num_free)
    start, end = map(np.asarray, product.span(jnp.int32(num_units), jnp.arange(config.num_blocks)))
    beginnings, parts = {}, {}
    for block in range(config.num_blocks):
        for index in range(start[block] // num_steps, -(-end[block] // num_steps)):
            begin = index * num_steps
            steps = set(range(max(begin, start[block]), min(begin + num_steps, end[block])))
            unit, tile, k = (int(number) for number in product.position(jnp.int32(begin)))
            assert k == 0
            if begin < start[block]:
                assert block not in parts, "a block has room for one part"
                parts[block] = (unit, tile), {step - begin for step in steps}
            elif steps:
                beginnings[unit, tile] = {step - begin for step in steps}
    for number in range(num_units * num_free):
        where = tuple(int(index) for index in product.free_tile(jnp.int32(number)))
        assert where not in beginnings, "a tile is taken once"
        beginnings[where] = set(range(num_steps))
    tiles = list(np.ndindex(num_units, num_tiles))
    first, last = map(np.asarray, product.owners(jnp.int32(num_units), *jnp.asarray(tiles, jnp.int32).T))
    for i, tile in enumerate(tiles):
        found = [(tile, beginnings[tile])] + [parts[block] for block in range(first[i] + 1, last[i] + 1)]
        assert all(where == tile for where, _ in found)
        assert sorted(step for _, steps in found for step in steps) == list(range(num_steps))


def play_block(block: int, gate_up: dict, down: dict, free: list[int]) -> Iterator[tuple[str, tuple, int]]:
    """What a block signals and waits for, in the kernel's order. It takes tiles from ``free``, which has their units."""
    for step in range(gate_up["start"][block], gate_up["end"][block]):
        tile, k = divmod(step, gate_up["num_steps"])
        unit = tile // gate_up["num_tiles"]
        is_end, is_last = k + 1 == gate_up["num_steps"], step + 1 == gate_up["end"][block]
        if is_end and step - k >= gate_up["start"][block]:
            yield "signal", ("ready", unit), 1
        if (is_end or is_last) and step - k < gate_up["start"][block]:
            yield "signal", ("parts", tile), 1
    start, end = gate_up["start"][block], gate_up["end"][block]
    tile, k = divmod(end - 1, gate_up["num_steps"])
    if start < end and start <= end - 1 - k and k + 1 < gate_up["num_steps"]:
        yield "wait", ("parts", tile), gate_up["owner"][end - 2 - k + gate_up["num_steps"]] - block
        yield "signal", ("ready", tile // gate_up["num_tiles"]), 1
    units = [step // down["num_steps"] // down["num_own"] for step in range(down["start"][block], down["end"][block])]
    for unit in sorted(set(units)):
        yield "wait", ("ready", unit), gate_up["num_tiles"]
    while free:
        yield "wait", ("ready", free.pop()), gate_up["num_tiles"]
    yield "signal", ("all",), 1
    yield "wait", ("all",), 132


@pytest.mark.parametrize("num_free", [0, 1])
@pytest.mark.parametrize(
    "shapes", [((1, 56), (14, 2), 110), ((8, 56), (14, 16), 2), ((1, 1), (2, 1), 1), ((2, 8), (2, 4), 11)]
)
def test_blocks_never_wait_in_vain(shapes: tuple, num_free: int) -> None:
    """In any order that blocks run in, all get to the end, and no semaphore is counted further than it is waited for."""
    products, num_units = [], shapes[2]
    for (num_tiles, num_steps), free in zip(shapes[:2], (0, num_free), strict=True):
        blocks = jax.ShapeDtypeStruct((1, num_tiles, 2 * num_steps, 8, BLOCK_WORDS), jnp.int32)
        product = int4_spans.Product(blocks, int4_spans.HOPPER, free)
        start, end = (np.asarray(side).tolist() for side in product.span(jnp.int32(num_units), jnp.arange(132)))
        owner = np.asarray(product.owner(jnp.int32(num_units), jnp.arange(max(end[-1], 1)))).tolist()
        sizes = {"num_tiles": num_tiles, "num_own": product.num_own, "num_steps": num_steps}
        products.append(sizes | {"start": start, "end": end, "owner": owner})
    order = random.Random(0)
    units = [unit for unit in range(num_units) for _ in range(num_free)]
    running = {block: play_block(block, *products, units) for block in range(132)}
    waiting: dict[int, tuple[tuple, int]] = {}
    counts: collections.Counter = collections.Counter()
    needed: dict[tuple, int] = {}
    while running:
        able = [block for block in running if block not in waiting or counts[waiting[block][0]] >= waiting[block][1]]
        assert able, "all blocks wait"
        block = order.choice(able)
        waiting.pop(block, None)
        event = next(running[block], None)
        if event is None:
            del running[block]
            continue
        kind, semaphore, count = event
        if kind == "signal":
            counts[semaphore] += 1
        else:
            waiting[block] = semaphore, count
            needed[semaphore] = count
    assert counts == needed


@pytest.mark.parametrize(("form", "shape"), LOWERED)
def test_every_form_lowers_for_cuda(form: str, shape: tuple[int, ...]) -> None:
    T, X, E, D, F = shape
    experts = block_shapes(E, D, F)
    config = FORMS[form]
    if any(blocks.shape[2] % config.step_blocks for blocks in experts):
        config = dataclasses.replace(config, step_columns=64)
    arguments = (
        jax.ShapeDtypeStruct((T, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((T, X), jnp.int32),
        jax.ShapeDtypeStruct((T, X), jnp.float32),
    )
    function = jax.jit(functools.partial(int4_moe.int4_moe_gpu, config=config))
    text = function.trace(*arguments, experts, arguments[0]).lower(lowering_platforms=("cuda",)).as_text()
    # One kernel is all there is: nothing is filled, copied or turned before it.
    operations = set(re.findall(r"stablehlo\.\w+", text))
    assert operations <= {
        f"stablehlo.{name}" for name in ("constant", "convert", "custom_call", "pad", "reshape", "slice")
    }
    assert text.count("stablehlo.custom_call") == 1 and "mosaic_gpu" in text


@pytest.mark.parametrize("num_stages", [2, 3, 4, 16])
def test_fetching_warps_tell_a_free_stage_from_one_a_turn_behind(num_stages: int) -> None:
    """Plays the ring: barriers know the parity of a phase alone, and any warp may be slow. The last steps are warp 0's."""
    order = random.Random(0)
    for num_shared in [40, 39, 38, 37, 3, 1, 0] * 7:
        num_steps, num_warps = num_shared + 10, int4_kernel.num_fetching_warps(num_stages)
        freed = [0] * num_stages
        filled: list[int | None] = [None] * num_stages
        following = [list(range(warp, num_shared, num_warps)) for warp in range(num_warps)]
        following[0] += range(num_shared, num_steps)
        consumed = 0
        while consumed < num_steps:
            able = []
            for warp, step in ((warp, steps[0]) for warp, steps in enumerate(following) if steps):
                # A phase has ended if the phase that is running has the other parity.
                awaited = 1 - step // num_stages % 2
                if freed[step % num_stages] % 2 != awaited:
                    able.append(warp)
            if filled[consumed % num_stages] == consumed:
                able.append(num_warps)
            actor = order.choice(able)
            if actor == num_warps:
                filled[consumed % num_stages] = None
                freed[consumed % num_stages] += 1
                consumed += 1
            else:
                step = following[actor].pop(0)
                assert filled[step % num_stages] is None, f"step {step} overwrites step {filled[step % num_stages]}"
                filled[step % num_stages] = step


def test_the_device_check_tells_right_from_wrong() -> None:
    """Its float64 sum, its NaN where nothing may be read, and its bound, on a CPU."""
    problem = check_int4_moe.draw_problem((6, 3, 9, 96, 160))
    reference = jax.jit(int4_moe.int4_moe_reference)

    def change(x_TD, expert_TX, weight_TX, experts):
        return reference(x_TD, jnp.where(expert_TX == 2, 3, expert_TX), weight_TX, experts)

    def leak(x_TD, expert_TX, weight_TX, experts):
        return reference(x_TD, jnp.where(expert_TX < 0, problem.shape[2] - 1, expert_TX), weight_TX, experts)

    assert check_int4_moe.adds_up(problem, int4_moe.int4_moe_reference)
    assert not check_int4_moe.adds_up(problem, lambda *args, dtype: int4_moe.int4_moe_reference(*args[:4], dtype=dtype))
    errors, outputs = check_int4_moe.run_routings(problem, reference, 10)
    assert max(errors) < 2 * check_int4_moe.LARGEST_ERROR and len(outputs) == 10
    assert max(check_int4_moe.run_routings(problem, change, 10)[0]) > 0.1
    assert max(check_int4_moe.run_routings(problem, leak, 10)[0]) == np.inf


def block_shapes(E: int, D: int, F: int) -> ExpertBlocks:
    shapes = ((E, 2, F, D // 8), (E, 2, F, D // 32), (E, D, F // 8), (E, D, F // 32))
    dtypes = (jnp.int32, jnp.bfloat16) * 2
    return jax.eval_shape(pack_experts, ExpertWeights(*map(jax.ShapeDtypeStruct, shapes, dtypes)))


@pytest.mark.parametrize(("T", "F", "num_free"), [(2, 256, 0), (3, 256, 3), (64, 256, 3), (16, 2048, 0), (16, 128, 0)])
def test_blocks_share_out_late_what_is_small(T: int, F: int, num_free: int) -> None:
    """Tiles of few steps and one term, of more than a few tokens, where there are bulk copies."""
    chosen = []

    def choose(x_TD: jax.Array, experts: ExpertBlocks) -> None:
        for has_bulk_copies in (True, False):
            config = dataclasses.replace(int4_spans.HOPPER, has_bulk_copies=has_bulk_copies)
            chosen.append(int4_moe.choose_config(x_TD, experts, config))

    jax.eval_shape(choose, jax.ShapeDtypeStruct((T, 7168), jnp.bfloat16), block_shapes(8, 7168, F))
    assert [config.free_tiles for config in chosen] == [num_free, 0]


def test_the_kernel_is_chosen_for_cuda_alone() -> None:
    experts = jax.jit(pack_experts)(draw_experts(np.random.default_rng(6), 4, 64, 64)[0])
    arguments = (jnp.zeros((2, 64), jnp.bfloat16), jnp.zeros((2, 2), jnp.int32), jnp.zeros((2, 2)), experts)
    traced = jax.jit(int4_moe.int4_moe).trace(*arguments)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_input_that_the_kernel_does_not_take_is_named() -> None:
    experts = jax.jit(pack_experts)(draw_experts(np.random.default_rng(7), 4, 64, 64)[0])
    with pytest.raises(NotImplementedError, match="float32"):
        int4_moe.choose_config(jnp.zeros((2, 64), jnp.float32), experts)
    with pytest.raises(NotImplementedError, match="128 wide"):
        int4_moe.choose_config(jnp.zeros((2, 128), jnp.bfloat16), experts)
    grouped = ExpertBlocks(*(jnp.zeros((4, 1, 1, 3, BLOCK_WORDS), jnp.int32) for _ in range(2)))
    with pytest.raises(NotImplementedError, match="groups of 3"):
        int4_moe.choose_config(jnp.zeros((2, 64), jnp.bfloat16), grouped)
    config = dataclasses.replace(int4_spans.HOPPER, shared_bytes=60_000)
    routing = [jnp.zeros((2, 2), dtype) for dtype in (jnp.int32, jnp.float32)]
    with pytest.raises(NotImplementedError, match="shared memory"):
        int4_moe.int4_moe_gpu(jnp.zeros((2, 64), jnp.bfloat16), *routing, experts, config=config)


def sharded_experts(mesh_text: str | None) -> tuple[kimi.Experts, kimi.Experts, KimiConfig]:
    """The same random experts on a mesh: plain, and in blocks."""
    config = KimiConfig.from_hf(json.loads((TINY_TARGET / "config.json").read_text()))
    infos = kimi.Experts.parameters(config)
    mesh = make_mesh(mesh_text)
    arrays = initialize({"layer": infos}, jax.random.key(0), jnp.float32)["layer"]
    placed = {name: jax.device_put(array, sharding_of(infos[name], mesh, name)) for name, array in arrays.items()}
    plain = kimi.Experts(config, placed, mesh)
    kimi.pack_experts({"layer": placed}, mesh)
    assert not set(placed) & set(ExpertWeights._fields), "the unpacked experts of a layer are given up before the next"
    return plain, kimi.Experts(config, placed, mesh), config


def shared_shapes(config: KimiConfig) -> list[tuple[int, int]]:
    """Gate, up and down of the shared expert."""
    return [info.shape for info in kimi.SharedExpert.parameters(config).values()]


@pytest.mark.parametrize("mesh", [None, "tensor=4", "expert=8", "expert=4,tensor=2"])
def test_experts_on_a_mesh_equal_one_device(mesh: str | None) -> None:
    plain, blocks, config = sharded_experts(mesh)
    rng = np.random.default_rng(8)
    x_TD = jnp.asarray(rng.normal(size=(5, config.hidden_size)), jnp.float32)
    expert_TX = jnp.asarray(rng.integers(0, config.n_routed_experts, (5, config.num_experts_per_tok)), jnp.int32)
    weight_TX = jnp.asarray(rng.random(expert_TX.shape), jnp.float32)
    shared = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shared_shapes(config))
    one_device = sharded_experts(None)[0]
    expected_TD = np.asarray(jax.jit(one_device)(x_TD, expert_TX, weight_TX, shared), np.float64)
    for experts in (plain, blocks):
        y_TD = jax.jit(experts)(x_TD, expert_TX, weight_TX, shared)
        assert relative_error(y_TD, expected_TD) < 1e-5
    shards = blocks.down_EMKmw[...].addressable_shards
    assert sum(shard.data.size for shard in shards) == blocks.down_EMKmw[...].size


def test_blocks_on_a_mesh_go_through_the_kernel() -> None:
    _, blocks, config = sharded_experts("expert=4,tensor=2")
    arguments = (
        jax.ShapeDtypeStruct((5, config.hidden_size), jnp.bfloat16),
        jax.ShapeDtypeStruct((5, config.num_experts_per_tok), jnp.int32),
        jax.ShapeDtypeStruct((5, config.num_experts_per_tok), jnp.float32),
        tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shared_shapes(config)),
    )
    lowered = jax.jit(blocks.__call__).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
