"""The engine over weights that are shapes, on meshes of GPUs that need not be there: a program to compile and to look at."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddtree_jax import Engine, dflash, kimi
from ddtree_jax.config import DFlashConfig, KimiConfig
from ddtree_jax.pallas.int4_moe import ExpertBlocks
from ddtree_jax.projections import Packed
from ddtree_jax.sharding import Parameters, make_mesh, sharding_of
from experiments.devices import DEVICES

NUM_DEVICES = 8

ArrayShapes = dict[str, dict[str, Any]]
"""Shapes with their places, by part and name; packed weights are one with their form."""


def mesh_without_devices(text: str, device: str) -> Mesh:
    """A mesh of GPUs that can be compiled for."""
    like = make_mesh(text)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=DEVICES[device].target_config, topology=f"1x1x{NUM_DEVICES}"
    )
    devices = np.array(topology.devices[: like.size]).reshape(like.devices.shape)
    return Mesh(devices, like.axis_names, axis_types=like.axis_types)


def read_configs(target: str, drafter: str, num_layers: int | None) -> tuple[KimiConfig, DFlashConfig]:
    """Both configs; if the target is shortened, the drafter takes its features from the layers that are left."""
    target_config = KimiConfig.from_hf(json.loads(Path(target).read_text()))
    drafter_config = DFlashConfig.from_hf(json.loads(Path(drafter).read_text()))
    if num_layers is None:
        return target_config, drafter_config
    num_features = len(drafter_config.target_layer_ids)
    taken = tuple(index * num_layers // num_features for index in range(num_features))
    return (
        replace(target_config, num_hidden_layers=num_layers),
        replace(drafter_config, num_target_layers=num_layers, target_layer_ids=taken),
    )


def abstract_engine(target: KimiConfig, drafter: DFlashConfig, mesh: Mesh, max_length: int) -> Engine:
    """An engine whose weights are shapes, with the kernels in bfloat16.

    Raises:
      NotImplementedError: the kernels do not take these shapes.
    """
    kimi.check_kernels(target, mesh)
    return Engine(
        kimi.Kimi(target, target_shapes(target, kimi.parameters(target), mesh), drafter.target_layer_ids, mesh, True),
        _abstract_drafter(drafter, mesh),
        mesh=mesh,
        max_length=max_length,
    )


def abstract_arrays(parameters: Parameters, mesh: Mesh) -> ArrayShapes:
    """Arrays of a model on a mesh, as shapes in their places."""
    return {
        part: {
            name: jax.ShapeDtypeStruct(info.shape, info.dtype or jnp.bfloat16, sharding=sharding_of(info, mesh, name))
            for name, info in table.items()
        }
        for part, table in parameters.items()
    }


def target_shapes(config: KimiConfig, parameters: Parameters, mesh: Mesh) -> ArrayShapes:
    """The same of a target that the kernels read: experts in blocks, projections packed if their kernel takes them."""

    def pack(arrays: dict[str, dict[str, jax.Array]]) -> dict[str, dict[str, Any]]:
        kimi.pack_experts(arrays, mesh)
        kimi.pack_projections(arrays, config, mesh)
        return arrays

    return _placed(pack, abstract_arrays(parameters, mesh), mesh)


def drafter_shapes(config: DFlashConfig, parameters: Parameters, mesh: Mesh) -> ArrayShapes:
    """The same of a drafter, projections packed if their kernel takes them."""

    def pack(arrays: dict[str, dict[str, jax.Array]]) -> dict[str, dict[str, Any]]:
        dflash.pack_projections(arrays, config, mesh)
        return arrays

    return _placed(pack, abstract_arrays(parameters, mesh), mesh)


def _placed(pack: Callable[..., dict[str, dict[str, Any]]], natural: ArrayShapes, mesh: Mesh) -> ArrayShapes:
    """Shapes of what ``pack`` makes of a model's arrays, in their places."""
    packed = jax.eval_shape(pack, natural)
    blocks = kimi.BLOCK_SPECS._asdict()
    for part, table in packed.items():
        for name, leaf in table.items():
            if isinstance(leaf, Packed):
                sharding = NamedSharding(mesh, leaf.form.blocks_spec)
            elif name in ExpertBlocks._fields:
                sharding = NamedSharding(mesh, blocks[name])
            else:
                sharding = natural[part][name].sharding
            place = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
            table[name] = jax.tree.map(lambda leaf, place=place: place(leaf.shape, leaf.dtype), leaf)
    return packed


def _abstract_drafter(config: DFlashConfig, mesh: Mesh) -> dflash.DFlash:
    arrays = drafter_shapes(config, dflash.parameters(config), mesh)
    if any(isinstance(leaf, Packed) for leaf in arrays["context"].values()):
        return dflash.DFlash(config, arrays, mesh, has_kernels=True)
    drafter = jax.eval_shape(lambda arrays: dflash.DFlash(config, arrays, mesh, has_kernels=True), arrays)
    of_name = {name: leaf.sharding for table in arrays.values() for name, leaf in table.items()}
    whole, heads, width = of_name["k_DJR"].spec
    of_name["key_value_DmJR"] = NamedSharding(mesh, PartitionSpec(whole, None, heads, width))

    def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        (sharding,) = (of_name[key.name] for key in path if getattr(key, "name", None) in of_name)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, drafter)
