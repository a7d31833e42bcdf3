"""Contexts whose exact keys and values are computed once, to be written to every cache that is measured.

So caches differ in nothing but what they make of the same numbers, and a context is prefilled once, not once per cache. What they
then hold is counted alike for ours and the built-in ones.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .cache import KVCache, cache_kwarg

States = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values [rows, kv_heads, tokens, dim] of every layer


@torch.inference_mode()
def prefill(model, ids: torch.Tensor, cache: Cache) -> Cache:
    """`ids` `[rows, tokens]` through `cache`, in one pass of the model."""
    model(ids.to(model.device), **cache_kwarg(cache), logits_to_keep=1)
    return cache


def exact(model, ids: torch.Tensor) -> States | None:
    """The keys and values of a context `[rows, tokens]`; None as `states` says."""
    cache = DynamicCache(config=model.config)
    return None if states(cache) is None else states(prefill(model, ids, cache))


def states(cache: DynamicCache) -> States | None:
    """What a plain cache holds; None for a model with windows or states of its own, of which it keeps the end only: such a
    model has to prefill every cache itself."""
    if not all(type(layer) is DynamicLayer for layer in cache.layers):
        return None
    return [(layer.keys, layer.values) for layer in cache.layers]


@torch.inference_mode()
def write(model, ids: torch.Tensor, held: States | None, cache: Cache, copies: int = 1) -> Cache:
    """The context `ids` `[rows, tokens]` through `cache`, in `copies * rows` rows: its exact keys and values, or, where there
    are none, in a pass of the model."""
    if held is None:
        return prefill(model, ids.repeat(copies, 1), cache)
    for layer, pair in enumerate(held):
        cache.update(*(x.repeat(copies, 1, 1, 1) if copies > 1 else x for x in pair), layer)
    return cache


def stored_bytes(cache: Cache) -> int:
    """Bytes of the storages behind a cache: ours counted by itself, a built-in one from its tensors."""
    if isinstance(cache, KVCache):
        return cache.memory().allocated
    tensors = [t for layer in cache.layers for value in vars(layer).values() for t in _tensors(value)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _tensors(value) -> list[torch.Tensor]:
    """Tensors in an attribute of a layer: itself, or the parts of a quantised one (scales, zero points, codes)."""
    if isinstance(value, torch.Tensor):
        parts = [getattr(value, name, None) for name in ("_data", "_scale", "_shift")]
        inner = [t for part in parts if part is not None for t in _tensors(part)]
        return inner or [value]
    if isinstance(value, tuple | list):
        return [t for item in value for t in _tensors(item)]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    return []
