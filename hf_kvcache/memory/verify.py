"""Predictions against the machine at hand: caches are filled, and what they hold is compared with what was planned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..cache import KVCache
from . import models
from .footprint import PagedFootprint, bind
from .planner import Caches, build


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
        cache = caches[name] if isinstance(caches, Mapping) else name
        make = functools.partial(build, cache, known.config)
        for tokens in lengths or edges(make().block_size):
            checks.append(_check(name, make, tokens, known.dtype, device))
    return checks


def _check(name: str, make: Callable[[], KVCache], tokens: int, dtype: torch.dtype, device: torch.device) -> Check:
    held = PagedFootprint(make(), dtype, device).held([tokens])
    rehearsed, real = bind(make(), dtype, device), make()
    rehearsed.storage.rehearse(np.array([tokens]))
    fill(real, tokens, dtype, device)
    stores = [store for group in rehearsed.storage.groups for store in group.store.stores]
    report = real.memory()
    return Check(
        cache=name,
        tokens=tokens,
        predicted_stored=int(held.device[0] + held.host[0]),
        stored=report.stored,
        predicted_allocated=sum(store.expected_bytes() for store in stores),
        allocated=report.allocated,
    )


def edges(block_size: int) -> tuple[int, ...]:
    """Lengths around the ends of the first blocks."""
    return 1, max(1, block_size - 1), block_size, block_size + 1, 3 * block_size, 4 * block_size + 3


def fill(cache: KVCache, tokens: int, dtype: torch.dtype, device: torch.device, batch: int = 1) -> None:
    """Append `tokens` tokens of zeros in every layer, in one pass."""
    for layer in filter(None, cache.storage.layers):
        shape = (batch, layer.spec.kv_heads, tokens)
        dims = layer.spec.k_dim, layer.spec.v_dim
        layer.append(*(torch.zeros(*shape, dim, dtype=dtype, device=device) for dim in dims))
