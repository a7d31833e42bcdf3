"""What a pool can say about itself: numbers at one moment, and as text for Prometheus."""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

RECENT = 1000  # queries that the recent hit rate covers
BOUNDS = (0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0)  # seconds


class Histogram:
    """How many durations were at most each of `BOUNDS` seconds, their number and their sum."""

    def __init__(self):
        self.counts, self.total = [0] * (len(BOUNDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> Histogram:
        twin = Histogram()
        twin.counts, twin.total = list(self.counts), self.total
        return twin

    def lines(self, name: str) -> Iterator[str]:
        """As Prometheus writes a histogram: cumulative."""
        passed = 0
        for bound, count in zip((*BOUNDS, "+Inf"), self.counts, strict=True):
            passed += count
            yield f'{name}_bucket{{le="{bound}"}} {passed}'
        yield f"{name}_sum {self.total}"
        yield f"{name}_count {passed}"


@dataclass(frozen=True)
class ReuseMetrics:
    """What was looked up and found.

    Attributes:
        queries: prompts looked up.
        tokens: their tokens; `hits`: those of them that needed no computation.
        recent_tokens, recent_hits: the same over the last 1,000 queries.
    """

    queries: int
    tokens: int
    hits: int
    recent_tokens: int
    recent_hits: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.tokens if self.tokens else 0.0

    @property
    def recent_hit_rate(self) -> float:
        return self.recent_hits / self.recent_tokens if self.recent_tokens else 0.0


@dataclass
class ReuseCounter:
    """Counts what `ReuseMetrics` tells."""

    queries: int = 0
    tokens: int = 0
    hits: int = 0
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, tokens: int, hits: int) -> None:
        self.queries, self.tokens, self.hits = self.queries + 1, self.tokens + tokens, self.hits + hits
        self.recent.append((tokens, hits))

    def metrics(self) -> ReuseMetrics:
        tokens, hits = (sum(numbers) for numbers in zip(*self.recent, strict=True)) if self.recent else (0, 0)
        return ReuseMetrics(self.queries, self.tokens, self.hits, tokens, hits)


@dataclass(frozen=True)
class TierMetrics:
    """A tier behind the device at one moment. A block counts once for each group of layers.

    Attributes:
        blocks, bytes: what it holds.
        stores, restores: blocks that came to it, and that came back to the device from it.
        evictions: blocks given up for lack of room, whether they went to a slower tier or nowhere.
        failures: stores and reads that went wrong, damaged blocks among them. Each was a block less to be found.
    """

    blocks: int
    bytes: int
    stores: int
    restores: int
    evictions: int
    failures: int


@dataclass(frozen=True)
class PoolMetrics:
    """A pool at one moment. A block counts once for each group of layers: a pool of caches whose layers are all alike has
    one group.

    Attributes:
        blocks_used: blocks that a cache or the prefix index refers to.
        blocks_shared: those that more than one row of a cache refers to.
        blocks_cached: those that the prefix index names; `blocks_evictable` of them can make room, `blocks_pinned`
            cannot.
        resident_tokens: positions that rows hold, a shared one once for each of them (logical).
        resident_slots: slots of the blocks used (physical).
        bytes_used, bytes_allocated: of those blocks on the device, and of all memory behind the pool.
        occupancy: share of the pool's limit that is used; of the tighter one where there are two; None without.
        reuse: what was looked up and found.
        evictions: blocks given up, by reason.
        allocation_failures: passes refused for lack of room.
        block_lifetime: seconds from when a block was entered into the index to when it was given up.
        reuse_gap: seconds from when a block was last in use to when it was used again.
        tiers: what each tier behind the device says, by name. (A ladder that serves several pools says it to each.)
    """

    blocks_used: int
    blocks_shared: int
    blocks_cached: int
    blocks_evictable: int
    blocks_pinned: int
    resident_tokens: int
    resident_slots: int
    bytes_used: int
    bytes_allocated: int
    occupancy: float | None
    reuse: ReuseMetrics
    evictions: Counter[str]
    allocation_failures: int
    block_lifetime: Histogram
    reuse_gap: Histogram
    tiers: dict[str, TierMetrics]

    def prometheus(self) -> str:
        """The text that a Prometheus server scrapes."""
        lines = []

        def add(name: str, kind: str, value) -> None:
            lines.append(f"# TYPE hf_kvcache_{name} {kind}")
            values = value if isinstance(value, dict) else {"": value}
            lines.extend(f"hf_kvcache_{name}{label} {number}" for label, number in values.items())

        for name in ("blocks_used", "blocks_shared", "blocks_cached", "blocks_evictable", "blocks_pinned",
                     "resident_tokens", "resident_slots", "bytes_used", "bytes_allocated"):  # fmt: skip
            add(name, "gauge", getattr(self, name))
        if self.occupancy is not None:
            add("occupancy_ratio", "gauge", self.occupancy)
        add("prefix_queries_total", "counter", self.reuse.queries)
        add("prefix_query_tokens_total", "counter", self.reuse.tokens)
        add("prefix_hit_tokens_total", "counter", self.reuse.hits)
        add("prefix_recent_hit_ratio", "gauge", self.reuse.recent_hit_rate)
        add("evictions_total", "counter", {f'{{reason="{reason}"}}': n for reason, n in sorted(self.evictions.items())})
        add("allocation_failures_total", "counter", self.allocation_failures)
        for name in ("blocks", "bytes", "stores", "restores", "evictions", "failures") if self.tiers else ():
            kind, ending = ("gauge", "") if name in ("blocks", "bytes") else ("counter", "_total")
            values = {f'{{tier="{tier}"}}': getattr(said, name) for tier, said in self.tiers.items()}
            add(f"tier_{name}{ending}", kind, values)
        for name, histogram in (("block_lifetime_seconds", self.block_lifetime), ("reuse_gap_seconds", self.reuse_gap)):
            lines.append(f"# TYPE hf_kvcache_{name} histogram")
            lines.extend(histogram.lines(f"hf_kvcache_{name}"))
        return "\n".join(lines) + "\n"
