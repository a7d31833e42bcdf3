"""Search over answers: every branch is forked, continued by a few sampled tokens, and the likeliest branches go on. What they
have in common is stored once.

python recipes/tree_search.py [--model PATH_OR_ID] [--prompt-tokens 512] [--depth 4] [--width 2] [--samples 3]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from eval import models
from hf_kvcache import BlockPool, scoring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or hub id; the demo model if left out")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=2, help="branches that go on")
    parser.add_argument("--samples", type=int, default=3, help="continuations of each")
    parser.add_argument("--new-tokens", type=int, default=16, help="of each continuation")
    args = parser.parse_args()

    model, tokenizer = models.load(args.model)
    prompt = scoring.windows(tokenizer, list(models.texts().values())[:1], 1, args.prompt_tokens)
    step = {"max_new_tokens": args.new_tokens, "min_new_tokens": args.new_tokens, "do_sample": True,
            "output_logits": True, "return_dict_in_generate": True}  # fmt: skip
    torch.manual_seed(0)

    pool = BlockPool(model.config)
    leaves = [(0.0, prompt, pool.session())]
    table = Table(title=f"the {args.width} likeliest of {args.width * args.samples} branches go on")
    for heading in ("level", "tokens in branches", "slots in memory", "computed", "without reuse", "best"):
        table.add_column(heading, justify="right")
    computed = without = 0
    for level in range(1, args.depth + 1):
        grown = []
        for score, ids, session in leaves:
            for _ in range(args.samples):
                branch = session.fork()
                out = branch.generate(model, ids, **step)
                new = out.sequences[:, ids.shape[1] :]
                chances = torch.stack(out.logits, dim=1).log_softmax(-1).gather(-1, new[..., None])
                grown.append((score + float(chances.sum()), out.sequences, branch))
                computed += ids.shape[1] - branch.metrics().hits + args.new_tokens - 1
                without += ids.shape[1] + args.new_tokens - 1
        held = pool.metrics()
        leaves = sorted(grown, key=lambda leaf: -leaf[0])[: args.width]
        row = {"level": level, "tokens": held.resident_tokens, "slots": held.resident_slots, "computed": computed,
               "computed_without": without, "best": leaves[0][0]}  # fmt: skip
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    Console().print(tokenizer.decode(leaves[0][1][0, args.prompt_tokens :]), style="italic")
    print(json.dumps({"model": str(model.name_or_path), **row, "blocks_shared": held.blocks_shared}))


if __name__ == "__main__":
    main()
