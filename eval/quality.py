"""Quality loss, measured through the cache.

One forward pass never reads what a cache has quantised or dropped: it returns exact keys and values for what is new. So the
context is first written through the cache, and then a continuation is fed one true decode step at a time (larger chunks
would see their neighbours exactly and hide the loss), against what the cache returns. The exact keys and values of each
context are computed once and written to every variant, so that variants differ in nothing but the cache.

Every window is decoded twice at once, as two rows of a batch: one is fed the text, for perplexity and divergence, and one is
fed what the plain cache generates greedily, which shows where free generation would first differ: up to there, both are fed
the same tokens.

Each run has controls. The plain cache with another prefill chunking differs by float noise only, or the run fails; a cache
that is known to be bad must show its loss.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache
from transformers.cache_utils import Cache

from hf_kvcache import KVCache, cache_kwarg, named

from . import caches, contexts, models
from .contexts import prefill, states
from .records import Record
from .session import Session

RECHUNKED, CHUNK = "dynamic/rechunked", 192  # the control, and the chunks its context is prefilled in
NOISE_LIMIT = 1e-5  # of the control, in float32
KNOWN_BAD, BAD_AT_LEAST = "int2/residual=0/block_size=128", 1e-3
BUCKETS = 4  # of decode steps, in which growth of the error shows


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


NOISE = 1e-6  # a KL below this is float noise: the plain cache with another prefill chunking reaches 1e-7


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
    states: contexts.States | None
    plain_bytes: int
    log_probs: torch.Tensor
    greedy: torch.Tensor

    @property
    def prompt(self) -> torch.Tensor:
        return self.ids[:, : self.context]


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
    cache = prefill(model, ids[:, :context], DynamicCache(config=model.config))
    exact = states(cache)
    exact = exact and [(k.clone(), v.clone()) for k, v in exact]  # the cache goes on
    plain_bytes = caches.stored_bytes(cache)
    log_probs, greedy = _decode(model, ids, context, _twice(cache, len(ids)))
    return Reference(ids, context, exact, plain_bytes, log_probs, greedy)


def write(model, ref: Reference, cache: Cache) -> Cache:
    """The context of every window through `cache`, twice: a row for the text and a row for greedy generation."""
    return contexts.write(model, ref.ids[:, : ref.context], ref.states, cache, copies=2)


@torch.inference_mode()
def predictions(model, ref: Reference, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    """What a cache that `write` has filled makes the model say: log-probabilities for the text `[windows, steps, vocabulary]`,
    and choices `[windows, steps]` where it is fed the plain cache's greedy tokens."""
    return _decode(model, ref.ids, ref.context, cache, ref.greedy)


@torch.inference_mode()
def divergence(model, ref: Reference, make_cache: Callable[..., Cache]) -> Divergence:
    """Write each context through a new cache and score true decode steps against the reference."""
    return summary([compare(model, ref, write(model, ref, make_cache(model.config)))])


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
    held = caches.stored_bytes(cache) // 2
    compressed = cache.stats()["compressed"] if isinstance(cache, KVCache) else None
    log_probs, choices = predictions(model, ref, cache)
    target = ref.ids[:, ref.context + 1 :, None]
    return Compared(
        kl=(ref.log_probs.exp() * (ref.log_probs - log_probs)).sum(-1),
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


def _twice(cache: DynamicCache, rows: int) -> DynamicCache:
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


# ---- the suite --------------------------------------------------------------------------------------------------------


def configure(parser: argparse.ArgumentParser) -> None:
    """The suite's own arguments."""
    parser.add_argument("--lengths", default="1024,4096,8192", help="tokens of a window, comma-separated")
    parser.add_argument("--steps", type=int, default=32, help="decode steps scored at the end of a window")
    parser.add_argument("--windows", default="6,2,1", help="windows of each length")


def main(session: Session, args: argparse.Namespace) -> None:
    """Measure every cache at every length, print tables, check the controls."""
    lengths, counts = ([int(x) for x in text.split(",")] for text in (args.lengths, args.windows))
    if session.quick:
        lengths, counts = lengths[:1], [3]
    counts += counts[-1:] * (len(lengths) - len(counts))
    records = run(session, list(zip(lengths, counts, strict=False)), args.steps)
    if session.processes.is_main_process:
        show(records, Console())
    check_controls(records, session.run["dtype"])


def run(session: Session, plan: list[tuple[int, int]], steps: int) -> list[Record]:
    """Records of every cache for each `(length, windows)` of the plan; the controls come with the first one."""
    texts = models.texts()
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:12]
    records = []
    with session.progress() as progress:
        bar = progress.add_task("quality", total=len(plan) * len(session.caches) + 2)
        for number, (length, count) in enumerate(plan):
            ids = windows(session.tokenizer, texts.values(), count, length)
            mine = torch.stack(session.share(list(ids))).to(session.model.device)
            ref = functools.cache(lambda mine=mine: reference(session.model, mine, steps))
            controls = [RECHUNKED, KNOWN_BAD] if number == 0 else []
            for name in dict.fromkeys([*controls, *session.caches]):
                protocol = {"context": length - steps - 1, "steps": steps, "windows": count}
                protocol |= {"score_chunk": 1, "prefill_chunk": CHUNK if name == RECHUNKED else None, "texts": digest}
                work = functools.partial(_work, session, name, ref)
                records.append(session.measure("quality", name, protocol, work))
                progress.advance(bar)
    return records


def _work(session: Session, name: str, ref: Callable[[], Reference]) -> dict:
    model = session.model
    fill = functools.partial(rechunked, model) if name == RECHUNKED else (
        lambda ref: write(model, ref, named.cache_factory(name)(model.config))
    )  # fmt: skip
    return summary(session.gather([compare(model, ref(), fill(ref()))])).as_dict()


@torch.inference_mode()
def rechunked(model, ref: Reference) -> DynamicCache:
    """The plain cache, its context prefilled in chunks: it differs by float noise."""
    cache = DynamicCache(config=model.config)
    for chunk in ref.ids[:, : ref.context].split(CHUNK, dim=1):
        prefill(model, chunk, cache)
    return _twice(cache, len(ref.ids))


class ControlError(RuntimeError):
    """A control shows that the measure itself is broken."""


def check_controls(records: list[Record], dtype: str) -> None:
    """Raise `ControlError` where the noise floor is too high or a bad cache looks good.

    In half precision another chunking rounds differently, and its divergence is the floor to read the others against.
    """
    for record in records:
        kl = record.metrics["kl_mean"]
        if record.cache == RECHUNKED and dtype == "float32" and not kl <= NOISE_LIMIT:
            raise ControlError(
                f"the plain cache with another prefill chunking has a KL of {kl:.1e}, where {NOISE_LIMIT} is the most "
                "that float noise explains: the model is not deterministic, or its cache is broken."
            )
        if record.cache == KNOWN_BAD and not kl >= BAD_AT_LEAST:
            raise ControlError(
                f"{KNOWN_BAD} is a bad cache and shows a KL of {kl:.1e} only: contexts are too short for it to "
                "compress anything, or the scores do not come through the cache."
            )


def show(records: list[Record], console: Console) -> None:
    """A table for every context length, and a warning where a cache had nothing to do."""
    for context in dict.fromkeys(record.protocol["context"] for record in records):
        rows = [record for record in records if record.protocol["context"] == context]
        first = rows[0].metrics
        table = Table(
            title=f"{first['steps']} decode steps after {context} tokens (plain perplexity {first['ppl_plain']:.2f})",
            caption="first: step at which greedy generation differs. read: share of the context read as compressed.",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for heading in ("cache", "KL", "p99", "top-1", "ppl", "first", "bytes", "read"):
            table.add_column(heading, justify="left" if heading == "cache" else "right", overflow="fold")
        for row in rows:
            table.add_row(row.cache, *_cells(row.metrics))
        console.print(table)
        for row in rows:
            if row.metrics["compressed"] == 0 and row.metrics["kl_mean"] < NOISE and not named.is_exact(row.cache):
                console.print(f"[yellow]{row.cache} compressed nothing at {context} tokens: its loss is not measured.")


def _cells(m: dict) -> list[str]:
    change = (torch.tensor(m["nll_change"]).exp().item() - 1) * 100
    return [
        readable(m["kl_mean"]),
        readable(m["kl_p99"]),
        f"{m['top1']:.1%}",
        f"{change:+.2f}±{m['nll_stderr'] * 100:.2f}%",
        "never" if m["first_difference"] is None else f"{m['first_difference']:.0f}",
        f"{m['bytes'] / m['plain_bytes']:.2f}",
        "-" if m["compressed"] is None else f"{m['compressed']:.0%}",
    ]
