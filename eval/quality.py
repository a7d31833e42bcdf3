"""Quality loss, measured through the cache (`hf_kvcache/scoring.py`).

Each run has controls. The plain cache with another prefill chunking differs by float noise only, or the run fails; a cache
that is known to be bad must show its loss.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
from collections.abc import Callable

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from hf_kvcache import named
from hf_kvcache.contexts import prefill
from hf_kvcache.scoring import NOISE, Reference, compare, readable, reference, summary, twice, windows, write

from . import models
from .records import Record
from .session import Session

RECHUNKED, CHUNK = "dynamic/rechunked", 192  # the control, and the chunks its context is prefilled in
NOISE_LIMIT = 1e-5  # of the control, in float32
KNOWN_BAD, BAD_AT_LEAST = "int2/residual=0/block_size=128", 1e-3


def configure(parser: argparse.ArgumentParser) -> None:
    """The suite's own arguments."""
    parser.add_argument("--lengths", default="1024,4096,8192", help="tokens of a window, comma-separated")
    parser.add_argument("--steps", type=int, default=32, help="decode steps scored at the end of a window")
    parser.add_argument("--windows", default="6,1,1", help="windows of each length")


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
    return twice(cache, len(ref.ids))


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
