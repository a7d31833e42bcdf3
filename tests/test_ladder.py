"""What a pool gives up goes down its ladder and comes back bit for bit, or is computed again: never anything else."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from hf_kvcache import BlockPool, CapacityError, ConfigurationError, IntegrityError, Ladder, Window, files
from hf_kvcache.codecs import Geometry, codec_for
from hf_kvcache.kernels.base import Pages
from hf_kvcache.pages import PageStore
from hf_kvcache.pool import Lock
from hf_kvcache.prefix import Group, Node, PrefixIndex, Slot
from hf_kvcache.tiers import ladder as ladder_file
from hf_kvcache.tiers.blobs import BLOB, DiskBlobs, HostBlobs

from .forcing import ours, text
from .test_blocks import CONFIG, LAYERS
from .test_reuse_lives import MACHINES, Life, Lives, Weights
from .test_sessions import OPTIONS, Passes, alone, hits, same

ROOM = 1 << 30
CODECS = {"native": {}, "int4": {"codec": "int4", "residual": 4}, "fp8": {"codec": "fp8", "residual": 4}}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return ours()


@pytest.fixture(params=["host", "disk", "both"])
def ladder(request, tmp_path) -> Ladder:
    """With one tier, or with a host that has room for few blocks, and a disk."""
    disk = {"disk_path": tmp_path / "tier", "disk_bytes": ROOM}
    return Ladder(**{"host": {"host_bytes": ROOM}, "disk": disk, "both": {"host_bytes": 20_000, **disk}}[request.param])


def disk(path: Path, **options) -> Ladder:
    return Ladder(disk_path=path, disk_bytes=ROOM, **options)


_known: dict[tuple, object] = {}


def expected(model, ids: torch.Tensor):
    """What `model` says without a pool, computed once."""
    key = model.config.model_type, *ids[0].tolist()
    if key not in _known:
        _known[key] = alone(model, ids)
    return _known[key]


def press(pool: BlockPool, model, tokens: int, texts: int = 2, **choices) -> None:
    """Have the pool give up what nobody uses, for other texts."""
    for seed in range(texts):
        pool.session(**choices).generate(model, text(1, tokens, 100 + seed), max_new_tokens=2, do_sample=False)


def contents(pool: BlockPool, depth: int = 100) -> dict[tuple[bytes, int], bytes]:
    """The bytes of every page that the index names, of the first `depth` blocks of each text, by block and group."""
    return {
        (slot.node.key, slot.place): slot.group.store.raw(np.array([slot.page])).numpy().tobytes()
        for slot in pool.prefixes.slots.values()
        if slot.node.depth <= depth
    }


def total(pool: BlockPool, name: str) -> int:
    return sum(getattr(tier, name) for tier in pool.metrics().tiers.values())


# ---- back again ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", CODECS.values(), ids=CODECS)
def test_an_evicted_chain_comes_back_bit_for_bit(model, ladder, choices):
    """And does all that a block does which never left."""
    ids, more = text(1, 51), text(1, 5, 1)
    pools = [
        BlockPool(model.config, capacity_tokens=80, block_size=8, poison=True, ladder=ladder),
        BlockPool(model.config, block_size=8, poison=True),
    ]
    found, before = [], {}
    for pool in pools:
        pool.session(**choices).generate(model, ids, **OPTIONS)
        before = before or contents(pool)
        press(pool, model, 64, **choices)
        session = pool.session(**choices)
        with Passes(model) as passes:
            found.append(session.generate(model, torch.cat([ids[:, :48], more], 1), **OPTIONS))
        assert hits(session) == 48 and passes.columns == 53 - 48 + 5
        pool.check_integrity()
    assert same(*found) and all(map(torch.equal, found[0].logits, found[1].logits)), "as if it had never left"
    assert choices or same(found[0], expected(model, torch.cat([ids[:, :48], more], 1)))
    after = contents(pools[0])
    common = before.keys() & after.keys()
    assert len(common) == 6 and all(before[key] == after[key] for key in common)
    assert total(pools[0], "restores") == 6 and not total(pools[0], "failures")


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "mistral", "deepseek_v3"])
def test_groups_with_windows_come_back_with_what_they_see(name, tmp_path):
    """Their pages are given up one by one, and a hit needs the last ones only."""
    model, ids = ours(name), text(1, 41)
    pool = BlockPool(model.config, capacity_tokens=64, block_size=4, poison=True, ladder=disk(tmp_path))
    pool.session().generate(model, ids, **OPTIONS)
    before = contents(pool, 10)
    press(pool, model, 56, texts=6)
    assert before.keys().isdisjoint(contents(pool))
    session = pool.session()
    with Passes(model) as passes:
        found = session.generate(model, ids, **OPTIONS)
    assert hits(session) == 40 and passes.columns == 41 - 40 + 5 and same(found, expected(model, ids))
    after = contents(pool, 10)
    assert after.keys() & before.keys() and all(after[key] == before[key] for key in before.keys() & after.keys())
    windows = [group.table.window for group in session.storage.groups]
    seen = sum(10 if window is None else -(-window // 4) + 1 for window in windows)
    assert 0 < total(pool, "restores") <= seen, "and no more than that"
    pool.check_integrity()


def test_rows_bring_back_what_they_share_once(model, tmp_path):
    pool = BlockPool(model.config, capacity_tokens=160, block_size=4, poison=True, ladder=disk(tmp_path))
    ids = torch.cat([text(1, 24).expand(2, -1), text(2, 17, 1)], 1)
    session = pool.session()
    wanted = session.generate(model, ids, **OPTIONS)
    session.reset()
    press(pool, model, 155)
    session = pool.session()
    assert same(session.generate(model, ids, **OPTIONS), wanted)
    assert hits(session) == 2 * 40 and total(pool, "restores") == 6 + 2 * 4
    pool.check_integrity()


def test_what_is_in_the_pool_and_what_is_below_make_one_chain(model, tmp_path):
    """The tail of a chain goes before its head."""
    pool = BlockPool(model.config, capacity_tokens=80, block_size=4, poison=True, ladder=disk(tmp_path))
    ids = text(1, 41)
    pool.session().generate(model, ids, **OPTIONS)
    pool.session().generate(model, text(1, 50, 1), **OPTIONS)
    there = pool.session()
    there.prepare(ids, model=model)
    assert hits(there) == 40 and 0 < total(pool, "restores") < 10
    pool.check_integrity()


def test_a_session_makes_room_with_its_own_last_text(model, tmp_path):
    """One session that goes back and forth between two texts, in a pool that has room for one of them."""
    pool = BlockPool(model.config, capacity_tokens=64, block_size=4, poison=True, ladder=disk(tmp_path))
    texts, session = [text(1, 45, seed) for seed in range(2)], pool.session()
    for turn in range(4):
        before = hits(session)
        assert same(session.generate(model, texts[turn % 2], **OPTIONS), expected(model, texts[turn % 2]))
        assert hits(session) - before == (44 if turn > 1 else 0)
        pool.check_integrity()


def test_where_not_all_of_it_fits_nothing_comes_back(model, tmp_path):
    pool = BlockPool(model.config, capacity_tokens=80, block_size=4, poison=True, ladder=disk(tmp_path))
    ids, live = text(1, 41), pool.session()
    pool.session().generate(model, ids, **OPTIONS)
    wanted = live.generate(model, text(1, 50, 1), **OPTIONS)
    session = pool.session()
    assert session.prepare(ids, model=model) == 24, "what is in the pool"
    with pytest.raises(CapacityError):
        session.generate(model, ids, **OPTIONS)
    assert total(pool, "restores") == 0 and total(pool, "blocks") > 0
    session.reset()
    more = torch.cat([wanted.sequences, text(1, 5, 2)], 1)
    assert same(live.generate(model, more, **OPTIONS), expected(model, more))
    pool.check_integrity()


def test_a_limit_in_bytes_and_inference_mode(model, ladder):
    probe = BlockPool(model.config, block_size=4)
    probe.session().generate(model, text(1, 60), **OPTIONS)
    pool = BlockPool(model.config, capacity_bytes=probe.bytes_used(), block_size=4, poison=True, ladder=ladder)
    ids = text(1, 41)
    with torch.inference_mode():
        pool.session().generate(model, ids, **OPTIONS)
        press(pool, model, 60)
    session = pool.session()
    assert same(session.generate(model, ids, **OPTIONS), expected(model, ids)) and hits(session) == 40
    pool.check_integrity()


def test_a_block_is_one_read_and_a_chain_one_copy_for_each_layer(tmp_path, monkeypatch):
    pool, puts, reads = small(disk(tmp_path)), [], []
    put, read = Pages.put_raw, DiskBlobs._read
    live(pool, [0] * 40)
    live(pool, [1] * 48)
    monkeypatch.setattr(Pages, "put_raw", lambda self, ids, pages: (puts.append(len(ids)), put(self, ids, pages)))
    monkeypatch.setattr(DiskBlobs, "_read", lambda self, *args: (reads.append(1), read(self, *args))[1])
    assert live(pool, [0] * 41) == 40
    assert len(reads) == 5 and puts[:LAYERS] == [5] * LAYERS


# ---- what goes down --------------------------------------------------------------------------------------------------

BLOCK, WEIGHTS = 8, Weights()


def small(ladder: Ladder | None, blocks: int = 6, **options) -> BlockPool:
    """A pool for `live`."""
    return BlockPool(CONFIG, capacity_tokens=blocks * BLOCK, block_size=BLOCK, poison=True, ladder=ladder, **options)


def live(pool: BlockPool, tokens: list[int], weights: Weights = WEIGHTS, **choices) -> int:
    """A session that stores `tokens` and ends; returns how many it found."""
    session = pool.session(**choices)
    columns = session.prepare(torch.tensor([tokens]), model=weights)
    Life(session, [tokens[:columns]]).append([tokens[columns:]])
    session.reset()
    pool.check_integrity()
    return columns


def numbers(tier) -> list[int]:
    """The first token of each block that a tier holds, from the head of its blob, least recently used first."""
    heads = [bytes(tier._read(name, size)).split(b"\n")[0] for name, size in tier.sizes.items()]
    return [json.loads(head)["token_ids"][0] for head in heads]


def blob_bytes() -> int:
    """Of a block of `live`."""
    pool = small(Ladder(host_bytes=ROOM))
    live(pool, [0] * 8)
    live(pool, [1] * 48)
    (size,) = pool.ladder.tiers[0].sizes.values()
    return size


def test_host_then_disk_then_gone(tmp_path):
    size = blob_bytes()
    ladder = Ladder(host_bytes=3 * size + 5, disk_path=tmp_path, disk_bytes=4 * size)
    pool = small(ladder)
    for number in range(16):
        live(pool, [number] * BLOCK)
    # Six are in the pool, the newest of the others in host memory, the next ones on disk.
    assert [numbers(tier) for tier in ladder.tiers] == [[7, 8, 9], [3, 4, 5, 6]]
    said = pool.metrics().tiers
    assert (said["host"].evictions, said["disk"].evictions) == (7, 3)
    assert sum(path.stat().st_size for path in tmp_path.glob(f"*{BLOB}")) == said["disk"].bytes == 4 * size
    assert [live(pool, [number] * 9) for number in (2, 9, 6, 15)] == [0, BLOCK, BLOCK, BLOCK]


def test_a_block_that_was_of_use_stays_and_is_not_stored_again():
    pool = small(Ladder(host_bytes=10 * blob_bytes()))
    live(pool, [0] * BLOCK)
    for number in range(1, 50):
        live(pool, [number] * BLOCK)
        assert number % 8 or live(pool, [0] * 9) == BLOCK
    assert live(pool, [1] * 9) == 0
    host = pool.metrics().tiers["host"]
    assert host.restores >= 5 and host.stores <= 50, "each text once"


def test_blocks_of_low_priority_are_dropped(tmp_path):
    now = [0.0]
    pool = small(disk(tmp_path, offload_min_priority=40), clock=lambda: now[0])
    for number, choices in enumerate(
        [{}, {"priorities": [(0, 8, 60)]}, {"priorities": [(0, 8, 39)]}, {"priorities": [(0, 8, 90, 10.0)]}]
    ):
        live(pool, [number] * BLOCK, **choices)
    now[0] = 11.0  # the last one's time is over
    live(pool, [9] * 6 * BLOCK)
    assert total(pool, "stores") == 1 and live(pool, [1] * 9) == BLOCK
    assert [live(pool, [number] * 9) for number in (0, 2, 3)] == [0, 0, 0]


def test_a_block_goes_down_after_so_many_uses(tmp_path):
    pool = small(disk(tmp_path, store_after_uses=2))
    live(pool, [0] * 17)
    live(pool, [0] * 9)
    live(pool, [9] * 6 * BLOCK)
    assert total(pool, "stores") == 1, "the second block was of use to nobody"
    assert live(pool, [0] * 17) == BLOCK


def test_a_session_that_goes_on_uses_its_blocks(tmp_path):
    pool = small(disk(tmp_path, store_after_uses=3))
    session = pool.session()
    for turns in range(3):
        columns = session.prepare(torch.tensor([[0] * (9 + turns)]), model=WEIGHTS)
        assert columns == (8 + turns if turns else 0)
        Life(session, [[0] * columns]).append([[0] * (9 + turns - columns)])
    session.reset()
    live(pool, [9] * 6 * BLOCK)
    assert total(pool, "stores") == 1


def test_dropping_prefixes_drops_the_ladder(ladder):
    pool = small(ladder)
    live(pool, [0] * 24)
    live(pool, [1] * 48)
    assert total(pool, "blocks") > 0
    pool.drop_prefixes()
    assert total(pool, "blocks") == total(pool, "bytes") == 0 and live(pool, [0] * 24) == 0
    folders = [tier.folder for tier in ladder.tiers if isinstance(tier, DiskBlobs)]
    assert not any(path.name.endswith(BLOB) for folder in folders for path in folder.iterdir())


def test_what_is_being_loaded_is_not_given_up_for_what_makes_room():
    size = blob_bytes()
    pool = small(Ladder(host_bytes=6 * size))
    live(pool, [0] * 48)
    live(pool, [1] * 48)
    assert total(pool, "blocks") == 6
    assert live(pool, [0] * 48) == 40, "the other text goes, and finds no room below"
    assert total(pool, "restores") == 5 and total(pool, "failures") == 0


def test_pools_may_share_a_ladder(tmp_path):
    ladder = disk(tmp_path)
    pools = [small(ladder) for _ in range(2)]
    live(pools[0], [0] * 24)
    live(pools[0], [1] * 48)
    assert live(pools[1], [0] * 25) == 24
    assert live(small(ladder), [0] * 25, weights=Weights()) == 0, "of other weights"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"host_bytes": -1},
        {"host_bytes": 1, "disk_path": "x"},
        {"host_bytes": 1, "disk_bytes": 5},
        {"disk_path": "x", "disk_bytes": 0},
        {"host_bytes": 1, "store_after_uses": 0},
        {"host_bytes": 1, "offload_min_priority": 101},
    ],
)
def test_wrong_numbers_are_refused(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=str([0, *wrong.values()][-1])):
        Ladder(**wrong)
    assert not list(tmp_path.iterdir())


# ---- tenants ---------------------------------------------------------------------------------------------------------


def test_a_tenant_neither_finds_nor_touches_what_another_left_below(model, ladder, monkeypatch):
    """And its lookups are the same work whether there is anything or not."""
    reads, work = [], []
    for kind in (HostBlobs, DiskBlobs):
        read = kind._read
        monkeypatch.setattr(kind, "_read", lambda self, *args, read=read: (reads.append(args), read(self, *args))[1])
    ids = text(1, 41)
    for neighbour in (False, True):
        pool = BlockPool(model.config, capacity_tokens=80, block_size=4, ladder=ladder)
        if neighbour:
            pool.session(salt="a").generate(model, ids, **OPTIONS)
            press(pool, model, 70, salt="a")
            assert total(pool, "blocks") > 0
        reads.clear()
        session, before = pool.session(salt="b"), pool.prefixes.hashed
        session.prepare(ids, model=model)
        work.append(pool.prefixes.hashed - before)
        assert hits(session) == 0 and not reads
    assert work[0] == work[1]
    session = pool.session(salt="a")
    session.prepare(ids, model=model)
    assert hits(session) == 40 and reads


# ---- the next process ------------------------------------------------------------------------------------------------


def test_the_next_process_finds_what_is_on_disk(tmp_path):
    """A pool that has seen no pass yet, and a model that was loaded again."""
    ids, folder = text(1, 41), tmp_path / "tier"
    for codec, choices in CODECS.items():
        model = ours()
        pool = BlockPool(model.config, capacity_tokens=80, block_size=8, ladder=disk(folder / codec))
        pool.session(**choices).generate(model, ids, **OPTIONS)
        before = contents(pool)
        press(pool, model, 70, **choices)
        pool.ladder.close()
        model = ours()
        pool = BlockPool(model.config, capacity_tokens=80, block_size=8, poison=True, ladder=disk(folder / codec))
        session = pool.session(**choices)
        with Passes(model) as passes:
            found = session.generate(model, ids, **OPTIONS)
        assert hits(session) == 40 and passes.columns == 41 - 40 + 5
        assert choices or same(found, expected(model, ids))
        after = contents(pool)
        assert len(before.keys() & after.keys()) == 5 and all(
            before[k] == after[k] for k in before.keys() & after.keys()
        )
        pool.check_integrity()
        other = ours(num_key_value_heads=4)
        strange = BlockPool(other.config, block_size=8, ladder=pool.ladder).session(**choices)
        strange.generate(other, ids, **OPTIONS)
        assert hits(strange) == 0


def test_a_folder_is_one_ladders_at_a_time(tmp_path):
    ladder = disk(tmp_path)
    with pytest.raises(ConfigurationError, match=r"in use by another ladder: close\(\)"):
        disk(tmp_path)
    pool = small(ladder)
    live(pool, [0] * 8)
    live(pool, [1] * 48)
    ladder.close()
    disk(tmp_path).close()
    assert live(pool, [0] * 9) == 0 and total(pool, "blocks") == 0, "nothing goes down a closed one"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be used"):
        disk(tmp_path / "file")


def test_at_the_start_strangers_stay_leftovers_go_and_the_budget_counts(tmp_path, caplog):
    size = blob_bytes()
    pool = small(disk(tmp_path))
    for number in range(10):
        live(pool, [number] * BLOCK)
    pool.ladder.close()
    for number, path in enumerate(sorted(tmp_path.glob(f"*{BLOB}"), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (number, number))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"odd{BLOB}").write_text("not a name of ours")
    (tmp_path / f"x{files.TEMPORARY}").write_text("half")
    pool = small(Ladder(disk_path=tmp_path, disk_bytes=2 * size + 1))
    assert "2 entries are no blobs" in caplog.text
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [BLOB, BLOB, BLOB, ".lock", ".txt"]
    assert [live(pool, [number] * 9) for number in range(4)] == [0, 0, BLOCK, BLOCK], "the newest two of four"


# ---- failures --------------------------------------------------------------------------------------------------------


def fail(error: Exception):
    def raising(*args, **options):
        raise copy.copy(error)  # its traceback holds on to whoever was at work

    return raising


def flipped(blob: np.ndarray, place: int, behind: bytes = b"") -> np.ndarray:
    """A blob with one bit changed: at `place`, counted from the end of the first `behind` where that is given."""
    blob = blob.copy()
    blob[place + (blob.tobytes().index(behind) + len(behind) if behind else 0)] ^= 0x01
    return blob


FULL = OSError(errno.ENOSPC, "No space left on device")
BAD_STORES = {  # what is replaced, with what, and whether blocks get lost by it
    "host_memory": (HostBlobs, "_write", fail(MemoryError()), False),
    "full_disk": (DiskBlobs, "_write", fail(FULL), True),
    "no_new_file": (files, "temporary", fail(FULL), True),
    "no_rename": (os, "replace", fail(OSError(errno.EIO, "Input/output error")), True),
    "no_removal": (Path, "unlink", fail(OSError(errno.EIO, "Input/output error")), False),
    "pages": (PageStore, "raw", fail(RuntimeError("out of memory")), True),
    "checksum": (ladder_file, "checksums", fail(MemoryError()), True),
    "packing": (ladder_file, "_blob", fail(MemoryError()), True),
}
read = DiskBlobs._read
BAD_LOADS = {
    "error": (DiskBlobs, "_read", fail(OSError(errno.EIO, "Input/output error"))),
    "host_error": (HostBlobs, "_read", fail(OSError("gone"))),
    "gone": (DiskBlobs, "_path", lambda self, name: self.folder / "nowhere"),
    "short": (DiskBlobs, "_read", lambda self, name, nbytes: read(self, name, nbytes)[: nbytes - 1]),
    "first_bit": (DiskBlobs, "_read", lambda *args: flipped(read(*args), 0)),
    "a_token": (DiskBlobs, "_read", lambda *args: flipped(read(*args), 0, b'"token_ids": [')),
    "the_checksum": (DiskBlobs, "_read", lambda *args: flipped(read(*args), 0, b"\n")),
    "a_page": (DiskBlobs, "_read", lambda *args: flipped(read(*args), 8, b"\n")),
    "last_bit": (DiskBlobs, "_read", lambda *args: flipped(read(*args), -1)),
    "memory": (ladder_file, "empty_host", fail(MemoryError())),
    "pages": (PageStore, "put_raw", fail(RuntimeError("an illegal memory access"))),
}


def give_up(pool: BlockPool, model, ids: torch.Tensor) -> None:
    pool.session().generate(model, ids, max_new_tokens=1, do_sample=False)
    press(pool, model, 60)


@pytest.mark.parametrize("fault", BAD_STORES)
def test_a_store_that_fails_is_a_block_less_and_nothing_else(model, fault, tmp_path, monkeypatch, caplog):
    owner, name, broken, is_lost = BAD_STORES[fault]
    ladder = Ladder(host_bytes=10_000, disk_path=tmp_path, disk_bytes=20_000 if fault == "no_removal" else ROOM)
    pool = BlockPool(model.config, capacity_tokens=80, block_size=4, poison=True, ladder=ladder)
    ids, with_fault = text(1, 41), pool.session()
    kept = with_fault.generate(model, text(1, 7, 50), **OPTIONS)  # in use all the time
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        give_up(pool, model, ids)
        pool.check_integrity()
    assert total(pool, "failures") > 0 and caplog.text.count("could not store") in (1, 2)
    assert not list(tmp_path.glob(f"*{files.TEMPORARY}"))
    session = pool.session()
    assert same(session.generate(model, ids, **OPTIONS), expected(model, ids))
    assert hits(session) < 40 if is_lost else (fault == "no_removal" or hits(session) == 40)
    more = torch.cat([kept.sequences, text(1, 4, 51)], 1)
    assert same(with_fault.generate(model, more, **OPTIONS), expected(model, more))
    del session
    with_fault.reset()
    give_up(pool, model, ids)  # all is well again
    session = pool.session()
    assert same(session.generate(model, ids, **OPTIONS), expected(model, ids))
    assert fault == "no_removal" or hits(session) == 40
    pool.check_integrity()


@pytest.mark.parametrize("fault", BAD_LOADS)
def test_a_load_that_fails_is_a_miss(model, fault, tmp_path, monkeypatch, caplog):
    owner, name, broken = BAD_LOADS[fault]
    ladder = Ladder(host_bytes=ROOM) if owner is HostBlobs else disk(tmp_path)
    pool = BlockPool(model.config, capacity_tokens=80, block_size=4, poison=True, ladder=ladder)
    ids = text(1, 41)
    give_up(pool, model, ids)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        session = pool.session()
        with Passes(model) as passes:
            found = session.generate(model, ids, **OPTIONS)
        assert hits(session) == 0 and passes.columns == 41 + 5 and same(found, expected(model, ids))
        pool.check_integrity()
    assert total(pool, "failures") > 0 and "could not load" in caplog.text
    session.reset()
    give_up(pool, model, ids)
    session = pool.session()
    assert same(session.generate(model, ids, **OPTIONS), expected(model, ids)) and hits(session) == 40
    pool.check_integrity()


def test_one_bad_block_ends_a_hit_and_a_sound_copy_below_takes_its_place(model, tmp_path):
    ladder = Ladder(host_bytes=ROOM, disk_path=tmp_path, disk_bytes=ROOM)
    pool = BlockPool(model.config, capacity_tokens=80, block_size=4, poison=True, ladder=ladder)
    ids = text(1, 41)
    give_up(pool, model, ids)
    host, below = ladder.tiers
    root = next(iter(pool.prefixes.roots.values()))
    chain = pool.prefixes.match(root, ids[0].numpy(), below=pool.below(root)).nodes
    names = [ladder_file._name(node.key, 0, root.groups[0].store.signature) for node in chain]
    below.complete_store(names[2], host.load(names[2]))
    for name in (names[2], names[6]):
        host._blobs[name] = flipped(host._blobs[name], -3)
    session = pool.session()
    assert same(session.generate(model, ids, **OPTIONS), expected(model, ids))
    assert hits(session) == 6 * 4 and pool.metrics().tiers["disk"].restores == 1
    assert pool.metrics().tiers["host"].failures == 2 and not host.lookup(names[2]) and not host.lookup(names[6])
    pool.check_integrity()


def test_a_file_cut_short_or_flipped_on_disk_is_a_miss(tmp_path):
    pool = small(disk(tmp_path))
    for number in range(9):
        live(pool, [number] * BLOCK)
    paths = sorted(tmp_path.glob(f"*{BLOB}"))
    assert len(paths) == 3
    os.truncate(paths[0], paths[0].stat().st_size - 64)
    damaged = bytearray(paths[1].read_bytes())
    damaged[-70] ^= 1
    paths[1].write_bytes(damaged)
    paths[2].unlink()
    assert [live(pool, [number] * 9) for number in range(3)] == [0, 0, 0]
    assert total(pool, "failures") == 3


@pytest.mark.parametrize("call", ["store", "load"])
def test_pages_are_given_back_where_somebody_interrupts(call, tmp_path, monkeypatch):
    """Of a model with two groups of layers: those of the second one as well, at which nobody has arrived yet."""
    model, ids = ours("gemma2"), text(1, 41)
    pool = BlockPool(model.config, capacity_tokens=80, block_size=4, poison=True, ladder=disk(tmp_path))
    give_up(pool, model, ids)
    session = pool.session()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Ladder, call, fail(KeyboardInterrupt()))
        session.generate(model, ids if call == "load" else text(1, 60, 50), **OPTIONS)
    session.reset()
    pool.check_integrity()
    session = pool.session()
    assert same(session.generate(model, ids, **OPTIONS), expected(model, ids))
    pool.check_integrity()


def test_slow_is_only_slow(model, ladder, monkeypatch):
    for kind in (HostBlobs, DiskBlobs):
        for name in ("_read", "_write", "_remove"):
            method = getattr(kind, name)
            monkeypatch.setattr(kind, name, lambda *args, method=method: (time.sleep(0.002), method(*args))[1])
    pool = BlockPool(model.config, capacity_tokens=80, block_size=8, poison=True, ladder=ladder)
    ids = text(1, 41)
    give_up(pool, model, ids)
    session = pool.session()
    assert same(session.generate(model, ids, **OPTIONS), expected(model, ids)) and hits(session) == 40
    assert not total(pool, "failures")


@pytest.mark.parametrize("kind", [HostBlobs, DiskBlobs])
def test_a_tier_notices_what_does_not_add_up(kind, tmp_path):
    tier = kind(*([tmp_path] if kind is DiskBlobs else []), 100)
    tier.complete_store("a", np.zeros(60, np.uint8))
    tier.complete_store("b", np.zeros(40, np.uint8))
    tier.check_integrity()
    tier.prepare_load("a")
    assert tier.prepare_store(30) == ["b"] and tier.prepare_store(50) is None and tier.prepare_store(101) is None
    tier.complete_load("a")
    assert tier.prepare_store(30) == ["a"] and tier.prepare_store(70) == ["a", "b"] and tier.prepare_store(0) == []
    tier.touch("a")
    assert tier.prepare_store(30) == ["b"]
    tier.check_integrity()
    tier.complete_load("a")
    with pytest.raises(IntegrityError, match="not begun"):
        tier.check_integrity()
    tier._loading.clear()
    for change in (1, 1000):
        tier.used += change
        with pytest.raises(IntegrityError, match="bytes are counted"):
            tier.check_integrity()
        tier.used -= change


# ---- a process that dies ---------------------------------------------------------------------------------------------


def a_store() -> PageStore:
    store = PageStore(codec_for("native"), LAYERS, Lock(), PrefixIndex())
    for layer in range(LAYERS):
        store.bind(layer, Geometry(2, 8, 8, BLOCK, torch.float32), torch.device("cpu"))
    return store


def slot_of(store: PageStore, page: int, number: int) -> Slot:
    """A block with the bytes of a page, and a number for its key."""
    return Slot(Node(number.to_bytes(32, "big"), None, bytes(64), (), 1, [None]), 0, Group(store), page, 0.0)


def spill_until_killed(folder: Path, store: PageStore, first: int, done: int) -> None:
    """What a child does: stores as fast as it can, in little room, and says so after each block."""
    ladder = Ladder(disk_path=folder, disk_bytes=50_000)
    for number in itertools.count(first):
        ladder.store([slot_of(store, number % 8, number % 64)], lambda slot: 35)
        os.write(done, b".")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_leaves_its_parents_folder_alone(tmp_path):
    """Its own list of what is there would soon be wrong, and its budget another one."""
    tier = DiskBlobs(tmp_path, 100)
    tier.complete_store("a", np.full(60, 7, np.uint8))

    def child(queue):
        queue.put((tier.lookup("a"), tier.prepare_store(10)))
        tier.drop("a")
        tier.close()

    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get() == (False, None)
    process.join()
    assert process.exitcode == 0 and tier.load("a").tolist() == [7] * 60
    with pytest.raises(ConfigurationError, match="in use"):
        DiskBlobs(tmp_path, 100)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fifty_processes_killed_while_they_spill_leave_sound_blobs_or_none(tmp_path):
    store = a_store()
    pages = np.array(store.take(9))
    store.put_raw(pages, torch.randint(0, 256, (9, store.page_bytes), dtype=torch.uint8))
    wanted, target = store.raw(pages[:8]).numpy(), pages[8:]
    generator, sound, leftovers = random.Random(0), 0, 0
    for life in range(50):
        begun, done = os.pipe()
        child = os.fork()
        if not child:
            try:
                spill_until_killed(tmp_path, store, 11 * life, done)
            finally:
                os._exit(1)
        os.close(done)
        for _ in range(generator.randrange(20)):
            assert os.read(begun, 1)
        time.sleep(0.003 * generator.random())
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, "it was at work until then"
        os.close(begun)
        leftovers += len(list(tmp_path.glob(f"*{files.TEMPORARY}")))
        ladder = Ladder(disk_path=tmp_path, disk_bytes=ROOM)
        assert not list(tmp_path.glob(f"*{files.TEMPORARY}"))
        for number in range(64):
            node = slot_of(store, 0, number).node
            if ladder.lookup(node.key, 0, store.signature):
                with ladder.loading([(store, 0, [node])]):
                    assert ladder.load(store, 0, [node], target).all()
                assert (store.raw(target)[0].numpy() == wanted[number % 8]).all()
                sound += 1
        ladder.check_integrity()
        assert not any(tier.failures for tier in ladder.tiers)
        ladder.close()
    assert sound > 500 and leftovers > 0


# ---- at once, and at random ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("salts", ["ab", "aa"], ids=["two_tenants", "one_tenant"])
def test_two_threads_in_little_room(model, salts, tmp_path):
    page = 2048 * 2
    ladder = Ladder(host_bytes=10 * page, disk_path=tmp_path, disk_bytes=40 * page)
    pool = BlockPool(model.config, capacity_tokens=140, block_size=4, poison=True, ladder=ladder)
    prompts = [torch.cat([text(1, 24), text(1, 30, seed)], 1) for seed in range(4)]
    wanted, failures = [expected(model, ids) for ids in prompts], []

    def work(salt: str) -> None:
        try:
            for turn in range(6):
                with pool.session(salt=salt) as session:
                    if not same(session.generate(model, prompts[turn % 4], **OPTIONS), wanted[turn % 4]):
                        failures.append((salt, turn))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(salt,)) for salt in salts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        pool.metrics()
        time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert not failures
    pool.check_integrity()
    assert total(pool, "restores") > 0 and not total(pool, "failures")


class LadderLives(Lives):
    """The lives of `test_reuse_lives.py`, whose invariants compare every block in the index with what its chain gives, in a
    smaller pool on a ladder whose tiers are small and fail."""

    @initialize()
    def start(self):
        super().start()
        self.folder = tempfile.mkdtemp()
        self.pool.capacity_tokens = 14 * BLOCK
        self.pool.ladder = Ladder(host_bytes=12_000, disk_path=self.folder, disk_bytes=40_000)

    @rule(where=st.integers(0, 10**9), tier=st.integers(0, 1))
    def damage(self, where, tier):
        """A bit of a blob changes."""
        tier = self.pool.ladder.tiers[tier]
        if not tier.sizes:
            return
        name = list(tier.sizes)[where % len(tier.sizes)]
        blob = flipped(tier._read(name, tier.sizes[name]), where % tier.sizes[name])
        if isinstance(tier, HostBlobs):
            tier._blobs[name] = blob
        else:
            tier._path(name).write_bytes(blob)

    @rule()
    def next_process(self):
        """Another ladder on the same folder."""
        self.pool.ladder.close()
        self.pool.ladder = Ladder(host_bytes=12_000, disk_path=self.folder, disk_bytes=40_000)

    @invariant()
    def files_are_what_is_counted(self):
        for tier in self.pool.ladder.tiers[1:] if hasattr(self, "pool") else ():
            assert {path.name: path.stat().st_size for path in tier.folder.glob(f"*{BLOB}")} == {
                name + BLOB: size for name, size in tier.sizes.items()
            }

    def teardown(self):
        super().teardown()
        if hasattr(self, "pool"):
            assert all(not tier.sizes for tier in self.pool.ladder.tiers)
            self.pool.ladder.close()
            shutil.rmtree(self.folder)


for name, choices in MACHINES.items():
    tolerance = 0.03 if "codec" in choices else 0.0  # as there
    machine = type(f"LadderLives_{name}", (LadderLives,), {"choices": choices, "tolerance": tolerance})
    machine.TestCase.settings = settings(
        max_examples=3,
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
    globals()[f"Test_{name}"] = machine.TestCase


@pytest.mark.parametrize("choices", [{}, {"retention": Window(12, 3)}], ids=["native", "window"])
def test_the_machines_see_blocks_go_down_and_come_back(choices):
    machine = type("Machine", (LadderLives,), {"choices": choices})()
    machine.start()
    for turn in range(30):
        own = [turn % 6 >> bit & 1 for bit in range(3)] * 8
        machine.create(salt=None, shared=8, own=own, batch=1)
        machine.every_session_holds_what_its_tokens_give()
        machine.every_block_in_the_index_holds_what_its_chain_gives()
        machine.adds_up()
        machine.files_are_what_is_counted()
        machine.end(machine.lives[0])
    said = machine.pool.metrics().tiers
    assert all(tier.stores > 0 and tier.restores > 0 for tier in said.values()), said
    machine.teardown()


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_say_what_each_tier_did(tmp_path):
    size = blob_bytes()
    pool = small(Ladder(host_bytes=2 * size, disk_path=tmp_path, disk_bytes=ROOM))
    assert "tier" not in small(None).metrics().prometheus()
    for number in range(10):
        live(pool, [number] * BLOCK)
    host, below = (pool.metrics().tiers[name] for name in ("host", "disk"))
    assert (host.blocks, host.bytes, host.stores, host.evictions, host.restores) == (2, 2 * size, 4, 2, 0)
    assert (below.blocks, below.bytes, below.stores, below.evictions) == (2, 2 * size, 2, 0)
    assert live(pool, [0] * 9) == live(pool, [3] * 9) == BLOCK
    said = dict(line.rsplit(" ", 1) for line in pool.metrics().prometheus().splitlines() if "tier" in line)
    assert int(said['hf_kvcache_tier_restores_total{tier="disk"}']) > 0 and total(pool, "restores") == 2
    assert said['hf_kvcache_tier_failures_total{tier="host"}'] == "0"
    assert "# TYPE hf_kvcache_tier_blocks" in said and said["# TYPE hf_kvcache_tier_stores_total"] == "counter"
