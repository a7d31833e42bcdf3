"""Quality loss, measured through the cache.

One forward pass never reads what a cache has quantised or dropped: it returns exact keys and values for what is new. So the
context is first written through the cache, and then a continuation is fed one true decode step at a time (larger chunks
would see their neighbours exactly and hide the loss), against what the cache returns. The exact keys and values of each
context are computed once and written to every variant, so that variants differ in nothing but the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from hf_kvcache import cache_kwarg


@dataclass(frozen=True)
class Divergence:
    """How far a cache's next-token distributions are from the plain cache's, over all scored steps.

    Attributes:
        kl_mean, kl_p99, kl_max: Kullback-Leibler divergence from the plain cache's distribution, in nats.
        top1: share of steps with the same most likely token.
        nll_change, nll_stderr: mean change of the reference token's negative log-likelihood and its paired standard error.
        steps: scored positions; `context` tokens were written through the cache before.
    """

    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float
    nll_change: float
    nll_stderr: float
    steps: int
    context: int

    def as_dict(self) -> dict:
        return asdict(self)


NOISE = 1e-6  # a KL below this is float noise: the plain cache with another prefill chunking reaches 1e-7


def readable(kl: float) -> str:
    """A KL divergence for people: 0 where it is noise."""
    return "0" if kl < NOISE else f"{kl:.1e}"


@dataclass
class Reference:
    """Windows of text with the plain cache's answers.

    Attributes:
        ids: `[windows, context + steps + 1]` token ids.
        states: keys and values of the context, per layer.
        log_probs: `[windows, steps, vocabulary]` the plain cache's predictions, float32.
    """

    ids: torch.Tensor
    context: int
    states: list[tuple[torch.Tensor, torch.Tensor]]
    log_probs: torch.Tensor


def windows(tokenizer, texts: Iterable[str], count: int, length: int) -> torch.Tensor:
    """`count` windows `[count, length]` of token ids, spread evenly over `texts`."""
    texts = list(texts)
    rows = []
    for i in range(count):
        text, turn = texts[i % len(texts)], i // len(texts)
        turns = -(-count // len(texts))
        start = len(text) * (turn + 1) // (turns + 1)
        ids = tokenizer(text[start : start + 12 * length], return_tensors="pt").input_ids[0, :length]
        if len(ids) < length:
            raise ValueError(f"a text of {len(text)} characters has fewer than {length} tokens from {start} on.")
        rows.append(ids)
    return torch.stack(rows)


@torch.inference_mode()
def reference(model, ids: torch.Tensor, steps: int) -> Reference:
    """The plain cache's answers for `steps` decode steps at the end of every window."""
    context = ids.shape[1] - steps - 1
    cache = DynamicCache(config=model.config)
    model(ids[:, :context], **cache_kwarg(cache), logits_to_keep=1)
    states = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    return Reference(ids, context, states, _decode(model, ids, context, cache))


@torch.inference_mode()
def divergence(model, ref: Reference, make_cache: Callable[..., Cache]) -> Divergence:
    """Write each context through a new cache and score true decode steps against the reference."""
    cache = make_cache(model.config)
    for layer, (k, v) in enumerate(ref.states):
        cache.update(k, v, layer)
    log_probs = _decode(model, ref.ids, ref.context, cache)
    kl = (ref.log_probs.exp() * (ref.log_probs - log_probs)).sum(-1).flatten()
    target = ref.ids[:, ref.context + 1 :, None]
    change = (ref.log_probs.gather(-1, target) - log_probs.gather(-1, target)).flatten()
    agree = (ref.log_probs.argmax(-1) == log_probs.argmax(-1)).float()
    return Divergence(
        kl_mean=kl.mean().item(),
        kl_p99=kl.quantile(0.99).item(),
        kl_max=kl.max().item(),
        top1=agree.mean().item(),
        nll_change=change.mean().item(),
        nll_stderr=(change.std() / len(change) ** 0.5).item(),
        steps=len(kl),
        context=ref.context,
    )


def _decode(model, ids: torch.Tensor, context: int, cache: Cache) -> torch.Tensor:
    steps = [
        model(ids[:, i : i + 1], **cache_kwarg(cache)).logits[:, -1].float().log_softmax(-1)
        for i in range(context, ids.shape[1] - 1)
    ]
    return torch.stack(steps, dim=1)
