"""Many requests with one long prefix (a system prompt, a document): computed and stored once, with a pin so that it stays.

python recipes/shared_prefix.py [--model PATH_OR_ID] [--requests 32] [--prefix-tokens 2048] [--own-tokens 64]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from eval import generation, models
from hf_kvcache import BlockPool, PagedCache, cache_kwarg, scoring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or hub id; the demo model if left out")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefix-tokens", type=int, default=2048)
    parser.add_argument("--own-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=8)
    args = parser.parse_args()

    console = Console(stderr=True)
    model, tokenizer = models.load(args.model)
    prefix, *_ = scoring.windows(tokenizer, list(models.texts().values())[:1], 1, args.prefix_tokens)
    own = scoring.windows(tokenizer, models.texts().values(), args.requests, args.own_tokens)
    prompts = [torch.cat([prefix, words])[None] for words in own]
    length = {"max_new_tokens": args.new_tokens, "min_new_tokens": args.new_tokens, "do_sample": False}

    pool, sessions, times, answers = BlockPool(model.config), [], [], []
    for ids in track(prompts, description="requests", console=console):
        sessions.append(pool.session())
        ttft, answer = generation.first_token(partial(sessions[-1].generate, model, ids, **length))
        times.append(ttft)
        answers.append(answer)
        if len(sessions) == 1:
            pin = sessions[0].pin(args.prefix_tokens)

    plain = PagedCache(model.config)
    last = model.generate(prompts[-1], attention_mask=torch.ones_like(prompts[-1]), **length, **cache_kwarg(plain))
    held, metrics = pool.metrics(), pool.metrics().reuse
    apart = sum(session.memory().stored for session in sessions)
    per_token = plain.memory().plain / plain.get_seq_length()
    needed = per_token * (args.prefix_tokens + args.requests * (args.own_tokens + args.new_tokens))

    table = Table(title=f"{args.requests} requests: {args.prefix_tokens} tokens shared, {args.own_tokens} of their own")
    for heading in ("", "shared", "each for itself"):
        table.add_column(heading, justify="right")
    table.add_row("KV MB", f"{held.bytes_used / 1e6:.1f}", f"{apart / 1e6:.1f}")
    table.add_row("TTFT ms", f"{statistics.median(times[1:]) * 1e3:.0f}", f"{times[0] * 1e3:.0f}")
    table.add_row("tokens computed", str(metrics.tokens - metrics.hits), str(metrics.tokens))
    Console().print(table)
    result = {"bytes": held.bytes_used, "bytes_apart": apart, "bytes_over_needed": held.bytes_used / needed,
              "ttft_first": times[0], "ttft_others": statistics.median(times[1:]), "hit_rate": metrics.hit_rate,
              "pinned_tokens": pin.tokens[0], "blocks_shared": held.blocks_shared,
              "same_tokens": torch.equal(last, answers[-1])}  # fmt: skip
    print(json.dumps({"model": str(model.name_or_path), **result}))


if __name__ == "__main__":
    main()
