"""Steps and first passes of many caches, timed in turns: what `latency` is made of. It needs torch and transformers only.

All caches of a context length live at once and take turns, one decode step each, so that whatever disturbs the machine
disturbs all of them alike; figures are medians, and ratios to `DynamicCache` in the same run. Each cache is filled with the
keys and values of real text (repeated to the length asked for: a step's time does not depend on what the numbers are), and
before anything is timed its logits are compared with the plain cache's on the same shapes; where they differ by more than
the cache allows, no timing is printed.

    ITL = slope * length + intercept

is fitted to the medians by least squares, after the drift of the machine from one context length to the next has been taken
out: a small plain cache takes turns with all the others and says how fast the machine is. A cache's break-even length is
where its line crosses `DynamicCache`'s. Long contexts decide the slope; the built-in cache's steps grow faster once they
leave the processor's caches, so that its line starts below its shortest steps: how the fixed costs compare, the ratio at the
shortest context says.

Prefill takes turns as well: the time to the first token, and how far memory rises above what was in use before.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from hf_kvcache import KVCache, cache_kwarg, contexts, named
from hf_kvcache.kernels import dispatch

# Largest difference of a logit before timings are refused. On the demo model, whose text is repeated here, int4 is off by up to
# 3.5, int2 by 13 and the built-in int4 by 7, honestly (plain torch on the same codes is as far off); a cache that reads the
# wrong blocks is off by more than the last, and so is anything that is not a number.
EXACT, LOSSY, VERY_LOSSY = 1e-3, 8.0, 25.0
# The same between a kernel and plain torch on the same pages, over the standard deviation of the logits. On the demo model
# it is up to 0.0014; in half precision, where every layer rounds anew, up to 1.3: there a kernel is better checked in float32.
KERNEL, KERNEL_HALF = 0.005, 2.0
BANDWIDTH_BYTES = 1 << 30
ANCHOR, ANCHOR_CONTEXT = "anchor", 128


class RefusedError(RuntimeError):
    """A cache's logits are wrong on the shapes that were to be timed."""


@dataclass(frozen=True)
class Timing:
    """One cache at one context length: `itl` is the median step in seconds, `spread` the interquartile range over it.
    `anchor` is the median step of a small plain cache that took turns with all others at every context length: where it
    moves, the machine did."""

    cache: str
    context: int
    batch: int
    itl: float
    spread: float
    bytes: int
    worst_logit: float
    anchor: float = 1.0


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


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second reached in summing a tensor far larger than any cache of the processor: with torch's threads on a CPU."""
    x = torch.ones(BANDWIDTH_BYTES // 4, device=device)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        x.sum().item()
        times.append(time.perf_counter() - start)
    return BANDWIDTH_BYTES / min(times)


@torch.inference_mode()
def states(model, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values `[1, kv_heads, n, dim]` of every layer for `ids` `[1, n]`."""
    cache = contexts.prefill(model, ids, DynamicCache(config=model.config))
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
    token = torch.full((batch, 1), 11, device=model.device)
    alive: dict[str, Cache] = {}
    worst: dict[str, float] = {}
    expected = None
    for name in names:
        cache = _make(name, model, context + rounds + 2)
        fill(cache, exact, context, batch)
        kernels_off = _by_plain_torch(model, token, cache)
        logits = model(token, **cache_kwarg(cache)).logits[:, -1].float()
        _check_kernels(name, logits, kernels_off, context, model.dtype)
        expected = logits if expected is None else expected
        alive[name], worst[name] = cache, (logits - expected).abs().max().item()
        _check(name, worst[name], context, model.dtype)
    alive[ANCHOR] = DynamicCache(config=model.config)
    fill(alive[ANCHOR], exact, ANCHOR_CONTEXT, batch)
    steps: dict[str, list[float]] = {name: [] for name in alive}
    with _garbage_later():
        for _ in range(rounds):
            for name, cache in alive.items():
                steps[name].append(_timed(model, token, cache))
            tick()
    anchor, _ = _median(steps[ANCHOR][1:])
    return [
        Timing(name, context, batch, *_median(steps[name][1:]), contexts.stored_bytes(alive[name]), worst[name], anchor)
        for name in names
    ]


def _timed(model, ids: torch.Tensor, cache: Cache) -> float:
    """Seconds until the next token of every row is known on the host."""
    start = time.perf_counter()
    model(ids, **cache_kwarg(cache), logits_to_keep=1).logits.argmax(-1).tolist()
    return time.perf_counter() - start


@contextlib.contextmanager
def _garbage_later() -> Iterator[None]:
    """No garbage is collected inside: in a process that holds a model, that takes as long as a step."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _by_plain_torch(model, token: torch.Tensor, cache: Cache) -> torch.Tensor | None:
    """The logits of the next step with the reference in the place of kernels, on a fork; None for a built-in cache."""
    if not isinstance(cache, KVCache):
        return None
    with dispatch.plain_torch():
        return model(token, **cache_kwarg(cache.fork())).logits[:, -1].float()


def _check_kernels(name: str, logits: torch.Tensor, kernels_off: torch.Tensor | None, context: int, dtype) -> None:
    """The same pages, read by a kernel and by plain torch: this sees a wrong kernel behind any loss of the codec."""
    if kernels_off is None:
        return
    difference = (logits - kernels_off).abs().max().item()
    allowed = kernels_off.std().item() * (KERNEL if dtype == torch.float32 else KERNEL_HALF)
    if not difference <= allowed:
        raise RefusedError(
            f"{name} at {context} tokens: a logit differs by {difference:.3g} from what plain torch reads in the same pages, "
            f"at most {allowed:.3g} is right. Nothing is timed until that is mended."
        )


def _check(name: str, difference: float, context: int, dtype: torch.dtype) -> None:
    kind = named.kind_of(name)
    if kind == "window":
        return  # sees another text by design: `eval quality` says what that costs
    # In half precision the built-in caches are as far from each other: sums in another order round differently.
    allowed = EXACT if named.is_exact(name) and dtype == torch.float32 else LOSSY
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
    usual = {
        batch: statistics.median(t.anchor for t in timings if t.batch == batch) for batch in {t.batch for t in timings}
    }
    for key in dict.fromkeys((t.cache, t.batch) for t in timings):
        points = [t for t in timings if (t.cache, t.batch) == key]
        x = torch.tensor([[p.context, 1.0] for p in points], dtype=torch.float64)
        y = torch.tensor([[p.itl * usual[p.batch] / p.anchor] for p in points], dtype=torch.float64)
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


@dataclass(frozen=True)
class Prefill:
    """Median seconds to the first token after `tokens`, and the most bytes in use above what there was before."""

    cache: str
    tokens: int
    ttft: float
    peak: int


@torch.inference_mode()
def prefill(
    model, ids: torch.Tensor, names: Sequence[str], rounds: int, tick: Callable[[], None] = lambda: None
) -> list[Prefill]:
    """Time the first pass over `ids` `[batch, tokens]` with new caches, in turns."""
    times: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, int] = {}
    with _garbage_later():
        for number in range(1 + rounds):
            for name in names:
                cache = _make(name, model, ids.shape[1] + 1)
                if number == 0:  # not timed: watching memory takes time, and what is done first is warmed up by it
                    with PeakMemory(model.device) as memory:
                        _timed(model, ids, cache)
                    peaks[name] = memory.peak
                else:
                    times[name].append(_timed(model, ids, cache))
                tick()
    return [Prefill(name, ids.shape[1], statistics.median(times[name]), peaks[name]) for name in names]


class PeakMemory:
    """The most memory in use inside the `with`, above what was in use at its start: the device's allocator knows it, and on
    a CPU the process's resident memory is watched."""

    INTERVAL = 0.002  # seconds

    def __init__(self, device: torch.device):
        self.device, self.peak = device, 0

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
            return self
        _give_back_freed_memory()
        import psutil  # here, because a machine with a GPU may be without

        self._process, self._stop = psutil.Process(), threading.Event()
        self._before = self._process.memory_info().rss
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *error) -> None:
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        self._stop.set()
        self._watcher.join()

    def _watch(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(self.INTERVAL)
            self.peak = max(self.peak, self._process.memory_info().rss - self._before)


def _give_back_freed_memory() -> None:
    """What the C library keeps for later would hide what is allocated from it."""
    with contextlib.suppress(AttributeError, OSError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _make(name: str, model, length: int) -> Cache:
    return named.cache_factory(name if name != "static" else f"static:{length}")(model.config)
