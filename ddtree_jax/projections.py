"""Weights as `skinny_gemm` reads them: which products of a layer are one launch, and how a mesh divides it.

::

    checkpoint       q_a_DA [D, A]   kv_a_DW [D, W]          a shard's own parts, a layer at a time
                          └──── pack ────┘
    in memory        qkv_a: blocks of 64 x 64, q_a's rows before kv_a's; natural arrays are given up
                          │
    a call           x [B, T, D] ──► one launch ──► [B, T, A], [B, T, W]     up to 256 tokens; for more, unpacked inside

Natural arrays stay, and are multiplied by `Projection` itself, in float32, without a Hopper GPU, and in shapes that the
kernel does not take; one projection of a model that is not taken leaves all of them natural. Unpacking is a copy, made in
every pass over more than 256 tokens: dear in decoding (32 sequences of 16 nodes), cheap beside a chunk of prefill.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from ddtree_jax.pallas.skinny_gemm import Output, choose_shape, device_config, pack_weights, skinny_gemm
from ddtree_jax.sharding import ArrayInfo, Parameters, partition

# The kernel takes seconds to lower; it is lowered once for all layers.
_skinny_gemm = jax.jit(skinny_gemm, static_argnames=("outputs", "num_groups"))


@dataclass(frozen=True, slots=True)
class Product:
    """A product of x [B, T, ...] with the weight of a name, ``equation`` as einsum has it; of two it is gate and up.

    Axes that x, weight and result share are heads of matrices of their own. The result's last axis is cut into ``sizes``,
    each an array, if there are any. With ``dtype`` products are summed in it and kept in it: those of bfloat16 numbers are
    exact in float32, so that the kernel's sums are as good as those of operands that were converted before.
    """

    equation: str
    names: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    dtype: Any = None

    @property
    def axes(self) -> tuple[str, str, str]:
        """Letters of x and the result behind B and T, and of the weight."""
        inputs, result = self.equation.split("->")
        x, weight = inputs.split(",")
        return x[2:], result[2:], weight

    @property
    def cuts(self) -> list[int]:
        """Where the result's last axis is cut."""
        return [sum(self.sizes[:i]) for i in range(1, len(self.sizes))]

    @property
    def contracted(self) -> str:
        x, result, _ = self.axes
        return "".join(letter for letter in x if letter not in result)

    def __call__(self, x: Float[Array, "B T *rest"], *weights: Array) -> list[Array]:
        """The results from natural arrays."""
        if self.dtype is not None:
            x, *weights = (array.astype(self.dtype) for array in (x, *weights))
        y, *ups = (jnp.einsum(self.equation, x, weight) for weight in weights)
        for up in ups:
            y = jax.nn.silu(y) * up
        return jnp.split(y, self.cuts, axis=-1) if self.sizes else [y]

    def rows(self, *weights: Array) -> list[Array]:
        """For each result its rows [O, K], or [2, F, K] of gate and up."""
        _, result, letters = self.axes
        order = [letters.index(letter) for letter in result + self.contracted]
        # [result's axes, columns]
        arrays = [jnp.transpose(w, order).reshape(*(w.shape[i] for i in order[: len(result)]), -1) for w in weights]
        pieces = [jnp.split(array, self.cuts, axis=-2) for array in arrays]
        flat = [[piece.reshape(-1, piece.shape[-1]) for piece in of_weight] for of_weight in pieces]
        return [jnp.stack(parts) if len(parts) == 2 else parts[0] for parts in zip(*flat, strict=True)]


@dataclass(frozen=True, slots=True)
class Projection:
    """Products of one input that are one launch if their weights are packed, then under ``name``."""

    name: str
    products: tuple[Product, ...]

    @property
    def names(self) -> list[str]:
        """Of the natural arrays."""
        return [name for product in self.products for name in product.names]

    def __call__(self, x: Float[Array, "B T *rest"], weights: Mapping[str, Array]) -> list[Array]:
        """The results from natural arrays, found by their names."""
        return [y for product in self.products for y in product(x, *(weights[name] for name in product.names))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What is static of packed weights; ``shapes`` are those of a shard's results behind B and T.

    If ``axis`` is a mesh axis, shards have parts of the columns, and what they give is summed over it.
    """

    names: tuple[str, ...]
    outputs: tuple[Output, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_groups: int
    mesh: Mesh
    x_spec: PartitionSpec
    blocks_spec: PartitionSpec
    result_specs: tuple[PartitionSpec, ...]
    axis: str | None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["blocks"], meta_fields=["form"])
@dataclass(frozen=True)
class Packed:
    """Weights of a projection in the kernel's blocks; those of a mesh's shards stand below each other."""

    blocks: Float[Array, "M N 64 64"]
    form: Form

    def __call__(self, x: Float[Array, "B T *rest"]) -> list[Array]:
        """The results on the whole mesh: one launch a shard, one all-reduce if shards have parts of the columns."""
        form = self.form
        run = jax.shard_map(
            Packed._run_shard,
            mesh=form.mesh,
            in_specs=(form.blocks_spec, form.x_spec),
            out_specs=list(form.result_specs),
            check_vma=False,
        )
        return run(self, x)

    def _run_shard(self, x: Float[Array, "B T *rest"]) -> list[Array]:
        results = self.multiply(x)
        return [jax.lax.psum(y, self.form.axis) for y in results] if self.form.axis else results

    def multiply(self, x: Float[Array, "B T *rest"]) -> list[Array]:
        """A shard's own results, where blocks and x are its own."""
        B, T = x.shape[:2]
        flat = x.reshape(B * T, math.prod(x.shape[2:]))
        results = _skinny_gemm(flat, self.blocks, outputs=self.form.outputs, num_groups=self.form.num_groups)
        return [y.reshape(B, T, *shape) for y, shape in zip(results, self.form.shapes, strict=True)]


def named(*projections: Projection) -> dict[str, Projection]:
    return {projection.name: projection for projection in projections}


def pack_all(
    arrays: dict[str, dict[str, Any]],
    parameters: Parameters,
    projections: Mapping[str, Sequence[Projection]],
    mesh: Mesh,
) -> None:
    """Replaces the natural arrays of every projection of each part by packed ones, a projection at a time.

    ``parameters`` tells the arrays' axes. Each shard's part is packed where it lies.
    """
    for part, table in arrays.items():
        for projection in projections.get(part, ()):
            pack, form = _packer(projection, table, parameters[part], mesh)
            table[projection.name] = Packed(pack(*(table.pop(name) for name in projection.names)), form)


def are_taken(
    arrays: Mapping[str, Mapping[str, Any]],
    parameters: Parameters,
    projections: Mapping[str, Sequence[Projection]],
    mesh: Mesh,
) -> bool:
    """Whether the kernel takes all projections on this device; of the arrays, shapes and dtypes are enough."""
    try:
        check(arrays, parameters, projections, mesh)
    except NotImplementedError:
        return False
    return True


def check(
    arrays: Mapping[str, Mapping[str, Any]],
    parameters: Parameters,
    projections: Mapping[str, Sequence[Projection]],
    mesh: Mesh,
) -> None:
    """Raises NotImplementedError, which names the value, if the kernel does not take a projection on this device."""
    config = device_config()
    for part, table in arrays.items():
        for projection in projections.get(part, ()):
            leaves = [table[name] for name in projection.names]
            pack, form = _packer(projection, table, parameters[part], mesh)
            blocks = jax.eval_shape(pack, *(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves))
            num_shards = math.prod(mesh.shape[axis] for axis in form.blocks_spec if axis)
            local = jax.ShapeDtypeStruct((blocks.shape[0] // num_shards, *blocks.shape[1:]), blocks.dtype)
            x_TK = jax.ShapeDtypeStruct((1, form.num_groups * local.shape[1] * local.shape[2]), blocks.dtype)
            choose_shape(x_TK, local, form.outputs, form.num_groups, config)


_Leaves = tuple[tuple[tuple[int, ...], Any], ...]
"""Shape and dtype of each natural array."""


def _packer(
    projection: Projection, table: Mapping[str, Any], infos: Mapping[str, ArrayInfo], mesh: Mesh
) -> tuple[Callable[..., Array], Form]:
    """The program that packs a projection's arrays as they lie on the mesh, and what is static of the result."""
    leaves = tuple((table[name].shape, table[name].dtype) for name in projection.names)
    return _cached_packer(projection, leaves, tuple(partition(infos[name].axes) for name in projection.names), mesh)


@functools.cache
def _cached_packer(
    projection: Projection, leaves: _Leaves, specs: tuple[PartitionSpec, ...], mesh: Mesh
) -> tuple[Callable[..., Array], Form]:
    """One for all layers of the same shapes."""
    form = _form(projection, leaves, specs, mesh)

    def pack(*arrays: Array) -> Array:
        table = dict(zip(projection.names, arrays, strict=True))
        rows = [row for one in projection.products for row in one.rows(*(table[name] for name in one.names))]
        return pack_weights(rows, form.outputs)

    return jax.jit(jax.shard_map(pack, mesh=mesh, in_specs=specs, out_specs=form.blocks_spec, check_vma=False)), form


def _form(projection: Projection, leaves: _Leaves, specs: tuple[PartitionSpec, ...], mesh: Mesh) -> Form:
    outputs, shapes, result_specs, summed_over = [], [], [], set()
    found = dict(zip(projection.names, zip(leaves, specs, strict=True), strict=True))
    for product in projection.products:
        x, result, letters = product.axes
        (shape, dtype), spec = found[product.names[0]]
        axis_of = dict(zip(letters, spec, strict=True))
        size_of = dict(zip(letters, NamedSharding(mesh, spec).shard_shape(shape), strict=True))
        summed_over |= {axis_of[letter] for letter in product.contracted} - {None}
        for size in product.sizes or (size_of[result[-1]],):
            shapes.append((*(size_of[letter] for letter in result[:-1]), size))
            result_specs.append(PartitionSpec(None, None, *(axis_of[letter] for letter in result)))
            options = {"dtype": jnp.dtype(product.dtype or dtype), "is_gated": len(product.names) == 2}
            outputs.append(Output(width=math.prod(shapes[-1]), **options))
    return Form(
        names=tuple(projection.names),
        outputs=tuple(outputs),
        shapes=tuple(shapes),
        # One product has heads of its own, or all take all of the input.
        num_groups=math.prod(size_of[letter] for letter in x if letter in result),
        mesh=mesh,
        x_spec=PartitionSpec(None, None, *(axis_of[letter] for letter in x)),
        blocks_spec=PartitionSpec(*{axis for spec in specs for axis in spec if axis}),
        result_specs=tuple(result_specs),
        axis=next(iter(summed_over), None),
    )
