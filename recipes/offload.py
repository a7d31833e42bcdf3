"""A context several times larger than its memory, old blocks on disk: what a decode step reads, how fast beside a plain read of
the same file, and the memory of the process. (Keys and values are random: no time here depends on them. Whether tokens are right:
`compare_caches.py --caches offloaded:256,disk:256 --prompt-tokens 8192`.) The file goes to the folder that TMPDIR names.

python recipes/offload.py [--model PATH_OR_ID] [--tokens 32768] [--resident 1024]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))
from eval import models
from hf_kvcache import OffloadedCache, PagedCache, cache_kwarg


def step(model, cache, times: int = 7) -> tuple[float, float]:
    """Median seconds of a forward pass of one token, and the bytes that each brought back."""
    seconds, before = [], cache.stats()["bytes_read"]
    for _ in range(times):
        start = time.perf_counter()
        model(torch.tensor([[1]]), **cache_kwarg(cache))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), (cache.stats()["bytes_read"] - before) / times


def sequential_bandwidth(path: Path) -> float:
    """Bytes per second of reading a file from beginning to end out of the file cache, the best of nine times."""
    times = []
    for buffer in [bytearray(size) for size in (1 << 18, 1 << 20, 4 << 20)] * 3:
        with open(path, "rb", buffering=0) as file:
            times.append(-time.perf_counter())
            while file.readinto(buffer):
                pass
            times[-1] += time.perf_counter()
    return path.stat().st_size / min(times)


def measure(model, args, folder: str, **choices) -> dict:
    config, process, chunk = model.config, psutil.Process(), args.resident // 8
    before, shape = process.memory_info().rss, (1, config.num_key_value_heads, chunk, config.head_dim)
    cache = OffloadedCache(config, resident_tokens=args.resident, disk_path=folder, **choices)
    for _ in track(range(args.tokens // chunk), f"writing {args.tokens} tokens {choices}"):
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape), torch.randn(shape), layer)
    step(model, cache)  # warm
    (seconds, read), held = step(model, cache), cache.memory().by_tier
    rss, budget = process.memory_info().rss - before, 1.2 * held["device"] + read / config.num_hidden_layers
    plain = sequential_bandwidth(next(Path(folder).iterdir()))
    return {"step": seconds, "read": read, "on_disk": held["disk"], "rss": rss, "rss_budget": budget, "sequential": plain,
            "share": read / seconds / plain}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or hub id; the demo model if left out")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--resident", type=int, default=1024)
    args = parser.parse_args()
    model, _ = models.load(args.model)
    result = {"model": str(model.name_or_path), "tokens": args.tokens, "file_cache": "warm", "keys_values": "random"}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        result["step_without_context"] = step(model, PagedCache(model.config))[0]
        result["native"] = measure(model, args, folder)
        result["int4"] = measure(model, args, folder, codec="int4", residual=64, block_size=64)
    print(json.dumps(result | {"native_over_int4": result["native"]["step"] / result["int4"]["step"]}))


if __name__ == "__main__":
    main()
