"""Every exact cache gives what the built-in one gives: on all architectures, for all modes of `generate()`, with and
without padding, on our attention and on transformers' own. The reference is `DynamicCache` with eager attention."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForSeq2SeqLM, BartConfig, DynamicCache, EncoderDecoderCache, T5Config

import hf_kvcache
from hf_kvcache import OffloadedCache, PagedCache, SlidingWindowCache, cache_kwarg
from hf_kvcache.spec import specs_from_config

from .architectures import ARCHITECTURES, LINEAR, NAMES, OUTSIDE, VOCABULARY, build

NEW_TOKENS = 10
CACHES = {
    "paged": lambda config: PagedCache(config, block_size=4),
    "offloaded": lambda config: OffloadedCache(config, block_size=4, resident_tokens=8),
    "window": lambda config: SlidingWindowCache(config, block_size=4, window=64),
}
MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams-returned": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "temperature": 1.0},
    "prompt-lookup": {"prompt_lookup_num_tokens": 3},
    "assistant": {"assistant_model": ...},  # filled in by the test
    "chunked-prefill": {"prefill_chunk_size": 4},
}
WINDOWS = {"sliding_window", "attention_chunk_size"}
ALIKE = ("sampling", "beams")  # what greedy and beams-returned ask of a cache
SPECULATIVE = ("prompt-lookup", "assistant")  # one row at a time
ALL_CACHES_EVERYWHERE = ("llama", "gemma2", "gpt_oss", "gemma4_text", "falcon", "deepseek_v3")

# What transformers itself cannot do.
REFUSED = {(name, mode): "a recurrent state cannot be cropped" for name in LINEAR for mode in SPECULATIVE}
if Version(transformers.__version__) < Version("5.24"):
    reason = f"the assistant's own cache fails past its window in transformers {transformers.__version__}"
    REFUSED |= {(name, "assistant"): reason for name, shape in ARCHITECTURES.items() if WINDOWS & set(shape)}
WITHOUT_SOFTCAP = ("gemma2",)  # its attention on sdpa, where transformers allows that, is another one


def runs(name: str, mode: str, everywhere: bool) -> list[tuple[str, str]]:
    """The (attention implementation, cache) pairs that a model is tested on. On transformers' own attention a cache only has
    to give back what it was given: for most models one implementation and a few modes show that."""
    stock = ("eager",) if name in WITHOUT_SOFTCAP else ("sdpa", "eager")
    caches = CACHES if everywhere or name in ALL_CACHES_EVERYWHERE else ("paged",)
    if not everywhere and name not in ALL_CACHES_EVERYWHERE:
        stock = stock[:1] if mode in ("greedy", "beams-returned", "assistant") else ()
    return [("hf_kvcache", cache) for cache in CACHES] + [(i, c) for i in stock for c in caches]


@functools.cache
def models(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model, and an assistant that guesses some of its tokens: the same with a little noise on the weights."""
    model = build(name)
    assistant = copy.deepcopy(model)
    use(assistant, "eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter += 0.06 * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator)
    own = assistant.generation_config
    own.num_assistant_tokens, own.num_assistant_tokens_schedule, own.assistant_confidence_threshold = 4, "constant", 0.0
    return model, assistant


def use(model: torch.nn.Module, implementation: str) -> bool:
    """Switch the attention implementation; whether the model took it."""
    if implementation == "hf_kvcache":
        hf_kvcache.enable(model)
        return True  # a model that keeps its own attention is still right
    try:
        model.set_attn_implementation(implementation)
    except ValueError:
        return False
    return model.config._attn_implementation == implementation


def prompt(padded: bool, rows: int) -> dict[str, torch.Tensor]:
    """Eleven columns with a repetition, for prompt lookup to find; the last of two rows has four columns of padding."""
    ids = torch.randint(2, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(3))
    ids[:, 8:] = ids[:, 5:8]
    mask = torch.ones_like(ids)
    if padded:
        ids[1, :4], mask[1, :4] = 0, 0
    return {"input_ids": ids[-rows:], "attention_mask": mask[-rows:]}


def generate(model, inputs: dict, cache, **mode):
    torch.manual_seed(5)
    return model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False, **mode},
        **cache_kwarg(cache),
    )


def difference(ours, reference) -> str | None:
    """What two results of `generate()` differ in; None when in nothing."""
    if not torch.equal(ours.sequences, reference.sequences):
        return f"tokens {ours.sequences.tolist()} instead of {reference.sequences.tolist()}"
    if len(ours.logits) != len(reference.logits):
        return f"{len(ours.logits)} steps instead of {len(reference.logits)}"
    worst = max(float((a - b).abs().max()) for a, b in zip(ours.logits, reference.logits, strict=True))
    return None if worst < 1e-4 else f"scores differ by {worst:.1e}"


def pytest_generate_tests(metafunc) -> None:
    """Every model in every mode; those that ask of a cache what another one asks as well, of some models."""
    if metafunc.function is test_generates_what_the_built_in_cache_generates:
        everywhere = metafunc.config.getoption("everywhere")
        some = NAMES if everywhere else ALL_CACHES_EVERYWHERE
        cases = [(name, mode) for name in NAMES for mode in MODES if mode not in ALIKE or name in some]
        metafunc.parametrize(("name", "mode"), cases, ids=map("-".join, cases))


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_generates_what_the_built_in_cache_generates(name, padded, mode, pytestconfig):
    if (name, mode) in REFUSED:
        pytest.skip(REFUSED[name, mode])
    model, assistant = models(name)
    options = {"assistant_model": assistant} if mode == "assistant" else MODES[mode]
    inputs = prompt(padded, rows=1 if mode in SPECULATIVE else 2)
    use(model, "eager")
    reference = generate(model, inputs, DynamicCache(config=model.config), **options)
    wrong = []
    for implementation, kind in runs(name, mode, pytestconfig.getoption("everywhere")):
        if not use(model, implementation):
            continue
        cache = CACHES[kind](model.config)
        found = difference(generate(model, inputs, cache, **options), reference)
        cache.check_integrity()
        if implementation == "hf_kvcache" and name not in OUTSIDE and cache.stats()["materialisations"]:
            found = f"{cache.stats()['materialisations']} layers were materialised"
        if found:
            wrong.append(f"{kind} on {implementation}: {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_speculation_accepts_and_takes_back(mode):
    """Without both, the modes above would prove little."""
    model, assistant = models("smollm3")
    options = {"assistant_model": assistant} if mode == "assistant" else MODES[mode]
    cache, cropped = PagedCache(model.config, block_size=4), []
    cache.crop = lambda n: (cropped.append(-int(n)), PagedCache.crop(cache, n))[1]
    use(model, "hf_kvcache")
    generate(model, prompt(False, rows=1), cache, **options)
    assert len(cropped) < NEW_TOKENS, "no guess was accepted"
    assert any(cropped), "no guess was refused"


@pytest.mark.parametrize("name", NAMES)
def test_predicts_the_shapes_that_a_built_in_cache_holds(name):
    model, _ = models(name)
    use(model, "eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.long), **cache_kwarg(cache))
    held = [getattr(layer, "keys", None) is not None for layer in cache.layers]
    specs = specs_from_config(model.config)
    assert [spec.stores for spec in specs] == held + [False] * (len(specs) - len(held))
    shapes = [
        (x.keys.shape[1], x.keys.shape[3], x.values.shape[3]) for x, h in zip(cache.layers, held, strict=True) if h
    ]
    assert [(s.kv_heads, s.k_dim, s.v_dim) for s in specs if s.stores] == shapes
    windows = [getattr(x, "sliding_window", None) for x, h in zip(cache.layers, held, strict=True) if h]
    assert [s.window for s in specs if s.stores] == windows


@functools.cache
def encoder_decoder(name: str) -> torch.nn.Module:
    shape = {"vocab_size": VOCABULARY, "d_model": 32, "pad_token_id": 0, "decoder_start_token_id": 2}
    configs = {
        "t5": T5Config(**shape, d_kv=8, d_ff=48, num_layers=2, num_heads=4, eos_token_id=None),
        "bart": BartConfig(
            **shape,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            eos_token_id=None,
            forced_eos_token_id=None,
        ),
    }
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(configs[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.25)
    return model


@pytest.mark.parametrize("mode", ["greedy", "beams"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_serves_as_the_decoder_half_of_an_encoder_decoder_cache(name, padded, mode):
    model, inputs = encoder_decoder(name), prompt(padded, rows=2)
    use(model, "eager")
    built_in = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    reference = generate(model, inputs, built_in, **MODES[mode])
    for implementation in ("hf_kvcache", "sdpa", "eager"):
        if not use(model, implementation):
            continue
        ours = PagedCache(model.config, block_size=4)
        cache = EncoderDecoderCache(ours, DynamicCache(config=model.config))
        assert difference(generate(model, inputs, cache, **MODES[mode]), reference) is None, implementation
        assert ours.get_seq_length() == NEW_TOKENS, "our half was not used"
        ours.check_integrity()
