"""What each layer of a model stores, read from its config: the shapes that a page is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SLIDING = ("sliding_attention", "hybrid_sliding", "chunked_attention", "reference_sliding_attention")
STATE_ONLY = ("linear_attention", "conv", "mamba", "recurrent")
NOTHING = ("dummy", "moe", "mlp")


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model.

    Attributes:
        kind: the config's layer type (`full_attention`, `sliding_attention`, `linear_attention`, ...).
        kv_heads, k_dim, v_dim: shape of what the layer stores per position; None where the config does not say.
        window: positions that the layer itself looks back over; None for all.
        stores: whether the layer keeps keys and values of its own.
    """

    kind: str
    kv_heads: int | None
    k_dim: int | None
    v_dim: int | None
    window: int | None = None
    stores: bool = True

    @property
    def shape(self) -> tuple[int | None, int | None, int | None]:
        return self.kv_heads, self.k_dim, self.v_dim

    def suits(self, shape: tuple[int, int, int]) -> bool:
        """Whether a layer may store this, as far as the config says."""
        return self.kv_heads is None or shape == self.shape or _is_shard(shape, self.shape)


def _is_shard(shape: tuple[int, int, int], whole: tuple[int, int, int]) -> bool:
    """Whether this is what one of several tensor-parallel processes holds of a layer: some of its heads."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized() or shape[1:] != whole[1:]:
        return False
    return whole[0] % shape[0] == 0 and whole[0] <= shape[0] * torch.distributed.get_world_size()


def specs_from_config(config) -> list[LayerSpec]:
    """A `LayerSpec` for every layer of `config` (of its text decoder, where it has several parts)."""
    config = config.get_text_config(decoder=True)
    names = ("num_decoder_layers", "num_hidden_layers", "num_layers")  # encoder-decoders count their halves apart
    count = next(filter(None, (getattr(config, name, None) for name in names)))
    kinds = _layer_kinds(config, count)
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    specs = []
    for index, kind in enumerate(kinds):
        heads, k_dim, v_dim = _shape(config, kind)
        stores = kind not in STATE_ONLY + NOTHING and index < count - shared
        specs.append(LayerSpec(kind, heads, k_dim, v_dim, _window(config, kind), stores))
    return specs


def _layer_kinds(config, count: int) -> list[str]:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        sliding = getattr(config, "sliding_window", None) is not None
        chunked = getattr(config, "attention_chunk_size", None) is not None
        kinds = ["sliding_attention" if sliding else "chunked_attention" if chunked else "full_attention"] * count
    return list(kinds)


def _window(config, kind: str) -> int | None:
    if kind == "chunked_attention":
        return config.attention_chunk_size
    return config.sliding_window if kind in SLIDING else None


def _shape(config, kind: str) -> tuple[int | None, int | None, int | None]:
    """KV heads, key channels and value channels of a layer of this kind."""
    get = lambda name: getattr(config, name, None)  # noqa: E731
    if isinstance(get("kv_lora_rank"), int) and isinstance(get("qk_rope_head_dim"), int):
        return 1, config.kv_lora_rank, config.qk_rope_head_dim  # latent attention: one latent and one rotary part
    q_heads = get("num_attention_heads")
    grouped = [get(name) for name in ("num_key_value_heads", "num_kv_heads") if _declares(config, name)]
    heads = next(filter(None, grouped), q_heads)
    if get("multi_query") and not get("new_decoder_architecture"):
        heads = 1
    dim = get("head_dim") or get("d_kv")
    if not isinstance(dim, int) and isinstance(q_heads, int):
        hidden = get("hidden_size")
        dim = hidden // q_heads if isinstance(hidden, int) else None
    if kind == "full_attention" and get("global_head_dim"):  # Gemma 4: full layers are wider than sliding ones
        dim, heads = config.global_head_dim, get("num_global_key_value_heads") or heads
    known = all(isinstance(x, int) for x in (heads, dim))
    return (heads, dim, dim) if known else (None, None, None)


def _declares(config, name: str) -> bool:
    """Whether the model's config class knows `name`. A config keeps any keyword it is given, and one that the model
    does not read says nothing about its layers."""
    return hasattr(type(config), name) or name in type(config).attribute_map
