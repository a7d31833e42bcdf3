"""What is known of a pool at work: from its metrics, from the text that Prometheus scraped, or from a trace over time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..errors import ConfigurationError
from ..metrics import PoolMetrics

MANY = 1 << 40  # more of anything is no measurement
# What a sample may say, and the largest value that makes sense.
FIELDS = {
    "resident_tokens": MANY,  # positions that all requests hold
    "resident_slots": MANY,  # slots of the blocks in use
    "requests": MANY,  # that run
    "request_tokens": MANY,  # that one of them holds
    "occupancy": 1,  # share of the pool's limit
    "waste": 1,  # share of the slots that holds no token
    "hit_rate": 1,  # share of the prompts' tokens that were found
    "repeated_rate": 1,  # share of the prompts' tokens that began an earlier prompt as well
    "allocation_failures": MANY,  # counted since the start
    "blocks_used": MANY,
    "blocks_evictable": MANY,  # that only the prefix index refers to
    "ttft": MANY,  # seconds to the first token
    "itl": MANY,  # seconds between tokens
}
PROMETHEUS = {
    f"hf_kvcache_{name}": name for name in ("resident_tokens", "resident_slots", "blocks_used", "blocks_evictable")
}
PROMETHEUS |= {
    "hf_kvcache_occupancy_ratio": "occupancy",
    "hf_kvcache_prefix_recent_hit_ratio": "hit_rate",
    "hf_kvcache_allocation_failures_total": "allocation_failures",
}


@dataclass(frozen=True)
class Observation:
    """A pool at work. Means over the samples, unless said otherwise; None where nothing tells.

    Attributes:
        resident_tokens, requests, request_tokens: tokens of all requests, how many run, tokens of one.
        occupancy: 95th percentile of the share of the pool's limit.
        waste: share of the slots in use by requests that holds no token.
        hit_rate, repeated_rate: shares of the prompts' tokens that were found, and that could have been.
        idle: share of the blocks that no request uses, kept for reuse.
        failures: passes refused for lack of room, over the samples; since the pool was made, where only one says so.
        ttft, itl: seconds.
        itl_fixed: share of the time between tokens that does not grow with the resident tokens; None where these did not
            vary enough to tell.
        counted: samples that say how many passes were refused.
    """

    resident_tokens: float | None = None
    requests: float | None = None
    request_tokens: float | None = None
    occupancy: float | None = None
    waste: float | None = None
    hit_rate: float | None = None
    repeated_rate: float | None = None
    idle: float | None = None
    failures: int | None = None
    ttft: float | None = None
    itl: float | None = None
    itl_fixed: float | None = None
    counted: int = 1


def read_observation(path: str | Path) -> Observation:
    """An observation from a file: a pool's metrics as Prometheus text, or JSON lines with one sample each.

    Raises:
        ConfigurationError: naming the line and the field that is not as it must be.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}): give metrics or a trace.") from None
    if "hf_kvcache_" in text and not text.lstrip().startswith("{"):
        return observe([_from_prometheus(text)])
    lines = text.splitlines()
    samples = [_sample(f"{path}, line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]
    if not samples:
        raise ConfigurationError(
            f"{path} has no samples: give metrics as Prometheus text, or one JSON object per line."
        )
    return observe(samples)


def from_metrics(metrics: PoolMetrics) -> Observation:
    """An observation from a pool's metrics of one moment."""
    return observe([_from_prometheus(metrics.prometheus())])


def observe(samples: Sequence[Mapping[str, float]]) -> Observation:
    """An observation from samples over time, with the fields of `FIELDS` that are known."""
    mean = lambda name: _over(samples, name, np.mean)  # noqa: E731
    tokens, requests, evictable, used = map(mean, ("resident_tokens", "requests", "blocks_evictable", "blocks_used"))
    idle = evictable / used if used and evictable is not None else None
    waste, slots = mean("waste"), mean("resident_slots")
    if waste is None and slots and tokens is not None:
        waste = max(0.0, 1 - tokens / (slots * (1 - (idle or 0)))) if (idle or 0) < 1 else None
    failures = [sample["allocation_failures"] for sample in samples if "allocation_failures" in sample]
    each = mean("request_tokens")
    return Observation(
        resident_tokens=tokens,
        requests=requests,
        request_tokens=tokens / requests if each is None and tokens and requests else each,
        occupancy=_over(samples, "occupancy", lambda x: np.percentile(x, 95)),
        waste=waste,
        hit_rate=mean("hit_rate"),
        repeated_rate=mean("repeated_rate"),
        idle=idle,
        failures=_failures(failures),
        ttft=mean("ttft"),
        itl=mean("itl"),
        itl_fixed=_fixed_share(samples),
        counted=len(failures),
    )


def _over(samples: Sequence[Mapping[str, float]], name: str, summary) -> float | None:
    values = [sample[name] for sample in samples if name in sample]
    return float(summary(values)) if values else None


def _failures(counts: Sequence[float]) -> int | None:
    """By how much a counter grew; where it fell it began again from 0."""
    if len(counts) < 2:
        return int(counts[0]) if counts else None
    return int(sum(after - before if after >= before else after for before, after in pairwise(counts)))


def _fixed_share(samples: Sequence[Mapping[str, float]]) -> float | None:
    """The intercept of time between tokens over resident tokens (least squares), as a share of the mean time."""
    pairs = [(s["resident_tokens"], s["itl"]) for s in samples if "resident_tokens" in s and "itl" in s]
    tokens, times = np.array(pairs, float).reshape(-1, 2).T
    if len(pairs) < 8 or tokens.max() < 1.5 * max(tokens.min(), 1):
        return None
    _, intercept = np.polyfit(tokens, times, 1)
    return float(np.clip(intercept / times.mean(), 0, 1))


def _from_prometheus(text: str) -> dict[str, float]:
    sample = {}
    for line in text.splitlines():
        found = re.match(r"(\w+)(?:\{[^}]*\})?\s+(\S+)", line)  # labels may come before the value, and a time after it
        if found is None or found[1] not in PROMETHEUS:
            continue
        name, value = found.groups()
        try:
            number = float(value)
        except ValueError:
            raise ConfigurationError(f"{name} is {value!r}, which is no number: scrape the metrics again.") from None
        _check(name, PROMETHEUS[name], number)
        sample[PROMETHEUS[name]] = number
    if not sample:
        raise ConfigurationError(
            f"none of {', '.join(PROMETHEUS)} is in these metrics: scrape pool.metrics().prometheus()."
        )
    return sample


def _sample(where: str, line: str) -> dict[str, float]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{where} is not JSON ({error}): write one object per line.") from None
    if not isinstance(record, dict) or not record.keys() & FIELDS.keys():
        raise ConfigurationError(f"{where} says nothing of a pool: write some of {', '.join(FIELDS)}.")
    sample = {name: record[name] for name in FIELDS if record.get(name) is not None}
    for name, value in sample.items():
        _check(f"{where}: field {name}", name, value)
    return sample


def _check(what: str, field: str, value) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= FIELDS[field]:
        raise ConfigurationError(
            f"{what} is {value!r} and must be a number of at least 0 and at most {FIELDS[field]:,}."
        )
