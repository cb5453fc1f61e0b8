"""What a profile reads from XLA's texts: stages of instructions, and launches of a loop's body."""

from experiments.loop_text import launches_of
from experiments.profile_round import configs, stage_of, stages_of

PROGRAM = """
  %loop_add_fusion.3 = f32[8]{0} fusion(%x), calls=%f, metadata={op_name="jit(run)/while/body/verify/attention/add"}
  %input-reduce.12 = f32[] fusion(%x), calls=%g, metadata={op_name="jit(run)/while/body/accept/cond/branch_0_fun/reduce"}
  %wrapped_iota = s32[4]{0} fusion(), calls=%h, metadata={op_name="jit(run)/while/body/iota"}
"""

PLAN = """001: kCopy [source | sink]
002: kWhile [source | sink]
condition:
    003: kCustomKernel [source | sink] loop_and_fusion
  body:
    000: kCommandBuffer [source | next=269 (1)]
        004: kCustomKernel [source | sink] loop_broadcast_fusion
        005: kConditional [source | sink]
    269: kConditional [prev=000 (1)]
      false_branch:
        000: kCommandBuffer [source | sink]
    000: kCommandBuffer [prev=269 (1) | sink]
309: kCopy [source | sink]
"""


def test_kernels_belong_to_the_stage_of_their_instruction():
    stages = stages_of(PROGRAM)
    assert stages == {"loop_add_fusion_3": "verify", "input_reduce_12": "accept"}
    assert stage_of("loop_add_fusion_3", stages) == "verify"
    assert stage_of("wrapped_iota", stages) == stage_of("nvjet_sm90_tst_64x8", stages) == "other"
    own = {"tree_expand_top": "expand", "sample_draw": "accept", "commit_rows": "commit", "int4_moe": "verify"}
    for name, stage in own.items():
        assert stage_of(f"{name}_mosaic_gpu_kernel", stages) == stage


def test_launches_are_what_stands_outermost_in_the_loop():
    assert launches_of(PLAN) == {"kCustomKernel": 1, "kCommandBuffer": 2, "kConditional": 1}
    assert launches_of("001: kCopy [source | sink]") == {}


def test_wide_models_have_the_widths_of_k26():
    target, drafter = configs("wide")
    assert (target.hidden_size, target.kv_lora_rank, target.vocab_size) == (7168, 512, 163_840)
    assert (target.num_attention_heads, target.moe_intermediate_size, target.n_routed_experts) == (8, 256, 384)
    assert (drafter.depth, drafter.hidden_size, len(drafter.target_layer_ids)) == (7, 7168, target.num_hidden_layers)
