"""`torch.compile(model)` through decode steps: one graph without a break, compiled at most twice, and what an uncompiled model
gives. (Twice, because the number of columns is a constant of the first graph and a variable of the second.)"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig, DynamicCache

from hf_kvcache import BlockPool, CacheInputError, CacheStateError, CapacityError, PagedCache, cache_kwarg
from hf_kvcache.attention import attention

from .architectures import build
from .configs import CONFIGURATIONS
from .forcing import ours, padding, positions, text

PROMPT = 11
PADDED = padding(2, PROMPT, 0, 4)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled:
    """A model and its compiled self, in one graph.

    Attributes:
        counter: counts the frames that were compiled.
    """

    def __init__(self, model: torch.nn.Module, backend: str = "eager", dynamic: bool | None = None):
        self.model, self.config, self.counter = model, model.config, CompileCounterWithBackend(backend)
        self.step = torch.compile(model, backend=self.counter, fullgraph=True, dynamic=dynamic)

    @property
    def frames(self) -> int:
        return self.counter.frame_count


@torch.no_grad()
def decode(model, step, cache, steps: int, mask=None, prompt=None) -> tuple[list, torch.Tensor]:
    """Greedy tokens `[1 + steps, rows]` and their logits: a prompt that `model` prefills, then `steps` calls of `step`."""
    ids = text(2, PROMPT) if prompt is None else prompt
    given = {} if mask is None else {"attention_mask": mask, "position_ids": positions(mask)}
    logits = [model(ids, **given, **cache_kwarg(cache)).logits[:, -1]]
    for _ in range(steps):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            given = {"attention_mask": mask, "position_ids": positions(mask)[:, -1:]}
        logits.append(step(logits[-1].argmax(-1, keepdim=True), **given, **cache_kwarg(cache)).logits[:, -1])
    logits = torch.stack(logits)
    return logits.argmax(-1).tolist(), logits


def uncompiled(model, cache, steps: int, mask=None) -> tuple[list, torch.Tensor]:
    return decode(model, model, cache, steps, mask)


def built_in(name: str, steps: int, mask=None, **changes) -> tuple[list, torch.Tensor]:
    """What `DynamicCache` gives on eager attention."""
    model = build(name, **changes)
    model.set_attn_implementation("eager")
    return uncompiled(model, DynamicCache(config=model.config), steps, mask)


def agree(got: tuple[list, torch.Tensor], wanted: tuple[list, torch.Tensor]) -> bool:
    return got[0] == wanted[0] and float((got[1] - wanted[1]).abs().max()) < 1e-4


def test_a_padded_batch_is_compiled_twice_at_most():
    c = Compiled(ours(num_hidden_layers=1))
    got = decode(c.model, c.step, PagedCache(c.config, block_size=4), 50, PADDED)
    assert c.frames == 2
    assert agree(got, built_in("llama", 50, PADDED, num_hidden_layers=1))


# Soft-capping and hybrid layers, sink logits; latents and plain keys and values that the model's own code reads.
@pytest.mark.parametrize(("name", "layers"), [("gemma2", 2), ("gpt_oss", 1), ("deepseek_v3", 1), ("falcon", 1)])
def test_what_models_ask_for(name, layers):
    c = Compiled(ours(name, num_hidden_layers=layers), dynamic=True)
    got = decode(c.model, c.step, PagedCache(c.config, block_size=4), 12, PADDED)
    assert c.frames == 1
    assert agree(got, built_in(name, 12, PADDED, num_hidden_layers=layers))


def test_every_configuration_runs_the_same_code():
    """How and where keys and values are stored is no part of what is compiled. (The class of the cache is, to torch.)"""
    c = Compiled(ours(num_hidden_layers=1))
    reference, classes, wrong = built_in("llama", 50, num_hidden_layers=1), set(), []
    for name, configuration in CONFIGURATIONS.items():
        if name == "int8-layers":
            continue  # is about a second layer
        steps = 50 if name in ("paged", "int4", "window", "offloaded") else 14
        cache, twin = configuration.build(c.config), configuration.build(c.config)
        got, wanted = decode(c.model, c.step, cache, steps), uncompiled(c.model, twin, steps)
        if not agree(got, wanted) or cache.stats() != twin.stats():
            wrong.append(f"{name}: not what it gives uncompiled")
        if configuration.exact and not configuration.sees and not agree(got, tuple(x[: steps + 1] for x in reference)):
            wrong.append(f"{name}: not what the built-in cache gives")
        cache.check_integrity()
        classes.add(type(cache))
        if c.frames != 1 + len(classes):
            wrong.append(f"{name}: {c.frames} frames for {len(classes)} classes")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_inductor():
    model = ours(num_hidden_layers=1)
    got = decode(model, torch.compile(model, fullgraph=True, dynamic=True), PagedCache(model.config, block_size=4), 50)
    assert agree(got, built_in("llama", 50, num_hidden_layers=1))


def test_what_happens_between_compiled_steps():
    """The prompt is compiled as well here."""
    c = Compiled(ours(num_hidden_layers=1))
    kept = {}
    for step in (c.step, c.model):
        cache = PagedCache(c.config, block_size=4)
        _, logits = decode(step, step, cache, 6)
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([1, 1]))
        branch = cache.fork()
        with torch.no_grad():
            again = [
                step(text(2, 1, seed=i), **cache_kwarg(x)).logits[:, -1] for i, x in enumerate((cache, branch, cache))
            ]
        cache.check_integrity()
        cache.reset()
        kept[step] = torch.cat([*logits, *again, *decode(step, step, cache, 2)[1]])
    assert c.frames == 2
    assert torch.equal(kept[c.step], kept[c.model])
    storage = weakref.ref(cache.storage)
    del cache, branch
    gc.collect()
    assert storage() is None, "compiled code keeps a cache alive"


@torch.no_grad()
def test_errors_leave_the_cache_as_it_was():
    c = Compiled(ours(num_hidden_layers=1), dynamic=True)
    pool = BlockPool(c.config, capacity_tokens=2 * 16)
    cache = PagedCache(c.config, block_size=4, pool=pool)
    decode(c.model, c.step, cache, 16 - PROMPT)

    def refused(error: type, match: str, **options) -> None:
        before = cache.stats()
        with pytest.raises(error, match=match):
            c.step(text(2, 1), **options, **cache_kwarg(cache))
        assert cache.stats() == before
        pool.check_integrity()

    refused(CapacityError, "0 of 8 are free")
    cache.crop(-2)
    refused(CacheInputError, "hides columns", attention_mask=padding(2, 15, 1, 0))
    refused(CacheInputError, "covers", attention_mask=padding(2, 9))
    c.step(text(2, 1), **cache_kwarg(cache))
    assert cache.get_seq_length() == 15


def test_pages_give_no_gradient_and_ask_for_none():
    cache = PagedCache(ours("gpt_oss", num_hidden_layers=1).config)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(q, k, v, s_aux):
        keys, values = cache.update(k, v, 0)
        return q + attention(torch.nn.Identity(), q, keys, values, None, s_aux=s_aux)[0].transpose(1, 2)

    q, k, s_aux = (torch.randn(*shape, requires_grad=True) for shape in ((2, 4, 1, 8), (2, 2, 1, 8), (4,)))
    layer(q, k, k, s_aux).sum().backward()
    assert torch.equal(q.grad, torch.ones_like(q)) and k.grad is None and s_aux.grad is None


# ---- generate() compiles by itself -----------------------------------------------------------------------------------


def test_a_cache_is_compileable_where_memory_is_reserved_for_it():
    config = ours().config
    assert not PagedCache(config).is_compileable
    assert not PagedCache(build("llama").config, pool=BlockPool(capacity_tokens=64)).is_compileable, "not enabled"
    assert not PagedCache(config, pool=BlockPool(config, capacity_bytes=1 << 20)).is_compileable
    reserved = PagedCache(config, pool=BlockPool(config, capacity_tokens=64))
    assert reserved.is_compileable == hasattr(torch.Tag, "cudagraph_unsafe")
    for name in ("falcon_h1", "deepseek_v3"):
        assert not PagedCache(ours(name).config, pool=BlockPool(capacity_tokens=64)).is_compileable


@pytest.mark.parametrize(("name", "layers", "padded"), [("llama", 1, False), ("gemma2", 2, True)])
def test_generate_compiles_its_steps(name, layers, padded):
    """As on CUDA; here because the configuration says so. Masks are then made outside of what is compiled, and nothing in
    it has a size that grows: a CUDA graph is good for every step."""
    model, frames = ours(name, num_hidden_layers=layers), []

    def backend(graph, inputs):
        frames.append(inputs)
        return graph.forward

    choice = CompileConfig(backend=backend, fullgraph=True, mode="default")
    choice._compile_all_devices = True
    inputs = {"input_ids": text(2, PROMPT), "attention_mask": PADDED if padded else torch.ones_like(PADDED)}
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    cache = PagedCache(model.config, block_size=4, pool=BlockPool(model.config, capacity_tokens=64))
    got = model.generate(**inputs, **options, compile_config=choice, **cache_kwarg(cache))
    assert 1 <= len(frames) <= 2
    assert all(isinstance(x, torch.Tensor) for x in frames[-1])
    plain = build(name, num_hidden_layers=layers)
    plain.set_attn_implementation("eager")
    wanted = plain.generate(**inputs, **options, **cache_kwarg(DynamicCache(config=plain.config)))
    assert torch.equal(got.sequences, wanted.sequences)
    assert max(float((a - b).abs().max()) for a, b in zip(got.logits, wanted.logits, strict=True)) < 1e-4
    assert cache.stats()["materialisations"] == 0


# ---- the operators ---------------------------------------------------------------------------------------------------


def test_operators_are_what_they_say():
    model = ours(num_hidden_layers=1)
    cache = PagedCache(model.config, block_size=4)
    k, v, q = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 8), torch.randn(2, 4, 1, 8)
    ticket, mask = cache.storage.ticket, torch.ones(2, 64, dtype=torch.bool)
    ops = torch.ops.hf_kvcache
    torch.library.opcheck(ops.append, (k, v, ticket, 0, None))
    torch.library.opcheck(ops.append, (k, v, ticket, 0, mask))
    torch.library.opcheck(ops.attend, (q, k, v, ticket, 0, 0.5, None, None, None, None))
    torch.library.opcheck(ops.attend, (q, k, v, ticket, 0, 0.5, 3, 20.0, torch.randn(4), None))
    torch.library.opcheck(ops.materialise, (k, v, ticket, 0, cache.get_seq_length()))


def test_positions_that_do_not_follow_on():
    """Of a prompt that generate() compiles (with `prefill_chunk_size`)."""
    cache = PagedCache(ours(num_hidden_layers=1).config, block_size=4)
    cache._is_user_defined = True  # as generate() says
    k, q, ticket, ops = torch.randn(1, 2, 5, 8), torch.randn(1, 4, 5, 8), cache.storage.ticket, torch.ops.hf_kvcache

    def chunk(begin: int) -> None:
        ops.append(k, k, ticket, 0, None)
        ops.attend(q, k, k, ticket, 0, 0.5, None, None, None, torch.arange(begin, begin + 5)[None])

    chunk(0)
    chunk(5)
    with pytest.raises(CacheStateError, match="holds 10 tokens, and the 5 columns given end at position 9"):
        chunk(5)
    assert cache.get_seq_length() == 10


@pytest.mark.parametrize(("name", "foreign"), [("llama", False), ("mistral", True)])
def test_a_mask_that_is_not_known_while_tracing_is_noted(name, foreign):
    """A session shares nothing that was computed under one."""
    compiled = Compiled(ours(name))
    cache = PagedCache(compiled.config)
    with torch.no_grad():
        compiled.step(text(1, PROMPT), **cache_kwarg(cache))
    assert cache.storage.foreign_mask is foreign
