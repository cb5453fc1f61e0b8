"""Small synthetic sources whose experts fill whole blocks, so that they are stored as the kernel reads them."""

import copy
import json
from pathlib import Path
from typing import Any

from checkpoints_tools.synthesize import synthesize

CONFIGS = Path(__file__).parent / "configs"
DRAFTERS = ("kimi_k25_dflash_reconstructed", "kimi_k26_dflash_reconstructed")


def target_config(num_layers: int = 3, **changes: Any) -> dict[str, Any]:
    """K2.6's published config with small sizes: experts of 512 features, 64 a device on eight."""
    config = copy.deepcopy(json.loads((CONFIGS / "kimi_k26.json").read_text()))
    config["text_config"] |= {
        "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": num_layers, "num_attention_heads": 8,
        "num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 512, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "eos_token_id": 2,
    } | changes  # fmt: skip
    return config | {"eos_token_id": 2}


def drafter_config(name: str) -> dict[str, Any]:
    """A published drafter's config with small sizes."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    config["dflash_config"] |= {"mask_token_id": 255}
    return config | {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16,
        "vocab_size": 256,
    }  # fmt: skip


def write_target(folder: Path, num_layers: int = 3, shard_gb: float = 1e-3, **changes: Any) -> Path:
    """A target of some shards."""
    synthesize(target_config(num_layers, **changes), folder, shard_gb=shard_gb)
    return folder
