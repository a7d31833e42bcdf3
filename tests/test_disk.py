"""Cold blocks on disk: where they go, what is read when, and what happens when the file does not do as it should."""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_kvcache import (
    BlockPool,
    CacheStateError,
    CapacityError,
    ConfigurationError,
    DiskTier,
    HostTier,
    KVCache,
    OffloadedCache,
    QuantizedCache,
    TierError,
    files,
)
from hf_kvcache.cold import Place, SpillFile
from hf_kvcache.kernels import cpu
from hf_kvcache.tiers import disk

from .architectures import LINEAR
from .forcing import error, forced, ours, text, uncached

PAGE = 4 * 2 * 8 * 2 * 4  # bytes of a block of 4 tokens in one layer of the model below; a block has three


@pytest.fixture(scope="module")
def model():
    return ours()


@pytest.fixture(params=["native", "plain"])
def reader(request, monkeypatch) -> str:
    """Read by the C++ kernel, and by plain Python."""
    if request.param == "plain":
        monkeypatch.setattr(cpu, "load", lambda: None)
    elif cpu.load() is None:
        pytest.skip(cpu.status())
    return request.param


def spilled(model, folder, columns: int = 40, rows: int = 1, make=KVCache, **options) -> KVCache:
    """A cache of `columns` tokens, all but the newest 4 on disk, read two blocks at a time."""
    tier = DiskTier(**{"resident_tokens": 4, "path": folder, "chunk_bytes": 2 * PAGE * rows, **options})
    cache = make(model.config, block_size=4 if make is KVCache else 8, tier=tier)
    forced(model, cache, text(rows, columns))
    return cache


def spill(folder) -> Path | None:
    """The one spill file in a folder."""
    return next(iter(Path(folder).iterdir()), None)


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ring", "resident"), [(1, 8), (3, 0)])
@pytest.mark.parametrize("name", ["gemma2", "gemma3n_text", "qwen3_next", "deepseek_v3"])
def test_any_model_any_number_of_buffers(name, ring, resident, tmp_path):
    model, ids = ours(name), text(2, 40)
    tier = DiskTier(resident, tmp_path, ring=ring, chunk_bytes=600)
    cache = KVCache(model.config, block_size=4, tier=tier)
    assert error(forced(model, cache, ids, [20, 1, 1, 1, 5] + [1] * 12), uncached(model, ids)) < 1e-4
    assert cache.memory().by_tier["disk"] > 0 and cache.memory().by_tier["host"] == 0
    cache.check_integrity()


def written(config, tier) -> KVCache:
    """A cache of int4 blocks whose keys and values are the same whatever the tier."""
    generator = torch.Generator().manual_seed(0)
    cache = QuantizedCache(config, bits=4, block_size=8, residual=8, tier=tier)
    for n in (40, 9, 1, 1, 70, 1):
        for layer in range(3):
            cache.update(*torch.randn((2, 3, 2, n, 8), generator=generator), layer)
    return cache


@pytest.mark.parametrize("host_bytes", [0, 5 * 3 * PAGE, None])
@pytest.mark.parametrize("direct", [None, False], ids=["in-place", "copied"])
def test_bits_are_those_of_the_host_tier(model, tmp_path, host_bytes, direct):
    results = []
    for tier in (HostTier(8), DiskTier(8, tmp_path, host_bytes=host_bytes, chunk_bytes=3000, direct=direct)):
        cache = written(model.config, tier)
        table, store, held = cache.storage.groups[0].table, cache.storage.groups[0].store, cache.memory().by_tier
        ids = np.concatenate([table.ids[r, : table.n_cold[r]] for r in range(3)])
        fields = [store.cold.layer(layer).gather(ids) for layer in range(3)]
        results.append((fields, held, forced(model, cache, text(3, 9), [1, 8])))
    (fields, held, logits), (others, also_held, close) = results
    for layer, other in zip(fields, others, strict=True):
        assert all(torch.equal(layer[name], other[name]) for name in layer)
    assert error(close, logits) < 1e-5  # parts are added up in another order
    assert sum(held.values()) == sum(also_held.values()) and (also_held["disk"] > 0) == (host_bytes is not None)
    assert also_held["host"] <= (held["host"] if host_bytes is None else host_bytes)


def test_rows_that_share_blocks_read_them_once(model, tmp_path):
    cache = spilled(model, tmp_path, columns=43)
    cache.batch_repeat_interleave(3)
    fork = cache.fork()
    for each in (cache, fork):
        before, held = each.stats()["bytes_read"], each.memory().by_tier["disk"]
        forced(model, each, text(3, 1))
        assert each.stats()["bytes_read"] - before == each.memory().by_tier["disk"] >= held == 9 * 3 * PAGE
    cache.check_integrity()


@pytest.mark.parametrize(("bits", "most"), [("native", 1.0), (8, 0.4), (4, 0.25)])
def test_a_step_reads_every_cold_byte_once(model, tmp_path, bits, most):
    choice = {"codec": bits, "residual": 8, "block_size": 64}
    cache = KVCache(model.config, tier=DiskTier(64, tmp_path, chunk_bytes=5000), **choice)
    forced(model, cache, text(2, 300))
    stats, written = cache.stats(), cache.memory().by_tier["disk"]
    assert stats["bytes_written"] == written and stats["bytes_read"] == 0
    plain = stats["blocks_cold"] * 64 * 2 * 2 * 8 * 4 * 3
    assert written <= most * plain if bits != "native" else written == plain
    for step in range(1, 4):
        forced(model, cache, text(2, 1))
        assert cache.stats()["bytes_read"] == step * written


# ---- what is read when -----------------------------------------------------------------------------------------------


def test_the_next_chunks_are_read_while_one_is_attended_to(model, tmp_path, monkeypatch):
    """Four chunks in each of three layers, three buffers: whenever a kernel runs, the two reads that follow have begun,
    across the borders of layers too."""
    cache, events = spilled(model, tmp_path, columns=37, chunk_bytes=2 * PAGE), []
    assert cache.stats()["blocks_cold"] == 8
    submit, pages = SpillFile.submit, disk._Read.pages
    monkeypatch.setattr(SpillFile, "submit", lambda self, *a: events.append("begin") or submit(self, *a))
    monkeypatch.setattr(disk._Read, "pages", lambda self: events.append("arrive") or pages(self))
    forced(model, cache, text(1, 1))
    begun, seen = 0, []
    for event in events:
        begun += event == "begin"
        if event == "arrive":
            seen.append(begun)
    assert seen == [min(12, i + 3) for i in range(12)]


def test_what_a_pass_makes_cold_is_not_read_ahead(model, tmp_path):
    """Fresh cold blocks reach a layer's file when that layer appends; the layer before must not have them read."""
    cache, twin = spilled(model, tmp_path, columns=36), KVCache(model.config, block_size=4)
    forced(model, twin, text(1, 36))
    for length in (1, 5, 4, 11, 1, 1, 1, 1):
        ids = text(1, length, seed=length)
        assert error(forced(model, cache, ids), forced(model, twin, ids)) < 1e-4


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_host_memory_first_then_disk_then_an_error(model, tmp_path):
    block = 3 * PAGE
    cache = spilled(model, tmp_path, columns=4 + 6 * 4, host_bytes=4 * block + 100, disk_bytes=3 * block)
    assert {name: cache.memory().by_tier[name] for name in ("host", "disk")} == {"host": 4 * block, "disk": 2 * block}
    forced(model, cache, text(1, 4))
    assert cache.memory().by_tier["disk"] == 3 * block
    before, twin = cache.stats(), cache.fork()
    with pytest.raises(CapacityError, match=rf"host_bytes={4 * block + 100} and 0 of disk_bytes={3 * block}") as caught:
        forced(model, cache, text(1, 4))
    assert caught.value.needed == block and caught.value.available == 100 and "disk_path" in str(caught.value)
    assert "longest context that fits is" in str(caught.value)
    assert cache.stats() == before
    cache.crop(-8)  # gives two blocks of the fork's to nobody
    twin.reset()
    expected = KVCache(model.config, block_size=4)
    forced(model, expected, text(1, 24))
    more = text(1, 8, seed=1)
    assert error(forced(model, cache, more), forced(model, expected, more)) < 1e-4
    cache.check_integrity()


def test_limits_count_for_all_groups_of_layers(tmp_path):
    model = ours("gemma2")
    tier = DiskTier(4, tmp_path, disk_bytes=40000)
    cache = KVCache(model.config, block_size=8, tier=tier, layers={2: {"codec": "int8"}}, residual=4)
    with pytest.raises(CapacityError, match="disk_bytes=40000"):
        for _ in range(100):
            forced(model, cache, text(1, 8))
    assert 30000 < cache.memory().by_tier["disk"] <= 40000
    assert sum(slab.nbytes for g in cache.storage.groups for p in g.store.cold.pages for slab in p.slabs) <= 40000
    cache.check_integrity()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"resident_tokens": -1}, "resident_tokens=-1"),
        ({"host_bytes": -1}, "host_bytes=-1"),
        ({"disk_path": "/tmp", "disk_bytes": -5}, "disk_bytes=-5"),
        ({"disk_path": "/tmp", "disk_bytes": 0.5}, "disk_bytes=0.5"),
        ({"disk_bytes": 100}, "disk_bytes=100.*disk_path"),
        ({"disk_path": __file__}, "test_disk.py.*Give a folder"),
        ({"disk_path": f"{__file__}/sub"}, "sub.*Give a folder"),
        ({"disk_path": "/tmp", "disk_bytes": 1 << 60}, "more than the .* bytes that are free in /tmp"),
        ({"tier": HostTier(4), "disk_path": "/tmp"}, "tier=host.*disk_path"),
        ({"tier": HostTier(4), "resident_tokens": 4}, "tier=host.*resident_tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_at_construction(model, options, says):
    with pytest.raises(ConfigurationError, match=says):
        OffloadedCache(model.config, **options)


# ---- the file --------------------------------------------------------------------------------------------------------


def test_the_file_shrinks_is_used_again_and_goes(model, tmp_path):
    cache = spilled(model, tmp_path, columns=20)
    file = cache.pool.cold[cache.storage.groups[0].tier.place].file
    small = file.nbytes
    assert small - 4096 < spill(tmp_path).stat().st_size <= small
    for n in range(10):
        forced(model, cache, text(1, 40, seed=n))
    large = file.nbytes
    assert large >= cache.memory().by_tier["disk"] > 10 * small
    cache.crop(16)  # to less than half: slabs are given back
    assert spill(tmp_path).stat().st_size == file.nbytes == small
    for n in range(10):
        forced(model, cache, text(1, 40, seed=n))
    assert file.nbytes <= large
    cache.reset()
    assert spill(tmp_path).stat().st_size == file.nbytes == cache.pool.nbytes() == 0
    forced(model, cache, text(1, 30))
    assert spill(tmp_path).stat().st_size > 0
    del cache, file
    gc.collect()
    assert spill(tmp_path) is None


def test_nobody_else_may_read_the_file(model, tmp_path):
    umask = os.umask(0)
    try:
        cache = spilled(model, tmp_path)
    finally:
        os.umask(umask)
    assert cache.stats()["bytes_written"] and spill(tmp_path).stat().st_mode & 0o077 == 0


def test_extents_are_taken_from_gaps_and_joined(tmp_path):
    file = SpillFile(tmp_path)
    starts = [file.allocate(size) for size in (5000, 100, 4096, 9000)]
    assert starts == [0, 8192, 12288, 16384] and file.nbytes == 16384 + 12288
    file.release(8192, 100)
    assert file.allocate(8000) == 28672  # no gap is large enough
    file.release(12288, 4096)
    assert file.allocate(8000) == 8192  # two neighbours are
    file.release(8192, 8000)
    file.release(28672, 8000)
    file.release(16384, 9000)
    assert file.nbytes == 8192
    file.release(0, 5000)
    assert file.nbytes == 0


def _spill_until_killed(config, folder, seconds):
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of its own work, however busy the machine is; as abrupt as SIGKILL
    while True:
        cache = KVCache(config, block_size=4, tier=DiskTier(4, folder))
        for n in (40, 1, 8, 3):
            for layer in range(3):
                cache.update(*(torch.zeros(1, 2, n, 8) for _ in "kv"), layer)


def test_processes_killed_at_random_points_leave_nothing_that_stays(model, tmp_path):
    """Fifty times; the file of a living process in the same folder is left alone, and stays readable."""
    cache, twin = spilled(model, tmp_path), KVCache(model.config, block_size=4)
    forced(model, twin, text(1, 40))
    delays, left = random.Random(0), 0
    for n in range(50):
        seconds = 0.001 + delays.random() * 0.04
        process = os.fork()
        if not process:
            _spill_until_killed(model.config, tmp_path, seconds)
        _, status = os.waitpid(process, 0)
        assert os.WTERMSIG(status) == signal.SIGPROF
        left += len(list(tmp_path.iterdir())) - 1
        DiskTier(4, tmp_path)  # the next start
        assert len(list(tmp_path.iterdir())) == 1
        ids = text(1, 1, seed=n)
        assert error(forced(model, cache, ids), forced(model, twin, ids)) < 1e-4
    assert left > 5, "hardly any process was killed while it had a file"


def test_a_forked_process_does_not_touch_its_parents_file(model, tmp_path):
    cache = spilled(model, tmp_path)
    content = spill(tmp_path).read_bytes()

    def child(queue):
        try:
            forced(model, cache, text(1, 5))
        except TierError as raised:
            queue.put(str(raised))
        cache.reset()

    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert "was forked" in queue.get()
    process.join()
    assert process.exitcode == 0 and spill(tmp_path).read_bytes() == content
    forced(model, cache, text(1, 5))


# ---- faults ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def faulty(name: str, kind: str, first: int, times: int):
    """`os.preadv` or `os.pwrite` go wrong `times` times from call `first` on. Yields the list of calls."""
    real, calls = getattr(os, name), []

    def call(descriptor, data, offset):
        calls.append(offset)
        if not first < len(calls) <= first + times:
            return real(descriptor, data, offset)
        if kind == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if kind == "slow":
            time.sleep(0.01)
            return real(descriptor, data, offset)
        if name == "pwrite":  # the operating system may write less than it was given
            return real(descriptor, data[: len(data) // 2 or 1], offset)
        if kind == "short":
            return 0
        count = real(descriptor, data, offset)
        data[0][count // 2] ^= 16
        return count

    setattr(os, name, call)
    try:
        yield calls
    finally:
        setattr(os, name, real)


PASSES = [1, 9]  # a decode step that moves a block, and a pass that moves blocks of both kinds
HELD = ("tokens", "columns", "blocks_open", "blocks_cold")


def held(cache) -> dict:
    cache.check_integrity()
    return {name: cache.stats()[name] for name in HELD}


@pytest.fixture
def case(model, tmp_path):
    """A cache on disk, and for a pass of any length its tokens and the logits of a cache that never moved anything."""
    plain = KVCache(model.config, block_size=4)
    forced(model, plain, text(1, 43))

    def answers(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = text(1, length, seed=3)
        return ids, forced(model, plain.fork(), ids)

    return spilled(model, tmp_path, columns=43), answers


@pytest.mark.parametrize("length", PASSES)
@pytest.mark.parametrize("kind", ["error", "short", "flipped", "slow"])
def test_a_read_that_fails_once_is_repeated_and_twice_is_an_error(model, case, monkeypatch, kind, length):
    monkeypatch.setattr(cpu, "load", lambda: None)
    cache, (ids, wanted) = case[0], case[1](length)
    with faulty("preadv", kind, 0, 0) as calls:
        forced(model, cache.fork(), ids)
    assert len(calls) >= 3 * 5  # ten blocks and more, two at a time, in three layers
    before = held(cache)
    for first in range(0, len(calls), 5):
        with faulty("preadv", kind, first, 1):
            assert error(forced(model, cache.fork(), ids), wanted) < 1e-4
        with faulty("preadv", kind, first, 2), contextlib.ExitStack() as stack:
            if kind == "slow":
                assert error(forced(model, cache.fork(), ids), wanted) < 1e-4
            else:
                says = r"layer \d, block \d+ of row 0: .*spill.*twice.*as before this pass"
                stack.enter_context(pytest.raises(TierError, match=says))
                forced(model, cache, ids)
        assert held(cache) == before
    assert error(forced(model, cache, ids), wanted) < 1e-4  # the same pass again


@pytest.mark.parametrize("length", PASSES)
@pytest.mark.parametrize("kind", ["error", "full", "short"])
def test_a_write_that_fails_undoes_the_pass(model, case, kind, length):
    """Of blocks that were on the device, and of those that go to disk straight from the input."""
    cache, (ids, wanted) = case[0], case[1](length)
    with faulty("pwrite", kind, 0, 0) as calls:
        forced(model, cache.fork(), ids)
    assert len(calls) >= 3 and len(calls) % 3 == 0
    before = held(cache)
    for first in range(len(calls)):
        with faulty("pwrite", kind, first, 1), contextlib.ExitStack() as stack:
            if kind == "short":
                assert error(forced(model, cache.fork(), ids), wanted) < 1e-4
            else:
                says = f"layer {first * 3 // len(calls)}, block.*could not be written.*as before this pass"
                stack.enter_context(pytest.raises(TierError, match=says))
                forced(model, cache, ids)
        assert held(cache) == before
    assert error(forced(model, cache, ids), wanted) < 1e-4


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_recurrent_states_that_have_seen_a_failed_pass_are_not_used(name, call, tmp_path, monkeypatch):
    """They cannot go back: a pass that is repeated would go through them twice, and nobody would see it."""
    monkeypatch.setattr(cpu, "load", lambda: None)
    model, ids, more = ours(name), text(1, 43), text(1, 1, seed=3)
    cache = KVCache(model.config, block_size=4, tier=DiskTier(4, tmp_path, chunk_bytes=600))
    forced(model, cache, ids)
    with faulty(call, "error", 0, 2), pytest.raises(TierError, match=r"but for recurrent states.*reset\(\)"):
        forced(model, cache, more)
    cache.check_integrity()
    for go_on in (
        lambda: forced(model, cache, more),
        lambda: forced(model, cache.fork(), more),
        lambda: cache.save(tmp_path / "saved", model, input_ids=ids),
    ):
        with pytest.raises(CacheStateError, match=r"recurrent states.*reset\(\)"):
            go_on()
    cache.reset()
    forced(model, cache, ids)
    assert error(forced(model, cache, more), uncached(model, torch.cat([ids, more], 1))[:, -1:]) < 1e-4


@pytest.mark.parametrize("attention", ["hf_kvcache", "sdpa"])
def test_damage_on_the_disk_is_an_error_until_it_is_repaired(tmp_path, reader, attention):
    """Real damage, for the native reader too: a flipped bit, a file cut short, a descriptor that cannot be read."""
    model = ours()
    model.set_attn_implementation(attention)
    cache, ids = spilled(model, tmp_path), text(1, 1, seed=3)
    wanted = forced(model, cache.fork(), ids)
    path, (store,) = spill(tmp_path), {g.store.cold for g in cache.storage.groups}
    content, descriptor = path.read_bytes(), store.cold.file._descriptor

    def damaged(says: str) -> None:
        before = cache.stats()["tokens"]
        with pytest.raises(TierError, match=rf"layer \d, block \d of row 0: .*{path}.*{says}"):
            forced(model, cache, ids)
        assert cache.stats()["tokens"] == before
        cache.check_integrity()

    for byte in (0, PAGE * 9 // 2, len(content) - 1 - (len(content) - 1) % 4096):
        with open(path, "r+b") as file:
            file.seek(byte)
            file.write(bytes([content[byte] ^ 1]))
        damaged("checksum")
        path.write_bytes(content)
    os.truncate(path, len(content) // 2)
    damaged("bytes early")
    path.write_bytes(content)
    kept, unreadable = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
    os.dup2(unreadable, descriptor)
    damaged("Bad file descriptor")
    os.dup2(kept, descriptor)
    for each in (kept, unreadable):
        os.close(each)
    assert error(forced(model, cache, ids), wanted) < 1e-5


def test_what_the_native_reader_refuses_once_is_read_again(model, tmp_path, monkeypatch):
    if cpu.load() is None:
        pytest.skip(cpu.status())
    cache, real, refused = spilled(model, tmp_path), cpu.read_pages, []
    wanted = forced(model, cache.fork(), text(1, 1))
    monkeypatch.setattr(cpu, "read_pages", lambda *a: refused.append(1) or 0 if len(refused) < 3 else real(*a))
    assert error(forced(model, cache, text(1, 1)), wanted) < 1e-5 and len(refused) == 3


def test_a_full_disk_loses_nothing(model, tmp_path):
    """A limit of the operating system's: real errors of real writes."""
    resource = pytest.importorskip("resource")
    cache = spilled(model, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (spill(tmp_path).stat().st_size, hard))
        with pytest.raises(TierError, match="could not be written"):
            forced(model, cache, text(1, 300))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    twin = KVCache(model.config, block_size=4)
    forced(model, twin, text(1, 40))
    ids = text(1, 30, seed=1)
    assert error(forced(model, cache, ids), forced(model, twin, ids)) < 1e-4
    cache.check_integrity()


def test_pages_that_nothing_wrote_are_not_read(tmp_path, model):
    cache = spilled(model, tmp_path)
    pages = cache.storage.groups[0].store.cold.layer(0)
    slab = pages.slabs[0]
    slab.spoil(np.array([0]))
    with pytest.raises(TierError, match="checksum"):
        slab[torch.tensor([0])]


def test_a_pool_of_caches_shares_file_and_limits(model, tmp_path):
    pool = BlockPool(model.config, block_size=4)
    first, second = (KVCache(model.config, pool=pool, tier=DiskTier(4, tmp_path)) for _ in range(2))
    for each in (first, second):
        forced(model, each, text(1, 30))
    assert len(list(tmp_path.iterdir())) == 1 and list(pool.cold) == [Place(0, tmp_path, None)]
    del first
    gc.collect()
    pool.trim()
    pool.check_integrity()
    assert pool.nbytes() >= second.memory().stored


# ---- memory ----------------------------------------------------------------------------------------------------------

RESIDENT_MEMORY = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import hf_kvcache

RESIDENT, STEP = 1024, 128
config = LlamaConfig(vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
                     num_key_value_heads=4, head_dim=64, max_position_embeddings=1 << 14)
model = hf_kvcache.enable(LlamaForCausalLM(config).eval())
ids = torch.randint(64, (1, STEP))
rss = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096

@torch.inference_mode()
def grow(cache, tokens):
    for start in range(0, tokens - 2 * STEP, STEP):
        for layer in range(4):
            cache.update(*torch.randn(2, 1, 4, STEP, 64), layer)
        yield rss()
    for length in 2 * [STEP] + 20 * [1]:
        model(ids[:, :length], **hf_kvcache.cache_kwarg(cache), logits_to_keep=1)
        yield rss()

def make(resident):
    return hf_kvcache.OffloadedCache(config, resident_tokens=resident, disk_path=sys.argv[1])

warm = make(STEP)
list(grow(warm, 4 * STEP))  # what attention and the allocator keep, whatever the cache
del warm
before, cache = rss(), make(RESIDENT)
most = max(grow(cache, 8 * RESIDENT)) - before
token = 2 * 4 * 64 * 4
assert cache.memory().by_tier["disk"] >= 7 * RESIDENT * token * 4
print(most, int(1.2 * RESIDENT * token * 4 + 7 * RESIDENT * token))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_stays_within_the_budget(tmp_path):
    """1.2 times the bytes of `resident_tokens`, and one layer of what is read ahead, for a context of 8 times as many."""
    # Blocks that the allocator hands back are to leave the process, not to stay in its free lists.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RESIDENT_MEMORY, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(files.__file__).parents[1])
    assert run.returncode == 0, run.stderr
    most, budget = map(int, run.stdout.split())
    assert most <= budget, f"{most / 1e6:.1f} MB of {budget / 1e6:.1f}"
