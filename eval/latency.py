"""Decode latency against context length, every cache beside the built-in ones.

All caches of a context length live at once and take turns, one decode step each, so that whatever disturbs the machine
disturbs all of them alike; figures are medians, and ratios to `DynamicCache` in the same run. Each cache is filled with the
keys and values of real text (repeated to the length asked for: a step's time does not depend on what the numbers are), and
before anything is timed its logits are compared with the plain cache's on the same shapes; where they differ by more than
the cache allows, no timing is printed.

    ITL = slope * length + intercept

is fitted to the medians by least squares. A cache's break-even length is where its line crosses `DynamicCache`'s.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from hf_kvcache import cache_kwarg, named

from . import caches

# Largest difference of a logit before timings are refused. On the demo model int2 is off by up to 13 and the built-in fp8
# by 2, honestly; a cache that reads the wrong blocks is off by more than the last, and so is anything that is not a number.
EXACT, LOSSY, VERY_LOSSY = 1e-3, 2.0, 25.0
BANDWIDTH_BYTES = 1 << 30


class RefusedError(RuntimeError):
    """A cache's logits are wrong on the shapes that were to be timed."""


@dataclass(frozen=True)
class Timing:
    """One cache at one context length: `itl` is the median step in seconds, `spread` the interquartile range over it."""

    cache: str
    context: int
    batch: int
    itl: float
    spread: float
    bytes: int
    worst_logit: float


@dataclass(frozen=True)
class Line:
    """`ITL = slope * length + intercept` of one cache (seconds per token of context, seconds), ratios to `DynamicCache`,
    `break_even` in tokens (None: never faster), `bandwidth` in bytes of the cache read per second of the slope."""

    cache: str
    batch: int
    slope: float
    intercept: float
    slope_ratio: float
    intercept_ratio: float
    break_even: float | None
    bandwidth: float


def read_bandwidth() -> float:
    """Bytes per second that torch's threads reach in summing a tensor far larger than any cache of the processor."""
    x = torch.ones(BANDWIDTH_BYTES // 4)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        x.sum()
        times.append(time.perf_counter() - start)
    return BANDWIDTH_BYTES / min(times)


@torch.inference_mode()
def states(model, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values `[1, kv_heads, n, dim]` of every layer for `ids` `[1, n]`."""
    cache = DynamicCache(config=model.config)
    model(ids, **cache_kwarg(cache), logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cache.layers]


def fill(cache: Cache, exact: Sequence[tuple[torch.Tensor, torch.Tensor]], context: int, batch: int) -> None:
    """Write `context` tokens, `exact` over and over, into every layer of `cache` for `batch` rows."""
    for layer, pair in enumerate(exact):
        times = -(-context // pair[0].shape[2])
        k, v = (x.repeat(batch, 1, times, 1)[:, :, :context] for x in pair)
        cache.update(k, v, layer)


@torch.inference_mode()
def measure(
    model, exact, names: Sequence[str], context: int, batch: int, rounds: int, tick: Callable[[], None] = lambda: None
) -> list[Timing]:
    """Interleaved decode steps of every cache of `names` at `context`; the first must be `dynamic`.

    Raises:
        RefusedError: when a cache's logits are wrong.
    """
    token = torch.full((batch, 1), 11)
    alive: dict[str, Cache] = {}
    worst: dict[str, float] = {}
    expected = None
    for name in names:
        cache = named.cache_factory(name if name != "static" else f"static:{context + rounds + 2}")(model.config)
        fill(cache, exact, context, batch)
        logits = model(token, **cache_kwarg(cache)).logits[:, -1].float()
        expected = logits if expected is None else expected
        alive[name], worst[name] = cache, (logits - expected).abs().max().item()
        _check(name, worst[name], context)
    steps: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    for _ in range(rounds):
        for name, cache in alive.items():
            start = time.perf_counter()
            model(token, **cache_kwarg(cache))
            steps[name].append(time.perf_counter() - start)
        tick()
    return [
        Timing(name, context, batch, *_median(steps[name][1:]), caches.stored_bytes(alive[name]), worst[name])
        for name in names
    ]


def _check(name: str, difference: float, context: int) -> None:
    kind = name.split(":")[0].split("/")[0]
    if kind == "window":
        return  # sees another text by design: `eval quality` says what that costs
    allowed = EXACT if kind in ("dynamic", "static", "paged", "offloaded") else LOSSY
    if kind == "int2" or kind.startswith("hf-"):
        allowed = VERY_LOSSY
    if not difference <= allowed:
        raise RefusedError(
            f"{name} at {context} tokens: a logit differs by {difference:.3g} from the plain cache's, at most {allowed} is "
            "right. Nothing is timed until that is mended."
        )


def _median(times: list[float]) -> tuple[float, float]:
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return statistics.median(times), (quartiles[2] - quartiles[0]) / statistics.median(times)


def fit(timings: Sequence[Timing]) -> list[Line]:
    """A line per cache and batch size, in the order of the timings."""
    lines: dict[tuple[str, int], tuple[float, float]] = {}
    for key in dict.fromkeys((t.cache, t.batch) for t in timings):
        points = [t for t in timings if (t.cache, t.batch) == key]
        x = torch.tensor([[p.context, 1.0] for p in points], dtype=torch.float64)
        y = torch.tensor([[p.itl] for p in points], dtype=torch.float64)
        slope, intercept = torch.linalg.lstsq(x, y).solution.flatten().tolist()
        lines[key] = (slope, intercept)
    return [_line(key, lines, timings) for key in lines]


def _line(key: tuple[str, int], lines: dict, timings: Sequence[Timing]) -> Line:
    slope, intercept = lines[key]
    plain_slope, plain_intercept = lines["dynamic", key[1]]
    longest = max((t for t in timings if (t.cache, t.batch) == key), key=lambda t: t.context)
    gained = plain_slope - slope
    return Line(
        cache=key[0],
        batch=key[1],
        slope=slope,
        intercept=intercept,
        slope_ratio=slope / plain_slope,
        intercept_ratio=intercept / plain_intercept,
        break_even=max(0.0, (intercept - plain_intercept) / gained) if gained > 0 else None,
        bandwidth=longest.bytes / longest.context / slope if slope > 0 else float("inf"),
    )


def as_dicts(items: Sequence) -> list[dict]:
    """Timings or lines for JSON."""
    return [asdict(item) for item in items]
