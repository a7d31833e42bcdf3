"""What is saved goes on as if nothing had happened, in any process, from any place, and only with the model that computed it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from hf_kvcache import (
    BlockPool,
    CacheInputError,
    CacheStateError,
    CapacityError,
    ConfigurationError,
    DiskTier,
    HostTier,
    KVCache,
    OffloadedCache,
    PagedCache,
    QuantizedCache,
    SavedStateError,
    SlidingWindowCache,
    Window,
    cache_kwarg,
    codecs,
    pages,
)
from hf_kvcache.codecs.packing import LANES, PLANAR
from hf_kvcache.kernels import dispatch

from .architectures import LINEAR, build
from .configs import EXACT, every
from .forcing import error, forced, generate, ours, padding, text
from .test_bad_input import refused, state


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return ours()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "cache.safetensors"


def filled(model, cache: KVCache, columns: int = 30, mask: torch.Tensor | None = None) -> KVCache:
    """`cache` with the tokens of `text(rows, columns)`, which `prepare` was told, from passes of several lengths."""
    ids = text(1 if mask is None else len(mask), columns)
    cache.prepare(ids, mask)
    forced(model, cache, ids, [columns - 3, 1, 2], mask)
    return cache


def packed(cache: KVCache) -> list[dict]:
    """The fields of all sealed and cold pages of a cache, in the order of its text."""
    found = []
    for layer in filter(None, cache.storage.layers):
        table, store = layer.group.table, layer.group.store
        for r in range(table.rows):
            for owner, lo, hi in table.ranges(r):
                if owner is not store.open:
                    fields = owner.layer(layer.index).gather(table.ids[r, lo:hi])
                    found.append(
                        {name: field.contiguous().view(torch.uint8).numpy().tobytes() for name, field in fields.items()}
                    )
    return found


def go_on_alike(model, cache: KVCache, again: KVCache, mask: torch.Tensor | None = None, rows: int = 1) -> None:
    """Both give the same logits for the same text, to the last bit, in passes of several lengths."""
    more = text(rows, 9, seed=1)
    one, other = (forced(model, each, more, [5, 1, 3], mask) for each in (cache, again))
    assert torch.equal(one, other)
    again.check_integrity()


# ---- nothing is lost -------------------------------------------------------------------------------------------------


@every
def test_a_loaded_cache_goes_on_as_the_saved_one(model, path, configuration):
    mask = padding(2, 42, 0, 7)
    cache = filled(model, configuration.build(model.config), 33, mask[:, :33])
    cache.save(path)
    again = KVCache.load(path, model)
    assert type(again) is type(cache) and repr(again) == repr(cache) and state(again) == state(cache)
    assert packed(again) == packed(cache)
    whole = torch.cat([text(2, 33), text(2, 9, seed=1)], dim=1)
    assert again.prepare(whole, mask) == cache.prepare(whole, mask) == 33
    go_on_alike(model, cache, again, mask, rows=2)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "gemma3n_text", "deepseek_v3", *LINEAR])
def test_models_of_every_kind(path, name):
    model = ours(name)
    cache = filled(model, PagedCache(model.config, block_size=4))
    cache.save(path)
    go_on_alike(model, cache, KVCache.load(path, model))


def test_generate_goes_on_with_prompt_and_answer(model, path):
    ids, cache = text(1, 21), PagedCache(model.config)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), **cache_kwarg(cache), max_new_tokens=10, do_sample=False
    )
    cache.save(path, input_ids=out)
    again = KVCache.load(path, model)
    more = torch.cat([out, text(1, 5, seed=1)], dim=1)
    assert again.prepare(more) == 30  # the newest token was never computed
    assert generate(model, more, again, 8) == generate(model, more, PagedCache(model.config), 8)


def test_rows_that_share_blocks_are_saved_once_and_share_them_still(model, path):
    cache = filled(model, PagedCache(model.config, block_size=4), 33)
    cache.save(path)
    alone = path.stat().st_size
    cache.batch_repeat_interleave(4)
    forced(model, cache, text(4, 2, seed=2))
    cache.save(path)
    assert path.stat().st_size < 1.5 * alone
    again = KVCache.load(path, model)
    assert again.memory().stored == cache.memory().stored
    go_on_alike(model, cache, again, rows=4)


def test_what_was_cut_forked_or_taken_back_is_saved_as_it_is(model, path):
    cache = filled(model, QuantizedCache(model.config, bits=8, block_size=8, residual=0), 33)
    twin = cache.fork()
    cache.crop(-6)  # within a sealed block
    forced(model, twin, text(1, 3, seed=4))
    cache.save(path)
    again = KVCache.load(path, model)
    assert state(again) == state(cache)
    go_on_alike(model, cache, again)


def test_a_saved_cache_can_be_saved_again_without_the_model(path):
    model = build("llama")
    cache = filled(model, PagedCache(model.config))
    with refused(CacheInputError, "which model", r"cache\.save\(path, model\)", "enable"):
        cache.save(path)
    cache.save(path, model)
    first = path.read_bytes()
    KVCache.load(path, model).save(path)
    assert path.read_bytes() == first, "the same content is the same file"


def test_a_session_is_saved_with_its_answer_as_a_plain_cache(model, path):
    ids, pool = text(1, 21), BlockPool(model.config, block_size=4)
    session = pool.session(salt="s")
    out = session.generate(model, ids, max_new_tokens=10, do_sample=False)
    session.save(path)
    again = KVCache.load(path, model)
    assert type(again) is KVCache and again.prepare(torch.cat([out, text(1, 3)], dim=1)) == 30
    session.media = [(b"a picture", 12, 4)]
    session.reset()
    session.generate(model, ids, pixels=None, max_new_tokens=3, do_sample=False)
    session.save(path)
    assert KVCache.load(path, model).prepare(ids) == 12, "ids do not tell what stands behind a placeholder"


def test_who_knows_no_tokens_is_told(model, path):
    cache = PagedCache(model.config)
    forced(model, cache, text(1, 20))
    with pytest.warns(UserWarning, match="input_ids"):
        cache.save(path)
    again = KVCache.load(path, model)
    go_on_alike(model, cache, again)
    assert again.prepare(text(1, 40)) == 0


# ---- places ----------------------------------------------------------------------------------------------------------


def test_cold_blocks_come_back_cold_or_wherever_they_are_wanted(model, path):
    cache = filled(model, OffloadedCache(model.config, block_size=4, resident_tokens=8), 33)
    cache.save(path)
    assert KVCache.load(path, model).stats()["blocks_cold"] == cache.stats()["blocks_cold"] > 0
    warm = KVCache.load(path, model, tier="device")
    assert warm.stats()["blocks_cold"] == 0
    plain, more = filled(model, PagedCache(model.config, block_size=4), 33), text(1, 7, seed=1)
    assert error(forced(model, warm, more, [4, 1, 2]), forced(model, plain, more, [4, 1, 2])) < EXACT
    warm.save(path)
    cold = KVCache.load(path, model, tier=HostTier(4))
    forced(model, cold, text(1, 1))
    assert cold.stats()["blocks_cold"] > 0


@pytest.mark.parametrize("own", [False, True], ids=["all-layers", "one-layer"])
def test_a_disk_tiers_folder_is_not_in_the_file_and_a_warning_says_so(model, path, own):
    tier = DiskTier(8, path.parent / "a-folder-of-mine")
    choices = {"layers": {1: {"tier": tier}}} if own else {"tier": tier}
    filled(model, KVCache(model.config, block_size=4, **choices), 30).save(path)
    assert b"a-folder-of-mine" not in path.read_bytes()
    with pytest.warns(UserWarning, match=f"in {tempfile.gettempdir()}, where temporary files are.*tier=DiskTier"):
        assert KVCache.load(path, model).memory().by_tier["disk"] > 0
    if not own:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert KVCache.load(path, model, tier=tier).storage.groups[0].tier.place == tier.place


@pytest.mark.parametrize("codec", [name for name in codecs.CODECS if name != "native"])
@pytest.mark.parametrize("orders", [(PLANAR, LANES), (LANES, PLANAR)], ids="-".join)
@pytest.mark.parametrize("kind", [HostTier, DiskTier])
def test_codes_are_packed_anew_where_kernels_read_another_order(model, path, monkeypatch, codec, orders, kind):
    saved_as, loaded_as = orders
    tier = HostTier(16) if kind is HostTier else DiskTier(16, path.parent)
    with dispatch.plain_torch():
        monkeypatch.setattr(pages, "order_for", lambda device: saved_as)
        cache = filled(model, KVCache(model.config, codec=codec, block_size=8, residual=4, tier=tier), 41)
        cache.save(path)
        monkeypatch.setattr(pages, "order_for", lambda device: loaded_as)
        again = KVCache.load(path, model, tier=tier)
        assert {store.pages[0].order for group in again.pool.groups.values() for store in group.stores} == {loaded_as}
        go_on_alike(model, cache, again)


@pytest.mark.parametrize("place", ["file://{}", "memory://{}"])
def test_any_file_system_that_fsspec_knows(model, path, place):
    url = place.format(path)
    cache = filled(model, PagedCache(model.config))
    for _ in range(2):  # the second one takes the first one's place
        cache.save(url)
    go_on_alike(model, cache, KVCache.load(url, model))
    fs, name = fsspec.core.url_to_fs(url)
    assert [Path(entry).name for entry in fs.ls(str(Path(name).parent), detail=False)] == [path.name]


def test_another_process_goes_on(model, path):
    cache = filled(model, QuantizedCache(model.config, bits=4, block_size=8, residual=8), 41)
    cache.save(path)
    code = f"""
        import hf_kvcache
        from tests.forcing import generate, ours, text
        model = ours()
        cache = hf_kvcache.KVCache.load({str(path)!r}, model)
        held = cache.prepare(text(1, 41))
        print(held, generate(model, text(1, 41), cache, 9))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert run.returncode == 0, run.stderr
    cache.prepare(text(1, 41))
    assert run.stdout.split(maxsplit=1) == ["40", f"{generate(model, text(1, 41), cache, 9)}\n"]


# ---- what it costs, and what it tells --------------------------------------------------------------------------------


def test_a_file_is_as_large_as_what_is_held(path):
    model = ours(num_hidden_layers=4, hidden_size=128, num_attention_heads=2, num_key_value_heads=2)
    for make in (PagedCache, OffloadedCache, QuantizedCache, SlidingWindowCache):
        cache = PagedCache(model.config, block_size=64) if make is PagedCache else make(model.config)
        filled(model, cache, 64 * 8 + 1)  # a page with one token at the end
        cache.save(path)
        assert path.stat().st_size <= 1.02 * cache.memory().stored, make


@pytest.mark.parametrize("bits", [None, 8, "fp8"])
def test_nothing_of_other_texts_gets_into_a_file(model, path, bits):
    pool = BlockPool(model.config)
    other = KVCache(model.config, pool=pool, codec=bits, block_size=8)
    filled(model, other, 63)
    for group in pool.groups.values():
        for store in group.stores:
            for slab in (slab for each in store.pages for slab in each.slabs):
                slab.fill_(0xAB)  # somebody's secret
    kept = KVCache(model.config, pool=pool, codec=bits, block_size=8)
    del other
    filled(model, kept, 42)
    kept.save(path)
    assert b"\xab" * 8 not in path.read_bytes()


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_only_the_model_that_computed_it(model, path):
    filled(model, PagedCache(model.config)).save(path)
    other = ours()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 3] += 1e-3
    with refused(SavedStateError, "LlamaForCausalLM", "other weights", "compute it again"):
        KVCache.load(path, other)
    for another in (ours(dtype=torch.bfloat16), ours("qwen2"), ours(num_hidden_layers=2)):
        with refused(SavedStateError, "fingerprint"):
            KVCache.load(path, another)


def test_classes_and_kinds_are_not_mixed_up(model, path):
    filled(model, PagedCache(model.config)).save(path)
    assert type(PagedCache.load(path, model)) is PagedCache
    with refused(SavedStateError, "holds a PagedCache", "KVCache.load"):
        QuantizedCache.load(path, model)
    with refused(SavedStateError, "holds a cache, not a prefix store"):
        BlockPool(model.config).load(path, model)


def test_a_pool_that_is_given_keeps_what_it_has(model, path):
    cache = filled(model, PagedCache(model.config), 64)
    cache.save(path)
    pool = BlockPool(model.config, capacity_tokens=128)
    session = pool.session()
    session.generate(model, text(1, 40, seed=3), max_new_tokens=2, do_sample=False)
    again = KVCache.load(path, model, pool=pool)
    go_on_alike(model, cache, again)
    before = pool.metrics()
    with refused(CapacityError, "capacity_tokens=128"):
        KVCache.load(path, model, pool=pool)
    after = pool.metrics()
    assert (after.blocks_used, after.blocks_cached, after.evictions) == (
        before.blocks_used,
        before.blocks_cached,
        before.evictions,
    )
    del again
    pool.check_integrity()
    with refused(CacheInputError, "other weights"):
        other = ours("qwen2")
        filled(other, PagedCache(other.config)).save(path)
        KVCache.load(path, other, pool=pool)


def test_what_cannot_be_saved_is_refused(model, path):
    class Own(codecs.NativeCodec):
        name = "own"

    with refused(CacheStateError, "nothing to save"):
        PagedCache(model.config).save(path)
    with refused(CacheStateError, "nothing to save"):
        BlockPool(model.config).save(path)
    with refused(ConfigurationError, "own", "AffineCodec"):
        filled(model, KVCache(model.config, codec=Own())).save(path)
    cache = filled(model, PagedCache(model.config))
    for ids, says in (
        (text(1, 29), r"\(1, 29\)"),
        (text(2, 30), "1 rows of 30 columns"),
        (text(1, 30, seed=1), "differ in row 0"),
    ):
        with refused(CacheInputError, says):
            cache.save(path, input_ids=ids)
    with refused(CacheInputError, "other layers"):
        cache.save(path, build("gpt2"))
    assert not path.exists()


def test_choices_of_every_kind_are_written_down(model, path):
    shared = HostTier(8)
    layers = {
        0: {"tier": shared, "codec": "int8"},
        2: {"tier": shared, "codec": codecs.AffineCodec(8, 2)},
        1: {"tier": "host"},
    }
    cache = KVCache(model.config, block_size=8, residual=8, retention=Window(24, 2, rebase=False), layers=layers)
    filled(model, cache, 40).save(path)
    again = KVCache.load(path, model)
    assert repr(again) == repr(cache) and len(again.storage.groups) == 3
    go_on_alike(model, cache, again)


def test_there_is_no_such_place(model, tmp_path):
    for place, says in ((tmp_path / "none", "No such file"), ("s4://bucket/x", "s4"), ("memory://none", "none")):
        with refused(SavedStateError, says):
            KVCache.load(place, model)
    with refused(SavedStateError, "s4"):
        filled(model, PagedCache(model.config)).save("s4://bucket/x")


# ---- faults of the place ---------------------------------------------------------------------------------------------


class Flaky(MemoryFileSystem):
    """A file system on which one operation goes wrong."""

    protocol, store, pseudo_dirs, fails = "flaky", {}, [""], None

    def put_file(self, lpath, rpath, **options):
        if self.fails == "put":
            self.pipe_file(rpath, b"half")
            raise ConnectionError("gone")
        super().put_file(lpath, rpath, **options)

    def mv(self, path1, path2, **options):
        if self.fails == "mv":
            raise PermissionError("no renaming")
        super().mv(path1, path2, **options)

    def get_file(self, rpath, lpath, **options):
        if self.fails == "get":
            raise TimeoutError("slow")
        if self.fails == "short":
            Path(lpath).write_bytes(self.cat_file(rpath)[:-100])
        else:
            super().get_file(rpath, lpath, **options)


@pytest.mark.parametrize("fails", ["put", "mv", "get", "short"])
def test_a_file_system_that_fails_costs_nothing_that_was_there(model, fails, monkeypatch):
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    url, cache = "flaky://folder/x", filled(model, PagedCache(model.config))
    cache.save(url)
    with monkeypatch.context() as patch:
        patch.setattr(Flaky, "fails", fails)
        with refused(SavedStateError, "flaky://folder/x"):
            if fails in ("put", "mv"):
                forced(model, cache, text(1, 3))
                cache.save(url)
            else:
                KVCache.load(url, model)
    assert KVCache.load(url, model).get_seq_length() == 30
    assert len(Flaky.store) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.save(url)
    go_on_alike(model, cache, KVCache.load(url, model))


def test_the_file_is_safetensors_and_its_header_json(model, path):
    from safetensors.numpy import load_file

    filled(model, PagedCache(model.config)).save(path)
    tensors = load_file(path)
    assert tensors["tokens"].tolist() == text(1, 30)[0].tolist() and tensors["pages.0.sealed"].dtype == "uint8"
    data = path.read_bytes()
    said = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert (said["format"], said["version"]) == ("hf_kvcache", "1") and json.loads(said["description"])["columns"] == 30
