"""A file of saved state is whole or not there, and what is damaged, forged or something else is refused before it is used."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import hf_kvcache
from hf_kvcache import (
    BlockPool,
    DiskTier,
    KVCache,
    OffloadedCache,
    PagedCache,
    SavedStateError,
    TierError,
    files,
    savefile,
)
from hf_kvcache.kernels import cpu
from hf_kvcache.savefile import Entry, SavedFile

from .forcing import forced, ours, text
from .test_bad_input import refused, state
from .test_disk import faulty
from .test_saving import filled, go_on_alike


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return ours(num_hidden_layers=2)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "cache.safetensors"


@pytest.fixture
def cache(model) -> KVCache:
    return filled(model, OffloadedCache(model.config, codec="int8", block_size=8, resident_tokens=8), 29)


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_a_truncated_or_longer_file_is_refused(model, cache, path):
    cache.save(path)
    data = path.read_bytes()
    for length in [*range(0, 20), *np.linspace(20, len(data) - 1, 60).astype(int).tolist()]:
        path.write_bytes(data[:length])
        with refused(SavedStateError, str(path.name)):
            KVCache.load(path, model)
    path.write_bytes(data + b"\0")
    with refused(SavedStateError, "something was added"):
        KVCache.load(path, model)


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_is_refused_or_changes_nothing(model, cache, path, seed):
    cache.save(path)
    data, rng = path.read_bytes(), random.Random(seed)
    header = 8 + int.from_bytes(data[:8], "little")
    refusals = 0
    places = [rng.randrange(8 * header) for _ in range(60)] + [rng.randrange(8 * len(data)) for _ in range(60)]
    for bit in places:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            again = KVCache.load(path, model)
        except SavedStateError:
            refusals += 1
        else:
            assert bit < 8 * header, "only in the header are there bits that say nothing (a space for another)"
            assert state(again) == state(cache)
            go_on_alike(model, cache.fork(), again)
    assert refusals > 110


def test_damage_says_where_it_is(model, cache, path):
    cache.save(path)
    with open(path, "rb") as file:
        saved = SavedFile(file, path, "cache")
        start = saved._data + saved.table["pages.1.cold"]["data_offsets"][0]
        nbytes = saved.table["pages.1.cold"]["shape"][1]
    data = bytearray(path.read_bytes())
    data[start + nbytes + 5] ^= 16
    path.write_bytes(data)
    pool = BlockPool(model.config)
    with refused(SavedStateError, r"pages\.1\.cold, row 1", "save it again"):
        KVCache.load(path, model, pool=pool)
    assert not pool.groups and pool.nbytes() == 0


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 8, b"PK\3\4" * 100, b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}", b"\x10\0\0\0\0\0\0\0" + b"[" * 16]
)
def test_what_is_something_else_is_refused(model, path, data):
    path.write_bytes(data)
    with refused(SavedStateError, "cannot be used"):
        KVCache.load(path, model)


def test_a_deeply_nested_header_is_refused(model, path):
    header = b"[" * 200_000
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with refused(SavedStateError, "cannot be used"):
        KVCache.load(path, model)


def test_another_format_version_is_refused(model, cache, path, monkeypatch):
    monkeypatch.setattr(savefile, "VERSION", "2")
    cache.save(path)
    monkeypatch.undo()
    with refused(SavedStateError, "version '2'", "reads '1'"):
        KVCache.load(path, model)


# ---- forgery: all checksums are right, and what they cover is not ----------------------------------------------------


def forge(path: Path, change) -> None:
    """Write a file again with what `change(description, tensors)` makes of it, under new checksums."""
    with open(path, "rb") as file:
        saved = SavedFile(file, path, "cache")
        tensors = {name: saved.tensor(name).clone() for name in saved.table if name != savefile.CHECKSUMS}
        change(saved.description, tensors)
    with open(path, "wb") as file:
        savefile.write(file, saved.description, {name: Entry.of(tensor) for name, tensor in tensors.items()})


def said(*keys, value):
    def change(description, tensors):
        for key in keys[:-1]:
            description = description[key]
        description[keys[-1]] = value

    return change


def put(name: str, where, value):
    def change(description, tensors):
        tensors[name][where] = value

    return change


FORGERIES = {
    "nothing-said": lambda d, t: d.clear() or d.update(kind="cache"),
    "class": said("class", value="dict"),
    "columns": said("columns", value=2**62),
    "columns-text": said("columns", value="29"),
    "batch": said("batch", value=2**40),
    "block-size": said("block_size", value=2**40),
    "block-size-odd": said("block_size", value=12),
    "residual": said("residual", value=-1),
    "codec": said("choices", "codec", value=["AffineCodec", {"k_bits": 3, "v_bits": 8}]),
    "codec-class": said("choices", "codec", value=["Codec", {}]),
    "tier-arguments": said("choices", "tiers", value=[["host", {"folder": "/etc"}]]),
    "tier-number": said("choices", "tier", value=7),
    "layers": said("groups", 0, "layers", value=[0, 0]),
    "layers-missing": said("groups", 0, "layers", value=[0, 9]),
    "groups": said("groups", value=[]),
    "heads": said("groups", 0, "pages", value=[[10**9, 8, 8, "float32", "lanes"]] * 2),
    "dtype": said("groups", 0, "pages", value=[[2, 8, 8, "complex64", "lanes"]] * 2),
    "order": said("groups", 0, "pages", value=[[2, 8, 8, "float32", "rows"]] * 2),
    "held": said("groups", 0, "held", value={"cold": [10**12, 0], "sealed": [1, 0], "open": [0, 1]}),
    "held-negative": said("groups", 0, "held", value={"cold": [-1, 0], "sealed": [1, 0], "open": [0, 1]}),
    "slack": said("groups", 0, "slack", value=-(2**40)),
    "cold-beyond-sealed": put("rows.0", (0, 0), 4),
    "sealed-beyond-all": put("rows.0", (1, 0), 99),
    "entries": put("rows.0", (2, 0), 3),
    "entries-negative": put("rows.0", (2, 0), -1),
    "length": put("rows.0", (3, 0), 30),
    "gap": put("rows.0", (4, 0), 8),
    "count-zero": put("blocks.0", (0, 0), 0),
    "count-large": put("blocks.0", (0, 0), 2**30),
    "page-beyond": put("blocks.0", (1, 0), 77),
    "page-negative": put("blocks.0", (1, 0), -1),
    "page-twice": put("blocks.0", (1, 1), 0),
    "slots": put("slots.0.open", 0, 2),
    "tokens-counts": put("tokens.rows", 0, 2**60),
    "no-rows": lambda d, t: t.pop("rows.0"),
    "no-pages": lambda d, t: t.pop("pages.1.cold"),
    "no-cut": lambda d, t: t.pop("cut.1.open"),
    "pages-of-another-shape": lambda d, t: t.update({"pages.0.cold": t["pages.0.cold"][:, :-1]}),
    "fewer-pages": lambda d, t: t.update({"pages.0.cold": t["pages.0.cold"][:-1]}),
    "rows-of-another-type": lambda d, t: t.update({"rows.0": t["rows.0"].int()}),
    "states": said("states", value={"0": {"record_past": True, "previous": [True], "kernel": [4]}}),
}  # fmt: skip


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES)
def test_a_description_that_contradicts_itself_is_refused(model, cache, path, change):
    cache.save(path)
    forge(path, lambda description, tensors: None)
    KVCache.load(path, model).check_integrity()  # forging works
    forge(path, change)
    pool = BlockPool(model.config, block_size=8)
    kept = filled(model, PagedCache(model.config, pool=pool))
    with refused(hf_kvcache.KVCacheError, "."):
        KVCache.load(path, model, pool=pool)
    pool.check_integrity()
    assert pool.bytes_used() == kept.memory().stored


# ---- crashes and full disks ------------------------------------------------------------------------------------------


def _save_and_die(cache, path, calls: int) -> None:
    """Be killed at one of the calls and returns that a save consists of, or behind it."""
    remaining = iter(range(calls))
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    sys.setprofile(lambda *call: next(remaining, None) is None and die())
    try:
        cache.save(path)
    finally:
        die()


def test_a_process_that_is_killed_while_saving_leaves_the_earlier_file(model, path):
    """Fifty times, at random points of the save and not of the clock, however busy the machine is."""
    caches = [filled(model, PagedCache(model.config), columns) for columns in (100, 160)]
    rng, calls, leftovers = random.Random(0), [], 0
    caches[0].save(path)
    sys.setprofile(lambda *call: calls.append(None))
    caches[0].save(path)
    sys.setprofile(None)
    for n in range(50):
        last = rng.randrange(len(calls))
        child = os.fork()
        if not child:
            _save_and_die(caches[n % 2], path, last)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        leftovers += len(list(path.parent.iterdir())) - 1
        again = KVCache.load(path, model)
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
        whole = next(cache for cache in caches if cache.get_seq_length() == again.get_seq_length())
        assert state(again) == state(whole)
    assert leftovers > 5, "most were killed somewhere else"
    go_on_alike(model, whole, again)


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 1])
def test_a_full_disk_costs_nothing(model, cache, path, share, monkeypatch):
    cache.save(path)
    before, temporary = path.read_bytes(), files.temporary
    forced(model, cache, text(1, 20, seed=5))
    twin = cache.fork()

    class Full:
        def __init__(self, file):
            self.file, self.left = file, int(share * len(before))

        def write(self, data):
            self.left -= memoryview(data).nbytes
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

    def full(*place):
        new, file = temporary(*place)
        return new, Full(file)

    monkeypatch.setattr(files, "temporary", full)
    with refused(SavedStateError, "No space left", "what was there before still is", "make room"):
        cache.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
    go_on_alike(model, twin, cache)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_at_the_end_costs_nothing(model, cache, path, call, monkeypatch):
    def broken(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    cache.save(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, call, broken)
    with refused(SavedStateError, "Input/output error"):
        filled(model, PagedCache(model.config)).save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("place", ["file://{}", "memory://{}"])
def test_a_fault_of_a_slower_tier_is_told_as_such(model, path, place, monkeypatch):
    """Of pages that are saved, or loaded; what was there before still is."""
    monkeypatch.setattr(cpu, "load", lambda: None)
    url, tier = place.format(path), DiskTier(8, path.parent / "tier")
    cache = filled(model, KVCache(model.config, block_size=8, tier=tier), 29)
    twin = cache.fork()
    cache.save(url)
    with faulty("preadv", "error", 0, 2), refused(TierError, "could not be read, twice"):
        cache.save(url)
    pool = BlockPool(model.config)
    with faulty("pwrite", "full", 0, 1), refused(TierError, "could not be written.*No space left"):
        KVCache.load(url, model, pool=pool, tier=tier)
    pool.check_integrity()
    assert pool.metrics().blocks_used == 0
    go_on_alike(model, twin, KVCache.load(url, model, pool=pool, tier=tier))
    go_on_alike(model, cache, KVCache.load(url, model, tier=tier))


def test_reads_that_are_short_or_fail(model, cache, path):
    class Short:
        """Gives a few bytes at a time, and after `limit` of them an error."""

        def __init__(self, file, limit):
            self.file, self.left = file, limit

        def seek(self, *place):
            return self.file.seek(*place)

        def readinto(self, buffer):
            self.left -= 1
            if not self.left:
                raise OSError(errno.EIO, "Input/output error")
            return self.file.readinto(buffer[:100])

    cache.save(path)
    with open(path, "rb") as file:
        SavedFile(Short(file, 10**9), path, "cache").verify()
        for limit in (1, 5, 60):
            with refused(SavedStateError, "Input/output error"):
                SavedFile(Short(file, limit), path, "cache").verify()


def test_tensors_of_any_size_come_back(tmp_path):
    entries = {
        "none": torch.zeros(0, dtype=torch.int64),
        "one": torch.tensor([7]),
        "odd": torch.arange(33, dtype=torch.uint8).reshape(3, 11),
        "half": torch.randn(2, 3, 5).bfloat16(),
        "no-rows": torch.zeros((2, 0), dtype=torch.int32),
    }
    path = tmp_path / "x"
    with savefile.writing(path) as file:
        savefile.write(file, {"kind": "test"}, {name: Entry.of(tensor) for name, tensor in entries.items()})
    with savefile.reading(path) as file:
        saved = SavedFile(file, path, "test")
        assert all(torch.equal(saved.tensor(name), tensor) for name, tensor in entries.items())
        with refused(SavedStateError, "no tensor two"):
            saved.tensor("two")
    assert json.loads(json.dumps(saved.description)) == {"kind": "test"}
