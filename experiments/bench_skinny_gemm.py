"""Small projections of one of 8 ranks of Kimi K2.6 and its drafter, against float64, XLA's products and their bytes.

See `bench_kernels`. Weights stay cold: calls go through copies that together are several times the second cache.
"""

import concurrent.futures
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.choose_and_multiply import choose_and_multiply_gpu
from ddtree_jax.pallas.choose_experts import choose_experts_gpu
from ddtree_jax.pallas.skinny_gemm import (
    Config,
    Output,
    choose_config,
    device_config,
    pack_weights,
    skinny_gemm,
    skinny_gemm_gpu,
    skinny_gemm_reference,
)
from experiments.bench_int4_moe import BYTES_PER_SECOND
from experiments.kernel_times import kernel_seconds

COLD_BYTES = 160e6
MANY_NODES = (128, 192, 256)
EXPERTS, CHOICE = 384, {"num_chosen": 8, "factor": 2.827}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Projections of one input."""

    name: str
    columns: int
    outputs: tuple[Output, ...]
    groups: int = 1

    @property
    def weight_shapes(self) -> list[tuple[int, ...]]:
        return [(*(2,) * output.is_gated, output.width, self.columns) for output in self.outputs]

    @property
    def weight_bytes(self) -> int:
        return 2 * sum(map(math.prod, self.weight_shapes))

    def bytes(self, nodes: int) -> int:
        """That must be read and written."""
        tokens = 2 * nodes * self.groups * self.columns
        return self.weight_bytes + tokens + sum(nodes * o.width * np.dtype(o.dtype).itemsize for o in self.outputs)

    @property
    def num_copies(self) -> int:
        return max(2, math.ceil(COLD_BYTES / self.weight_bytes))

    def draw(self) -> list[list[jax.Array]]:
        """Copies of the weights [O, K], or [2, F, K] gated, round 0 and of a size that keeps products near 1."""
        stacks = [_draw(jax.random.key(i), (self.num_copies, *shape)) for i, shape in enumerate(self.weight_shapes)]
        return [[_take(stack, number) for stack in stacks] for number in range(self.num_copies)]


@functools.partial(jax.jit, static_argnums=1)
def _draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5


@jax.jit
def _take(stack: jax.Array, number: int) -> jax.Array:
    """One program for all copies: an index that is static would be compiled for each of them."""
    return jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)


SHARED_DOWN = Case(name="shared down", columns=256, outputs=(Output(width=7168),))
CASES = (
    Case(name="q_a, kv_a", columns=7168, outputs=(Output(width=1536), Output(width=576))),
    Case(
        name="router, shared gate and up",
        columns=7168,
        outputs=(Output(width=384, dtype=jnp.float32), Output(width=256, is_gated=True)),
    ),
    Case(name="o", columns=1024, outputs=(Output(width=7168),)),
    Case(name="q_b", columns=1536, outputs=(Output(width=8 * 192),)),
    SHARED_DOWN,
    Case(name="key_up", columns=128, outputs=(Output(width=8 * 512),), groups=8),
    Case(name="value_up", columns=512, outputs=(Output(width=8 * 128),), groups=8),
    Case(name="dense gate and up", columns=7168, outputs=(Output(width=2304, is_gated=True),)),
    Case(name="dense down", columns=2304, outputs=(Output(width=7168),)),
    Case(
        name="drafter q, k, v",
        columns=7168,
        outputs=(Output(width=1024), Output(width=128), Output(width=128)),
    ),
    Case(name="drafter fc", columns=6 * 7168, outputs=(Output(width=896),)),
    Case(name="drafter context k, v", columns=7168, outputs=(Output(width=12 * 128),)),
)


def draw_tokens(case: Case, nodes: int) -> jax.Array:
    return jax.random.normal(jax.random.key(nodes), (nodes, case.groups * case.columns), jnp.bfloat16)


def natural_layout(case: Case, weights: Sequence[jax.Array]) -> list[jax.Array]:
    """Weights as a checkpoint has them, an array a projection: [K, O], of float32 results [O, K], of heads [G, O, K]."""
    arrays = []
    for weight, output in zip(weights, case.outputs, strict=True):
        if case.groups > 1:
            arrays.append(weight.reshape(case.groups, -1, case.columns))
        elif output.is_gated:
            arrays += [half.T for half in weight]
        else:
            arrays.append(weight if output.dtype == jnp.float32 else weight.T)
    return arrays


def by_xla(case: Case, x_TK: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """What `kimi` computes of natural arrays: the router from float32 operands, results rounded before they are gated."""
    if case.groups > 1:
        x_TGK = x_TK.reshape(x_TK.shape[0], case.groups, -1)
        return [jnp.einsum("TGK,GOK->TGO", x_TGK, arrays[0]).reshape(x_TK.shape[0], -1)]
    waiting, results = list(arrays), []
    for output in case.outputs:
        if output.is_gated:
            gate, up = (jnp.einsum("TK,KO->TO", x_TK, waiting.pop(0)) for _ in range(2))
            results.append(jax.nn.silu(gate) * up)
        elif output.dtype != jnp.float32:
            results.append(jnp.einsum("TK,KO->TO", x_TK, waiting.pop(0)))
        else:
            results.append(jnp.einsum("TK,OK->TO", x_TK.astype(jnp.float32), waiting.pop(0).astype(jnp.float32)))
    return results


def float64(case: Case, x_TK: jax.Array, weights: Sequence[jax.Array]) -> np.ndarray:
    """All outputs side by side."""
    x_GTK = np.moveaxis(np.asarray(x_TK, np.float64).reshape(x_TK.shape[0], case.groups, -1), 1, 0)
    results = []
    for weight, output in zip(weights, case.outputs, strict=True):
        split = np.asarray(weight, np.float64)
        split = split.reshape(*split.shape[:-2], case.groups, -1, case.columns)
        y = x_GTK @ split.swapaxes(-1, -2)
        y = y[0] / (1 + np.exp(-y[0])) * y[1] if output.is_gated else y
        results.append(np.moveaxis(y, 0, 1).reshape(y.shape[1], -1))
    return np.concatenate(results, axis=1)


def error(found: Sequence[jax.Array], expected: np.ndarray) -> float:
    joined = np.concatenate([np.asarray(y, np.float64) for y in found], axis=1)
    return float(np.linalg.norm(joined - expected) / np.linalg.norm(expected))


def our_config(case: Case) -> Config:
    return choose_config(_blocks(case), device_config())


def _blocks(case: Case) -> jax.ShapeDtypeStruct:
    weights = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in case.weight_shapes]
    return jax.eval_shape(functools.partial(pack_weights, outputs=case.outputs), weights)


def our_call(case: Case, config: Config) -> Callable[..., Any]:
    return functools.partial(skinny_gemm_gpu, outputs=case.outputs, num_groups=case.groups, config=config)


def cases_to_compile() -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """Names, functions and arguments' shapes, of the most different of `CASES`."""
    for index, nodes in ((0, 128), (1, 256), (2, 1), (7, 256)):
        case = CASES[index]
        x_TK = jax.ShapeDtypeStruct((nodes, case.groups * case.columns), jnp.bfloat16)
        yield (
            f"{case.name}, {nodes} nodes",
            our_call(case, choose_config(_blocks(case), Config())),
            (x_TK, _blocks(case)),
        )
    x_TK = jax.ShapeDtypeStruct((16, SHARED_DOWN.columns), jnp.bfloat16)
    yield (
        "shared down, choice, 16 nodes",
        functools.partial(choose_and_multiply, Config()),
        (*jax.eval_shape(functools.partial(draw_choice, 16)), x_TK, _blocks(SHARED_DOWN)),
    )


def measure(nodes: Sequence[int], runs: int, cases: Sequence[Case] = CASES) -> Iterator[dict[str, Any]]:
    """Result lines, without where and with what they were measured. ``reference_seconds`` is `by_xla`'s, all kernels."""
    for case in cases:
        weights = case.draw()
        arrange = jax.jit(functools.partial(natural_layout, case))
        theirs = functools.partial(by_xla, case), [arrange(copy) for copy in weights]
        yield from _lines(case, weights, our_call(case, our_config(case)), theirs, nodes, runs)


def measure_many(runs: int, nodes: Sequence[int] = MANY_NODES) -> Iterator[dict[str, Any]]:
    """The same of many nodes; ``reference_seconds`` is that of unpacking the weight first, as it is done for more."""
    for case in CASES[:4]:
        weights, pack = case.draw(), _packer(case)
        ours, theirs = (
            functools.partial(function, outputs=case.outputs, num_groups=case.groups)
            for function in (skinny_gemm, skinny_gemm_reference)
        )
        yield from _lines(case, weights, ours, (theirs, [[pack(copy)] for copy in weights]), nodes, runs)


def _packer(case: Case) -> Callable[[Sequence[jax.Array]], jax.Array]:
    return jax.jit(functools.partial(pack_weights, outputs=case.outputs))


def _lines(
    case: Case,
    weights: Sequence[Sequence[jax.Array]],
    our_function: Callable[..., Any],
    theirs: tuple[Callable[..., Any], Sequence[Sequence[jax.Array]]],
    nodes: Sequence[int],
    runs: int,
) -> Iterator[dict[str, Any]]:
    """A line for each number of nodes. Ours takes packed weights, theirs has arrays of its own for each copy."""
    pack, cluster = _packer(case), our_config(case).cluster
    tokens, packed = [draw_tokens(case, count) for count in nodes], [[pack(copy)] for copy in weights]
    ours, references = (_compile(function, tokens, copies[0]) for function, copies in ((our_function, packed), theirs))
    for count, x_TK, our_program, their_program in zip(nodes, tokens, ours, references, strict=True):
        times = kernel_seconds(our_program, [(x_TK, *copy) for copy in packed], runs)
        reference = kernel_seconds(their_program, [(x_TK, *copy) for copy in theirs[1]], runs)
        yield {
            "benchmark": "skinny_gemm",
            "case": {"projection": case.name, "nodes": count, "cluster": cluster, "seed": 0},
            **_compare(times, reference, case.bytes(count)),
            "runs": runs,
            "error": error(our_program(x_TK, *packed[0]), float64(case, x_TK, weights[0])),
        }


def _compare(times: dict[str, float], reference: dict[str, float], num_bytes: int) -> dict[str, Any]:
    """Part of a line: seconds of our kernels, of the reference's and of the bytes."""
    seconds, ceiling = sum(times.values()), num_bytes / BYTES_PER_SECOND
    return {
        "seconds": seconds,
        "reference_seconds": sum(reference.values()),
        "ceiling_seconds": ceiling,
        "ceiling": f"{num_bytes / 1e6:.1f} MB at {BYTES_PER_SECOND / 1e12} TB/s",
        "fraction_of_ceiling": ceiling / seconds,
        "kernels": times,
    }


def choose_and_multiply(config: Config, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """One launch, of logits, bias, tokens and the weight."""
    expert_TX, weight_TX, (y_TD,) = choose_and_multiply_gpu(
        *_with_tokens(*arrays), outputs=SHARED_DOWN.outputs, config=config, **CHOICE
    )
    return expert_TX, weight_TX, y_TD


def choose_then_multiply(config: Config, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Two launches."""
    *choice, x_TK, blocks = _with_tokens(*arrays)
    return *choose_experts_gpu(*choice, **CHOICE), *our_call(SHARED_DOWN, config)(x_TK, blocks)


def _with_tokens(logits_TE: jax.Array, bias_E: jax.Array, x_TK: jax.Array, blocks: jax.Array) -> tuple:
    return logits_TE, bias_E, jnp.ones(len(x_TK), bool), x_TK, blocks


def draw_choice(nodes: int) -> tuple[jax.Array, jax.Array]:
    """Logits and bias."""
    logits_TE, bias_E = (
        _draw(jax.random.key(nodes + i), shape) for i, shape in enumerate(((nodes, EXPERTS), (EXPERTS,)))
    )
    return 16 * logits_TE.astype(jnp.float32), bias_E.astype(jnp.float32)


def measure_choice(nodes: Sequence[int], runs: int) -> Iterator[dict[str, Any]]:
    """Result lines of the choice and the shared expert's down in one launch; ``reference_seconds`` is that of two.

    What says which rows are tokens is made once for all layers, and not counted.

    Raises:
      AssertionError: one launch does not give the bits of two.
    """
    config, pack = our_config(SHARED_DOWN), _packer(SHARED_DOWN)
    packed = [pack(copy) for copy in SHARED_DOWN.draw()]
    for count in nodes:
        inputs = [(*draw_choice(count), draw_tokens(SHARED_DOWN, count), blocks) for blocks in packed]
        calls = (functools.partial(call, config) for call in (choose_and_multiply, choose_then_multiply))
        one, two = (jax.jit(call).lower(*inputs[0]).compile() for call in calls)
        times, reference = (
            {name: time for name, time in kernel_seconds(program, inputs, runs).items() if "mosaic_gpu" in name}
            for program in (one, two)
        )
        pairs = zip(one(*inputs[0]), two(*inputs[0]), strict=True)
        num_different = sum(int(jnp.sum(a != b)) for a, b in pairs)
        assert num_different == 0, f"{count} nodes: {num_different} numbers differ"
        yield {
            "benchmark": "skinny_gemm",
            "case": {"projection": "shared down, choice", "nodes": count, "cluster": config.cluster, "seed": 0},
            **_compare(times, reference, SHARED_DOWN.bytes(count)),
            "reference_kernels": reference,
            "runs": runs,
            "error": num_different,
        }


def _compile(call: Callable[..., Any], tokens: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> list[Any]:
    """One program for each number of tokens, compiled side by side."""
    function = jax.jit(call)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(lambda x_TK: function.lower(x_TK, *arrays).compile(), tokens))
