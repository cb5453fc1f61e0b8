"""One rank's share of a mesh: its shapes, where its tokens are sent, what it must read, whose time a kernel's is."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from plain_runs import allow_shapes, leave_out_kernels

from ddtree_jax import DecodeConfig, dflash, kimi
from ddtree_jax.layers import gain
from ddtree_jax.pallas.int4_moe import ExpertBlocks
from ddtree_jax.placement import Placement
from ddtree_jax.projections import pack_all
from ddtree_jax.sharding import ArrayInfo, make_mesh
from experiments import bench_rank, rank, stage_times
from experiments.abstract_engine import read_configs
from experiments.loop_runs import Passes, Rounds, describe_state, draw_caches, lower_passes
from experiments.loop_text import STAGES as STAGE_NAMES
from experiments.programs import CONFIGS, Program
from experiments.rank_floor import rest_bytes, target_bytes
from experiments.rank_load import time_load
from experiments.synthetic import count_bytes, draw_arrays

SLOTS, LENGTH = 64, 17
# Compiled quickly: little is run.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    allow_shapes(monkeypatch)


def share_of(config: str, mesh: str, num_layers: int | None = 2) -> rank.Share:
    return rank.Share.of(*read_configs(*CONFIGS[config], num_layers), mesh)


@pytest.mark.parametrize("mesh", ["tensor=8", "expert=8", "expert=2,tensor=4"])
def test_a_share_is_a_model_of_its_own(mesh):
    """Parameters cut by the mesh's rules are those of the share's configs, but for what stays whole or is gathered."""
    share = share_of("kimi_k26", mesh)
    cut = share.target_parameters, share.drafter_parameters
    own = kimi.parameters(share.target), dflash.parameters(share.drafter)
    different = {
        name
        for tables, others in zip(cut, own, strict=True)
        for part, table in tables.items()
        for name, info in table.items()
        if info.shape != others[part][name].shape
    }
    gathered = {"fc_YD"} if share.tensor > 1 else set()
    routed = {"router_ED", "router_bias_E"} if share.target.n_routed_experts < 384 else set()
    assert different == gathered | routed


def test_bytes_of_a_rank_of_k26(no_kernels):
    """76 GB at tensor=8; all experts chosen, a pass reads all of them but for the embeddings it does not look up."""
    share = share_of("kimi_k26", "tensor=8", None)
    target, drafter = rank.Tables.of(share, make_mesh(None))
    assert 73e9 < count_bytes(target) < 77e9
    everything = [np.arange(384, dtype=np.int32).reshape(48, 8)] * share.num_moe_layers
    found = target_bytes(share, target, everything, 1000)
    embedding = count_bytes(target["embed"])
    cache = 61 * 1000 * 1152
    assert sum(found.values()) == count_bytes(target) - embedding + embedding * 48 // 20480 + cache
    # 110 experts of 2 x 256 x 7168 and 7168 x 256 weights, in groups of 32 with a scale of 2 bytes, in 60 layers.
    some = target_bytes(share, target, rank.draw_routing(share, 16, 110, 0), 1000)
    assert some["verify/experts"] == 60 * 110 * 3 * 256 * 7168 * (1 / 2 + 2 / 32)
    rest = rest_bytes(share, target, drafter, 16, 100_000)
    assert rest["draft/attention"] == (5 * 2048 + 100_000) * 2 * 128 * 2
    whole = sum(bytes for stage, bytes in rest.items() if stage not in ("expand", "accept", "draft/attention"))
    # Keys' and values' weights lie in layers and, together, in the context.
    assert count_bytes(drafter["context"]) > 7168 * (6 * 7168 // 8 + 12 * 128) * 2
    head = count_bytes(target["head"]["unembedding_VD"])
    assert whole == count_bytes(drafter) + head + embedding * 8 // 20480
    # A floor whose stage no kernel can have would stand beside no time.
    details = ((part, name) for part, (names, _) in stage_times._DETAILS.items() for name in (*names, ""))
    scopes = [f"{part}/layer_{layer}/{name}" for part, name in details for layer in range(2)]
    stages = {stage_times.stage_of(scope) for scope in (*scopes, *STAGE_NAMES)}
    assert found.keys() | rest.keys() <= stages


def test_a_mesh_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="embed/embedding_VD"):
        share_of("kimi_k26", "tensor=7")


@pytest.mark.parametrize(("num_tokens", "distinct"), [(1, 8), (16, 110), (16, 8), (16, 128), (64, 285), (3, 24)])
@pytest.mark.parametrize("mesh", ["tensor=8", "expert=8"])
def test_routing_hits_as_many_experts_as_asked(mesh, num_tokens, distinct):
    share = share_of("kimi_k26", mesh, 4)
    tables = rank.draw_routing(share, num_tokens, distinct, 5)
    local = share.target.n_routed_experts
    assert len(tables) == 3
    for expert_TX in tables:
        assert expert_TX.shape == (num_tokens, 8) and expert_TX.max() < local
        here = np.unique(expert_TX[expert_TX >= 0])
        assert len(here) == round(distinct * local / 384)
        for chosen_X in expert_TX:
            own = chosen_X[chosen_X >= 0]
            assert len(np.unique(own)) == len(own)
    assert not np.array_equal(*tables[:2])
    again = rank.draw_routing(share, num_tokens, distinct, 5)
    np.testing.assert_array_equal(tables, again)


def test_routing_that_is_impossible_is_refused(monkeypatch):
    share = share_of("kimi_k26", "tensor=8")
    for num_tokens, distinct in ((16, 7), (2, 17), (64, 385)):
        with pytest.raises(ValueError, match=f"distinct is {distinct}; allowed are 8 to"):
            rank.draw_routing(share, num_tokens, distinct, 0)
    for distinct in (7, 9):
        values = {"NODES": ["16", "1"], "CONTEXTS": ["1024"], "PROGRAMS": ["round"], "CONFIG": "kimi_k26", "LAYERS": 2}
        values |= {"MESH": "tensor=8", "SLOTS": None, "DISTINCT": distinct}
        for name, value in values.items():
            monkeypatch.setattr(bench_rank, f"_{name}", SimpleNamespace(value=value), raising=False)
        with pytest.raises(app.UsageError, match=f"--distinct is {distinct}; allowed are 8 to"):
            bench_rank.main([""])
    assert [rank.expected_distinct(n, 384, 8) for n in (1, 8, 16, 32, 64)] == [8, 60, 110, 188, 284]


@pytest.fixture
def no_kernels(monkeypatch):
    leave_out_kernels(monkeypatch, rank)


def test_a_share_decodes_and_its_tokens_go_where_they_are_sent(no_kernels):
    """The engine's loop, compiled over shapes, runs on drawn weights; so do passes alone."""
    share = share_of("tiny", "expert=2,tensor=4")
    mesh = make_mesh(None)
    placement = Placement(mesh)
    routing = rank.draw_routing(share, 1, share.target.num_experts_per_tok, 1)
    tables = rank.Tables.of(share, mesh)
    abstract = rank.abstract_models(share, mesh, tables)
    engine = rank.engine_of(abstract, [placement.describe(table) for table in routing], mesh, SLOTS)
    lowered = engine.trace_rounds(DecodeConfig(mode="ar"), 1).lower()
    state = describe_state(lowered, placement)

    models = rank.drawn_models(share, mesh, tables, 0)
    models.target.send(placement.put(routing))
    assert count_bytes(models) == count_bytes(abstract)
    caches = draw_caches(state.target_cache, state.drafter_cache, 2)
    before = np.asarray(caches.target[0], np.float32)
    rounds = Rounds(lowered.compile(QUICK), models, state, 0, placement, caches)
    rounds.run(LENGTH, 3)
    assert rounds.tokens_a_round == 1
    is_written_S = np.any(before != np.asarray(caches.target[0], np.float32), axis=(0, 2))
    np.testing.assert_array_equal(np.flatnonzero(is_written_S), LENGTH + np.arange(3))

    compiled = lower_passes(abstract.target, placement, batch=1, num_slots=SLOTS, num_nodes=1).compile(QUICK)
    # Passes read what is committed alone, and write nothing.
    is_behind_S1 = np.arange(SLOTS)[:, None] >= LENGTH

    def spoil(cache_BSW: jax.Array) -> np.ndarray:
        return np.where(is_behind_S1, np.float32(np.nan), np.asarray(cache_BSW, np.float32)).astype(cache_BSW.dtype)

    caches.target = placement.put(jax.tree.map(spoil, caches.target))
    held, results = np.asarray(caches.target[0], np.float32), []

    def run_pass(*arrays: Any) -> Any:
        results.append(compiled(*arrays))
        return results[-1]

    Passes(run_pass, models, placement, caches).run(LENGTH, 2)
    (_, logits_BNV), *others = results
    assert logits_BNV.shape == (1, 1, share.target.vocab_size) and not others
    assert np.isfinite(logits_BNV).all()
    np.testing.assert_array_equal(held, np.asarray(caches.target[0], np.float32))


def test_a_share_drafts(no_kernels):
    """From features of all of the target, and with as much context as all ranks have."""
    share = share_of("tiny", "tensor=8")
    mesh = make_mesh(None)
    drafter = rank.abstract_models(share, mesh, rank.Tables.of(share, mesh)).drafter
    config = share.drafter
    features_BTY = jax.ShapeDtypeStruct((1, 3, config.hidden_size * len(config.target_layer_ids)), jnp.bfloat16)
    embedded_BTD = jax.ShapeDtypeStruct((1, 3, config.hidden_size), jnp.bfloat16)
    positions_BT, length_B = jax.ShapeDtypeStruct((1, 3), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    rows = jax.eval_shape(lambda drafter, *arrays: drafter.context(*arrays), drafter, features_BTY, positions_BT)
    heads = config.num_key_value_heads, config.head_dim
    assert {leaf.shape for leaf in jax.tree.leaves(rows)} == {(1, 3, *heads)}
    cache = jax.eval_shape(lambda drafter: drafter.init_cache(1, SLOTS), drafter)
    hidden_BTD = jax.eval_shape(lambda drafter, *arrays: drafter(*arrays), drafter, embedded_BTD, length_B, cache)
    assert hidden_BTD.shape == embedded_BTD.shape


def test_a_share_is_loaded_from_what_a_converter_writes(tmp_path):
    """Every parameter comes back and is packed; a folder that holds anything is left as it is."""
    share, folder = share_of("tiny", "tensor=8"), tmp_path / "load"
    found = time_load(share, str(folder), make_mesh(None))
    tables = rank.Tables.of(share, make_mesh(None))
    assert found["bytes"] == count_bytes(tables.target) + count_bytes(tables.drafter)
    assert found["seconds"] > found["read_seconds"] > 0
    assert found["ceiling_seconds"] > 0
    files = sorted(folder.rglob("*"))
    with pytest.raises(FileExistsError, match="is not empty"):
        time_load(share, str(folder), make_mesh(None))
    assert sorted(folder.rglob("*")) == files


def test_the_router_computes_and_is_overruled():
    """Alone, and where the shared expert's last product is computed beside it."""
    share, mesh = share_of("tiny", "tensor=8"), make_mesh(None)
    config = replace(share.target, n_routed_experts=share.num_experts, moe_intermediate_size=64)
    random = np.random.default_rng(3)

    def draw(infos: dict[str, ArrayInfo]) -> dict[str, Any]:
        return {name: jnp.asarray(random.normal(size=info.shape), jnp.float32) for name, info in infos.items()}

    arrays = draw(kimi.Router.parameters(config))
    router, own = rank.DrawnRouter(config, arrays, mesh), kimi.Router(config, arrays, mesh)
    (drawn_TX,) = rank.draw_routing(share, 5, config.num_experts_per_tok + 1, 0)[:1]
    router.drawn_TX = nnx.Param(drawn_TX)
    x_TD = jnp.asarray(random.normal(size=(5, config.hidden_size)), jnp.float32)
    is_token_T = jnp.arange(5) != 3
    expert_TX, weight_TX = jax.jit(lambda *args: router(*args))(x_TD, is_token_T)
    np.testing.assert_array_equal(expert_TX, drawn_TX)
    own_TX, own_weight_TX = own(x_TD, is_token_T)
    np.testing.assert_allclose(weight_TX, own_weight_TX, rtol=1e-5)

    table = {name: info for name, info in kimi.SharedExpert.parameters(config).items() if "down" in name}
    natural = draw(table)
    packed = {"layer": dict(natural)}
    pack_all(packed, {"layer": table}, {"layer": list(kimi.SharedExpert.projections(config).values())}, mesh)
    hidden_1TF = jnp.asarray(random.normal(size=(1, 5, 64)), jnp.float32)
    args = x_TD @ arrays["router_ED"].T, is_token_T, hidden_1TF, packed["layer"]["shared_down"]
    for one, expected_TX in ((own, own_TX), (router, drawn_TX)):
        expert_TX, weight_TX, parts = one.choose_and_multiply(*args)
        np.testing.assert_array_equal(expert_TX, expected_TX)
        np.testing.assert_allclose(weight_TX, own_weight_TX, rtol=1e-5)
        np.testing.assert_allclose(parts, hidden_1TF @ natural["shared_down_FD"], rtol=1e-4, atol=1e-4)


def test_weights_are_drawn_where_they_lie():
    mesh, name = make_mesh("expert=8"), ExpertBlocks._fields[0]
    split, whole = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("expert", None))
    infos = {"o": ArrayInfo((64, 32), (None, None), mean=1.0, deviation=0.1), "gain": gain(5)}
    table = {name: jax.ShapeDtypeStruct((8, 3, 4, 1, 576), jnp.int32, sharding=split)}
    table |= {name: jax.ShapeDtypeStruct(info.shape, jnp.bfloat16, sharding=whole) for name, info in infos.items()}
    drawn = draw_arrays({"layer_1": table}, {"layer_1": infos}, 0)["layer_1"]
    assert {shard.data.shape for shard in drawn[name].addressable_shards} == {(1, 3, 4, 1, 576)}
    words = np.asarray(drawn[name])
    scales = words[..., 512:].reshape(-1).view(np.uint16).astype(np.uint32) << 16
    assert np.all(np.abs(scales.view(np.float32) - 0.01) < 0.001)
    assert len(np.unique(words[..., :512])) > 0.9 * words[..., :512].size
    assert np.std(np.asarray(drawn["o"], np.float32)) == pytest.approx(0.1, rel=0.05)
    assert np.mean(np.asarray(drawn["o"], np.float32)) == pytest.approx(1.0, abs=0.01)
    assert np.all(np.asarray(drawn["gain"], np.float32) == 1)


SCOPES = {
    "norm.1": "draft/layer_0/mul",
    "gemm.1": "draft/layer_0/gate_up/BTD,DF->BTF/dot_general",
    "grow.1": "expand/cond/branch_0_fun/tree_grow/mpmd_map",
    "norm.2": "verify/layer_0/attention/mul",
    "blas.1": "verify/layer_0/attention/qkv_a/BTD,DA->BTA/dot_general",
    "gemm.2": "verify/layer_0/feed_forward/gate_up/BTD,DF->BTF/dot_general",
    "gemm.3": "verify/layer_1/feed_forward/shared/BTD,DF->BTF/dot_general",
    "moe.1": "verify/layer_1/feed_forward/jit(int4_moe)/cond/int4_moe/mpmd_map",
}
PLAN = """001: kCustomKernel [source | sink] clear_1 grid: [1, 1, 1]
002: kWhile        [source | sink]
  body:
    000: kCommandBuffer [source | sink]
        003: kCustomKernel [source | sink] norm_1 grid: [1, 1, 1]
        004: kCustomKernel [prev=003 (1) | sink] gemm_1 grid: [1, 1, 1]
        005: kCustomCall   [source | sink] kCustomCall
        006: kCustomKernel [source | sink] norm_1 grid: [1, 1, 1]
        007: kGemm         [source | sink] kGemm
        008: kCopy         [source | sink] kCopy
        009: kCustomKernel [source | sink] gemm_1 grid: [1, 1, 1]
        010: kCustomKernel [source | sink] gemm_3 grid: [1, 1, 1]
        011: kCustomCall   [source | sink] kCustomCall
        012: kCustomKernel [source | sink] loose_1 grid: [1, 1, 1]
013: kCopy [source | sink]
"""
INSTRUCTIONS = "norm.1 gemm.1 grow.1 norm.2 blas.1 copy.1 gemm.2 gemm.3 moe.1 loose.1".split()
RECORDS = ["norm_1", "gemm_1", "tree_grow_mosaic_gpu_kernel", "norm_1", "nvjet_sm90_tst_64x8", "gemm_1", "gemm_3"]
RECORDS += ["int4_moe_mosaic_gpu_kernel", "loose_1"]
STAGES = ["draft/" + stage_times.ELEMENTWISE, "draft/MLP", "expand", "verify/" + stage_times.ELEMENTWISE]
STAGES += ["verify/q_a and kv_a", "verify/dense MLP", "verify/shared expert", "verify/experts", "other"]


class Compiled:
    def as_text(self) -> str:
        lines = [
            f'  %{name} = f32[8] fusion(%x), metadata={{op_name="jit(run)/while/body/{scope}"}}'
            for name, scope in SCOPES.items()
        ]
        return "\n".join(["%body (state: (f32[8])) -> (f32[8]) {", *lines, "}"])


def steps() -> stage_times.Steps:
    launches = "".join(
        f'thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}\n'
        for number, name in enumerate(INSTRUCTIONS, start=3)
    )
    return stage_times.steps_of(Program(Compiled(), PLAN, launches, 0.0))


def test_steps_of_a_plan():
    found = steps()
    assert [step.stage for step in found.inside] == STAGES
    assert [step.kernel for step in found.inside] == [
        *("norm_1", "gemm_1", "tree_grow", "norm_1", None, "gemm_1", "gemm_3", "int4_moe", "loose_1")
    ]
    assert found.outside == {"clear_1"}
    with pytest.raises(RuntimeError, match="XLA wrote no plan"):
        stage_times.steps_of(Program(Compiled(), "", "", 0.0))


@pytest.mark.parametrize("order", [range(9), (0, 1, 2, 4, 3, 5, 6, 7, 8), (0, 1, 2, 3, 4, 5, 6, 8, 7)])
def test_time_belongs_to_the_step_that_a_record_is_of(order):
    """Equal kernels share a name, libraries choose theirs; records may come a little out of order."""
    records = [("clear_1", 100.0), *[(RECORDS[i], 2.0**i) for _ in range(3) for i in order]]
    seconds, counts = stage_times.add_up(records, steps())
    assert seconds == {stage: 3 * 2.0**i for i, stage in enumerate(STAGES)}
    assert set(counts.values()) == {3}


def test_stages_sum_to_the_whole():
    lines = bench_rank.stage_lines([(name, 1e-6) for name in RECORDS], steps(), {"verify/experts": 4570, "accept": 7})
    seconds = {line["stage"]: line["seconds"] for line in lines}
    whole = seconds.pop("all kernels")
    assert whole == pytest.approx(len(RECORDS) * 1e-6 / bench_rank.RECORDED)
    assert sum(value for stage, value in seconds.items() if "/" not in stage) == pytest.approx(whole)
    assert sum(value for stage, value in seconds.items() if stage.startswith("verify/")) == pytest.approx(
        seconds["verify"]
    )
    (experts,) = (line for line in lines if line["stage"] == "verify/experts")
    assert experts["ceiling_seconds"] == pytest.approx(1e-9)


def test_what_nothing_is_known_of_stays_in_the_sum():
    seconds, _ = stage_times.add_up([("norm_1", 1.0), ("strange", 2.0)], stage_times.Steps(steps().inside[:2], set()))
    assert seconds == {STAGES[0]: 1.0, stage_times.UNKNOWN: 2.0}
