"""A model's layers by type: what each type keeps of a request, before any cache of ours makes it smaller."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import NOTHING, STATE_ONLY, LayerSpec, specs_from_config
from .footprint import shard, token_bytes
from .models import Model
from .states import state_of


@dataclass(frozen=True)
class LayerKind:
    """The layers of one type, as a plain cache in the model's dtype keeps them.

    Attributes:
        kind: `full_attention`, `sliding_attention`, `chunked_attention`, `latent_attention`, `shared` (keys and values of an
            earlier layer), `cross_attention` (of the encoder's text), or the config's name of a layer with a state, or with
            neither (`moe`, `mlp`).
        layers: how many there are.
        kv_heads, k_dim, v_dim: of each, on one of the devices that share them; 0 where it keeps none.
        window: positions that it looks back over; None for all.
        token_bytes: of one token in all of these layers, while their window is not full.
        state_bytes: of a request in all of them, whatever its length.
        request_bytes: of one request at the plan's context.
    """

    kind: str
    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None
    token_bytes: int
    state_bytes: int
    request_bytes: int


def layer_kinds(model: Model, context: int, source: int, shards: int) -> tuple[LayerKind, ...]:
    """The model's layers by type, those with a state, shared keys and an encoder's text too."""
    groups: dict[tuple, list[LayerSpec]] = {}
    for spec in specs_from_config(model.config):
        shape = (spec.kv_heads, spec.k_dim, spec.v_dim, spec.window) if spec.stores else ()
        groups.setdefault((_kind(model, spec), *shape), []).append(spec)
    kinds = []
    for (kind, *_), specs in groups.items():
        spec, layers = specs[0], len(specs)
        state = 0 if kind == "shared" else _state_bytes(model, spec, shards) * layers
        token = token_bytes(spec, model.dtype, shards) * layers if spec.stores else 0
        kept = context if spec.window is None else min(context, spec.window - 1)
        shape = (shard(spec.kv_heads, shards), spec.k_dim, spec.v_dim) if spec.stores else (0, 0, 0)
        window = spec.window if spec.stores else None
        kinds.append(LayerKind(kind, layers, *shape, window, token, state, token * kept + state))
    crossing = [spec for spec in specs_from_config(model.config) if spec.stores] if source else []
    if crossing:
        token, spec = sum(token_bytes(spec, model.dtype, shards) for spec in crossing), crossing[0]
        shape = (shard(spec.kv_heads, shards), spec.k_dim, spec.v_dim)
        kinds.append(LayerKind("cross_attention", len(crossing), *shape, None, 0, token * source, token * source))
    return tuple(kinds)


def _kind(model: Model, spec: LayerSpec) -> str:
    if not spec.stores and spec.kind not in STATE_ONLY + NOTHING:
        return "shared"
    if spec.stores and getattr(model.text, "kv_lora_rank", None):
        return "latent_attention"
    return spec.kind


def _state_bytes(model: Model, spec: LayerSpec, shards: int) -> int:
    state = state_of(model.text, spec.kind)
    return 0 if state is None else -(-state.nbytes(model.dtype) // shards)
