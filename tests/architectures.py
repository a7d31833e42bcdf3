"""Tiny random causal language models, one for each way in which an architecture can use a cache: grouped heads, sliding
and hybrid layers, soft-capping, sink logits, keys and values shared between layers, latent attention, linear attention,
and models whose code does not go through transformers' attention interface."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 97
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,  # texts have the length that a test asks for
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
SHARED_KV = {
    "head_dim": 8,
    "sliding_window": 6,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "layer_types": ALTERNATING,
}

# What each model has beyond COMMON, by transformers' name of its type.
ARCHITECTURES: dict[str, dict] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"head_dim": 8, "sliding_window": 6},
    "gemma2": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "phi3": {},
    "phi": {},
    "gpt_oss": {"head_dim": 8, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt_neox": {},
    "falcon": {"alibi": False, "new_decoder_architecture": False, "multi_query": True},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 3,
    },
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen3_moe": {"head_dim": 8, **EXPERTS},
    "gemma3n_text": {
        **SHARED_KV,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [48] * 4,
        "laurel_rank": 8,
    },
    "gemma4_text": {**SHARED_KV, "global_head_dim": 8},
    "bloom": {"n_head": 4, "n_layer": 3},
    "smollm3": {},
    "olmo2": {},
    "starcoder2": {"sliding_window": 6},
    "cohere2": {"sliding_window": 6},
    "stablelm": {},
    "granite": {},
    "llama4_text": {
        "head_dim": 8,
        "num_local_experts": 2,
        "attention_chunk_size": 6,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 1,
    },
    "qwen3_next": {
        "head_dim": 8,
        **EXPERTS,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_hidden_layers": 4,
    },
    "falcon_h1": {
        "head_dim": 8,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_expand": 1,
        "mamba_chunk_size": 8,
    },
}
NAMES = tuple(ARCHITECTURES)

LINEAR = ("qwen3_next", "falcon_h1")  # with a recurrent state, which cannot be cropped
OUTSIDE = ("falcon", "bloom", "deepseek_v3", "llama4_text")  # read keys and values themselves, or need a dense mask


def build(name: str, dtype: torch.dtype = torch.float32, **changes) -> torch.nn.Module:
    """A model of type `name` in eval mode, the caller's own, with `changes` to its config; the same weights every time.

    Skips the test where the installed transformers does not know the type.
    """
    return copy.deepcopy(_built(name, tuple(sorted(changes.items())))).to(dtype)


@functools.cache
def _built(name: str, changes: tuple) -> torch.nn.Module:
    try:
        config = AutoConfig.for_model(name, **COMMON | ARCHITECTURES[name] | dict(changes))
    except ValueError:
        pytest.skip(f"transformers {transformers.__version__} has no model type {name!r}")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for key, parameter in model.named_parameters():
            if parameter.dim() >= 2 or key.endswith("sinks"):  # spread enough that tokens vary
                parameter.normal_(0, 0.25)
    return model
