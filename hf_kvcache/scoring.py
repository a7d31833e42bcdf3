"""Quality loss, measured through the cache.

One forward pass never reads what a cache has quantised or dropped: it returns exact keys and values for what is new. So the
context is first written through the cache, and then a continuation is fed one true decode step at a time (larger chunks
would see their neighbours exactly and hide the loss), against what the cache returns. The exact keys and values of each
context are computed once and written to every variant, so that variants differ in nothing but the cache.

Every window is decoded twice at once, as two rows of a batch: one is fed the text, for perplexity and divergence, and one is
fed what the plain cache generates greedily, which shows where free generation would first differ: up to there, both are fed
the same tokens.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from . import contexts
from .cache import KVCache, cache_kwarg
from .contexts import States, prefill, states, stored_bytes
from .errors import ConfigurationError

BUCKETS = 4  # of decode steps, in which growth of the error shows
NOISE = 1e-6  # a KL below this is float noise: the plain cache with another prefill chunking reaches 1e-7


@dataclass(frozen=True)
class Divergence:
    """How far a cache's next-token distributions are from the plain cache's, over all scored steps.

    Attributes:
        ppl, ppl_plain: perplexity of the text with this cache and with the plain one.
        nll_change, nll_stderr: mean change of the text's negative log-likelihood and its paired standard error.
        kl_mean, kl_stderr, kl_p99, kl_max: Kullback-Leibler divergence from the plain cache's distribution, in nats.
        top1: share of steps with the same most likely token.
        first_difference: the step at which greedy generation first differs, the median of the windows; None if it
            differs in less than half of them.
        identical: share of windows whose greedy generation does not differ.
        by_position: KL and top-1 of decode steps `[from, to)`.
        steps: scored positions in all; `context` tokens were written through the cache before.
        compressed: share of the context that is no longer read as it was written; None for a built-in cache.
        bytes, plain_bytes: storages behind the context in this cache and in the plain one.
    """

    ppl: float
    ppl_plain: float
    nll_change: float
    nll_stderr: float
    kl_mean: float
    kl_stderr: float
    kl_p99: float
    kl_max: float
    top1: float
    first_difference: float | None
    identical: float
    by_position: list[dict]
    steps: int
    context: int
    compressed: float | None
    bytes: int
    plain_bytes: int

    def as_dict(self) -> dict:
        return asdict(self)


def readable(kl: float) -> str:
    """A KL divergence for people: 0 where it is noise."""
    return "0" if kl < NOISE else f"{kl:.1e}"


@dataclass
class Reference:
    """Windows of text with the plain cache's answers.

    Attributes:
        ids: `[windows, context + steps + 1]` token ids.
        states: keys and values of the context, per layer; None where a cache has to be prefilled by the model.
        plain_bytes: bytes of a plain cache that holds the context.
        log_probs: `[windows, steps, vocabulary]` the plain cache's predictions for the text, float32.
        greedy: `[windows, steps]` what the plain cache generates greedily instead.
    """

    ids: torch.Tensor
    context: int
    states: States | None
    plain_bytes: int
    log_probs: torch.Tensor
    greedy: torch.Tensor

    @property
    def prompt(self) -> torch.Tensor:
        return self.ids[:, : self.context]


def windows(tokenizer, texts: Iterable[str], count: int, length: int) -> torch.Tensor:
    """`count` windows `[count, length]` of token ids, spread evenly over `texts`, none of which overlap.

    Raises:
        ConfigurationError: for texts that are too short.
    """
    texts = list(texts)
    rows, turns = [], -(-count // len(texts))
    for i in range(count):
        text, turn = texts[i % len(texts)], i // len(texts)
        start, end = (len(text) * part // (turns + 1) for part in (turn + 1, turn + 2))
        ids = tokenizer(text[start : min(end, start + 12 * length)], return_tensors="pt").input_ids[0, :length]
        if len(ids) < length:
            raise ConfigurationError(
                f"a text of {len(text)} characters has fewer than {length} tokens from its {start}th to its {end}th: give longer "
                "texts, or ask for fewer or shorter windows."
            )
        rows.append(ids)
    return torch.stack(rows)


@torch.inference_mode()
def reference(model, ids: torch.Tensor, steps: int) -> Reference:
    """The plain cache's answers for `steps` decode steps at the end of every window."""
    context = ids.shape[1] - steps - 1
    cache = prefill(model, ids[:, :context], DynamicCache(config=model.config))
    exact = states(cache)
    exact = exact and [(k.clone(), v.clone()) for k, v in exact]  # the cache goes on
    plain_bytes = stored_bytes(cache)
    log_probs, greedy = _decode(model, ids, context, twice(cache, len(ids)))
    return Reference(ids, context, exact, plain_bytes, log_probs, greedy)


def write(model, ref: Reference, cache: Cache, copies: int = 2) -> Cache:
    """The context of every window through `cache`, twice: a row for the text and a row for greedy generation. (`in_one_pass`
    needs one copy only.)"""
    return contexts.write(model, ref.ids[:, : ref.context], ref.states, cache, copies)


@torch.inference_mode()
def predictions(model, ref: Reference, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    """What a cache that `write` has filled makes the model say: log-probabilities for the text `[windows, steps, vocabulary]`,
    and choices `[windows, steps]` where it is fed the plain cache's greedy tokens."""
    return _decode(model, ref.ids, ref.context, cache, ref.greedy)


@torch.inference_mode()
def divergence(model, ref: Reference, make_cache: Callable[..., Cache]) -> Divergence:
    """Write each context through a new cache and score true decode steps against the reference."""
    return summary([compare(model, ref, write(model, ref, make_cache(model.config)))])


def settled(context: int, block_size: int, residual: int) -> int:
    """The longest context up to `context` after which a block has just been sealed: no other one is, for fewer steps than a
    block has positions."""
    return context - (context - residual) % block_size


@torch.inference_mode()
def in_one_pass(model, ref: Reference, cache: Cache) -> torch.Tensor:
    """The divergence `[windows, steps]` of all steps, in nats, at the price of one pass.

    What a pass adds it reads exactly, and so do true steps as long as it lies in open blocks: with a `settled` context this
    is what `compare` finds, but for float noise. `write` has filled the cache, with one copy.
    """
    logits = model(ref.ids[:, ref.context : -1], **cache_kwarg(cache)).logits
    return _divergence(ref, logits.float().log_softmax(-1))


def _divergence(ref: Reference, log_probs: torch.Tensor) -> torch.Tensor:
    return (ref.log_probs.exp() * (ref.log_probs - log_probs)).sum(-1)


@dataclass
class Compared:
    """The divergence of every window and step; small, so that processes can exchange it."""

    kl: torch.Tensor  # [windows, steps]
    nll: torch.Tensor
    nll_plain: torch.Tensor
    agree: torch.Tensor
    same: torch.Tensor  # of greedy tokens
    context: int
    compressed: float | None
    bytes: int
    plain_bytes: int


@torch.inference_mode()
def compare(model, ref: Reference, cache: Cache) -> Compared:
    """Score true decode steps of a cache that `write` has filled."""
    held = stored_bytes(cache) // 2
    compressed = cache.stats()["compressed"] if isinstance(cache, KVCache) else None
    log_probs, choices = predictions(model, ref, cache)
    target = ref.ids[:, ref.context + 1 :, None]
    return Compared(
        kl=_divergence(ref, log_probs),
        nll=-log_probs.gather(-1, target)[..., 0],
        nll_plain=-ref.log_probs.gather(-1, target)[..., 0],
        agree=ref.log_probs.argmax(-1) == log_probs.argmax(-1),
        same=choices == ref.greedy,
        context=ref.context,
        compressed=compressed,
        bytes=held,
        plain_bytes=ref.plain_bytes,
    )


def summary(parts: list[Compared]) -> Divergence:
    """One `Divergence` of all windows of all parts."""
    kl, nll, plain, agree, same = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("kl", "nll", "nll_plain", "agree", "same")
    )
    change, count, steps = nll - plain, kl.numel(), kl.shape[1]
    firsts = [int(row.int().argmin()) if not row.all() else steps for row in same]
    middle = statistics.median(firsts)
    edges = [steps * i // BUCKETS for i in range(BUCKETS + 1)]
    buckets = [(a, b) for a, b in itertools.pairwise(edges) if b > a]
    return Divergence(
        ppl=nll.mean().exp().item(),
        ppl_plain=plain.mean().exp().item(),
        nll_change=change.mean().item(),
        nll_stderr=(change.std() / count**0.5).item(),
        kl_mean=kl.mean().item(),
        kl_stderr=(kl.std() / count**0.5).item(),
        kl_p99=kl.flatten().quantile(0.99).item(),
        kl_max=kl.max().item(),
        top1=agree.float().mean().item(),
        first_difference=None if middle == steps else middle,
        identical=sum(first == steps for first in firsts) / len(firsts),
        by_position=[
            {"from": a, "to": b, "kl": kl[:, a:b].mean().item(), "top1": agree[:, a:b].float().mean().item()}
            for a, b in buckets
        ],
        steps=count,
        context=parts[0].context,
        compressed=parts[0].compressed,
        bytes=sum(part.bytes for part in parts),
        plain_bytes=sum(part.plain_bytes for part in parts),
    )


def twice(cache: DynamicCache, rows: int) -> DynamicCache:
    """Every row a second time, behind all the others."""
    cache.reorder_cache(torch.arange(rows).repeat(2))
    return cache


def _decode(model, ids: torch.Tensor, context: int, cache: Cache, greedy: torch.Tensor | None = None):
    """Feed one token at a time: the text to the first half of the rows, greedy tokens to the second half (the cache's own
    ones where none are given). Returns log-probabilities of the first half and choices of the second."""
    count = len(ids)
    log_probs, choices, fed = [], [], ids[:, context]
    for step, text in enumerate(ids[:, context:-1].unbind(1)):
        logits = model(torch.cat([text, fed])[:, None], **cache_kwarg(cache)).logits[:, -1].float()
        log_probs.append(logits[:count].log_softmax(-1))
        choices.append(logits[count:].argmax(-1))
        fed = choices[-1] if greedy is None else greedy[:, step]
    return torch.stack(log_probs, dim=1), torch.stack(choices, dim=1)
