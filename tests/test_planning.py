"""What is planned is what is allocated: every cache configuration on models of every kind, to the byte."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache, T5Config

from hf_kvcache import (
    BlockPool,
    CapacityError,
    DiskTier,
    HostTier,
    KVCache,
    PagedCache,
    QuantizedCache,
    Window,
    enable,
    memory,
)
from hf_kvcache.cache import cache_kwarg
from hf_kvcache.memory import budget, models
from hf_kvcache.memory.footprint import PagedFootprint, PlainFootprint, bind, shard
from hf_kvcache.memory.verify import fill
from hf_kvcache.named import DEFAULT

from . import configs
from .architectures import LINEAR, build
from .forcing import forced, ours, text

# Grouped heads, windows, soft-capping, sinks, one head, latents, shared keys, other layer shapes, states beside or instead.
MODELS = ("llama", "mistral", "gemma3_text", "gpt_oss", "falcon", "deepseek_v3", "gemma3n_text", "gemma4_text",
          "llama4_text", "qwen3_next", "falcon_h1")  # fmt: skip
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
F32 = torch.float32


def edges(cache: KVCache) -> list[int]:
    size, residual = cache.block_size, cache.residual
    lengths = {1, size - 1, size, size + 1, 2 * size, size + residual, size + residual + 1, 5 * size + 3}
    return sorted(lengths - {0})


@pytest.mark.parametrize("name", MODELS)
def test_predicted_equals_allocated(name):
    config = build(name).config
    for row, configuration in configs.CONFIGURATIONS.items():
        lengths = edges(configuration.build(config))
        checks = memory.verify(config, {row: configuration.build}, lengths=lengths, dtype=F32)
        assert [check.tokens for check in checks] == lengths
        for check in checks:
            assert check.agrees and check.stored > 0, check


@pytest.mark.parametrize("name", ("llama", "gemma3_text", "qwen3_next", "falcon_h1"))
def test_predicted_equals_what_a_model_leaves(name):
    model = enable(build(name))
    for row in ("paged", "window", "offloaded", "int4", "int8-layers"):
        make = configs.CONFIGURATIONS[row].build
        cache = make(model.config)
        with torch.no_grad():
            model(torch.ones(1, 21, dtype=torch.long), **cache_kwarg(cache))
            model(torch.ones(1, 1, dtype=torch.long), **cache_kwarg(cache))
        held = PagedFootprint(make(model.config), F32, CPU).held([22])
        states = sum(kind.state_bytes for kind in memory.Planner(model.config, caches=()).kinds(22))
        assert (states > 0) == (name in LINEAR)
        assert cache.memory().stored == held.device[0] + held.host[0] + held.disk[0] + states, row
        assert cache.memory().by_tier["host"] == held.host[0]


@pytest.mark.parametrize("name", LINEAR)
def test_states_in_half_precision_are_as_transformers_keeps_them(name):
    model = build(name, torch.bfloat16)
    cache = PagedCache(model.config)
    with torch.no_grad():
        model(torch.ones(1, 5, dtype=torch.long), **cache_kwarg(cache))
    planner = memory.Planner(model.config, caches=(), dtype=torch.bfloat16)
    assert cache.memory().by_tier["state"] == sum(kind.state_bytes for kind in planner.kinds(5))


@configs.every
def test_steps_come_to_what_one_pass_does(configuration):
    config = build("gemma3_text").config
    footprint = PagedFootprint(configuration.build(config), F32, CPU)
    stepwise = bind(configuration.build(config), F32, CPU)
    for tokens in range(1, 70):
        stepwise.storage.rehearse(np.array([1]))
        stored = stepwise.memory()
        held = footprint.held([tokens])
        assert stored.stored == held.device[0] + held.host[0] + held.disk[0], tokens
        assert sum(int(g.table.kept.sum()) for g in stepwise.storage.groups) == held.tokens[0]
    stepwise.check_integrity()
    assert stepwise.pool.nbytes() == 0, "a rehearsal allocates nothing"


def test_allocation_over_many_passes_is_rehearsed():
    config = build("llama").config
    for make in (
        lambda: QuantizedCache(config, bits=4, block_size=8, residual=8),
        lambda: PagedCache(config, block_size=4),
    ):
        rehearsed, real = bind(make(), F32, CPU), make()
        for tokens in (30, 1, 1, 9, 1, 40, 1):
            rehearsed.storage.rehearse(np.array([tokens, tokens]))
            fill(real, tokens, F32, CPU, batch=2)
            expected = sum(store.expected_bytes() for group in rehearsed.storage.groups for store in group.store.stores)
            assert expected == real.pool.nbytes() == real.memory().allocated


def test_rows_add_up():
    config = build("llama").config
    footprint = PagedFootprint(PagedCache(config, block_size=4), F32, CPU)
    one, both = footprint.held([5, 9]), bind(PagedCache(config, block_size=4), F32, CPU)
    both.storage.rehearse(np.array([5, 9]))
    assert both.memory().stored == one.device.sum()


def test_a_refused_rehearsal_takes_nothing():
    config = build("llama").config
    cache = bind(PagedCache(config, pool=BlockPool(config, capacity_tokens=32)), F32, CPU)
    with pytest.raises(CapacityError, match="at most 32 more tokens"):
        cache.storage.rehearse(np.array([33]))
    assert cache.pool.bytes_used() == 0


def test_a_plain_cache_is_predicted_too():
    model = build("gemma3_text")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(1, 4, dtype=torch.long), **cache_kwarg(cache))
    bytes_held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    footprint = PlainFootprint(model.config, F32)
    assert footprint.held([12]).device[0] == bytes_held
    assert footprint.peak(12) > bytes_held


def test_the_peak_is_what_each_store_needed_at_its_highest():
    config = build("llama").config
    make = lambda: QuantizedCache(config, bits=4, block_size=8, residual=8)  # noqa: E731
    footprint, cache = PagedFootprint(make(), F32, CPU), bind(make(), F32, CPU)
    highest = {}
    for tokens in range(1, 60):
        cache.storage.rehearse(np.array([1]))
        cache.memory()
        for store in cache.storage.groups[0].store.stores:
            highest[store] = max(highest.get(store, 0), store.used * store.page_bytes)
        assert footprint.peak(tokens) == sum(highest.values()), tokens


@pytest.mark.parametrize("ring", [1, 2, 3])
def test_the_buffers_to_which_blocks_come_back_are_planned(ring):
    model = ours(num_hidden_layers=3)
    make = lambda direct: KVCache(model.config, block_size=4, tier=HostTier(8, direct=direct, ring=ring))  # noqa: E731
    cache, staged, in_place = make(False), *(PagedFootprint(make(direct), F32, CPU) for direct in (False, True))
    ids, (group,) = text(1, 60), cache.storage.groups
    forced(model, cache, ids[:, :40])
    planned, buffers = [], []
    for n in range(41, 61):
        forced(model, cache, ids[:, n - 1 : n])
        buffers.append(sum(buffer.buffer.nbytes for buffer in group.tier._staged.values()))
        planned.append(staged.held([n]).staging[0])
        assert staged.peak(n) - in_place.peak(n) == planned[-1], n
    assert planned[0] == buffers[0] > 0 and all(b <= p for p, b in zip(planned, buffers, strict=True))
    assert buffers[-1] > buffers[0] and not in_place.held([60]).staging[0] and not staged.held([8]).staging[0]
    requests = memory.Workload("two", (memory.Request(40, 20),) * 2)
    with_buffers, without = (memory.simulate(footprint, requests) for footprint in (staged, in_place))
    assert with_buffers.device[2] - without.device[2] == 2 * staged.held([59]).staging[0]


@pytest.mark.parametrize("chunk", [1024, 1 << 20])
def test_the_chunks_that_come_back_from_disk_are_planned(chunk, monkeypatch):
    model = ours(num_hidden_layers=3)
    make = lambda: KVCache(model.config, block_size=4, tier=DiskTier(8, direct=False, chunk_bytes=chunk))  # noqa: E731
    honest, copies, most = DiskTier._copied, [], 0

    def copied(tier, pages, device):
        nonlocal most
        copy = honest(tier, pages, device)
        copies.append(weakref.ref(copy))
        most = max(most, sum(len(p.row) * p.layout.nbytes for ref in copies if (p := ref()) is not None))
        return copy

    monkeypatch.setattr(DiskTier, "_copied", copied)
    cache = make()
    forced(model, cache, text(1, 40))
    forced(model, cache, text(1, 1))
    planned = PagedFootprint(make(), F32, CPU).held([41]).staging[0]
    assert 0 < most <= planned
    if chunk == 1024:  # several a layer: two are there at a time
        assert most == planned


@pytest.mark.parametrize("limit", [None, 0, 5], ids=["host", "disk", "both"])
def test_what_lies_on_disk_is_told_from_what_lies_in_host_memory(limit, tmp_path):
    config = build("llama").config
    block = PagedFootprint(PagedCache(config, block_size=4), F32, CPU).groups[0].store.open.page_bytes
    room = None if limit is None else limit * block

    def make(pool=None):
        return KVCache(config, block_size=4, tier=DiskTier(8, tmp_path, host_bytes=room), pool=pool)

    pool, footprint = BlockPool(config), PagedFootprint(make(), F32, CPU)
    caches = [make(pool) for _ in range(2)]
    for cache in caches:
        fill(cache, 24, F32, CPU)
    host, disk = (sum(cache.memory().by_tier[where] for cache in caches) for where in ("host", "disk"))
    assert host + disk == 2 * 4 * block and disk == {None: 0, 0: 8, 5: 3}[limit] * block
    alone = footprint.held([24])
    together = alone.together(np.array([[0], [0]]))
    assert (together.host[0], together.disk[0]) == (host, disk), "the limit is the pool's"
    assert alone.host[0] + alone.disk[0] == 4 * block and alone.disk[0] == (4 * block if limit == 0 else 0)
    simulated = memory.simulate(footprint, memory.Workload("two", (memory.Request(24, 1),) * 2))
    assert (simulated.host[2], simulated.disk[2]) == (host, disk)
    planner = memory.Planner(config, caches={"mine": lambda config: make()}, dtype=F32, device="cpu")
    answer = planner.plan(None, 24, 2)
    assert (answer.caches[0].host_bytes, answer.caches[0].disk_bytes) == (alone.host[0], alone.disk[0])
    (note,) = [note for note in answer.notes if "Not limited here, with 2 x 24 tokens" in note]
    for size, where in ((host, "host memory"), (disk, "disk")):
        assert (f"{memory.show_bytes(size)} of {where} (mine)" in note) == (size > 0)


def test_an_encoders_text_is_what_a_real_model_leaves():
    config = T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    cache = EncoderDecoderCache(PagedCache(config), DynamicCache())
    with torch.no_grad():
        text, answer = torch.ones(1, 13, dtype=torch.long), torch.ones(1, 5, dtype=torch.long)
        model(text, decoder_input_ids=answer, **cache_kwarg(cache))
    crossing = cache.cross_attention_cache.layers
    kinds = {kind.kind: kind for kind in memory.Planner(config, caches=(), encoder_tokens=13).kinds(5)}
    assert kinds["cross_attention"].layers == len(crossing) == 3
    assert kinds["cross_attention"].request_bytes == sum(
        x.nbytes for layer in crossing for x in (layer.keys, layer.values)
    )
    assert kinds["full_attention"].token_bytes * 16 == cache.self_attention_cache.memory().stored, "a block of 16"


def test_layers_without_keys_and_values_are_called_what_they_are():
    config = build("llama").config
    config.layer_types = ["full_attention", "moe", "mlp"]
    kinds = memory.Planner(config, caches=(), dtype=F32).kinds(10)
    assert [kind.kind for kind in kinds] == config.layer_types
    assert [kind.request_bytes > 0 for kind in kinds] == [True, False, False]


def test_what_is_inside_a_request_adds_up():
    config = build("llama").config
    cache = QuantizedCache(config, bits=4, block_size=16, residual=16)
    footprint = PagedFootprint(cache, F32, CPU)
    store = cache.storage.groups[0].store
    # 50 tokens: 2 blocks sealed (32 are older than the newest 16), one full block and one of 2 tokens open.
    # 3 layers x 2 heads x 2 bytes x (key scale and zero of 8 channels, value scale and zero of 16 tokens) x 2 blocks
    parts = footprint.anatomy(50)
    assert parts["scales"] == 3 * 2 * 2 * (2 * 8 + 2 * 16) * 2
    assert parts["tail"] == 2 * store.open.page_bytes
    assert parts["rounding"] == 14 * store.open.page_bytes // 16
    assert footprint.anatomy(48)["rounding"] == 0


def test_other_caches_than_those_of_one_lever():
    config = build("gemma3_text").config
    choices = {"codec": "int8", "block_size": 8, "tier": HostTier(8), "retention": Window(32, 2, rebase=False)}
    checks = memory.verify(
        config, {"all": lambda c: KVCache(c, residual=8, **choices)}, lengths=range(1, 90, 4), dtype=F32
    )
    assert all(check.agrees for check in checks)


def test_the_demo_model_to_the_byte():
    """SmolLM2-135M's shapes: 30 layers of 3 KV heads of 64."""
    fields = {"model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
              "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152}  # fmt: skip
    caches = [*DEFAULT, "k8v4", "k4v2", "disk:64"]
    checks = memory.verify(fields, caches)
    assert {check.cache for check in checks} == set(caches) and all(check.agrees for check in checks)
    paged = {check.tokens: check.stored for check in checks if check.cache == "paged"}
    assert paged[16] == 16 * 2 * 30 * 3 * 64 * 4 and paged[17] == 2 * paged[16]


def test_a_wrong_prediction_is_seen(monkeypatch):
    config = build("llama").config
    honest = PagedFootprint.held
    monkeypatch.setattr(
        PagedFootprint, "held", lambda self, n: honest(self, n)._replace(device=honest(self, n).device + 1)
    )
    assert not any(check.agrees for check in memory.verify(config, ["paged"], lengths=[5]))


def test_pages_of_a_cuda_device_are_planned_without_one():
    config = build("llama", head_dim=20).config  # odd head sizes are padded differently in the two orders
    make = lambda: QuantizedCache(config, bits=2, block_size=8)  # noqa: E731
    cuda, cpu = (PagedFootprint(make(), F32, device) for device in (CUDA, CPU))
    assert cuda.groups[0].store.sealed.pages[0].order == "planar"
    assert cuda.held([100]).device[0] > 0 and cpu.held([100]).device[0] > 0


@pytest.mark.parametrize(
    ("heads", "shards", "each"), [(8, 1, 8), (8, 4, 2), (8, 16, 1), (1, 8, 1), (6, 4, 6), (2, 4, 1)]
)
def test_heads_over_tensor_parallel_devices(heads, shards, each):
    assert shard(heads, shards) == each


def test_shards_divide_what_divides():
    config = build("llama").config
    whole, half = (memory.plan(config, shards=n, caches=["paged", "int4"], context=64, dtype=F32) for n in (1, 2))
    for one, other in zip(whole.caches, half.caches, strict=True):
        assert other.request_bytes * 2 == pytest.approx(one.request_bytes, rel=0.1)
    assert half.budget.weights == -(-whole.budget.weights // 2)


def test_the_longest_context_and_the_most_requests_are_the_last_that_fit():
    config = build("llama").config
    planner = memory.Planner(config, caches=["dynamic", "paged", "int4", "window:64+4"], dtype=F32, runtime=0)
    device = 3 << 20
    answer = planner.plan(device, 100, 4)
    for cache in answer.caches:
        fits = lambda context, requests, name=cache.name: planner.needed(name, context, requests) <= int(device * 0.9)  # noqa: E731
        assert fits(100, cache.requests) and not fits(100, cache.requests + 1)
        assert fits(cache.context, 4) and (cache.capped or not fits(cache.context + 1, 4))
        assert cache.bound_bytes == 4 * cache.request_bytes and cache.fits == fits(100, 4)
    assert answer.budget.pools + planner.beside(100, 4) + answer.budget.margin == device


def test_a_device_that_is_too_small_fits_nothing():
    answer = memory.plan(build("llama").config, device_memory=1 << 10, context=16, caches=["paged"])
    cache = answer.caches[0]
    assert (cache.fits, cache.requests, cache.context, answer.budget.pools) == (False, 0, 0, 0)


def test_without_a_device_bytes_are_known_and_nothing_else():
    answer = memory.plan(build("llama").config, context=16, caches=["paged"])
    cache = answer.caches[0]
    assert (cache.fits, cache.requests, cache.context, answer.budget.pools) == (None, None, None, None)
    assert cache.request_bytes > 0


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that operators made and that were alive at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                storage = tensor.untyped_storage()
                size = storage.nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, size)
        return out

    def _gone(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize("name", ("llama", "gemma3_text", "qwen3", "phi3", "deepseek_v3", "mixtral"))
def test_activations_of_a_pass_are_within_a_factor_of_what_is_measured(name):
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 8}
    if name == "deepseek_v3":
        sizes |= {"num_key_value_heads": 8, "qk_nope_head_dim": 4}  # K and V of one size: torch fuses their attention
    elif name != "phi3":
        sizes["head_dim"] = 16
    model = build(name, **sizes)
    tokens, known = 384, models.load(model.config)
    with torch.no_grad(), LiveBytes() as live:
        model(torch.ones(1, tokens, dtype=torch.long), use_cache=False, logits_to_keep=1)
    planned = budget.activations(known, tokens, tokens) + budget.logits(known, 1)
    assert live.peak / 2 < planned < 2 * live.peak, (planned, live.peak)
