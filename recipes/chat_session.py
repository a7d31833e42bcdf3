"""A chat of several turns: the time to the first token of each answer, with a session that finds prompt and answers of the
turns before, and with a new cache each time.

python recipes/chat_session.py [--model PATH_OR_ID] [--turns 8] [--user-tokens 40] [--new-tokens 118]
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from eval import generation, models
from hf_kvcache import BlockPool, PagedCache, cache_kwarg, scoring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or hub id; the demo model if left out")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--user-tokens", type=int, default=40, help="of what the user says in each turn")
    parser.add_argument("--new-tokens", type=int, default=118, help="of each answer")
    args = parser.parse_args()

    model, tokenizer = models.load(args.model)
    said = scoring.windows(tokenizer, models.texts().values(), args.turns, args.user_tokens)
    length = {"max_new_tokens": args.new_tokens, "min_new_tokens": args.new_tokens, "do_sample": False}
    first = {"max_new_tokens": 1, "do_sample": False}

    pool = BlockPool(model.config)
    table = Table(title=f"{args.turns} turns of {args.user_tokens} + {args.new_tokens} tokens")
    for heading in ("turn", "history", "found", "TTFT ms", "without reuse", "ratio"):
        table.add_column(heading, justify="right")
    history, rows = said[:1, :0], []
    for turn, words in enumerate(said, start=1):
        ids = torch.cat([history, words[None]], dim=1)
        with pool.session() as session:  # found again by its tokens alone: nobody has to keep the last turn's
            ttft, answer = generation.first_token(partial(session.generate, model, ids, **length))
            found = session.metrics().hits
        plain = cache_kwarg(PagedCache(model.config))
        fresh = partial(model.generate, ids, attention_mask=torch.ones_like(ids), **first, **plain)
        without, expected = generation.first_token(fresh)
        same = torch.equal(answer[:, : expected.shape[1]], expected)
        rows.append({"turn": turn, "history": history.shape[1], "found": found, "ttft": ttft, "ttft_without": without,
                     "same_token": same})  # fmt: skip
        table.add_row(str(turn), str(history.shape[1]), str(found), f"{ttft * 1e3:.0f}", f"{without * 1e3:.0f}",
                      f"{without / ttft:.1f}")  # fmt: skip
        history = answer
    Console().print(table)
    print(json.dumps({"model": str(model.name_or_path), "turns": rows, "hit_rate": pool.metrics().reuse.hit_rate}))


if __name__ == "__main__":
    main()
