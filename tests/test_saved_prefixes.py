"""A prefix store that was saved is found again in another pool: the same blocks, by the same sessions, in the same order."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_kvcache import (
    BlockPool,
    CacheInputError,
    KVCacheError,
    PagedCache,
    SavedStateError,
    Window,
    pages,
    savefile,
)
from hf_kvcache.codecs.packing import LANES, PLANAR
from hf_kvcache.kernels import dispatch
from hf_kvcache.savefile import Entry, SavedFile

from .forcing import generate, ours, padding, text
from .test_bad_input import refused

NEW = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return ours()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "prefixes.safetensors"


def run(pool: BlockPool, model, ids: torch.Tensor, **options) -> tuple[list[int], int]:
    """The answer to `ids` in a new session, and how many tokens of `ids` it found."""
    choices = {key: options.pop(key) for key in list(options) if key not in ("attention_mask",)}
    with pool.session(**choices) as session:
        out = session.generate(model, ids, **NEW, **options)
        return out[:, ids.shape[1] :].tolist(), session.metrics().hits


def moved(pool: BlockPool, model, path: Path, **limits) -> BlockPool:
    """A new pool with what the file at `path` has after `pool` was saved to it."""
    pool.save(path)
    other = BlockPool(model.config, block_size=4, **limits)
    other.load(path, model)
    other.check_integrity()
    return other


CHOICES = {
    "paged": {},
    "whole-blocks": {"partial_reuse": False},
    "int8": {"codec": "int8", "block_size": 8, "residual": 8},
    "fp8": {"codec": "fp8", "block_size": 8},
    "window": {"retention": Window(12, 2, rebase=False)},
    "mixed": {"block_size": 8, "layers": {0: {"codec": "int4"}, 1: {"retention": Window(16, 4)}}},
    "salted": {"salt": "a secret"},
}


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_another_pool_finds_what_this_one_finds(model, path, choices):
    pool, ids = BlockPool(model.config, block_size=4), text(1, 45)
    first, _ = run(pool, model, ids, **choices)
    other = moved(pool, model, path)
    longer = torch.cat([ids, torch.tensor(first), text(1, 3, seed=8)], dim=1)
    assert run(other, model, longer, **choices) == run(pool, model, longer, **choices)
    assert run(other, model, ids, **choices)[1] >= 32
    other.check_integrity()


def test_rows_branches_and_padding(model, path):
    pool, mask = BlockPool(model.config, block_size=4), padding(2, 30, 0, 9)
    ids = text(2, 30)
    run(pool, model, ids, attention_mask=mask)
    for seed in (1, 2):
        run(pool, model, torch.cat([ids[:1], text(1, 8, seed=seed)], dim=1))
    other = moved(pool, model, path)
    assert run(other, model, ids, attention_mask=mask) == run(pool, model, ids, attention_mask=mask)
    for seed in (1, 2):
        branch = torch.cat([ids[:1], text(1, 8, seed=seed)], dim=1)
        assert run(other, model, branch)[1] == run(pool, model, branch)[1] == 37
    assert len(other.prefixes.slots) == len(pool.prefixes.slots)


def test_a_salt_is_not_in_the_file_and_still_needed(model, path):
    pool, ids = BlockPool(model.config, block_size=4), text(1, 30)
    run(pool, model, ids, salt="the tenant's own secret", adapter="theirs")
    other = moved(pool, model, path)
    assert b"secret" not in path.read_bytes()
    for choices in ({}, {"salt": "another"}, {"salt": "the tenant's own secret"}):
        assert run(other, model, ids, **choices)[1] == 0
    assert run(other, model, ids, salt="the tenant's own secret", adapter="theirs")[1] == 29


def test_media_come_along(model, path):
    pool, ids = BlockPool(model.config, block_size=4), text(1, 30)
    media = [(b"\0picture", 9, 6), ("sound", 20, 2)]
    run(pool, model, ids, media=media)
    other = moved(pool, model, path)
    assert run(other, model, ids, media=media)[1] == 29
    assert run(other, model, ids, media=[(b"\1picture", 9, 6), ("sound", 20, 2)])[1] == 9


def test_what_is_there_already_is_not_loaded_twice(model, path):
    pool = BlockPool(model.config, block_size=4)
    for seed in (1, 2):
        run(pool, model, text(1, 30, seed=seed))
    pool.save(path)
    other = BlockPool(model.config, block_size=4)
    run(other, model, text(1, 30, seed=2))
    before = len(other.prefixes.slots)
    done = other.load(path, model)
    assert done == (len(pool.prefixes.slots) - before, before, 0)
    assert other.load(path, model) == (0, len(pool.prefixes.slots), 0)
    assert other.bytes_used() == pool.bytes_used()
    other.check_integrity()


@pytest.mark.parametrize("limit", ["capacity_tokens", "capacity_bytes"])
def test_a_smaller_pool_takes_what_would_be_evicted_last(model, path, limit):
    pool = BlockPool(model.config, block_size=4)
    for seed in range(4):
        run(pool, model, text(1, 40, seed=seed), priorities=[(0, None, 90)] if seed == 1 else ())
    pool.save(path)
    room = {"capacity_tokens": 100, "capacity_bytes": 25 * pool.groups[next(iter(pool.groups))].sealed.page_bytes}
    other = BlockPool(model.config, block_size=4, **{limit: room[limit]})
    done = other.load(path, model)
    assert done == (25, 0, len(pool.prefixes.slots) - 25)
    other.check_integrity()
    assert [copy.copy(other.can_admit([n])) for n in (100, 101)] == [True, False], "all of it can make room"

    def found(seed: int) -> int:
        with other.session() as session:
            return session.prepare(text(1, 41, seed=seed), model=model)

    # Two texts of 11 blocks: the one with the highest priority, then the newest one; of the next one the beginning.
    assert [found(seed) for seed in range(4)] == [0, 40, 12, 40]


def test_nothing_is_evicted_for_it(model, path):
    pool = BlockPool(model.config, block_size=4)
    run(pool, model, text(1, 40))
    pool.save(path)
    other = BlockPool(model.config, block_size=4, capacity_tokens=64)
    run(other, model, text(1, 40, seed=1))
    assert other.load(path, model) == (5, 0, 6)
    assert run(other, model, text(1, 40, seed=1))[1] == 39
    other.check_integrity()


def test_the_order_of_giving_up_stays(model, path):
    pool = BlockPool(model.config, block_size=4)
    for seed in (0, 1, 2, 0):  # the first one was used last
        run(pool, model, text(1, 20, seed=seed))
    other = moved(pool, model, path)

    def order(pool: BlockPool) -> list[bytes]:
        gone = []
        while pool.prefixes.slots:
            for slot in pool.prefixes.evict([group.sealed for group in pool.groups.values()], "test"):
                gone.append(slot.node.key)
                slot.group.store.unname(slot.page)
        return gone

    assert order(other) == order(pool) != []


@pytest.mark.parametrize("orders", [(PLANAR, LANES), (LANES, PLANAR)], ids="-".join)
def test_another_order_of_codes(model, path, monkeypatch, orders):
    choices, ids = {"codec": "int4", "block_size": 8}, text(1, 45)
    with dispatch.plain_torch():
        monkeypatch.setattr(pages, "order_for", lambda device: orders[0])
        pool = BlockPool(model.config)
        run(pool, model, ids, **choices)
        pool.save(path)
        wanted = run(pool, model, ids, **choices)
        monkeypatch.setattr(pages, "order_for", lambda device: orders[1])
        other = BlockPool(model.config)
        other.load(path, model)
        assert run(other, model, ids, **choices) == wanted


def test_a_loaded_store_fills_its_own_pages_only(model, path):
    pool, ids = BlockPool(model.config, block_size=4), text(1, 30)
    run(pool, model, ids)
    pool.save(path)
    other = BlockPool(model.config, block_size=4)
    cache = PagedCache(model.config, pool=other)
    busy = generate(model, ids, cache, 3)
    other.load(path, model)
    assert generate(model, ids, PagedCache(model.config), 3) == busy
    assert run(other, model, ids)[1] == 29
    other.check_integrity()


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_another_model_is_refused(model, path):
    pool = BlockPool(model.config)
    run(pool, model, text(1, 40))
    pool.save(path)
    other = ours()
    with torch.no_grad():
        other.lm_head.weight[5, 5] += 1e-3
    empty = BlockPool(other.config)
    with refused(SavedStateError, "other weights"):
        empty.load(path, other)
    assert not empty.groups and empty.identity is None
    filled = BlockPool(other.config)
    run(filled, other, text(1, 40))
    with refused(CacheInputError, "other weights"):
        filled.load(path, model)
    filled.check_integrity()


def said(change):
    return lambda description, tensors: change(description)


def put(name: str, where, value):
    def change(description, tensors):
        tensors[name][where] = value

    return change


FORGERIES = {
    "nothing-said": said(lambda d: [d.pop(key) for key in ("groups", "roots", "media")]),
    "group-layers": said(lambda d: d["groups"][0].update(layers=[0, 1, 7])),
    "group-order": said(lambda d: d["groups"][0].update(layers=[1, 0, 2])),
    "group-block": said(lambda d: d["groups"][0].update(block_size=2**40)),
    "group-count": said(lambda d: d["groups"][0].update(count=2**50)),
    "group-codec": said(lambda d: d["groups"][0].update(codec=["Own", {}])),
    "group-shape": said(lambda d: d["groups"][0].update(pages=[[2, 8, 9, "float32", "lanes"]] * 3)),
    "root-key": said(lambda d: d["roots"][0].__setitem__(0, "00")),
    "root-key-other": said(lambda d: d["roots"][0].__setitem__(0, "00" * 32)),
    "root-group": said(lambda d: d["roots"][0].__setitem__(2, [[5, None, 0]])),
    "root-window": said(lambda d: d["roots"][0].__setitem__(2, [[0, -1, 0]])),
    "root-none": said(lambda d: d["roots"][0].__setitem__(2, [])),
    "media": said(lambda d: d["media"].update({"0": [["str", "x", 0, 1]]})),
    "parent": put("blocks", (3, 1), 3),
    "parent-other": put("blocks", (3, 1), 0),
    "root": put("blocks", (3, 0), 9),
    "key": put("keys", (2, 0), 1),
    "token": put("tokens", 0, 5),
    "page": put("numbers", 1, 0),
    "page-none": put("numbers", 1, -1),
    "page-beyond": put("numbers", 4, 99),
    "level": put("levels", 0, 101),
    "seconds": put("seconds", 0, -1.0),
    "fewer-tokens": lambda d, t: t.update(tokens=t["tokens"][:-1]),
    "fewer-blocks": lambda d, t: t.update(blocks=t["blocks"][:-1]),
    "no-pages": lambda d, t: t.pop("pages.0.2"),
}  # fmt: skip


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_store_is_refused_and_the_pool_is_as_before(model, path, change):
    pool = BlockPool(model.config, block_size=4)
    run(pool, model, text(1, 30))
    pool.save(path)
    with open(path, "rb") as file:
        saved = SavedFile(file, path, "prefix store")
        tensors = {name: saved.tensor(name).clone() for name in saved.table if name != savefile.CHECKSUMS}
    change(saved.description, tensors)
    with open(path, "wb") as file:
        savefile.write(file, saved.description, {name: Entry.of(tensor) for name, tensor in tensors.items()})
    other = BlockPool(model.config, block_size=4)
    run(other, model, text(1, 20, seed=1))
    before = other.metrics()
    with refused(KVCacheError, "."):
        other.load(path, model)
    other.check_integrity()
    after = other.metrics()
    assert (after.bytes_used, after.blocks_cached) == (before.bytes_used, before.blocks_cached)


def test_a_damaged_store_is_refused(model, path):
    pool = BlockPool(model.config, block_size=4)
    run(pool, model, text(1, 30))
    pool.save(path)
    data, rng = path.read_bytes(), np.random.default_rng(0)
    other = BlockPool(model.config, block_size=4)
    header = 8 + int.from_bytes(data[:8], "little")
    for bit in rng.integers(8 * header, 8 * len(data), 60).tolist():
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with refused(SavedStateError, "checksum"):
            other.load(path, model)
    assert not other.groups
