"""Random lives of a batch, checked after every step against plain tensors: nothing leaks, nothing changes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from transformers import LlamaConfig

import hf_kvcache
from hf_kvcache import BlockPool, CacheStateError, CapacityError, DiskTier, HostTier, KVCache, PagedCache, Window

HEADS, DIM, LAYERS = 2, 8, 2
CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=HEADS * DIM,
    intermediate_size=16,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
)
LIVES = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
    ),  # shrinking a life of thirty steps takes minutes: seek by hand
)


@dataclass
class Plain:
    """What a cache must hold: for each row and layer the keys `[heads, tokens, dim]` that went in."""

    rows: list[list[torch.Tensor]] = field(default_factory=list)
    sealed: int = 0  # positions below may have been sealed at some time; a crop does not unseal them

    def copy(self) -> Plain:
        return Plain([list(layers) for layers in self.rows], self.sealed)

    @property
    def length(self) -> int:
        return self.rows[0][0].shape[1] if self.rows else 0


def append(cache: KVCache, plain: Plain, batch: int, n: int, seed: int) -> None:
    """One pass of `n` random tokens through every layer, values being the negated keys."""
    generator = torch.Generator().manual_seed(seed)
    keys = [torch.randn((batch, HEADS, n, DIM), generator=generator) for _ in range(LAYERS)]
    for layer, k in enumerate(keys):
        cache.update(k, -k, layer)
    if not plain.rows:
        plain.rows = [[torch.zeros((HEADS, 0, DIM)) for _ in range(LAYERS)] for _ in range(batch)]
    if len(plain.rows) == 1 < batch:
        plain.rows = [list(plain.rows[0]) for _ in range(batch)]
    for b, row in enumerate(plain.rows):
        for layer in range(LAYERS):
            row[layer] = torch.cat([row[layer], keys[layer][b]], dim=1)
    plain.sealed = max(plain.sealed, plain.length - cache.residual)


def held(cache: KVCache, row: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and keys that the cache holds for a row, read page by page."""
    storage = cache.storage.layers[layer]
    table, group = storage.group.table, storage.group
    positions, keys = [], []
    for store, lo, hi in table.ranges(row):
        pages = store.layer(storage.index)
        for e in range(lo, hi):
            first, count = int(table.first[row, e]), int(table.first[row, e + 1] - table.first[row, e])
            k, v = pages.decode(table.ids[row, e : e + 1])
            if store.codec.lossless:
                assert torch.equal(v[0, :, :count], -k[0, :, :count])
            sink_end = int(table.first[row, np.searchsorted(table.first[row, : table.n_entries[row]], table.sinks)])
            positions += [p + (int(table.gap[row]) if p >= sink_end else 0) for p in range(first, first + count)]
            keys.append(k[0, :, :count])
    assert group.table.length[row] == (positions[-1] + 1 if positions else 0)
    return torch.tensor(positions, dtype=torch.int64), torch.cat(keys, dim=1) if keys else torch.zeros((HEADS, 0, DIM))


class Lives(RuleBasedStateMachine):
    """Caches that share one poisoned pool, live random lives, and are compared with plain tensors after every step."""

    caches = Bundle("caches")
    choices: dict = {}  # noqa: RUF012 - set by each concrete machine
    tolerance = 0.0

    @initialize()
    def start(self):
        self.pool = BlockPool(CONFIG, poison=True)
        self.twins: list[tuple[KVCache, Plain]] = []

    def make(self) -> KVCache:
        return KVCache(CONFIG, block_size=8, pool=self.pool, **self.choices)

    @rule(target=caches, batch=st.integers(1, 3), n=st.integers(1, 40), seed=st.integers(0, 9999))
    def create(self, batch, n, seed):
        pair = (self.make(), Plain())
        append(*pair, batch, n, seed)
        self.twins.append(pair)
        return pair

    @rule(pair=caches, n=st.integers(1, 70), seed=st.integers(0, 9999))
    def grow(self, pair, n, seed):
        cache, plain = pair
        append(cache, plain, max(1, len(plain.rows)), n, seed)

    @rule(pair=caches, n=st.integers(1, 9), seed=st.integers(0, 9999))
    def decode(self, pair, n, seed):
        for i in range(n):
            append(*pair, max(1, len(pair[1].rows)), 1, seed + i)

    @rule(pair=caches, cut=st.integers(0, 90))
    def crop(self, pair, cut):
        cache, plain = pair
        before = cache.stats()
        try:
            cache.crop(-cut)
        except CacheStateError:
            assert cache.choices["retention"].window is not None and cache.stats() == before
            return
        left = max(0, plain.length - cut)
        plain.rows = [[k[:, :left] for k in row] for row in plain.rows] if left else []
        plain.sealed = plain.sealed if left else 0

    @rule(pair=caches, data=st.data())
    def reorder(self, pair, data):
        cache, plain = pair
        if plain.rows:
            rows = data.draw(st.lists(st.integers(0, len(plain.rows) - 1), min_size=1, max_size=4))
            cache.batch_select_indices(torch.tensor(rows))
            plain.rows = [list(plain.rows[r]) for r in rows]

    @rule(pair=caches, repeats=st.integers(1, 2))
    def repeat(self, pair, repeats):
        cache, plain = pair
        if plain.rows and len(plain.rows) * repeats <= 6:
            cache.batch_repeat_interleave(repeats)
            plain.rows = [list(row) for row in plain.rows for _ in range(repeats)]

    @rule(target=caches, pair=caches)
    def fork(self, pair):
        if len(self.twins) > 5:
            return multiple()
        twin = (pair[0].fork(), pair[1].copy())
        self.twins.append(twin)
        return twin

    @rule(pair=caches)
    def record(self, pair):
        pair[0].activate_past_recording()

    @rule(pair=caches)
    def reset(self, pair):
        pair[0].reset()
        pair[1].rows, pair[1].sealed = [], 0

    @rule(pair=consumes(caches))
    def free(self, pair):
        self.twins = [twin for twin in self.twins if twin is not pair]
        pair[0].reset()

    @invariant()
    def nothing_leaks(self):
        if hasattr(self, "pool"):
            self.pool.check_integrity()

    @invariant()
    def contents_equal_the_model(self):
        for cache, plain in getattr(self, "twins", []):
            assert cache.storage.columns == plain.length and cache.storage.batch in (len(plain.rows), 0)
            for b, row in enumerate(plain.rows):
                for layer in range(LAYERS):
                    self.compare(cache, b, row[layer], plain.sealed, *held(cache, b, layer))

    def compare(self, cache, row, expected, sealed, positions, keys):
        rule, n = cache.choices["retention"], expected.shape[1]
        kept = set(positions.tolist())
        must = (
            set(range(n))
            if rule.window is None
            else {*range(min(rule.sinks, n)), *range(max(0, n + 1 - rule.window), n)}
        )
        assert must <= kept <= set(range(n)), f"row {row} of {n} tokens lacks {sorted(must - kept)}"
        if self.tolerance == 0.0:
            assert torch.equal(keys, expected[:, positions])
        else:
            exact = positions >= sealed
            assert torch.equal(keys[:, exact], expected[:, positions][:, exact])
            assert (keys - expected[:, positions]).abs().max() <= self.tolerance

    def teardown(self):
        if hasattr(self, "pool"):
            for cache, _ in self.twins:
                cache.reset()
            self.pool.check_integrity()
            assert all(store.used == 0 for group in self.pool.groups.values() for store in group.stores)
            assert self.pool.nbytes() == 0


MACHINES = {
    "native": {},
    "window": {"retention": Window(12, 3)},
    "window_without_sinks": {"retention": Window(9, 0)},
    "host": {"tier": HostTier(10)},
    "host_window": {"tier": HostTier(4), "retention": Window(30, 5)},
    "int8": {"codec": "int8", "residual": 5},
    "disk_after_host": {"tier": DiskTier(10, host_bytes=20_000)},
    "int8_host_window": {"codec": "int8", "residual": 8, "tier": HostTier(16), "retention": Window(40, 2)},
}
for name, choices in MACHINES.items():
    tolerance = 0.02 if "codec" in choices else 0.0  # half a step of 255 over a spread of at most 9
    machine = type(f"Lives_{name}", (Lives,), {"choices": choices, "tolerance": tolerance})
    machine.TestCase.settings = LIVES
    globals()[f"Test_{name}"] = machine.TestCase


def test_growing_moves_no_block():
    cache, plain = PagedCache(CONFIG), Plain()
    append(cache, plain, 1, 40, 0)
    storage = cache.storage.layers[0]
    before = storage.group.store.open.layer(0).addresses[storage.group.table.ids[0, :3]].copy()
    for i in range(200):
        append(cache, plain, 1, 1, i)
    after = storage.group.store.open.layer(0).addresses[storage.group.table.ids[0, :3]]
    assert (before == after).all()


def test_blocks_in_use_are_the_fewest_that_hold_the_tokens():
    cache, plain = PagedCache(CONFIG), Plain()
    for n in (1, 14, 1, 1, 30, 1, 16):
        append(cache, plain, 3, n, n)
        used = cache.storage.groups[0].store.open.used
        assert used == 3 * -(-plain.length // 16)
        assert cache.memory().stored == used * 16 * HEADS * 2 * DIM * 4 * LAYERS


def test_writing_to_a_shared_open_block_copies_exactly_that_block():
    cache, plain = PagedCache(CONFIG), Plain()
    append(cache, plain, 1, 40, 0)
    fork = cache.fork()
    store = cache.storage.groups[0].store.open
    assert store.used == 3
    append(fork, plain.copy(), 1, 1, 1)
    fork.stats()  # settles what the pass still read
    assert store.used == 4


@pytest.mark.parametrize("limit", ["tokens", "bytes"])
def test_a_full_pool_refuses_and_changes_nothing(limit):
    page = 16 * HEADS * 2 * DIM * 4 * LAYERS
    pool = BlockPool(CONFIG, capacity_tokens=64) if limit == "tokens" else BlockPool(CONFIG, capacity_bytes=4 * page)
    cache, plain = PagedCache(CONFIG, pool=pool), Plain()
    append(cache, plain, 1, 60, 0)
    before = cache.stats()
    with pytest.raises(CapacityError, match=r"0 of 4 are free|bytes are needed") as error:
        append(cache, Plain(), 1, 5, 1)
    assert error.value.unit == limit and error.value.needed > error.value.available
    assert cache.stats() == before and pool.groups[next(iter(pool.groups))].open.used == 4
    append(cache, plain, 1, 4, 2)  # what fits still goes in
    pool.check_integrity()
    assert torch.equal(held(cache, 0, 1)[1], plain.rows[0][1])


@pytest.mark.parametrize(("codec", "retention"), [(None, None), (8, None), (None, "window")])
def test_a_limit_in_tokens_reserves_what_a_cache_of_everything_can_hold(codec, retention):
    pool = BlockPool(CONFIG, capacity_tokens=256)
    cache = hf_kvcache.KVCache(CONFIG, codec=codec, retention=retention, block_size=8, pool=pool)
    sealed, opened = cache.storage.groups[0].store.sealed, cache.storage.groups[0].store.open
    append(cache, Plain(), 1, 16, 0)
    assert [size for size in sealed.slab_sizes if size] == ([2] if retention else [32])
    addresses = {page.addresses[:32].tobytes() for page in sealed.pages}
    for i in range(100):
        append(cache, Plain(), 1, 1, i)
    if not retention:
        assert {page.addresses[:32].tobytes() for page in sealed.pages} == addresses, "a step allocated"
    assert codec is None or len(opened.refs) < 8, "open pages are few, and made as they are needed"
    cache.reset()
    assert pool.nbytes() == 0


def test_a_full_pool_still_seals_what_it_holds():
    pool = BlockPool(CONFIG, capacity_tokens=32)
    cache = hf_kvcache.QuantizedCache(CONFIG, bits=8, residual=0, block_size=8, pool=pool)
    for i in range(32):
        append(cache, Plain(), 1, 1, i)
    assert cache.stats()["tokens_sealed"] == 32


def test_every_token_is_sealed_once():
    cache, plain = hf_kvcache.QuantizedCache(CONFIG, bits=4, residual=8, block_size=8), Plain()
    append(cache, plain, 2, 50, 0)
    for i in range(40):
        append(cache, plain, 2, 1, i)
        cache.reorder_cache(torch.tensor([1, 0]))
        plain.rows.reverse()
    cache.fork()
    sealed = cache.stats()["tokens_sealed"]
    assert sealed == 2 * (90 - 8) // 8 * 8
    for row in range(2):
        n = sum(hi - lo for store, lo, hi in cache.storage.groups[0].table.ranges(row) if not store.codec.lossless)
        assert n == sealed // 2 // 8


def test_a_block_that_rows_share_is_sealed_once():
    cache = hf_kvcache.QuantizedCache(CONFIG, bits=8, residual=8, block_size=8)
    plain = Plain()
    append(cache, plain, 1, 16, 0)
    cache.batch_repeat_interleave(3)
    plain.rows = plain.rows * 3
    store = cache.storage.groups[0].store
    assert (store.sealed.used, store.open.used) == (1, 1)
    append(cache, plain, 3, 8, 1)
    cache.stats()
    assert (store.sealed.used, store.open.used) == (2, 3)
    cache.check_integrity()
