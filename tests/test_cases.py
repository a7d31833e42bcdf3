"""Faults that were reported against caches like ours: each test is named after what must hold instead."""

from __future__ import annotations

import copy
import functools
import gc
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hf_kvcache import (
    HostTier,
    KVCache,
    OffloadedCache,
    PagedCache,
    QuantizedCache,
    Window,
    cache_kwarg,
)
from hf_kvcache.codecs import AffineCodec, Geometry, PageLayout, codec_for
from hf_kvcache.codecs.packing import ORDERS
from hf_kvcache.kernels import cpu, reference

from .architectures import build
from .configs import every, only
from .forcing import error, forced, ours, padding, text, uncached
from .kernels.pages import random_stored

LOSSY = only(lambda row: not row.exact)
EXACT = only(lambda row: row.exact)
KEEPS_ALL = only(lambda row: row.sees is None)
WINDOWS = only(lambda row: row.sees is not None and not row.rebased)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return ours()


@pytest.fixture
def cache(model, configuration) -> KVCache:
    return configuration.build(model.config)


def contents(cache: KVCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What every layer holds, read from a fork that appends one more column and drops it again."""
    twin, held = cache.fork(), []
    for index, layer in enumerate(twin.layers):
        g = layer.storage.geometry
        handles = (torch.zeros(twin.storage.batch, g.kv_heads, 1, dim, dtype=g.dtype) for dim in (g.k_dim, g.v_dim))
        held.append(tuple(handle.clone()[:, :, :-1] for handle in twin.update(*handles, index)))
    return held


def same(a: list[tuple], b: list[tuple], rows=slice(None)) -> bool:
    """Whether `a` holds, bit for bit, rows `rows` of `b`."""
    return all(torch.equal(x, y[rows]) for layer in zip(a, b, strict=True) for x, y in zip(*layer, strict=True))


def keys_and_values(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values of the tiny Llama's shape."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, 2, columns, 8, generator=generator) for _ in "kv")


def fill(cache: KVCache, k: torch.Tensor, v: torch.Tensor) -> None:
    """One pass with the same keys and values in every layer."""
    for layer in range(len(cache.layers)):
        cache.update(k, v, layer)


# ---- the promise itself ----------------------------------------------------------------------------------------------


@only(lambda row: not row.rebased)
@pytest.mark.parametrize("missing", [(0, 0), (0, 5)], ids=["full", "padded"])
def test_logits_are_those_without_a_cache(model, configuration, missing):
    ids, mask = text(2, 48), padding(2, 48, *missing)
    wanted = uncached(model, ids, mask, configuration.sees)
    for passes in ([48], [24] + [1] * 24, [1] * 48, [4] * 12, [20, 3, 1, 20, 4]):
        cache = configuration.build(model.config)
        found = forced(model, cache, ids, passes, mask)
        cache.check_integrity()
        assert error(found, wanted, mask) < configuration.error, f"in passes of {passes}"


@KEEPS_ALL
def test_attention_over_pages_equals_attention_over_what_they_materialise_to(cache):
    for length in (20, 3, 1, 70, 1, 1):
        k, v = keys_and_values(2, length)
        q = torch.randn(2, 4, length, 8)
        for layer, stored in enumerate(cache.layers):
            keys, values = cache.update(k, v, layer)
            found = stored.storage.attend(keys.fresh, q, scale=0.3)
            visible = torch.ones(length, keys.shape[2]).tril(keys.shape[2] - length).bool()
            wanted = F.scaled_dot_product_attention(
                q, keys.clone(), values.clone(), attn_mask=visible, scale=0.3, enable_gqa=True
            )
            torch.testing.assert_close(found, wanted.transpose(1, 2), rtol=1e-4, atol=1e-4)


# ---- quantised -------------------------------------------------------------------------------------------------------


@only(lambda row: not row.exact and row.sees is None)
def test_the_last_residual_prompt_tokens_are_exact_after_prefill(cache):
    k, v = keys_and_values(2, 32)
    fill(cache, k, v)
    for layer, held in zip(cache.layers, contents(cache), strict=True):
        if not layer.storage.group.store.lossless:
            for stored, exact in zip(held, (k, v), strict=True):
                assert torch.equal(stored[:, :, 32 - cache.residual :], exact[:, :, 32 - cache.residual :])
                assert not torch.equal(stored, exact), "nothing was quantised"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(10))
def test_outlier_key_channels_leave_int4_attention_intact(seed, order):
    n, dim, block = 512, 128, 32
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, m, dim, generator=generator) for m in (128, n, n))
    k[..., torch.randperm(dim, generator=generator)[:16]] += 60
    k[..., 5] *= 25
    codec, g = AffineCodec(4), Geometry(1, dim, dim, block, torch.float32)
    blocks = [x.view(n // block, 1, block, dim) for x in (k, v)]
    decoded, _ = codec.decode(codec.encode(*blocks, order), g, order)
    exact, coarse = (
        (q[0, 0] @ keys.reshape(n, dim).T * dim**-0.5).double().log_softmax(-1) for keys in (blocks[0], decoded)
    )
    divergence = (exact.exp() * (exact - coarse)).sum(-1)
    assert 0 < divergence.mean() < 0.02


def test_runs_without_any_optional_package():
    code = """
        import sys
        class Without:
            def __init__(self, finder):
                self.finder = finder
            def find_spec(self, name, *rest):
                absent = {"optimum", "hqq", "quanto", "triton", "accelerate", "gguf", "lm_eval", "datasets"}
                return None if name.split(".")[0] in absent else self.finder.find_spec(name, *rest)
            def __getattr__(self, name):
                return getattr(self.finder, name)
        sys.meta_path[:] = map(Without, sys.meta_path)
        from tests.forcing import forced, ours, text
        from hf_kvcache import QuantizedCache
        model = ours()
        cache = QuantizedCache(model.config, bits=4, block_size=8, residual=0)
        forced(model, cache, text(1, 16), [8, 8])
        print(cache.stats()["tokens_sealed"])
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["16"]


@every
def test_reordering_moves_every_part_and_twice_in_a_row(model, configuration, cache):
    cache.reorder_cache(torch.tensor([0, 0]))  # before any update: nothing to move
    ids, more = text(3, 30), text(3, 6, seed=1)
    once, twice = torch.tensor([2, 0, 0]), torch.tensor([1, 1, 0])
    forced(model, cache, ids)
    before = contents(cache) if configuration.sees is None else None
    cache.reorder_cache(once)
    cache.reorder_cache(twice)
    cache.check_integrity()
    rows = once[twice]
    if before is not None:
        assert same(contents(cache), before, rows)
    wanted = configuration.build(model.config)
    forced(model, wanted, ids[rows])
    passes = [1] * 6
    assert error(forced(model, cache, more, passes), forced(model, wanted, more, passes)) < 1e-4


@every
def test_rows_can_be_selected_and_repeated(model, configuration, cache):
    ids, more = text(3, 30), text(4, 3, seed=1)
    forced(model, cache, ids)
    cache.batch_select_indices(torch.tensor([2, 1]))
    cache.batch_repeat_interleave(2)
    cache.check_integrity()
    wanted = configuration.build(model.config)
    forced(model, wanted, ids[[2, 2, 1, 1]])
    assert error(forced(model, cache, more, [1] * 3), forced(model, wanted, more, [1] * 3)) < 1e-4
    cache.check_integrity()


@every
def test_a_deep_copy_is_equal_and_independent(model, configuration, cache):
    ids, more, other = text(2, 30), text(2, 12, seed=1), text(2, 12, seed=2)
    forced(model, cache, ids, [25, 5])
    twin = copy.deepcopy(cache)
    forced(model, twin, other, [1] * 12)
    second = copy.deepcopy(cache)
    twin.check_integrity()
    assert cache.get_seq_length() == 30
    fresh = configuration.build(model.config)
    forced(model, fresh, ids, [25, 5])
    wanted = forced(model, fresh, more, [1] * 12)
    assert torch.equal(forced(model, cache, more, [1] * 12), wanted)
    assert torch.equal(forced(model, second, more, [1] * 12), wanted)


@only(lambda row: row.sees is None)
def test_a_second_question_on_the_same_context_equals_a_fresh_run(model, configuration, cache):
    context, first, second = text(2, 30), text(2, 9, seed=1), text(2, 9, seed=2)
    forced(model, cache, context)
    before = contents(cache)
    forced(model, cache, first, [1] * 9)
    cache.crop(30 - cache.get_seq_length())
    cache.check_integrity()
    assert not configuration.exact or same(contents(cache), before)
    found = forced(model, cache, second, [1] * 9)
    if configuration.exact:
        fresh = configuration.build(model.config)
        forced(model, fresh, context)
        assert error(found, forced(model, fresh, second, [1] * 9)) < 1e-5
    else:  # the first question may have sealed blocks of the context
        wanted = uncached(model, torch.cat([context, second], dim=1))[:, 30:]
        assert 0 < error(found, wanted) < configuration.error


@pytest.mark.parametrize("sliding", ["native", "int8"])
@pytest.mark.parametrize("full", ["native", "int8"])
@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss"])
def test_full_and_sliding_layers_are_quantised_as_configured(name, full, sliding):
    model, ids = ours(name), text(2, 40)
    layers = {"full_attention": {"codec": full}, "sliding_attention": {"codec": sliding}}
    cache = KVCache(model.config, block_size=8, residual=8, layers=layers)
    found, wanted = forced(model, cache, ids, [20] + [1] * 20), uncached(model, ids)
    cache.check_integrity()
    chosen = {(x.spec.kind, x.group.store.sealed.codec.name) for x in cache.storage.layers if x is not None}
    assert chosen == {("full_attention", full), ("sliding_attention", sliding)}
    assert error(found, wanted) < (1e-5 if full == sliding == "native" else 0.1)
    if full == "int8":  # (a window of 6 leaves no sliding layer anything to seal beyond a residual of 8)
        assert error(found, wanted) > 1e-5, "nothing was quantised"


@only(lambda row: not row.exact and row.sees is None)
def test_no_early_block_fixes_the_scale_of_a_later_one(cache):
    parts = [(0 * k, 0 * v) for k, v in [keys_and_values(1, 16)]]
    parts += [(size * k, size * v) for size in (1.0, 300.0, 0.01) for k, v in [keys_and_values(1, 16, seed=int(size))]]
    for k, v in parts:
        fill(cache, k, v)
    fill(cache, *keys_and_values(1, 16))  # what comes last may not be sealed
    for held in contents(cache):
        for number, part in enumerate(parts):
            for stored, exact in zip(held, part, strict=True):
                stored = stored[:, :, 16 * number : 16 * number + 16]
                assert (stored - exact).abs().max() <= 0.5 * exact.abs().max(), f"part {number}"
                assert torch.isfinite(stored).all()


class Largest(TorchDispatchMode):
    """Records the bytes of every storage that an operation makes."""

    def __init__(self):
        super().__init__()
        self.made: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # no address is used twice

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        given = {x.untyped_storage().data_ptr() for x in _tensors((arguments, options))}
        for x in _tensors(result):
            storage = x.untyped_storage()
            if storage.data_ptr() not in given:
                self.made[storage.data_ptr()] = storage.nbytes()
                self._alive.append(x)
        return result


def _tensors(tree) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [x for x in leaves if type(x) in (torch.Tensor, torch.nn.Parameter)]


@every
@pytest.mark.skipif(cpu.load() is None, reason="the C++ kernels are not built; plain torch decodes whole blocks")
def test_a_decode_step_makes_nothing_of_the_size_of_the_context(model, configuration):
    largest = []
    for context in (256, 1024):
        cache = configuration.build(model.config)
        forced(model, cache, text(1, context + 9), [context] + [1] * 9)  # staging buffers have their size now
        with Largest() as record:
            forced(model, cache, text(1, 9, seed=1), [1] * 9)
        stores = [store for group in cache.storage.groups for store in group.store.stores]
        for pages in (pages for store in stores for pages in store.pages):
            for slab in (
                slab for slab in pages.slabs if isinstance(slab, torch.Tensor)
            ):  # where new tokens themselves go
                record.made.pop(slab.untyped_storage().data_ptr(), None)
        largest.append(max(record.made.values()))
    assert largest[0] == largest[1]


@LOSSY
def test_tokens_that_come_one_at_a_time_are_sealed_too(model, cache):
    block, most = cache.block_size, 0
    rows_and_groups = 2 * len(cache.storage.groups)
    for _ in range(60):
        forced(model, cache, text(2, 1))
        open_ = sum(int((t.n_entries - t.n_sealed).sum()) for t in (group.table for group in cache.storage.groups))
        most = max(most, open_)
    assert most <= rows_and_groups * -(-(cache.residual + block) // block)
    assert cache.stats()["tokens_sealed"] >= 2 * (60 - cache.residual - block)


@LOSSY
def test_bytes_are_saved_and_the_error_is_not_zero(model, configuration, cache):
    ids = text(1, 128)
    found = forced(model, cache, ids, [120] + [1] * 8)[:, -8:]
    exact = PagedCache(model.config, block_size=8)
    wanted = forced(model, exact, ids, [120] + [1] * 8)[:, -8:]
    memory = cache.memory()
    assert memory.stored < 0.8 * exact.memory().stored
    assert memory.stored == sum(memory.by_tier.values()) and memory.stored < 0.8 * memory.plain
    if configuration.sees is None:
        assert 1e-5 < error(found, wanted) < configuration.error


@pytest.mark.parametrize(("bits", "most"), [(8, 0.56), (4, 0.32), (2, 0.2), ("fp8", 0.53)])
def test_a_cache_of_real_shape_has_the_size_that_it_claims(bits, most):
    config = build("llama", hidden_size=256, head_dim=64).config
    cache = QuantizedCache(config, bits=bits, residual=0, block_size=64)
    fill(cache, *(torch.randn(1, 2, 1024, 64, dtype=torch.bfloat16) for _ in "kv"))
    memory = cache.memory()
    assert memory.plain == 3 * 1024 * 2 * 2 * 64 * 2
    assert memory.ratio == memory.stored / memory.plain < most
    assert memory.allocated >= memory.stored


def half_a_step(codec: AffineCodec, fields: dict) -> tuple[torch.Tensor, torch.Tensor]:
    return fields["k_scale"].float().unsqueeze(-2) / 2, fields["v_scale"].float().unsqueeze(-1) / 2


INPUTS = {
    "normal": lambda x: x,
    "constant": lambda x: torch.full_like(x, 3.3),
    "zero": torch.zeros_like,
    "tiny": lambda x: x * 1e-6,
    "outliers": lambda x: torch.where(torch.arange(x.shape[-1]) % 7 == 3, x * 25 + 60, x) * (1 + 50 * (x > 2.5)),
    "one-sided": lambda x: -x.abs() - 1000,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_packed_bytes_decode_to_within_half_a_step(bits, dim, order, dtype):
    codec = AffineCodec(bits)
    for block in (8, 16, 32, 64):
        g = Geometry(2, dim, dim, block, dtype)
        layout = codec.layout(g, order)
        for name, make in INPUTS.items():
            k, v = (make(torch.randn(3, 2, block, dim)).to(dtype) for _ in "kv")
            fields = through_bytes(layout, codec.encode(k, v, order))
            for x, y, step in zip((k, v), codec.decode(fields, g, order), half_a_step(codec, fields), strict=True):
                off = (x.float() - y).abs() - step
                assert (off <= 1e-6 * x.float().abs().max()).all(), f"{name}, blocks of {block}: {off.max()} too far"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("dim", [32, 80, 128])
def test_fp8_bytes_decode_to_within_half_a_step(dim, dtype):
    codec, g = codec_for("fp8"), Geometry(2, dim, dim, 16, dtype)
    for name, make in INPUTS.items():
        k, v = (make(torch.randn(3, 2, 16, dim)).to(dtype) for _ in "kv")
        fields = through_bytes(codec.layout(g, ORDERS[0]), codec.encode(k, v, ORDERS[0]))
        for x, y in zip((k.float(), v.float()), codec.decode(fields, g, ORDERS[0]), strict=True):
            top = x.abs().amax((-2, -1), keepdim=True)
            # Three bits of mantissa; below 2^-6 of the scaled range the steps are equal.
            step = torch.maximum(x.abs() / 16, top / 448 * 2**-10) * 1.001
            assert ((x - y).abs() <= step).all(), name


def through_bytes(layout: PageLayout, fields: dict) -> dict[str, torch.Tensor]:
    """`fields` after a journey through the bytes of pages."""
    slab = torch.full((3, layout.nbytes), 0xFF, dtype=torch.uint8)
    views = layout.views(slab)
    assert fields.keys() == views.keys()
    for name, view in views.items():
        view[:] = fields[name]
    return layout.views(slab.clone())


@pytest.mark.skipif(cpu.load() is None, reason="the C++ kernels are not built")
@pytest.mark.parametrize("block", [8, 16, 64])
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("codec", ["native", "int8", "int4", "int2", "k8v4", "k4v2", "fp8"])
def test_the_packed_kernel_equals_the_unpacked_reference(codec, dim, block):
    stored = random_stored(codec, lengths=(3 * block + 3, 5), k_dim=dim, block_size=block)
    q = torch.randn(2, 6, 1, dim)
    arguments = (q, stored.sealed, stored.open_, stored.view, dim**-0.5)
    for found, wanted in zip(cpu.decode(*arguments), reference.decode(*arguments), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


# ---- rollback --------------------------------------------------------------------------------------------------------


@every
def test_cropping_nothing_keeps_all_and_cropping_too_much_empties(model, configuration, cache):
    ids, more = text(2, 20), text(2, 5, seed=1)
    wanted = forced(model, configuration.build(model.config), torch.cat([ids, more], 1), [20] + [1] * 5)
    forced(model, cache, ids)
    cache.crop(0)
    assert cache.get_seq_length() == 20
    assert torch.equal(forced(model, cache, more, [1] * 5), wanted[:, 20:])
    cache.crop(-1000)
    assert cache.get_seq_length() == 0 and cache.memory().stored == 0
    cache.check_integrity()
    assert torch.equal(forced(model, cache, torch.cat([ids, more], 1), [20] + [1] * 5), wanted)


@every
def test_update_returns_the_length_that_the_mask_sizes_announced(cache):
    lengths = torch.randint(1, 12, (20,)).tolist()
    for number, length in enumerate(lengths):
        for layer in range(len(cache.layers)):
            size, offset = cache.get_mask_sizes(length, layer)
            handles = cache.update(*keys_and_values(2, length, seed=number), layer)
            assert [handle.shape for handle in handles] == [(2, 2, size, 8)] * 2
            assert (size, offset) == (sum(lengths[: number + 1]), 0)
        assert cache.get_seq_length() == cache.get_query_offset(0) == size


@EXACT
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_speculative_decoding_equals_greedy_past_the_window_too(name, configuration):
    model = ours(name)
    if configuration.rebased and name != "llama":
        pytest.skip("the same as 'window': a model's own shorter window replaces it")
    ids = text(1, 16).repeat(1, 2)  # something to look up
    results = []
    for options in ({}, {"prompt_lookup_num_tokens": 4}):
        cache = configuration.build(model.config)
        out = model.generate(ids, max_new_tokens=24, do_sample=False, **options, **cache_kwarg(cache))
        cache.check_integrity()
        results.append(out)
    assert torch.equal(*results)


# ---- reuse -----------------------------------------------------------------------------------------------------------


def generate(model, cache, ids, mask=None, **options):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
        **cache_kwarg(cache),
    )


def same_text(a, b) -> bool:
    """Whether two results of `generate` have the same tokens and scores."""
    close = all(torch.allclose(x, y, atol=1e-4) for x, y in zip(a.logits, b.logits, strict=True))
    return torch.equal(a.sequences, b.sequences) and close


@every
def test_a_prompt_that_is_held_already_computes_one_token(model, configuration, cache):
    ids = text(2, 15)
    assert cache.prepare(ids) == 0
    first = generate(model, cache, ids)
    # A window that has moved on cannot go back: then everything is computed again.
    assert cache.prepare(ids) == (14 if configuration.sees != (8, 2) else 0)
    cache.check_integrity()
    second = generate(model, cache, ids)
    if configuration.exact:
        assert same_text(first, second)
    else:
        assert error(second.logits[0], first.logits[0]) < configuration.error


@every
def test_forks_of_a_system_prompt_are_right_and_leave_it_unchanged(model, configuration, cache):
    system = text(1, 21)
    forced(model, cache, system)
    bytes_before = cache.memory().stored
    before = contents(cache) if configuration.sees is None else None
    forks = [cache.fork() for _ in range(3)]
    assert sum(s.used * s.page_bytes for g in cache.storage.groups for s in g.store.stores) == bytes_before
    for seed, fork in enumerate(forks, start=1):
        suffix, fresh = text(1, 12, seed), configuration.build(model.config)
        forced(model, fresh, system)
        passes = [5] + [1] * 7
        assert torch.equal(forced(model, fork, suffix, passes), forced(model, fresh, suffix, passes))
        fork.check_integrity()
    assert cache.memory().stored == bytes_before
    assert before is None or same(contents(cache), before)


@EXACT
def test_a_prompt_in_inference_mode_goes_on_outside_of_it(model, configuration, cache):
    with torch.inference_mode():
        forced(model, cache, text(2, 21))
    branch = cache.fork()
    with torch.no_grad():
        for held in (cache, branch):  # the second one to write copies the open block
            model(text(2, 1), **cache_kwarg(held))
    cache.check_integrity()


@EXACT
def test_another_prompt_in_the_cache_leaves_the_common_prefix(model, configuration, cache):
    first, second = text(2, 15), text(2, 15, seed=1)
    second[:, :6] = first[:, :6]
    second[1, 5] += 1  # the rows agree on 6 and on 5 tokens
    cache.prepare(first)
    generate(model, cache, first)
    assert cache.prepare(second) == (5 if configuration.sees != (8, 2) else 0)
    cache.check_integrity()
    assert same_text(generate(model, cache, second), generate(model, configuration.build(model.config), second))


@EXACT
@pytest.mark.parametrize("more", [(3, 3), (2, 5)], ids=["equal", "ragged"])
def test_a_padded_batch_reused_for_a_second_turn_equals_a_fresh_run(model, configuration, cache, more):
    ids, mask = text(2, 11), padding(2, 11, 0, 4)
    ids = ids * mask
    cache.prepare(ids, mask)
    spoken = generate(model, cache, ids, mask).sequences
    rows = [
        torch.cat([spoken[r, missing:], text(1, n, seed=1)[0]])
        for r, (missing, n) in enumerate(zip((0, 4), more, strict=True))
    ]
    width = max(map(len, rows))
    mask = padding(2, width, *(width - len(row) for row in rows))
    ids = torch.stack([torch.cat([row.new_zeros(width - len(row)), row]) for row in rows])
    kept = cache.prepare(ids, mask)
    if configuration.sees is None and more == (3, 3):
        assert kept == 11
    cache.check_integrity()
    assert same_text(generate(model, cache, ids, mask), generate(model, configuration.build(model.config), ids, mask))


# ---- window and sinks ------------------------------------------------------------------------------------------------


@WINDOWS
def test_a_prompt_longer_than_the_window_and_several_turns(model, configuration, cache):
    ids, passes = text(2, 90), [30, 1, 1, 1, 25, 1, 1, 30]
    assert error(forced(model, cache, ids, passes), uncached(model, ids, sees=configuration.sees)) < max(
        configuration.error, 1e-5
    )
    assert cache.stats()["positions_dropped"] > 0


@functools.cache
def one_layer() -> torch.nn.Module:
    """With a single layer, what a query sees says everything: deeper ones also see what earlier queries saw."""
    return ours("llama", num_hidden_layers=1)


def streaming(model, ids, window: int, sinks: int, rebase: bool) -> torch.Tensor:
    """Logits of every position, from a run without a cache over just the tokens that it sees."""
    out = []
    for position in range(ids.shape[1]):
        seen = [p for p in range(position + 1) if p < sinks or p > position - window]
        where = torch.arange(len(seen)) if rebase else torch.tensor(seen)
        with torch.no_grad():
            out.append(
                model(ids[:, seen], torch.ones_like(ids[:, seen]), position_ids=where[None], use_cache=False).logits[
                    :, -1
                ]
            )
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("rebase", [True, False], ids=["rebased", "absolute"])
@pytest.mark.parametrize("passes", [[40], [30] + [1] * 10, [7] * 5 + [5], [1] * 40], ids=str)
def test_every_token_of_a_long_prefill_sees_the_sinks(passes, rebase):
    model, ids = one_layer(), text(2, 40)
    cache = KVCache(model.config, block_size=4, retention=Window(8, 2, rebase=rebase))
    assert error(forced(model, cache, ids, passes), streaming(model, ids, 8, 2, rebase)) < 1e-5


@pytest.mark.parametrize("rebase", [True, False], ids=["rebased", "absolute"])
def test_padded_rows_have_sinks_of_their_own(rebase):
    model, ids, mask = one_layer(), text(2, 40), padding(2, 40, 0, 13)
    cache = KVCache(model.config, block_size=4, retention=Window(8, 2, rebase=rebase))
    found = forced(model, cache, ids, [30] + [1] * 10, mask)
    assert error(found[1:, 13:], streaming(model, ids[1:, 13:], 8, 2, rebase)) < 1e-5


@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("tokens", [7, 8, 9, 16])
def test_windows_are_right_at_their_edges(tokens, block):
    model, ids = one_layer(), text(1, tokens + 3)
    for sinks in (0, 2):
        cache = KVCache(model.config, block_size=block, retention=Window(8, sinks))
        found = forced(model, cache, ids, [tokens, 1, 1, 1])
        assert error(found, streaming(model, ids, 8, sinks, rebase=True)) < 1e-5


@pytest.mark.parametrize("tokens", [5, 6, 7, 12])
@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt_oss", "llama4_text"])
def test_a_models_own_window_is_right_at_its_edges(name, tokens):
    model, ids = ours(name), text(2, tokens + 3)
    for passes in ([tokens, 1, 1, 1], [tokens, 3], [1] * (tokens + 3)):
        cache = PagedCache(model.config, block_size=4)
        assert error(forced(model, cache, ids, passes), uncached(model, ids)) < 1e-5, passes


@every
def test_what_unused_slots_hold_changes_nothing(model, configuration, cache):
    poisoned = configuration.build(model.config)
    for group in poisoned.storage.groups:
        for store in group.store.stores:
            store.poison = True
    ids, mask, results = text(2, 40), padding(2, 60, 0, 5), []
    for each in (cache, poisoned):
        parts = [forced(model, each, ids, [21] + [1] * 19, mask)]
        if configuration.sees is None:
            each.crop(-3)
        each.reorder_cache(torch.tensor([1, 0]))
        parts.append(forced(model, each, text(2, 20, seed=1), [2, 7] + [1] * 11, mask.flip(0)))
        results.append(torch.cat(parts, 1))
    assert torch.equal(*results)


# ---- offload, devices, batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [0, 3, 8])
@pytest.mark.parametrize("ring", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "qwen3_next"])
def test_any_ring_of_staging_buffers_serves_any_number_of_layers(name, ring, resident):
    model, ids = ours(name), text(2, 40)
    cache = OffloadedCache(model.config, block_size=4, tier=HostTier(resident, direct=False, ring=ring))
    assert error(forced(model, cache, ids, [20, 1, 1, 1, 5] + [1] * 12), uncached(model, ids)) < 1e-4
    assert cache.stats()["blocks_cold"] > 0
    assert cache.memory().by_tier["host"] > 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_beam_indices_of_any_integer_type(model, dtype):
    cache = PagedCache(model.config, block_size=4)
    forced(model, cache, text(2, 10))
    before = contents(cache)
    cache.reorder_cache(torch.tensor([1, 1], dtype=dtype))
    assert same(contents(cache), before, [1, 1])


@every
def test_dropping_a_cache_gives_every_byte_back(model, configuration):
    gc.collect()
    gc.disable()  # no reference cycle may keep a cache alive
    try:
        cache = configuration.build(model.config)
        forced(model, cache, text(2, 40), [30] + [1] * 10)
        slabs = [slab for g in cache.storage.groups for s in g.store.stores for p in s.pages for slab in p.slabs]
        watched = [weakref.ref(x) for x in (cache, cache.storage, cache.pool, *slabs)]
        del cache, slabs
        assert [reference() for reference in watched] == [None] * len(watched)
    finally:
        gc.enable()


@every
def test_dropping_a_cache_leaves_a_shared_pool_empty(model, configuration):
    gc.collect()
    gc.disable()
    try:
        first = configuration.build(model.config)
        pool, stores = first.pool, [s for g in first.storage.groups for s in g.store.stores]
        second = first.fork()
        for cache in (first, second):
            forced(model, cache, text(2, 40), [30] + [1] * 10)
        third = second.fork()
        del first, second, third, cache
        assert [store.used for store in stores] == [0] * len(stores)
        pool.check_integrity()
        pool.trim()
        assert pool.nbytes() == 0
    finally:
        gc.enable()


@every
@pytest.mark.parametrize("implementation", ["hf_kvcache", "sdpa", "eager"])
def test_a_left_padded_row_equals_the_row_alone(configuration, implementation):
    if implementation != "hf_kvcache" and configuration.sees is not None:
        pytest.skip("only our attention sees a window: test_bad_input.py has the error")
    model = build("llama")
    model.set_attn_implementation(implementation)
    ids, mask, passes = text(3, 40), padding(3, 40, 9, 0, 5), [21] + [1] * 19
    together = forced(model, configuration.build(model.config), ids, passes, mask)
    for row, missing in enumerate((9, 0, 5)):
        ids_alone = ids[row : row + 1, missing:]
        if configuration.exact or implementation == "hf_kvcache":
            limit, alone = 1e-4, forced(model, configuration.build(model.config), ids_alone, [21 - missing] + [1] * 19)
        else:  # only our masks tell a cache what is padding: elsewhere it shares blocks, and scales, with the text
            limit, alone = configuration.error, uncached(model, ids_alone)
        assert error(together[row : row + 1, missing:], alone) < limit


@EXACT
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_one_prefilled_row_serves_several_beams(model, configuration, cache, options):
    ids = text(1, 20)
    forced(model, cache, ids[:, :-1])
    found = generate(model, cache, ids, **options)
    cache.check_integrity()
    assert same_text(found, generate(model, configuration.build(model.config), ids, **options))


def test_one_prefilled_row_serves_several_samples(model):
    ids, results = text(1, 20), []
    for prefilled in (True, False):
        cache = PagedCache(model.config, block_size=4)
        if prefilled:
            forced(model, cache, ids[:, :-1])
        torch.manual_seed(7)
        out = model.generate(ids, max_new_tokens=6, do_sample=True, num_return_sequences=4, **cache_kwarg(cache))
        cache.check_integrity()
        results.append(out)
    assert torch.equal(*results)
