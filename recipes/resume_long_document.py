"""A long document, read once: its keys and values are saved, and another process goes on from the file. Shows the time to
the first token of an answer, cold and resumed, and the size of the file.

python recipes/resume_long_document.py [--model PATH_OR_ID] [--context 4096] [--cache paged]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from eval import generation, models
from hf_kvcache import KVCache, cache_kwarg, scoring
from hf_kvcache.named import cache_factory


def first_token(model, ids: torch.Tensor, cache: KVCache) -> tuple[float, torch.Tensor]:
    """Seconds until the first token after `ids`, and ids with that token."""
    cache.prepare(ids)  # keeps what is held of the document, all but its last token
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "do_sample": False}
    return generation.first_token(partial(model.generate, ids, **options, **cache_kwarg(cache)))


def resume(model, ids: torch.Tensor, path: str) -> dict:
    """What another process does, twice: the first time it also computes the fingerprint of the model."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        cache = KVCache.load(path, model)
        loading = time.perf_counter() - start
        ttft, out = first_token(model, ids, cache)
        times.append({"load": loading, "ttft": loading + ttft})
    return {"first": times[0], "again": times[1], "token": int(out[0, -1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or hub id; the demo model if left out")
    parser.add_argument("--context", type=int, default=4096, help="tokens of the document")
    parser.add_argument("--cache", default="paged", help="a name as in compare_caches.py")
    parser.add_argument("--resume", metavar="PATH", help="only resume from this file")
    args = parser.parse_args()

    model, tokenizer = models.load(args.model)
    ids = scoring.windows(tokenizer, models.texts().values(), 1, args.context)
    if args.resume:
        return print(json.dumps(resume(model, ids, args.resume)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "document.safetensors")  # or a URL, such as s3://bucket/document.safetensors
        cache = cache_factory(args.cache)(model.config)
        cold, out = first_token(model, ids, cache)
        start = time.perf_counter()
        cache.save(path)
        saving, size, stored = time.perf_counter() - start, path.stat().st_size, cache.memory().stored
        command = [sys.executable, __file__, *sys.argv[1:], "--resume", str(path)]
        resumed = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])

    table = Table("", "seconds", "of cold", title=f"Time to first token, {args.context} tokens, {args.cache}")
    for name, seconds in (("cold", cold), *((f"resumed, {key}", resumed[key]["ttft"]) for key in ("first", "again"))):
        table.add_row(name, f"{seconds:.2f}", f"{seconds / cold:.3f}")
    Console().print(table)
    print(json.dumps({"model": str(model.name_or_path), "cache": args.cache, "context": args.context, "cold": cold,
                      "saving": saving, "resumed": resumed, "ratio": resumed["first"]["ttft"] / cold, "file": size,
                      "stored": stored, "file_over_stored": size / stored,
                      "same_token": resumed["token"] == int(out[0, -1])}))  # fmt: skip


if __name__ == "__main__":
    main()
