"""What the caches that are measured hold, counted alike for ours and the built-in ones."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache

import hf_kvcache


def stored_bytes(cache: Cache) -> int:
    """Bytes of the storages behind a cache: ours counted by itself, a built-in one from its tensors."""
    if isinstance(cache, hf_kvcache.KVCache):
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
