"""One long prompt through the built-in cache and every cache of hf_kvcache: bytes, speed, and what it costs in quality.

python recipes/compare_caches.py [--model PATH_OR_ID] [--caches paged,int4,...] [--prompt-tokens 1536] [--out out]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from eval import generation, models
from eval.plots import bars
from hf_kvcache import named, scoring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or hub id; the demo model if left out")
    parser.add_argument("--caches", default=",".join(named.DEFAULT))
    parser.add_argument("--prompt-tokens", type=int, default=1536)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--context", type=int, default=1280, help="tokens before the scored steps; beyond a window, its loss shows"
    )
    parser.add_argument("--steps", type=int, default=32, help="true decode steps that are scored in each of four texts")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()

    console = Console(stderr=True)
    model, tokenizer = models.load(args.model)
    texts = models.texts()
    prompt = scoring.windows(tokenizer, list(texts.values())[:1], 1, args.prompt_tokens)
    scored = scoring.windows(tokenizer, texts.values(), count=4, length=args.context + args.steps + 1)
    with console.status("plain cache: predictions to compare with"):
        ref = scoring.reference(model, scored, steps=args.steps)

    rows = []
    names = ["dynamic", *args.caches.split(",")]
    for name in track(names, description="caches", console=console):
        row = {"cache": name, **generation.measure(model, prompt, named.cache_factory(name), args.new_tokens)}
        row["loss"] = scoring.divergence(model, ref, named.cache_factory(name)).as_dict()
        row["same_tokens"] = row["tokens"] == (rows[0]["tokens"] if rows else row["tokens"])
        rows.append(row)

    plain = rows[0]["bytes"]
    table = Table(
        title=f"{args.prompt_tokens} prompt tokens, {args.new_tokens} new ones",
        caption=f"same: the built-in cache's tokens. KL, top-1: {args.steps} decode steps after {args.context} tokens.",
    )
    for heading in ("cache", "KV MB", "ratio", "TTFT s", "ITL ms", "same", "KL", "top-1"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for row in rows:
        table.add_row(
            row["cache"],
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['bytes'] / plain:.2f}",
            f"{row['ttft']:.2f}",
            f"{row['itl'] * 1e3:.0f}",
            "yes" if row["same_tokens"] else "no",
            scoring.readable(row["loss"]["kl_mean"]),
            f"{row['loss']['top1']:.1%}",
        )
    Console().print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    picture = bars(rows, args.out / "compare_caches.png")
    print(f"plot: {picture}")
    print(json.dumps({"model": str(model.name_or_path), "plot": str(picture), "caches": rows}))


if __name__ == "__main__":
    main()
