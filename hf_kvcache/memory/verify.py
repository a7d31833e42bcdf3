"""Predictions against the machine at hand: caches are filled, and what they hold is compared with what was planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..cache import KVCache
from . import models
from .footprint import PagedFootprint, bind
from .planner import Caches, build

MOST = 1024  # tokens of a window that a check fills


@dataclass(frozen=True)
class Check:
    """A cache after a request of `tokens` tokens: bytes of its pages (`stored`) and of the memory behind them (`allocated`), as
    they were predicted and as they are."""

    cache: str
    tokens: int
    predicted_stored: int
    stored: int
    predicted_allocated: int
    allocated: int

    @property
    def agrees(self) -> bool:
        return (self.predicted_stored, self.predicted_allocated) == (self.stored, self.allocated)


def verify(
    model,
    caches: Caches,
    *,
    dtype: torch.dtype | None = None,
    lengths: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> list[Check]:
    """Fill every cache on `device` with requests of some lengths, and compare.

    Keys and values are zeros in the shapes of the model's config: no model runs. (What layers with a state keep is not
    stored in pages, and not part of this.)

    Args:
        lengths: tokens; None for those around the edges of the first blocks.

    Raises:
        ConfigurationError: for a cache that is none of ours.
    """
    known, device = models.load(model, dtype), torch.device(device)
    checks = []
    for name in caches:
        made = caches[name] if isinstance(caches, Mapping) else name
        asked, rehearsed, real = (build(made, known.config) for _ in range(3))
        footprint = PagedFootprint(asked, known.dtype, device)
        bind(rehearsed, known.dtype, device)
        for tokens in lengths or edges(real):
            held = footprint.held([tokens])
            rehearsed.storage.rehearse(np.array([tokens]))
            fill(real, tokens, known.dtype, device)
            report, stores = real.memory(), [s for group in rehearsed.storage.groups for s in group.store.stores]
            allocated = sum(store.expected_bytes() for store in stores)
            stored = int(held.device[0] + held.cold.sum())
            checks.append(Check(name, tokens, stored, report.stored, allocated, report.allocated))
            rehearsed.reset()
            real.reset()
    return checks


def edges(cache: KVCache) -> list[int]:
    """Lengths around the ends of a cache's first blocks, and past the shorter ones of its windows and resident tokens."""
    size = cache.block_size
    lengths = {1, max(1, size - 1), size, size + 1, 3 * size, 4 * size + 3}
    for group in cache.storage.groups:
        bounds = [group.retention.window, group.tier.resident_tokens]
        lengths |= {bound + size + 1 for bound in bounds if bound is not None and bound <= MOST}
    return sorted(lengths)


def fill(cache: KVCache, tokens: int, dtype: torch.dtype, device: torch.device, batch: int = 1) -> None:
    """Append `tokens` tokens of zeros in every layer, in one pass."""
    for layer in filter(None, cache.storage.layers):
        shape = (batch, layer.spec.kv_heads, tokens)
        dims = layer.spec.k_dim, layer.spec.v_dim
        layer.append(*(torch.zeros(*shape, dim, dtype=dtype, device=device) for dim in dims))
