"""Prefill form of the INT4 experts: schedule, the order of columns, which kernels are chosen, and lowering for GPUs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mlir_numpy import Machine, load_again

from ddtree_jax.pallas import int4_moe, int4_prefill, int4_prefill_schedule, int4_spans
from ddtree_jax.pallas.int4_blocks import BLOCK_WORDS, pack_down
from ddtree_jax.pallas.int4_moe import ExpertBlocks, ExpertWeights, pack_experts
from ddtree_jax.pallas.int4_prefill_schedule import MAX_TOKENS, max_units
from ddtree_jax.pallas.int4_prefill_steps import permute_columns
from ddtree_jax.quant import pack_int4

GARBAGE = 0x5EED5EED
KERNELS = ("int4_prefill_prepare", "int4_prefill_gate_up", "int4_prefill_down", "int4_prefill_sum")


def draw_routing(kind: str, T: int, X: int, E: int) -> np.ndarray:
    rng = np.random.default_rng(T)
    routings = {
        "random": lambda: rng.integers(0, E, (T, X)),
        "foreign": lambda: rng.integers(-E, 2 * E, (T, X)),
        "one": lambda: np.full((T, X), E - 1),
        "few": lambda: rng.integers(0, min(2, E), (T, X)),
        "none": lambda: np.full((T, X), -1),
        "single": lambda: np.where(np.arange(T * X).reshape(T, X) == T, 0, E),
    }
    return routings[kind]().astype(np.int32)


def sort_pairs(expert_P: np.ndarray, E: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Units and pairs by place, from the kernel's own code."""
    schedule = load_again(int4_prefill_schedule, **Machine(int4_prefill_schedule._THREADS, seed).modules())
    experts = schedule._whole_lanes(E)
    units = np.full(3 * max_units(expert_P.size, E), GARBAGE, np.int32)
    num_units, pair_P = np.full(1, GARBAGE, np.int32), np.full(expert_P.size, GARBAGE, np.int32)
    scratch = [np.full(size, GARBAGE, np.int32) for size in (experts, 2 * experts, expert_P.size)]
    schedule._sort(expert_P, units, num_units, pair_P, *scratch, num_pairs=expert_P.size, num_experts=E)
    return units.reshape(-1, 3)[: num_units[0]], pair_P


@pytest.mark.parametrize("kind", ["random", "foreign", "one", "few", "none", "single"])
@pytest.mark.parametrize("shape", [(7, 3, 5), (331, 8, 384), (300, 2, 3), (65, 1, 1)])
def test_units_hold_every_local_pair_once(kind: str, shape: tuple[int, int, int]) -> None:
    """As few units as can be, an expert's of one size but for its last, and large ones first."""
    T, X, E = shape
    expert_P = draw_routing(kind, *shape).reshape(-1)
    units, pair_P = sort_pairs(expert_P, E, seed=T)
    local = np.flatnonzero((expert_P >= 0) & (expert_P < E))
    assert sorted(pair_P[: len(local)]) == local.tolist()
    sizes: dict[int, list[int]] = {}
    for expert, first, count in units.tolist():
        assert 1 <= count <= MAX_TOKENS
        assert (expert_P[pair_P[first : first + count]] == expert).all()
        sizes.setdefault(expert, []).append(count)
    ends = sorted((first, first + count) for _, first, count in units.tolist())
    assert [first for first, _ in ends] == [0, *(end for _, end in ends)][: len(ends)]
    assert not ends or ends[-1][1] == len(local)
    largest = [max(counts) for counts in sizes.values()]
    assert [-(-size // 8) for size in largest] == sorted((-(-size // 8) for size in largest), reverse=True)
    assert len(units) <= max_units(T * X, E)
    for counts in sizes.values():
        assert len(counts) == -(-sum(counts) // MAX_TOKENS)
        assert max(counts) <= 8 * -(-sum(counts) // (8 * len(counts)))


def test_tokens_stand_in_the_order_of_the_weights_registers() -> None:
    """wgmma's operand A of 16 columns, made of a thread's words as the kernel does, times permuted tokens is the product."""
    rng = np.random.default_rng(0)
    integers = rng.integers(-8, 8, (64, 64)).astype(np.int32)
    block = pack_down(pack_int4(jnp.asarray(integers)), jnp.ones((64, 2), jnp.bfloat16))[0, 0, 0]
    block = np.asarray(block).view(np.uint32)
    x_TD = rng.integers(-9, 10, (5, 64)).astype(np.float32)
    permuted_TD = np.asarray(permute_columns(jnp.asarray(x_TD)))
    product_NT = np.zeros((64, 5))
    for w, lane, q, h, pair, i in np.ndindex(4, 32, 2, 2, 4, 2):
        r, t = divmod(lane, 4)
        nibble = (block[128 * w + 4 * lane + 2 * q + h] >> np.uint32(4 * pair + 16 * i)) & np.uint32(15)
        # Registers 0 and 1 of an operand hold columns 2 t + i of rows r and r + 8, registers 2 and 3 the columns 8 further.
        operand, register_half = divmod(pair, 2)
        column = 32 * q + 16 * operand + 8 * register_half + 2 * t + i
        product_NT[16 * w + 8 * h + r] += (int(nibble) - 8) * permuted_TD[:, column]
    np.testing.assert_array_equal(product_NT, integers @ x_TD.T)


def block_shapes(E: int, D: int, F: int) -> ExpertBlocks:
    shapes = ((E, 2, F, D // 8), (E, 2, F, D // 32), (E, D, F // 8), (E, D, F // 32))
    dtypes = (jnp.int32, jnp.bfloat16) * 2
    return jax.eval_shape(pack_experts, ExpertWeights(*map(jax.ShapeDtypeStruct, shapes, dtypes)))


def lower(T: int, X: int, experts: ExpertBlocks, config: int4_spans.Config) -> str:
    D = experts.gate_up_EMKmw.shape[2] * 64
    shapes = zip([(T, D), (T, X), (T, X)], [jnp.bfloat16, jnp.int32, jnp.float32], strict=True)
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    function = jax.jit(functools.partial(int4_moe.int4_moe_gpu, config=config))
    return function.trace(*arguments, experts).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("shape", [(2048, 8, 384, 7168, 256), (4096, 8, 48, 7168, 2048), (65, 3, 4, 512, 256)])
def test_many_tokens_go_through_the_prefill_kernels(shape: tuple[int, ...]) -> None:
    T, X, E, D, F = shape
    text = lower(T, X, block_shapes(E, D, F), int4_spans.HOPPER)
    assert [name for name in KERNELS if name not in text] == []


def test_more_tokens_than_a_turn_takes_go_in_turns() -> None:
    experts = block_shapes(4, 512, 256)
    assert "stablehlo.while" in lower(int4_prefill.MAX_TOKENS + 1, 2, experts, int4_spans.HOPPER)
    assert "stablehlo.while" not in lower(int4_prefill.MAX_TOKENS, 2, experts, int4_spans.HOPPER)


@pytest.mark.parametrize("config", [int4_spans.SMALL, int4_spans.AMPERE])
def test_other_devices_keep_to_the_decode_kernel(config: int4_spans.Config) -> None:
    config = dataclasses.replace(config, step_columns=64)
    assert "int4_prefill" not in lower(65, 2, block_shapes(4, 512, 256), config)


def test_few_tokens_keep_to_the_decode_kernel() -> None:
    assert "int4_prefill" not in lower(64, 2, block_shapes(4, 512, 256), int4_spans.HOPPER)


def test_input_that_the_kernels_do_not_take_is_named() -> None:
    def choose(
        experts: ExpertBlocks, shared_bytes: int = int4_spans.HOPPER.shared_bytes, shape: tuple[int, int] = (4096, 8)
    ) -> None:
        def call(*arrays: jax.Array) -> None:
            assert int4_prefill.choose_config(*arrays, 132, shared_bytes).num_blocks == 132

        jax.eval_shape(call, jax.ShapeDtypeStruct(shape, jnp.int32), *experts)

    experts = block_shapes(4, 512, 256)
    choose(experts)
    with pytest.raises(NotImplementedError, match="94000 bytes"):
        choose(experts, int4_spans.SMALL.shared_bytes)
    with pytest.raises(NotImplementedError, match="groups of 2 blocks"):
        choose(block_shapes(4, 128, 256))
    with pytest.raises(NotImplementedError, match="256 columns, not gate and up's 512 features"):
        choose(ExpertBlocks(jax.ShapeDtypeStruct((4, 2, 8, 8, BLOCK_WORDS), jnp.int32), experts.down_EMKmw))
    with pytest.raises(NotImplementedError, match="4096 tokens of 16 among 4 experts takes 262528 bytes"):
        choose(experts, shape=(4096, 16))
