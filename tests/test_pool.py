"""A pool that is full: what makes room, what is refused, what it says about itself. Block tables without tensors, so that long
lives cost little."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from hf_kvcache import BlockPool, CacheStateError, CapacityError, ConfigurationError, capacity
from hf_kvcache.blocks import Attached, BlockTable
from hf_kvcache.codecs import NativeCodec
from hf_kvcache.metrics import ReuseCounter
from hf_kvcache.prefix import Group, digest

from .architectures import build
from .forcing import forced, ours, text

BLOCK = 4


class Tables:
    """Rows of one native layer group in a pool, as sessions use them, with neither model nor tensors."""

    def __init__(self, blocks: int | None, window: int | None = None, clock=lambda: 0.0):
        tokens = None if blocks is None else blocks * BLOCK
        self.pool = BlockPool(capacity_tokens=tokens, block_size=BLOCK, clock=clock)
        self.group = self.pool.group((0,), NativeCodec(), BLOCK, None, NativeCodec())
        self.store, self.window = self.group.open, window

    def root(self):
        return self.pool.prefixes.root(digest(), BLOCK, [Group(self.store, self.window)])

    def start(self, tokens: list[int]) -> Row:
        """A row that begins with what is known of `tokens`, and appends the rest."""
        row = Row(self)
        with self.pool.lock:
            match = self.pool.prefixes.match(self.root(), np.array(tokens))
            length = match.longest(len(tokens) - 1)
            sinks, recent = match.kept(0, length)
            row.table.attach([Attached(match.pages(0, [*sinks, *recent]), recent.start * BLOCK, length)])
        row.tokens, row.hit = tokens[:length], length
        row.tail = match.nodes[length // BLOCK - 1] if length >= BLOCK else match.root
        try:
            row.append(tokens[length:])
        except CapacityError:
            row.stop()
            raise
        return row

    def evictable(self) -> list[int]:
        """Pages at rest, in the order in which they came to rest."""
        slots = [slot for slot in self.pool.prefixes.slots.values() if slot.order is not None]
        return [slot.page for slot in sorted(slots, key=lambda slot: slot.order)]


class Row:
    def __init__(self, tables: Tables):
        self.tables, self.tokens, self.tail = tables, [], tables.root()
        self.table = BlockTable(tables.group, tables.pool, window=tables.window)
        self.table.keep_beyond_window(BLOCK)

    def append(self, tokens: list[int]) -> None:
        """One pass, after which full blocks are published."""
        pool, group = self.tables.pool, self.tables.group
        with pool.lock:
            plans, demand = self.table.prepare(1, np.array([len(tokens)]), keep_new=len(tokens) == 1)
            self.table.commit(plans, pool.reserve([(group, demand)])[0])
            self.tokens = self.tokens + tokens
            root = self.tables.root()
            if not self.tail.alive or not self.tail.depth:
                self.tail = root
            sealed = self.table.sealed_blocks(0, self.tail.depth)
            for part, media in root.cut(np.array(self.tokens), (), self.tail.depth):
                self.tail = pool.publish(root, self.tail, part, media, [sealed.get(self.tail.depth)])

    def pages(self) -> list[int]:
        return self.table.ids[0, : self.table.n_entries[0]].tolist() if self.table.rows else []

    def stop(self) -> None:
        self.table.clear()


# ---- the order of giving up ------------------------------------------------------------------------------------------


def test_the_published_example_of_ten_blocks():
    """vLLM's design document of prefix caching follows ten blocks of four tokens through three requests. Its one queue has
    blocks with and without contents; here those without come first, and the rest has the same order."""
    published = [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    tables, text, names = Tables(10), list(range(100, 129)), {}

    def named(pages: list[int]) -> list[int]:
        return [names.setdefault(page, len(names)) for page in pages]

    first = tables.start(text[:15])
    assert named(first.pages()) == [0, 1, 2, 3]
    first.append([text[15]])
    first.append([text[16]])
    assert named(first.pages()) == [0, 1, 2, 3, 4]
    second = tables.start([*text[:10], 1, 2, 3, 4])
    assert second.hit == 10 and named(second.pages()) == [0, 1, 5, 6], "two blocks shared, the third copied in part"
    second.table.settle()  # the block it was copied from was read by its first pass
    first.stop()
    assert named(tables.evictable()) == [3, 2] and named(tables.store.free) == [4]
    second.stop()
    assert named(tables.evictable()) == [block for block in published if block not in (7, 8, 9, 4, 6)]
    assert named(tables.store.free) == [4, 6] and len(tables.store.refs) == 7, "7, 8 and 9 were never made"
    third = tables.start([*text[:12], *range(200, 217)])
    assert third.hit == 12 and named(third.pages()[:3]) == [0, 1, 2]
    assert sorted(named(third.pages()[3:])) == [4, 6, 7, 8, 9] and named(tables.evictable()) == [3, 5], (
        "nothing had to go"
    )
    third.append(list(range(5)))
    assert named(tables.evictable()) == [5] and tables.pool.prefixes.evicted == {"capacity": 1}, "block 3 was next"
    tables.pool.check_integrity()


def test_a_full_pool_gives_up_the_oldest_tails_and_only_as_many_as_it_needs():
    tables = Tables(10)
    for number in range(3):
        tables.start([number] * 12).stop()
    assert tables.store.used == 9
    row = tables.start([7] * 10)  # 3 blocks: one is free
    assert tables.pool.prefixes.evicted["capacity"] == 2
    assert [tables.start([number] * 13).hit if number else None for number in (2, 1)] == [12, 12]
    row.stop()
    tables.pool.check_integrity()


def test_without_a_limit_nothing_is_given_up():
    tables = Tables(None)
    for number in range(50):
        tables.start([number] * 40).stop()
    assert not tables.pool.prefixes.evicted and tables.store.used == 500
    assert tables.start([0] * 41).hit == 40


def test_a_refusal_gives_up_nothing_and_says_how_long_a_context_may_be():
    tables = Tables(10)
    live = tables.start([1] * 18)
    tables.start([2] * 12).stop()
    before = tables.evictable()
    with pytest.raises(
        CapacityError, match=r"6 more blocks of 4 .* 2 of 10 are free and 3 evictable.* 20 more"
    ) as caught:
        tables.start([3] * 24)
    assert (caught.value.needed, caught.value.available, caught.value.evictable) == (24, 20, 12)
    assert tables.evictable() == before and tables.pool.failures == 1 and not tables.pool.prefixes.evicted
    tables.start([3] * 20)
    assert tables.store.used == 10 and live.table.length[0] == 18
    tables.pool.check_integrity()


def test_a_window_gives_its_blocks_up_one_by_one_and_keeps_the_newest():
    tables = Tables(8, window=7)
    row = tables.start([1] * 4)
    for token in range(60):
        row.append([token])
        assert tables.store.used <= 8
    assert tables.pool.prefixes.evicted["capacity"] > 5
    row.stop()
    assert tables.start([*row.tokens, 0]).hit == 64
    tables.pool.check_integrity()


def test_dropping_prefixes_refuses_while_they_are_in_use():
    tables = Tables(10)
    row = tables.start([1] * 9)
    with pytest.raises(CacheStateError, match="2 cached blocks are in use"):
        tables.pool.drop_prefixes()
    assert tables.start([1] * 9).hit == 8
    row.stop()


def test_dropped_prefixes_leave_no_bytes_behind():
    tables = Tables(10)
    tables.start([1] * 12).stop()
    tables.pool.drop_prefixes()
    assert tables.store.used == 0 and tables.start([1] * 12).hit == 0
    assert tables.pool.metrics().evictions == {"dropped": 3}
    tables.pool.check_integrity()


# ---- long lives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 9])
def test_long_lives_in_a_full_pool_leak_nothing(window):
    generator, tables = random.Random(0), Tables(40, window)
    rows, done, refused = [], 0, 0
    while done < 5000:  # operations, most of which append and publish
        choice = generator.random()
        done += 1
        try:
            if choice < 0.2 and len(rows) < 6:
                tokens = [generator.randrange(3) for _ in range(generator.randrange(2, 40))]
                rows.append(tables.start([0] * generator.choice([0, 8, 16]) + tokens))
            elif choice < 0.9 and rows:
                row = generator.choice(rows)
                row.append([generator.randrange(3) for _ in range(generator.choice([1, 1, 1, 6]))])
            elif rows:
                rows.pop(generator.randrange(len(rows))).stop()
        except CapacityError:
            refused += 1
            if rows:
                rows.pop(generator.randrange(len(rows))).stop()
        if any(len(row.tokens) > 120 for row in rows):
            rows = [row for row in rows if len(row.tokens) <= 120 or row.stop()]
        if done % 200 == 0:
            tables.pool.check_integrity()
    assert (refused > 10 or window) and tables.pool.prefixes.evicted["capacity"] > 1000
    for row in rows:
        row.stop()
    tables.pool.drop_prefixes()
    tables.pool.check_integrity()
    assert tables.store.used == 0 and not tables.pool.prefixes.slots and not tables.pool.prefixes.roots


def test_waste_is_half_a_block_for_each_sequence():
    """1,000 log-normal lengths of 300 tokens on average: (block - 1) / 2 of the slots are empty, 2.4 %."""
    generator = np.random.default_rng(0)
    sigma = 0.8
    lengths = np.maximum(1, generator.lognormal(math.log(300) - sigma**2 / 2, sigma, 1000)).astype(int)
    assert 280 < lengths.mean() < 320
    pool = BlockPool(block_size=16)
    group = pool.group((0,), NativeCodec(), 16, False, NativeCodec())
    table = BlockTable(group, pool)
    with pool.lock:
        plans, demand = table.prepare(len(lengths), lengths, keep_new=False)
        table.commit(plans, pool.reserve([(group, demand)])[0])
    found = pool.metrics()
    assert found.resident_tokens == lengths.sum() and found.resident_slots == 16 * found.blocks_used
    waste = 1 - found.resident_tokens / found.resident_slots
    assert waste < 0.04 and waste == pytest.approx(7.5 / (lengths.mean() + 7.5), rel=0.1)


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_admission_is_what_allocation_then_does():
    model = ours("gemma2")
    config = model.config
    for limit in ({"capacity_tokens": 80}, {"capacity_bytes": 14_000}):
        pool = BlockPool(config, block_size=4, **limit)
        longest = max(n for n in range(1, 200) if pool.can_admit([n]))
        forced(model, pool.session(), text(1, longest))
        with pytest.raises(CapacityError, match=f"longest context that fits is {longest} tokens"):
            forced(model, pool.session(), text(1, longest + 1))
        assert pool.can_admit([1]) and not pool.can_admit([longest, 4])


@pytest.mark.parametrize(
    "options", [{"memory_fraction": 0.9}, {"memory_fraction": 0.5, "capacity_bytes": 100}, {"memory_fraction": 1.5}]
)
def test_a_share_of_memory_that_makes_no_sense(options):
    model = build("llama")
    given = options if len(options) == 1 and options["memory_fraction"] < 1 else options | {"model": model}
    with pytest.raises(ConfigurationError, match="memory_fraction"):
        BlockPool(model.config, **given)


def test_a_share_of_the_memory_that_is_free():
    model = build("llama")
    whole = BlockPool(model.config, memory_fraction=1.0, model=model).capacity_bytes
    half = BlockPool(model.config, memory_fraction=0.5, model=model).capacity_bytes
    assert 0 < half < whole and 0.3 < half / whole < 0.6


def test_limits_of_control_groups_count(tmp_path):
    own, group = tmp_path / "own", tmp_path / "root" / "a" / "b"
    group.mkdir(parents=True)
    own.write_text("1:cpu:/x\n0::/a/b\n")
    for folder, numbers in ((group, ("max", "5", "7")), (group.parent, ("1000", "300", "70"))):
        for name, number in zip(("max", "current", "stat"), numbers, strict=True):
            (folder / f"memory.{name}").write_text(
                f"anon 3\ninactive_file {number}\n" if name == "stat" else f"{number}\n"
            )
    assert list(capacity._limits_leave(own, tmp_path / "root")) == [770]
    assert list(capacity._limits_leave(tmp_path / "none", tmp_path / "root")) == []


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_count_what_happened():
    now = [0.0]
    tables = Tables(10, clock=lambda: now[0])
    first = tables.start([1] * 10)
    second = tables.start([1] * 10)
    found = tables.pool.metrics()
    assert (found.blocks_used, found.blocks_shared, found.blocks_cached, found.blocks_evictable) == (4, 2, 2, 0)
    assert (found.resident_tokens, found.resident_slots, found.occupancy) == (20, 16, 0.4)
    first.stop()
    second.stop()
    now[0] = 5.0
    third = tables.start([1] * 10)
    third.stop()
    now[0] = 30.0
    tables.start([2] * 40).stop()
    found = tables.pool.metrics()
    assert found.evictions == {"capacity": 2}
    assert (found.reuse_gap.count, found.reuse_gap.total) == (2, 10.0)
    assert (found.block_lifetime.count, found.block_lifetime.total) == (2, 60.0)
    assert found.blocks_evictable == 10 and found.occupancy == 1.0


def test_the_recent_hit_rate_covers_the_last_thousand_queries():
    counter = ReuseCounter()
    for number in range(1500):
        counter.add(10, 10 if number < 1000 else 5)
    found = counter.metrics()
    assert (found.queries, found.tokens, found.hits) == (1500, 15_000, 12_500)
    assert (found.recent_tokens, found.recent_hits, found.recent_hit_rate) == (10_000, 7500, 0.75)


def test_the_text_for_prometheus_parses():
    tables = Tables(4)
    tables.start([1] * 16).stop()
    tables.start([2] * 16).stop()
    values, kinds = {}, {}
    for line in tables.pool.metrics().prometheus().splitlines():
        if line.startswith("#"):
            _, word, name, kind = line.split(" ")
            assert word == "TYPE" and kind in ("gauge", "counter", "histogram")
            kinds[name] = kind
        else:
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
            family = name.split("{")[0]
            assert any(family.removesuffix(end) in kinds for end in ("", "_bucket", "_sum", "_count"))
    assert values['hf_kvcache_evictions_total{reason="capacity"}'] == 4
    assert values['hf_kvcache_block_lifetime_seconds_bucket{le="+Inf"}'] == 4
    assert values["hf_kvcache_occupancy_ratio"] == 1
    buckets = [values[name] for name in values if name.startswith("hf_kvcache_block_lifetime_seconds_bucket")]
    assert buckets == sorted(buckets)
