"""What a cache costs in memory, counted from its blocks and from the storages behind them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .blocks import BlockTable
from .storage import Storage


@dataclass(frozen=True)
class MemoryReport:
    """What a cache costs, in bytes unless said otherwise.

    Attributes:
        stored: pages that the cache refers to, scales and unused slots included.
        by_tier: the same by place (`device`, `host`, `disk`), plus `state` for what linear-attention layers keep.
        allocated: storages and spill files behind the cache's pool (shared with the other caches of that pool).
        plain: what a `DynamicCache` holds for the same tokens in the model's dtype.
        ratio: `stored / plain`.
        waste: share of the slots in the cache's blocks that hold no token.
    """

    stored: int
    by_tier: dict[str, int]
    allocated: int
    plain: int
    ratio: float
    waste: float


def report(storage: Storage, state_bytes: int) -> MemoryReport:
    """The report of one cache; `state_bytes` is what layers outside of the storage keep."""
    by_tier = {"device": 0, "host": 0, "disk": 0, "state": state_bytes}
    slots = tokens = 0
    for group in storage.groups:
        if storage.at_rest():  # in the middle of a pass there is nothing to tidy up
            group.table.settle()
        for store in group.store.stores:
            pages = np.unique(group.table.references(store))
            on_disk = int(store.on_disk(pages).sum())
            by_tier["device" if store.cold is None else "host"] += (len(pages) - on_disk) * store.page_bytes
            by_tier["disk"] += on_disk * store.page_bytes
            slots += len(pages) * group.store.block_size
        tokens += _distinct_tokens(group.table)
    plain = sum(layer.plain_bytes() for layer in storage.layers if layer is not None) + state_bytes
    stored = sum(by_tier.values())
    return MemoryReport(
        stored=stored,
        by_tier=by_tier,
        allocated=storage.pool.nbytes() + state_bytes,
        plain=plain,
        ratio=stored / plain if plain else 0.0,
        waste=1 - tokens / slots if slots else 0.0,
    )


def compressed(storage: Storage) -> float:
    """The share of what was written, over positions and layers, that a query no longer reads as it was: it is held in a lossy
    code, or a window has passed it (even where a block still holds it)."""
    written = changed = 0
    for group in storage.groups:
        table, rule, layers = group.table, group.retention, len(group.store.open.pages)
        passed = np.zeros_like(table.length)
        if rule.window is not None and not rule.native:
            passed = np.maximum(0, table.length - rule.window - rule.sinks)
        if not group.store.lossless:
            coded = np.take_along_axis(table.first, table.n_sealed[:, None], axis=1)[:, 0]
            passed = np.maximum(passed, table.gap + coded)
        written += layers * int(table.length.sum())
        changed += layers * int(passed.sum())
    return changed / written if written else 0.0


def _distinct_tokens(table: BlockTable) -> int:
    """Positions stored in the table's blocks, a block that several rows share counted once."""
    counts: dict[tuple[int, int], int] = {}
    for r in range(table.rows):
        for store, lo, hi in table.ranges(r):
            for e in range(lo, hi):
                key = (id(store), int(table.ids[r, e]))
                counts[key] = max(counts.get(key, 0), int(table.first[r, e + 1] - table.first[r, e]))
    return sum(counts.values())
