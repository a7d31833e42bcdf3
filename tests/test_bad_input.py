"""Everything that cannot work is refused by name, with the way out, and leaves the cache as it was."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch

import hf_kvcache
from hf_kvcache import (
    BlockPool,
    CacheInputError,
    CacheStateError,
    CapacityError,
    ConfigurationError,
    HostTier,
    KVCache,
    KVCacheError,
    OffloadedCache,
    PagedCache,
    QuantizedCache,
    SlidingWindowCache,
    TierError,
    UnsupportedError,
    Window,
    cache_kwarg,
)

from .architectures import LINEAR, build
from .configs import EXACT
from .forcing import error, forced, ours, text, uncached


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return ours()


@pytest.fixture
def config(model):
    return model.config


@contextlib.contextmanager
def refused(error: type[KVCacheError], *says: str):
    """The block raises `error`, and its message contains every one of `says`."""
    with pytest.raises(error) as caught:
        yield
    for part in says:
        assert re.search(part, str(caught.value)), f"{part!r} is not in {str(caught.value)!r}"


def state(cache: KVCache) -> dict:
    """What a cache holds, without the counters of what happened to it."""
    stats, memory = cache.stats(), cache.memory()
    held = ("tokens", "columns", "blocks_open", "blocks_sealed", "blocks_cold", "positions_dropped")
    return {key: stats[key] for key in held} | {"bytes": memory.by_tier, "waste": memory.waste}


@contextlib.contextmanager
def unchanged(model, cache: KVCache, more: int = 6):
    """Whatever happens in the block, the cache goes on as a twin does to which it did not happen."""
    twin, before = cache.fork(), state(cache)
    yield
    assert state(cache) == before
    cache.check_integrity()
    if cache.storage.columns:
        ids, passes = text(cache.storage.batch, more, seed=9), [1, 1, more - 2]
        wanted = forced(model, twin, ids, passes)
        assert torch.equal(forced(model, cache, ids, passes), wanted)


# ---- construction ----------------------------------------------------------------------------------------------------

IMPOSSIBLE = {
    "bits": (lambda c: QuantizedCache(c, bits=5), ["bits=5", "2, 4, 8 or 'fp8'"]),
    "codec-name": (lambda c: KVCache(c, codec="int5"), ["'int5'", "int8, int4, int2"]),
    "codec-bits": (lambda c: hf_kvcache.AffineCodec(3), ["bits=3", r"\(8, 4, 2\)"]),
    "window": (lambda c: SlidingWindowCache(c, window=0), ["window=0", "at least 1"]),
    "window-fraction": (lambda c: SlidingWindowCache(c, window=7.5), ["window=7.5", "whole number"]),
    "sinks": (lambda c: SlidingWindowCache(c, sinks=-1), ["sinks=-1", "at least 0"]),
    "block-size": (lambda c: PagedCache(c, block_size=0), ["block_size=0", "at least 1"]),
    "block-size-text": (lambda c: PagedCache(c, block_size="16"), ["block_size='16'", "whole number"]),
    "block-size-of-int4": (lambda c: QuantizedCache(c, bits=4, block_size=20), ["block_size=20", "multiple of 8"]),
    "residual": (lambda c: QuantizedCache(c, residual=-1), ["residual=-1", "at least 0"]),
    "resident": (lambda c: OffloadedCache(c, resident_tokens=-1), ["resident_tokens=-1", "at least 0"]),
    "ring": (lambda c: HostTier(8, ring=0), ["ring=0", "use 2"]),
    "host-bytes": (lambda c: HostTier(8, host_bytes=-1), ["host_bytes=-1", "at least 0"]),
    "layer-index": (lambda c: KVCache(c, layers={3: {"codec": "int8"}}), ["key 3", "below 3"]),
    "layer-type": (
        lambda c: KVCache(c, layers={"sliding_attention": {"codec": "int8"}}),
        ["'sliding_attention'", "full_attention"],
    ),
    "layer-choice": (lambda c: KVCache(c, layers={0: {"bits": 4}}), [r"\['bits'\]", "retention, codec, tier"]),
    "capacity-tokens": (lambda c: BlockPool(c, capacity_tokens=0), ["capacity_tokens=0", "positive"]),
    "capacity-bytes": (lambda c: BlockPool(c, capacity_bytes=-8), ["capacity_bytes=-8", "positive"]),
    "pool": (lambda c: KVCache(c, pool="large"), ["'large'", "BlockPool"]),
    "pool-of-another-model": (
        lambda c: KVCache(c, pool=BlockPool(build("gpt2").config)),
        ["another model|other layers", "share a model"],
    ),
    "enable": (lambda c: hf_kvcache.enable(torch.nn.Linear(2, 2)), ["Linear", "PreTrainedModel"]),
}


@pytest.mark.parametrize(("make", "says"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_be_built_is_refused_at_construction(config, make, says):
    with refused(ConfigurationError, *says):
        make(config)


def test_every_error_is_one_of_ours_and_one_of_pythons():
    for kind, builtin in (
        (ConfigurationError, ValueError),
        (CacheInputError, ValueError),
        (CacheStateError, RuntimeError),
        (CapacityError, RuntimeError),
        (TierError, OSError),
        (UnsupportedError, NotImplementedError),
    ):
        assert issubclass(kind, KVCacheError) and issubclass(kind, builtin)


# ---- input that does not fit -----------------------------------------------------------------------------------------


def filled(model, rows: int = 2, columns: int = 10, make=PagedCache, **choices) -> KVCache:
    cache = make(model.config, **{"block_size": 4, **choices})
    forced(model, cache, text(rows, columns))
    return cache


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("make", [PagedCache, OffloadedCache])
def test_another_batch_size(model, make, rows):
    cache = filled(model, make=make)
    with unchanged(model, cache), refused(CacheInputError, "holds 2 rows", f"given {rows}", "batch_repeat_interleave"):
        forced(model, cache, text(rows, 3))


def test_another_batch_size_in_generate(model):
    cache = filled(model)
    with unchanged(model, cache), refused(CacheInputError, "holds 2 rows", "given 3"):
        model.generate(text(3, 12), max_new_tokens=2, **cache_kwarg(cache))


def test_another_dtype(model):
    cache = filled(model)
    with unchanged(model, cache), refused(CacheInputError, "float32", "bfloat16", r"reset\(\)"):
        forced(ours(dtype=torch.bfloat16), cache, text(2, 3))
    cache.reset()
    forced(ours(dtype=torch.bfloat16), cache, text(2, 3))  # the way out


def test_a_cache_built_from_another_config_with_other_heads(model):
    other = ours("llama", num_key_value_heads=4)
    cache = PagedCache(model.config, block_size=4)
    with unchanged(model, cache), refused(CacheInputError, r"\(4, 8, 8\)", r"\(2, 8, 8\)", "this model's config"):
        forced(other, cache, text(2, 3))
    forced(model, cache, text(2, 3))
    cache.check_integrity()


def test_a_cache_built_from_a_config_with_fewer_layers(model):
    cache = PagedCache(build("llama", num_hidden_layers=2).config, block_size=4)
    with refused(CacheInputError, "layer 2", "2 layers", "config"):
        forced(model, cache, text(2, 3))
    cache.check_integrity()


def test_another_model_with_a_filled_cache(model):
    cache = filled(model)
    with unchanged(model, cache), refused(CacheInputError, r"\(2, 8, 8\)", r"\(4, 8, 8\)"):
        forced(ours("llama", num_key_value_heads=4), cache, text(2, 3))


def test_caches_of_one_pool_in_two_dtypes(model):
    cache = filled(model)
    second = PagedCache(model.config, block_size=4, pool=cache.pool)
    with unchanged(model, cache), refused(CacheInputError, "float32", "bfloat16", "share a pool"):
        forced(ours(dtype=torch.bfloat16), second, text(2, 3))


def test_rows_that_the_cache_does_not_have(model):
    cache = filled(model)
    for bad in ([0, 2], [-1, 0], []):
        with unchanged(model, cache), refused(CacheInputError, re.escape(str(bad)), "2 rows"):
            cache.reorder_cache(torch.tensor(bad, dtype=torch.int64))
    with unchanged(model, cache), refused(CacheInputError, "repeats=0", "at least 1"):
        cache.batch_repeat_interleave(0)


def test_a_mask_that_covers_the_new_columns_only(model):
    cache, mask = filled(model), torch.tensor([[0, 1, 1], [1, 1, 1]])
    with (
        unchanged(model, cache),
        refused(CacheInputError, "covers 3 columns", "13", "cached as well"),
        torch.no_grad(),
    ):
        model(text(2, 3), attention_mask=mask, position_ids=torch.arange(10, 13)[None], **cache_kwarg(cache))


def test_operations_on_a_single_layer(model):
    cache = filled(model)
    for name in ("reset", "crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"):
        with unchanged(model, cache), refused(CacheInputError, "on the cache"):
            getattr(cache.layers[0], name)(1)


# ---- a full pool -----------------------------------------------------------------------------------------------------


def test_a_pool_that_is_full_of_tokens(model):
    cache = filled(model, columns=12, pool=BlockPool(model.config, capacity_tokens=40))  # 24 of 40 slots
    says = ("10 more blocks", "4 of 10 are free", "16 more tokens", "crop")
    with unchanged(model, cache, more=4), refused(CapacityError, *says):
        forced(model, cache, text(2, 20))


def test_a_pool_that_is_full_of_bytes(model):
    page = 3 * 2 * 2 * 4 * 8 * 4  # layers, keys and values, heads, positions, channels, bytes
    cache = filled(model, columns=12, pool=BlockPool(model.config, capacity_bytes=10 * page))
    assert cache.memory().stored == 6 * page
    says = (f"{10 * page} more bytes", f"{4 * page} of {10 * page}", "fewer bits")
    with unchanged(model, cache, more=4), refused(CapacityError, *says):
        forced(model, cache, text(2, 20))


@pytest.mark.parametrize("limit", ["capacity_tokens", "capacity_bytes"])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_full_pool_counts_before_anything_is_stored(model, limit, bits):
    choices = {} if bits is None else {"codec": bits, "block_size": 8}
    cache = KVCache(model.config, pool=BlockPool(model.config, **{limit: 16}), **choices)
    with unchanged(model, cache), refused(CapacityError, f"{limit[9:]}|bytes"):
        forced(model, cache, text(2, 30))
    assert cache.get_seq_length() == 0 and cache.memory().stored == 0


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("held", [0, 8])
def test_recurrent_states_have_seen_a_pass_that_a_full_pool_refuses(name, held):
    model, ids = ours(name), text(1, 12)
    cache = PagedCache(model.config, pool=BlockPool(model.config, capacity_tokens=16))
    if held:
        forced(model, cache, ids[:, :held])
    with refused(CapacityError, "tokens fit"):
        forced(model, cache, text(1, 20))
    with refused(CacheStateError, "recurrent states", r"reset\(\)"):
        forced(model, cache, ids[:, held:])
    cache.reset()
    assert error(forced(model, cache, ids), uncached(model, ids)) < EXACT


def test_capacity_errors_carry_numbers(model):
    cache = filled(model, columns=12, pool=BlockPool(model.config, capacity_tokens=32))
    with pytest.raises(CapacityError) as caught:
        forced(model, cache, text(2, 8))
    assert (caught.value.needed, caught.value.available, caught.value.unit) == (16, 8, "tokens")


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_pool_that_fills_up_in_generate_leaves_the_other_caches_alone(model, options):
    pool = BlockPool(model.config, capacity_tokens=96)
    neighbour = filled(model, pool=pool)
    cache = PagedCache(model.config, block_size=4, pool=pool)
    with unchanged(model, neighbour), refused(CapacityError, "96", "tokens fit"):
        try:
            model.generate(text(2, 11), max_new_tokens=60, do_sample=False, **options, **cache_kwarg(cache))
        finally:
            held = cache.get_seq_length()
            assert 11 <= held < 70
            cache.check_integrity()
            cache.reset()
    assert cache.memory().stored == 0


def test_a_full_pool_still_seals(model):
    """Sealing needs a page for a moment; a pool with room for the tokens must not refuse it."""
    cache = QuantizedCache(
        model.config, bits=4, block_size=8, residual=0, pool=BlockPool(model.config, capacity_tokens=32)
    )
    forced(model, cache, text(1, 31), [7, *[1] * 24])
    assert cache.stats()["tokens_sealed"] == 24
    forced(model, cache, text(1, 1))
    with refused(CapacityError, "0 of 4 are free"):
        forced(model, cache, text(1, 1))
    assert cache.stats()["tokens"] == [32]
    cache.check_integrity()


# ---- states in which something is not possible -----------------------------------------------------------------------


def generate(model, cache, ids, **options):
    options = {"max_new_tokens": 4, "do_sample": False, **options}
    return model.generate(ids, **options, **cache_kwarg(cache))


MAKES = {
    "paged": PagedCache,
    "offloaded": lambda c, **k: OffloadedCache(c, resident_tokens=8, **k),
    "quantised": lambda c, **k: QuantizedCache(c, residual=8, **{**k, "block_size": 8}),
    "window": lambda c, **k: SlidingWindowCache(c, window=16, **k),
}


@pytest.mark.parametrize("columns", [10, 100])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_the_cache_holds_the_whole_prompt_already(model, make, columns):
    cache = filled(model, columns=columns, make=make)
    says = (f"holds {columns} tokens", f"{columns} columns", "prepare", "reset")
    with unchanged(model, cache), refused(CacheStateError, *says):
        generate(model, cache, text(2, columns))


def test_the_cache_is_longer_than_the_ids(model):
    cache = filled(model, columns=10)
    with unchanged(model, cache), refused(CacheStateError, "holds 10 tokens", "prepare"):
        generate(model, cache, text(2, 7))


def test_another_prompt_after_generating(model):
    cache = PagedCache(model.config, block_size=4)
    generate(model, cache, text(2, 10))
    with unchanged(model, cache), refused(CacheStateError, "holds 13 tokens", "another text", "prepare"):
        generate(model, cache, text(2, 11, seed=1))


def test_use_cache_false_with_a_filled_cache(model):
    cache, ids = filled(model, columns=10), text(2, 14)
    ids[:, :10] = text(2, 10)
    with refused(CacheStateError, "use_cache=False", "reset"):
        generate(model, cache, ids, use_cache=False)
    cache.check_integrity()
    assert cache.get_seq_length() == 14  # the first step was right: the second one gave the whole text again
    fresh, more = filled(model, columns=10), text(2, 3, seed=1)
    forced(model, fresh, ids[:, 10:])
    assert torch.equal(forced(model, cache, more), forced(model, fresh, more))


def test_a_handle_of_an_earlier_pass(model):
    cache = filled(model)
    new = [torch.zeros(2, 2, 1, 8) for _ in "kv"]
    keys, _ = cache.update(*new, 0)
    cache.crop(0)
    cache.reset()
    with refused(CacheStateError, "earlier forward pass", "clone"):
        keys.clone()


def test_a_handle_of_the_pass_before_last(model):
    cache = PagedCache(model.config, block_size=4)
    new = [torch.zeros(2, 2, 1, 8) for _ in "kv"]
    handles = []
    for _ in range(2):
        handles.append([cache.update(*new, layer) for layer in range(3)])
    with unchanged(model, cache), refused(CacheStateError, "earlier forward pass"):
        handles[0][1][0].sum()


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_pass_that_stopped_halfway(model, make, shared):
    cache, twin = (filled(model, columns=22, make=make) for _ in range(2))
    fork = cache.fork() if shared else None  # then the next pass begins with a copy on write
    cache.update(*(torch.full((2, 2, 7, 8), torch.nan) for _ in "kv"), 0)
    with refused(CacheStateError, "halfway", r"reset\(\)", r"crop\(\)"):
        forced(model, cache, text(2, 3))
    cache.crop(22)  # the way out
    cache.check_integrity()
    more, passes = text(2, 9, seed=1), [3] + [1] * 6
    wanted = forced(model, twin, more, passes)
    assert torch.equal(forced(model, cache, more, passes), wanted)
    assert fork is None or torch.equal(forced(model, fork, more, passes), wanted)


def test_cropping_to_where_the_window_no_longer_reaches(model):
    cache = filled(model, columns=40, make=KVCache, retention=Window(8, 2))
    with unchanged(model, cache), refused(CacheStateError, "40 tokens", "window of 8", "Crop less", "reset"):
        cache.crop(-20)


# ---- what no fused attention can do ----------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_window_on_attention_that_cannot_see_it(implementation):
    model = build("llama")
    model.set_attn_implementation(implementation)
    cache = KVCache(model.config, block_size=4, retention=Window(8, 2))
    forced(model, cache, text(1, 10))  # inside the window every attention is right
    with refused(UnsupportedError, "window 8", "11 tokens", "enable"):
        forced(model, cache, text(1, 1))
    cache.crop(10)  # layer 0 has stored what nothing could attend to
    cache.check_integrity()
    hf_kvcache.enable(model)  # the way out
    fresh = KVCache(model.config, block_size=4, retention=Window(8, 2))
    forced(model, fresh, text(1, 10))
    more = text(1, 5, seed=1)
    torch.testing.assert_close(forced(model, cache, more), forced(model, fresh, more))


def test_attention_weights(model):
    cache = filled(model)
    with unchanged(model, cache), refused(UnsupportedError, "eager"), torch.no_grad():
        model(text(2, 1), output_attentions=True, **cache_kwarg(cache))


def test_attention_weights_in_generate(model):
    cache = PagedCache(model.config, block_size=4)
    with refused(UnsupportedError, "eager"):
        generate(model, cache, text(2, 5), output_attentions=True, return_dict_in_generate=True)
    cache.check_integrity()


def test_dropout(model):
    training = ours("llama", attention_dropout=0.5).train()
    cache = PagedCache(model.config, block_size=4)
    with refused(UnsupportedError, "dropout=0.5", r"model.eval\(\)"):
        forced(training, cache, text(2, 5))
    assert cache.get_seq_length() == 0 and cache.storage.batch == 0
    cache.check_integrity()


# ---- after a pass that stopped halfway ---------------------------------------------------------------------------------


def stopped_halfway(model, cache, columns: int = 5) -> None:
    """A pass that only the first layer saw."""
    cache.update(*(torch.zeros(2, 2, columns, 8) for _ in "kv"), 0)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_prepare_takes_back_a_pass_that_stopped_halfway(model, make):
    ids = text(2, 30)
    cache = make(model.config)
    cache.prepare(ids[:, :20])
    forced(model, cache, ids[:, :20])
    stopped_halfway(model, cache, 10)
    assert cache.prepare(ids) == 20
    fresh = make(model.config)
    forced(model, fresh, ids[:, :20])
    assert torch.equal(forced(model, cache, ids[:, 20:]), forced(model, fresh, ids[:, 20:]))
    cache.check_integrity()


@pytest.mark.parametrize("look", ["stats", "memory", "fork", "reorder"])
def test_looking_at_a_cache_in_the_middle_of_a_pass_disturbs_nothing(model, look):
    cache = filled(model, columns=22, make=MAKES["quantised"])
    twin = cache.fork()
    stopped_halfway(model, cache)
    looked = {
        "stats": cache.stats,
        "memory": cache.memory,
        "fork": cache.fork,
        "reorder": lambda: cache.reorder_cache(torch.tensor([1, 0])),
    }[look]()
    cache.crop(22)
    cache.check_integrity()
    if look == "reorder":
        twin.reorder_cache(torch.tensor([1, 0]))
    more, passes = text(2, 9, seed=1), [3] + [1] * 6
    wanted = forced(model, twin, more, passes)
    assert torch.equal(forced(model, cache, more, passes), wanted)
    assert look != "fork" or torch.equal(forced(model, looked, more, passes), wanted)


def test_a_first_pass_that_the_pool_refuses_leaves_an_empty_cache(model):
    pool = BlockPool(model.config)
    forced(model, PagedCache(model.config, pool=pool), text(1, 4))
    half = ours(dtype=torch.bfloat16)
    keep = PagedCache(model.config, pool=pool)
    forced(model, keep, text(1, 4))
    cache = PagedCache(half.config, pool=pool)
    with refused(CacheInputError, "one dtype"):
        forced(half, cache, text(1, 9))
    assert cache.get_seq_length() == 0 and cache.storage.batch == 0
    cache.check_integrity()


def test_a_window_is_flat_again_after_speculation(model):
    cache = SlidingWindowCache(model.config, window=16, sinks=2, block_size=8)
    cache.activate_past_recording()
    forced(model, cache, text(1, 700), [1] * 700)
    held = cache.stats()["tokens"][0] - cache.stats()["positions_dropped"]
    assert held <= 16 + 256 + 3 * 8
    cache.reset()
    forced(model, cache, text(1, 100), [1] * 100)
    assert cache.stats()["tokens"][0] - cache.stats()["positions_dropped"] <= 16 + 3 * 8


@pytest.mark.parametrize("lever", [{"retention": "widow"}, {"tier": "hots"}, {"layers": {0: {"tier": "hots"}}}])
def test_names_of_levers_are_checked_at_construction(model, lever):
    with refused(ConfigurationError, "unknown; use"):
        KVCache(model.config, **lever)
    assert "window" in repr(KVCache(model.config, retention="window")) and KVCache(model.config, tier="host")


def test_sinks_may_outnumber_the_window_and_the_text(model):
    cache = SlidingWindowCache(model.config, window=4, sinks=40, block_size=8)
    out = forced(model, cache, text(1, 20))
    one = SlidingWindowCache(model.config, window=4, sinks=40, block_size=8)
    assert torch.allclose(out, forced(model, one, text(1, 20), [1] * 20), atol=1e-4)
