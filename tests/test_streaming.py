"""Endless text through a window with sinks: flat memory, and still coherent past the context the model was trained on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from eval import models
from hf_kvcache import SlidingWindowCache, cache_kwarg, enable
from hf_kvcache.kernels import reference
from hf_kvcache.rotary import RotaryAngles

from .architectures import build
from .forcing import demo_model


def test_10_000_tokens_hold_no_more_than_the_first_ones():
    model = enable(build("llama"))
    cache = SlidingWindowCache(model.config, window=32, sinks=4, block_size=8)
    generator = torch.Generator().manual_seed(0)
    sizes = []
    with torch.inference_mode():
        for start in range(0, 10_000, 50):
            ids = torch.randint(2, 97, (1, 50), generator=generator)
            model(ids, position_ids=torch.arange(start, start + 50)[None] % 400, **cache_kwarg(cache))
            report = cache.memory()
            sizes.append((report.stored, report.allocated))
    page = cache.storage.groups[0].store.open.page_bytes
    blocks = -(-31 // 8) + 1 + 1  # the window may begin and end inside a block; one more for the sinks
    assert max(stored for stored, _ in sizes) <= blocks * page
    assert len({allocated for _, allocated in sizes[3:]}) == 1, "memory grew after the window was full"
    table = cache.storage.groups[0].table
    assert table.length[0] == 10_000 and table.ids.shape[1] <= 64
    cache.check_integrity()


@pytest.mark.parametrize("name", ["llama", "phi", "stablelm", "gpt_neox", "qwen3"])
def test_turning_a_query_back_gives_the_score_at_the_nearer_position(name):
    """The model's own rotary embedding is the judge: a key at 2 seen from 500, turned back by 460, scores as from 40."""
    model = build(name)
    angles = RotaryAngles.from_config(model.config)
    assert angles is not None
    module = __import__(model.__module__, fromlist=["apply_rotary_pos_emb"])
    rotary = next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    width = 2 * len(angles.inverse_frequencies)
    q, k = torch.randn(1, 1, 1, width), torch.randn(1, 1, 1, width)

    def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
        cos, sin = rotary(x, torch.tensor([[position]]))
        return module.apply_rotary_pos_emb(x, x, cos, sin)[0]

    key = rotated(k, 2)
    turned = angles(np.array([[460]]), torch.device("cpu")).apply(rotated(q, 500))
    assert torch.allclose((turned * key).sum(), (rotated(q, 40) * key).sum(), atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "deepseek_v3", "smollm3", "cohere2", "llama4_text"])
def test_models_without_one_rotary_embedding_for_all_layers_get_the_plain_window(name):
    config = build(name).config
    if name == "smollm3" and not getattr(config, "no_rope_layers", None):
        pytest.skip("this release's config has no layers without rotary embedding")
    cache = SlidingWindowCache(config, window=16, sinks=2, block_size=8)
    assert RotaryAngles.from_config(config) is None
    assert all(group.angles is None for group in cache.storage.groups)


def test_a_rotary_embedding_for_each_layer_type_is_not_guessed_at():
    """Olmo 3 has one for sliding and one for full layers: the window works there, without re-based sinks."""
    config = AutoConfig.for_model("olmo3", num_hidden_layers=4)
    cache = SlidingWindowCache(config, window=16, sinks=2, block_size=8)
    assert all(group.angles is None for group in cache.storage.groups)


def test_chunked_input_equals_one_token_at_a_time():
    """The window, its sinks and their positions are a property of each query, not of how the text was cut."""
    model = enable(build("llama"))
    ids = torch.randint(2, 97, (1, 120), generator=torch.Generator().manual_seed(1))

    def logits(chunk: int) -> torch.Tensor:
        cache = SlidingWindowCache(model.config, window=20, sinks=3, block_size=8)
        with torch.inference_mode():
            return torch.cat([model(part, **cache_kwarg(cache)).logits for part in ids.split(chunk, dim=1)], dim=1)

    single = logits(1)
    for chunk in (7, 50, 120):
        assert torch.allclose(logits(chunk), single, atol=1e-4), f"chunks of {chunk}"


def test_rebased_sinks_equal_streaming_llms_own_recipe():
    """StreamingLLM stores keys before rotation and rotates them by their place in the cache: do just that, by brute force."""
    torch.manual_seed(0)
    window, sinks, n = 12, 4, 60
    config = build("llama").config
    angles = RotaryAngles.from_config(config)
    frequencies = angles.inverse_frequencies.double()

    def rotate(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        angle = position.double()[:, None] * frequencies
        a, b = x.double().chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    dim = 2 * len(frequencies)
    q, k, v = (torch.randn(n, dim) for _ in range(3))
    positions = torch.arange(n)
    expected = []
    for i in range(n):
        kept = [j for j in range(i + 1) if j < sinks or j > i - window]
        inside = torch.arange(len(kept))
        scores = (rotate(q[i : i + 1], inside[-1:]) @ rotate(k[kept], inside).T) * dim**-0.5
        expected.append(scores.softmax(-1) @ v[kept].double())
    dropped = np.maximum(np.arange(1, n + 1) - window - sinks, 0)[None]
    rotated_q = rotate(q, positions).float()
    turned = angles(dropped, torch.device("cpu")).apply(rotated_q[None, None])[0]
    out, _ = reference.prefill(
        rotated_q[None],
        rotate(k, positions).float()[None],
        v[None],
        dim**-0.5,
        window=window,
        sinks=sinks,
        turned=turned,
    )
    assert torch.allclose(out[:, 0].double(), torch.cat(expected), atol=1e-4)


@pytest.mark.demo
@pytest.mark.slow
def test_past_the_trained_context_the_demo_model_is_still_coherent():
    """10,240 tokens of a book through a window of 512: the last 1,024 are predicted about as well as by a fresh window."""
    model, tokenizer = demo_model()
    ids = tokenizer(models.texts()["plrabn12"], return_tensors="pt").input_ids[:, :10_240]
    assert ids.shape[1] > model.config.max_position_embeddings
    streamed = _nll(model, ids)
    fresh = _nll(model, ids[:, -2048:])
    assert streamed < fresh + 0.1, (streamed, fresh)


@torch.inference_mode()
def _nll(model, ids: torch.Tensor) -> float:
    """Mean negative log-likelihood of the last 1,024 tokens, read in chunks of 512 through a window."""
    cache = SlidingWindowCache(model.config, window=512, sinks=4)
    losses = []
    for start in range(0, ids.shape[1] - 1, 512):
        stop = min(start + 512, ids.shape[1] - 1)
        scored = start >= ids.shape[1] - 1024 - 512
        out = model(ids[:, start:stop], logits_to_keep=0 if scored else 1, **cache_kwarg(cache))
        if scored:
            losses.append(
                torch.nn.functional.cross_entropy(out.logits[0], ids[0, start + 1 : stop + 1], reduction="none")
            )
    return torch.cat(losses)[-1024:].mean().item()
