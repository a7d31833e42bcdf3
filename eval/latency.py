"""Decode latency against context length, every cache beside the built-in ones.

How it is measured, and why, says `timing.py`: all caches take turns in one run, figures are medians and ratios to
`DynamicCache`, and a cache whose logits are wrong on the shapes that were to be timed is not timed at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from hf_kvcache import named, scoring

from . import models, plots, timing
from .records import Record
from .session import Session


def configure(parser: argparse.ArgumentParser) -> None:
    """The suite's own arguments."""
    parser.add_argument("--contexts", default="512,2048,8192", help="tokens, comma-separated")
    parser.add_argument("--batch", default="1", help="batch sizes, comma-separated")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each cache, taken in turns")
    parser.add_argument("--prefill", type=int, default=1024, help="tokens of the first pass that is timed")
    parser.add_argument("--prefill-rounds", type=int, default=2)


def main(session: Session, args: argparse.Namespace) -> None:
    """Measure, print tables, draw the plot. Only the first process times anything: others would disturb it."""
    if not session.processes.is_main_process:
        return
    contexts, batches = ([int(x) for x in text.split(",")] for text in (args.contexts, args.batch))
    tokens, rounds = args.prefill, args.rounds
    if session.quick:
        contexts, batches, tokens, rounds = [256, 1024], batches[:1], 256, 6
    plan = {"contexts": contexts, "rounds": rounds, "prefill": tokens, "prefill_rounds": args.prefill_rounds}
    records = [record for batch in batches for record in run(session, plan | {"batch": batch})]
    show(records, Console())
    first = [r for r in records if r.protocol["batch"] == batches[0]]
    lines = {r.cache: [(t["context"], 1e3 * t["itl"]) for t in r.metrics["timings"]] for r in first}
    picture = session.path.parent / "latency.png"
    xlabel = f"context, tokens (batch {batches[0]})"
    plots.curves(lines, plots.styles(list(lines)), xlabel, "decode step, ms").savefig(picture, dpi=150)
    print(f"plot: {picture}")


def run(session: Session, protocol: dict) -> list[Record]:
    """A record per cache, the two plain built-in ones among them. All are of one interleaved run: an earlier run counts as
    a whole or not at all."""
    names = list(dict.fromkeys([*named.BUILT_IN[:2], *session.caches]))
    found: dict[str, dict] = {}
    if not all(session.known("latency", name, protocol) for name in names):
        found = _measure_all(session, names, protocol)
    return [session.measure("latency", name, protocol, lambda name=name: found[name]) for name in names]


def _measure_all(session: Session, names: list[str], protocol: dict) -> dict[str, dict]:
    """Metrics by cache."""
    model, batch, rounds = session.model, protocol["batch"], protocol["rounds"]
    texts, tokens = list(models.texts().values())[:1], protocol["prefill"]
    exact = timing.states(model, scoring.windows(session.tokenizer, texts, 1, 1024))
    ids = scoring.windows(session.tokenizer, texts, 1, tokens).repeat(batch, 1).to(model.device)
    timings: list[timing.Timing] = []
    with session.progress() as progress:
        total = len(protocol["contexts"]) * rounds + (1 + protocol["prefill_rounds"]) * len(names)
        bar = progress.add_task(f"latency, batch {batch}", total=total)
        tick = lambda: progress.advance(bar)  # noqa: E731
        for context in protocol["contexts"]:
            timings += timing.measure(model, exact, names, context, batch, rounds, tick)
        first = {p.cache: p for p in timing.prefill(model, ids, names, protocol["prefill_rounds"], tick)}
    lines = {line.cache: line for line in timing.fit(timings)} if len(protocol["contexts"]) > 1 else {}
    bandwidth, plain = timing.read_bandwidth(model.device), first["dynamic"].ttft
    found = {}
    for name in names:
        line = asdict(lines[name]) if name in lines else {}
        points = [asdict(t) for t in timings if t.cache == name]
        found[name] = {
            "timings": [{k: v for k, v in p.items() if k not in ("cache", "batch")} for p in points],
            **{k: v for k, v in line.items() if k not in ("cache", "batch")},
            "read_bandwidth": bandwidth,
            "ttft": first[name].ttft,
            "ttft_ratio": first[name].ttft / plain,
            "peak_bytes": first[name].peak,
        }
    return found


def show(records: list[Record], console: Console) -> None:
    """Tables on the terminal: steps and their ratio to the plain cache's, then lines and prefill."""
    plain = {
        (t["context"], r.protocol["batch"]): t["itl"]
        for r in records
        if r.cache == "dynamic"
        for t in r.metrics["timings"]
    }
    table = _table(
        "decode step (median; ratio to DynamicCache in the same run; spread = interquartile range)",
        ("cache", "batch", "context", "ms", "ratio", "spread", "MB"),
    )
    for r in records:
        for t in r.metrics["timings"]:
            ratio = f"{t['itl'] / plain[t['context'], r.protocol['batch']]:.3f}"
            cells = f"{t['itl'] * 1e3:.1f}", ratio, f"{t['spread']:.0%}", f"{t['bytes'] / 1e6:.1f}"
            table.add_row(r.cache, str(r.protocol["batch"]), str(t["context"]), *cells)
    console.print(table)
    if "slope" in records[0].metrics:
        console.print(_lines(records))
    table = _table(
        f"first pass over {records[0].protocol['prefill']} tokens", ("cache", "batch", "s", "ratio", "peak MB")
    )
    for r in records:
        m = r.metrics
        cells = f"{m['ttft']:.2f}", f"{m['ttft_ratio']:.3f}", f"{m['peak_bytes'] / 1e6:.0f}"
        table.add_row(r.cache, str(r.protocol["batch"]), *cells)
    console.print(table)


def _lines(records: list[Record]) -> Table:
    bandwidth = records[0].metrics["read_bandwidth"] / 1e9
    table = _table(
        f"ITL = slope * length + intercept (plain read: {bandwidth:.1f} GB/s)",
        ("cache", "batch", "slope us", "ratio", "intercept ms", "ratio", "even at", "GB/s"),
    )
    for r in records:
        m = r.metrics
        even = "-" if m["break_even"] is None else f"{m['break_even']:.0f}"
        slope, intercept = f"{m['slope'] * 1e6:.2f}", f"{m['intercept'] * 1e3:.1f}"
        ratios = f"{m['slope_ratio']:.3f}", f"{m['intercept_ratio']:.3f}"
        rate = f"{m['bandwidth'] / 1e9:.1f}"
        table.add_row(r.cache, str(r.protocol["batch"]), slope, ratios[0], intercept, ratios[1], even, rate)
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    return table
