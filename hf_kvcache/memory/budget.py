"""What a model needs beside its caches: weights, the runtime, and what a pass computes with."""

from __future__ import annotations

import torch

from ..errors import ConfigurationError
from .footprint import shard
from .models import Model, Parameters

GIB = 1 << 30
RUNTIME = 3 * GIB // 4  # assumed: a CUDA context with torch's kernels, and cuBLAS workspaces
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WEIGHTS = ("auto", "bf16", "fp16", "fp32", "8bit", "4bit")


def dtype_for(name: str | None) -> torch.dtype | None:
    """A dtype by its name.

    Raises:
        ConfigurationError: for a name that is none; the message lists them.
    """
    if name is not None and name not in DTYPES:
        raise ConfigurationError(f"dtype {name!r} is unknown; use one of {', '.join(DTYPES)}.")
    return DTYPES.get(name)


def weight_bytes(model: Model, count: Parameters, weights: str = "auto") -> int:
    """Bytes of the weights.

    `8bit` keeps linear layers and experts in a byte each and a float32 per row (LLM.int8); `4bit` in half a byte and a float32
    per 64 (NF4 as bitsandbytes stores it). Embeddings, the output projection and norms stay in the model's dtype. `auto` is
    what the config's `quantization_config` says, else the model's dtype.

    Raises:
        ConfigurationError: for a name that is none, and for a quantisation whose bytes are not known here.
    """
    if weights not in WEIGHTS:
        raise ConfigurationError(f"weights {weights!r} is unknown; use one of {', '.join(WEIGHTS)}.")
    plain = DTYPES.get(weights, model.dtype).itemsize
    if weights in DTYPES:
        return count.total * plain
    matrices, rows = count.linear + count.experts, count.rows
    if weights == "8bit":
        return matrices + 4 * rows + count.rest * plain
    if weights == "4bit":
        return matrices // 2 + 4 * matrices // 64 + count.rest * plain
    return _as_published(getattr(model.config, "quantization_config", None), count, plain)


def _as_published(quantization: dict | None, count: Parameters, plain: int) -> int:
    """Bytes of a checkpoint that is quantised as its config says."""
    if quantization is None:
        return count.total * plain
    quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method, matrices = quantization.get("quant_method"), count.linear + count.experts
    if method == "mxfp4":  # the experts: 4 bits, and 8 bits of scale for each 32
        return count.experts // 2 + count.experts // 32 + (count.linear + count.rest) * plain
    if method == "fp8":  # 8 bits, and a float32 for each block
        height, width = quantization.get("weight_block_size") or (1 << 30, 1 << 30)
        return matrices + 4 * (matrices // (height * width)) + count.rest * plain
    bits = (
        quantization.get("bits") or (quantization.get("load_in_8bit") and 8) or (quantization.get("load_in_4bit") and 4)
    )
    if bits:  # GPTQ, AWQ and bitsandbytes: a scale, and mostly a zero point, for each group
        group = max(1, quantization.get("group_size") or 64)
        return matrices * bits // 8 + 4 * matrices // group + count.rest * plain
    raise ConfigurationError(
        f"the bytes of weights in quantisation {method!r} are not known here; say weights as one of {', '.join(WEIGHTS[1:])}."
    )


def activations(model: Model, tokens: int, context: int, rows: int = 1, shards: int = 1) -> int:
    """Bytes that a pass of `tokens` tokens computes with at its peak, weights and caches not counted.

    Layers run one after the other, so it is what is alive at once in the larger half of one: the residual stream and its norm
    and, in attention, queries, keys and values before and after they are rotated and the output; or, in the feed-forward half,
    its gate, its activation and their product (of as many experts as a token is sent to). Attention itself is assumed to be
    fused. Latent attention as transformers computes it adds one layer's keys and values, expanded for all heads, of
    `rows` whole contexts of `context` tokens.
    """
    text, item = model.text, model.dtype.itemsize
    get = lambda name: getattr(text, name, None) or 0  # noqa: E731
    hidden, heads = text.hidden_size, get("num_attention_heads")
    latent = get("qk_nope_head_dim") + get("qk_rope_head_dim") if get("kv_lora_rank") else 0
    dim = latent or get("head_dim") or (hidden // heads if heads else 0)
    q = -(-heads // shards) * dim
    kv = q if latent else shard(get("num_key_value_heads") or heads, shards) * dim
    attention = 3 * q + 2 * kv + max(q, kv)
    inner = text.intermediate_size if hasattr(text, "intermediate_size") else get("d_ff") or 4 * hidden
    inner = max(inner) if isinstance(inner, (list, tuple)) else inner or 4 * hidden
    routed = get("num_experts_per_tok") * (get("moe_intermediate_size") or inner)
    forward = 3 * -(-max(inner, routed + get("shared_expert_intermediate_size")) // shards)
    peak = tokens * (2 * hidden + max(attention, forward)) * item
    return peak + (rows * context * expanded_bytes(model, shards) if latent else 0)


def expanded_bytes(model: Model, shards: int = 1) -> int:
    """Bytes of a token's keys and values in one layer of latent attention, expanded for all heads."""
    text = model.text
    dims = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    return -(-text.num_attention_heads // shards) * dims * model.dtype.itemsize


def logits(model: Model, rows: int) -> int:
    """Bytes of the scores of the next token, in the model's dtype and as generate() copies them, in float32."""
    return rows * model.text.vocab_size * (model.dtype.itemsize + torch.float32.itemsize)
