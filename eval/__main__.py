"""`python -m eval latency`: what a cache costs in time. (`quality` and `report` are to come.)"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hf_kvcache import named

from . import latency, models, plots, quality


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eval", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    timing = commands.add_parser("latency", help="decode latency against context length, beside the built-in caches")
    timing.add_argument("--model", help="path or hub id; the demo model if left out")
    timing.add_argument("--contexts", default="512,2048,8192", help="tokens, comma-separated")
    timing.add_argument("--batch", default="1", help="batch sizes, comma-separated")
    timing.add_argument("--caches", default="paged,offloaded:1024,window:1024+4,int8,int4,int2,fp8")
    timing.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    timing.add_argument("--rounds", type=int, default=12, help="steps of each cache, taken in turns")
    timing.add_argument("--out", type=Path, default=Path("out"))
    run_latency(parser.parse_args())


def run_latency(args: argparse.Namespace) -> None:
    console = Console(stderr=True)
    model, tokenizer = models.load(args.model, getattr(torch, args.dtype))
    exact = latency.states(model, quality.windows(tokenizer, list(models.texts().values())[:1], 1, 1024))
    built_in = [name for name in named.BUILT_IN if named.is_available(name)]
    names = list(dict.fromkeys([*built_in, *args.caches.split(",")]))
    contexts, batches = ([int(x) for x in text.split(",")] for text in (args.contexts, args.batch))
    timings = []
    with Progress(console=console) as progress:
        bar = progress.add_task("decode steps", total=len(contexts) * len(batches) * args.rounds)
        for batch in batches:
            for context in contexts:
                tick = lambda: progress.advance(bar)  # noqa: E731
                timings += latency.measure(model, exact, names, context, batch, args.rounds, tick)
    lines = latency.fit(timings) if len(contexts) > 1 else []
    bandwidth = latency.read_bandwidth()
    show(timings, lines, bandwidth)
    args.out.mkdir(parents=True, exist_ok=True)
    picture = plots.latency(timings, lines, args.out / "latency.png")
    print(f"plot: {picture}")
    machine = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    run = {"schema": 1, "model": model.name_or_path, "dtype": args.dtype, "rounds": args.rounds, **machine, **versions}
    run |= {"read_bandwidth": bandwidth, "timings": latency.as_dicts(timings), "lines": latency.as_dicts(lines)}
    (args.out / "latency.json").write_text(json.dumps(run, indent=1))
    print(json.dumps(run))


def show(timings: list[latency.Timing], lines: list[latency.Line], bandwidth: float) -> None:
    """Tables on the terminal: steps and their ratio to the plain cache's, then the fitted lines."""
    plain = {(t.context, t.batch): t.itl for t in timings if t.cache == "dynamic"}
    table = Table(title="decode step (median; ratio to DynamicCache in the same run; spread = interquartile range)")
    for heading in ("cache", "batch", "context", "ms", "ratio", "spread", "MB"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for t in timings:
        ratio, size = f"{t.itl / plain[t.context, t.batch]:.3f}", f"{t.bytes / 1e6:.1f}"
        table.add_row(t.cache, str(t.batch), str(t.context), f"{t.itl * 1e3:.1f}", ratio, f"{t.spread:.0%}", size)
    Console().print(table)
    if not lines:
        return
    table = Table(title=f"ITL = slope * length + intercept (plain read: {bandwidth / 1e9:.1f} GB/s)")
    for heading in ("cache", "batch", "slope us", "ratio", "intercept ms", "ratio", "break-even", "GB/s"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for x in lines:
        even = "never" if x.break_even is None else f"{x.break_even:.0f}"
        slope, intercept = f"{x.slope * 1e6:.2f}", f"{x.intercept * 1e3:.1f}"
        ratios = f"{x.slope_ratio:.3f}", f"{x.intercept_ratio:.3f}"
        table.add_row(x.cache, str(x.batch), slope, ratios[0], intercept, ratios[1], even, f"{x.bandwidth / 1e9:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
