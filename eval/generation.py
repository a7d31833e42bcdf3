"""What one generation costs with a cache: time to first token, time per token, bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from hf_kvcache import cache_kwarg
from hf_kvcache.contexts import stored_bytes


class Clock(BaseStreamer):
    """Notes when each token came; the first call of `put` is the prompt."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to finish."""


def first_token(generate: Callable[..., torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Seconds until `generate(streamer=...)` has a new token, with everything that it does before, and what it returns."""
    clock, start = Clock(), time.perf_counter()
    out = generate(streamer=clock)
    return clock.times[1] - start, out


def measure(model, prompt: torch.Tensor, make_cache: Callable[..., Cache], new_tokens: int) -> dict:
    """Generate greedily from `prompt` `[1, n]` with a new cache.

    Returns:
        `ttft` and `itl` (seconds; the median over all but the first token), `bytes` (storages of the cache at the end),
        `tokens` (the new ids).
    """
    cache, clock = make_cache(model.config), Clock()
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **cache_kwarg(cache),
        streamer=clock,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )
    gaps = [b - a for a, b in zip(clock.times[1:-1], clock.times[2:], strict=True)]
    return {
        "ttft": clock.times[1] - clock.times[0],
        "itl": statistics.median(gaps),
        "bytes": stored_bytes(cache),
        "tokens": out[0, prompt.shape[1] :].tolist(),
    }
