"""Endless text through a window with attention sinks: how near perplexity stays to that of a recomputed window.

The effect is StreamingLLM's (Xiao et al. 2024, "Efficient streaming language models with attention sinks"): a window alone
fails once the first tokens have left it, and a few of them kept as sinks repair that. One continuous text is read twice.

- Streamed: chunk by chunk through one cache. Every query has a window of its own, so chunks change nothing.
- Recomputed: every `stride` tokens are scored by a fresh forward pass, without a cache, over them and what is before
  them, `window + stride / 2` tokens in all. So a token is predicted from `window - stride / 2` to `window + stride / 2`
  others, and on average from the `window` that a query of the cache sees.

Scored are the same tokens for both: all that the first window does not hold, for until then nothing has been dropped. A
cache's `ratio` is its perplexity over the recomputed one.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from transformers.cache_utils import Cache

from hf_kvcache import cache_kwarg, named

from . import models
from .records import Record
from .session import Session

BIN = 1024  # positions whose tokens make one figure of `by_position`
QUICK_WINDOW = 256


@torch.inference_mode()
def streamed(model, ids: torch.Tensor, cache: Cache, chunk: int, tick: Callable[[int], None] = lambda n: None):
    """Negative log-likelihood of `ids[1:]`, given the tokens before as `cache` shows them; `ids` is `[n]`."""
    parts = []
    for start in range(0, len(ids) - 1, chunk):
        read = ids[None, start : min(start + chunk, len(ids) - 1)]
        parts.append(_nll(model(read, **cache_kwarg(cache)).logits[0], ids[start + 1 : start + 1 + read.shape[1]]))
        tick(read.shape[1])
    return torch.cat(parts)


@torch.inference_mode()
def recomputed(model, ids: torch.Tensor, scored: int) -> torch.Tensor:
    """Negative log-likelihood of the last `scored` of `ids` `[n]` by one forward pass without a cache."""
    logits = model(ids[None, :-1], use_cache=False, logits_to_keep=scored).logits[0]
    return _nll(logits, ids[-scored:])


def _nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), targets.to(logits.device), reduction="none").cpu()


def fresh_windows(ids: torch.Tensor, window: int, stride: int) -> list[tuple[torch.Tensor, int]]:
    """`(tokens, how many of the last are scored)` of each recomputed pass; together they score `ids[window + 1:]`.

    Raises:
        ValueError: for a stride that leaves some tokens without a past.
    """
    if not 1 <= stride <= window:
        raise ValueError(
            f"stride={stride} must be between 1 and the window of {window}: smaller ones cost more passes."
        )
    before = window - stride // 2
    edges = [*range(window + 1, len(ids), stride), len(ids)]
    return [(ids[max(0, i - before - 1) : j], j - i) for i, j in itertools.pairwise(edges)]


def by_position(nll: torch.Tensor, first: int) -> list[dict]:
    """Perplexity of `[texts, n]` tokens in bins of positions; `first` is the position of the first."""
    edges = sorted({first, *range(first + BIN - first % BIN, first + nll.shape[1], BIN), first + nll.shape[1]})
    return [{"from": i, "to": j, "ppl": ppl(nll[:, i - first : j - first])} for i, j in itertools.pairwise(edges)]


def ppl(nll: torch.Tensor) -> float:
    """Perplexity: the exponential of the mean negative log-likelihood."""
    return math.exp(nll.double().mean().item())


def read(tokenizer, names: Sequence[str], tokens: int) -> dict[str, torch.Tensor]:
    """The first `tokens` tokens of the texts `names` (see `models.texts`); of the first one if none is named.

    Raises:
        ValueError: for a text that is not there, or too short.
    """
    texts = models.texts()
    missing = [name for name in names if name not in texts]
    if missing:
        raise ValueError(f"no text is called {', '.join(missing)}; there are {', '.join(texts)}.")
    chosen = names or list(texts)[:1]
    rows = {name: tokenizer(texts[name][: 12 * tokens], return_tensors="pt").input_ids[0, :tokens] for name in chosen}
    for name, ids in rows.items():
        if len(ids) < tokens:
            raise ValueError(f"{name} has {len(ids)} tokens, {tokens} were asked for.")
    return rows


def run(
    session: Session, texts: dict[str, torch.Tensor], *, window: int, sinks: Sequence[int], chunk: int, stride: int
) -> list[Record]:
    """A record for each number of sinks, over all `texts` (`[n]` token ids by name, of one length).

    Raises:
        ValueError: for texts that the window holds, and for strides longer than it.
    """
    rows, names = list(texts.values()), list(dict.fromkeys(f"window:{window}+{s}" for s in sinks))
    tokens = len(rows[0])
    if tokens <= window + 1:
        raise ValueError(f"{tokens} tokens never leave a window of {window}: read more than {window + 1}.")
    protocol = {"window": window, "tokens": tokens, "texts": list(texts), "chunk": chunk, "stride": stride}
    with session.progress() as progress:
        baseline = functools.cache(lambda: _recomputed(session, progress, rows, window, stride))

        def work(name: str) -> dict:
            return _metrics(_streamed(session, progress, rows, name, chunk)[:, window:], baseline(), window + 1)

        return [session.measure("streaming", name, protocol, functools.partial(work, name)) for name in names]


def _streamed(session: Session, progress, texts: list[torch.Tensor], name: str, chunk: int) -> torch.Tensor:
    """`[texts, n - 1]` through new caches called `name`."""
    mine = session.share(texts)
    bar = progress.add_task(name, total=sum(len(ids) - 1 for ids in mine))
    tick = lambda n: progress.advance(bar, n)  # noqa: E731
    device, make = session.model.device, named.cache_factory(name)
    rows = [streamed(session.model, ids.to(device), make(session.model.config), chunk, tick).tolist() for ids in mine]
    return torch.tensor(session.gather(rows))


def _recomputed(session: Session, progress, texts: list[torch.Tensor], window: int, stride: int) -> torch.Tensor:
    """`[texts, n - 1 - window]` from fresh windows."""
    passes = session.share([part for ids in texts for part in fresh_windows(ids, window, stride)])
    parts = [
        recomputed(session.model, ids.to(session.model.device), scored).tolist()
        for ids, scored in progress.track(passes, description="recomputed")
    ]
    return torch.tensor([x for part in session.gather(parts) for x in part]).view(len(texts), -1)


def _metrics(nll: torch.Tensor, baseline: torch.Tensor, first: int) -> dict:
    """Of `[texts, n]` tokens from position `first` on."""
    bins = zip(by_position(nll, first), by_position(baseline, first), strict=True)
    return {
        "ppl": ppl(nll),
        "ppl_recomputed": ppl(baseline),
        "ratio": ppl(nll) / ppl(baseline),
        "by_position": [{**mine, "ppl_recomputed": fresh["ppl"]} for mine, fresh in bins],
    }


def configure(parser: argparse.ArgumentParser) -> None:
    """The suite's own arguments."""
    parser.add_argument("--window", type=int, default=1024, help="tokens that a query sees")
    parser.add_argument("--sinks", default="4,0", help="first tokens that stay, comma-separated")
    parser.add_argument("--tokens", type=int, default=9216, help="tokens of continuous text")
    parser.add_argument("--texts", default="", help="names, comma-separated; the first text if left out")
    parser.add_argument("--chunk", type=int, default=512, help="tokens read at once")
    parser.add_argument("--stride", type=int, default=256, help="tokens scored by each recomputed window")


def main(session: Session, args: argparse.Namespace) -> list[Record]:
    """Run the suite and print it; quick reads three short windows."""
    window, tokens, stride = args.window, args.tokens, args.stride
    if session.quick:
        window = min(window, QUICK_WINDOW)
        tokens, stride = min(tokens, 3 * window), min(stride, window // 2)
    texts = read(session.tokenizer, [name for name in args.texts.split(",") if name], tokens)
    sinks = [int(x) for x in args.sinks.split(",")]
    records = run(session, texts, window=window, sinks=sinks, chunk=args.chunk, stride=stride)
    if session.processes.is_main_process:
        show(records)
    return records


def show(records: Sequence[Record]) -> None:
    """A table on the terminal: perplexity beside the recomputed window's, and the ratio, also in the first and last bin."""
    protocol = records[0].protocol
    title = f"perplexity of {', '.join(protocol['texts'])}, {protocol['tokens']} tokens"
    table = Table(title=f"{title}, window {protocol['window']}")
    for heading in ("cache", "streamed", "recomputed", "ratio", "at first", "at last"):
        table.add_column(heading, justify="left" if heading == "cache" else "right", overflow="fold")
    for record in records:
        m = record.metrics
        ends = [f"{x['ppl'] / x['ppl_recomputed']:.3f}" for x in (m["by_position"][0], m["by_position"][-1])]
        table.add_row(record.cache, f"{m['ppl']:.2f}", f"{m['ppl_recomputed']:.2f}", f"{m['ratio']:.3f}", *ends)
    Console().print(table)
