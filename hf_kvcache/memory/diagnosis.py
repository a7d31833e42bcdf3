"""Which lever a pool's problem asks for, why, and what it would gain; and when the memory of keys and values is not the problem.

A rule is a function that looks for one symptom and asks the planner what the lever that answers it would save on this model, at
the length that its requests have. Adding one is a function and a row in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import ConfigurationError
from ..metrics import PoolMetrics
from . import budget, models, planner
from .footprint import Footprint
from .layers import layer_kinds
from .models import Model
from .observation import MANY, Observation, from_metrics
from .units import show_bytes

FULL = 0.85  # occupancy from which a pool is short of room
EMPTY = 0.5  # and below which it is not
WASTE = 0.1  # share of empty slots that is worth smaller blocks
REPEATED = 0.1  # share of prompt tokens computed again that is worth reuse
LONG = 4096  # tokens from which a window drops enough to be named
IDLE = 0.3  # share of blocks that only wait for reuse
FIXED = 0.8  # share of a step's time that no cache changes
WORTH = 1.05  # gains below this are not named
LINK = 25e9  # bytes per second between host and device: assumed (PCIe 4, 16 lanes)


@dataclass(frozen=True)
class Finding:
    """A lever that answers a symptom.

    Attributes:
        rule, lever: which rule found it, and the lever (`blocks`, `reuse`, `window`, `codec`, `tier`).
        why: the symptom, in numbers.
        change: what to do.
        cache: the cache to use instead, by name; None where it is not a matter of another cache.
        gain: how many times fewer bytes on the device a typical request takes.
        bytes_before, bytes_after: of it.
        price: what the lever costs.
    """

    rule: str
    lever: str
    why: str
    change: str
    cache: str | None
    gain: float
    bytes_before: int
    bytes_after: int
    price: str


@dataclass(frozen=True)
class Diagnosis:
    """What to do about a pool.

    Attributes:
        binds: whether the memory of keys and values is short; None where nothing tells.
        findings: levers that match its symptoms, the largest gain first.
        elsewhere: what binds instead, or as well, in sentences.
    """

    binds: bool | None
    findings: tuple[Finding, ...]
    elsewhere: tuple[str, ...]


@dataclass(frozen=True)
class _Case:
    """What rules look at: an observation, and the planner's view of the model, the cache in use and its typical request."""

    seen: Observation
    model: Model
    cache: str
    tokens: int
    binds: bool | None

    def bytes_of(self, cache: str, tokens: int | None = None) -> int:
        """Device bytes of a typical request in a cache, on average over where its last block ends."""
        footprint, tokens = self.footprint(cache), tokens or self.tokens
        lengths = np.arange(tokens, tokens + footprint.block_size)
        return int(footprint.held(lengths).needed.mean()) + self._states(tokens)

    def _states(self, tokens: int) -> int:
        """Bytes of a request that no cache makes smaller; an encoder's text is taken to be as long as what follows it."""
        source = tokens if self.model.is_encoder_decoder else 0
        return sum(kind.state_bytes for kind in layer_kinds(self.model, tokens, source, 1))

    def footprint(self, cache: str) -> Footprint:
        return planner.footprints(self.model, [cache], torch.device("cuda"))[cache]

    def finding(self, rule: str, lever: str, why: str, change: str, cache: str | None, after: int, price: str):
        before = self.bytes_of(self.cache)
        return Finding(rule, lever, why, change, cache, before / max(1, after), before, after, price)


def diagnose(
    observed: Observation | PoolMetrics,
    model,
    *,
    cache: str = "paged",
    request_tokens: int | None = None,
    device_memory: int | None = None,
    dtype: torch.dtype | None = None,
    weights: str = "auto",
) -> Diagnosis:
    """Say which levers match what was observed of a pool, the largest gain first.

    Args:
        observed: metrics of a pool (`pool.metrics()`), or an `Observation` (`read_observation`).
        model: as for `plan`.
        cache: the cache in use, by name.
        request_tokens: tokens of a typical request; None for what was observed.
        device_memory: bytes; with it, weights are weighed against caches.
        dtype, weights: as for `plan`.

    Raises:
        ConfigurationError: for an unknown cache or model, and where nothing says how long requests are.
    """
    seen = from_metrics(observed) if isinstance(observed, PoolMetrics) else observed
    tokens = request_tokens or seen.request_tokens
    if not tokens or not 1 <= tokens <= MANY:
        raise ConfigurationError("nothing observed says how long a request is: give request_tokens.")
    known = models.load(model, dtype)
    case = _Case(seen, known, cache, round(tokens), _binds(seen))
    findings = [finding for rule in RULES.values() if (finding := rule(case)) and finding.gain >= WORTH]
    return Diagnosis(
        binds=case.binds,
        findings=tuple(sorted(findings, key=lambda finding: -finding.gain)),
        elsewhere=tuple(_elsewhere(case, device_memory, weights)),
    )


def _binds(seen: Observation) -> bool | None:
    if seen.occupancy is not None and seen.occupancy >= FULL:
        return True
    # One sample counts failures since the pool was made: in a pool that is nearly empty now they tell of another time.
    if seen.failures and (seen.counted > 1 or seen.occupancy is None or seen.occupancy >= EMPTY):
        return True
    return None if seen.failures is None and seen.occupancy is None else False


# ---- the rules ----------------------------------------------------------------------------------------------------------


def fragmentation(case: _Case) -> Finding | None:
    """Slots of the last blocks stay empty: smaller blocks."""
    if case.seen.waste is None or case.seen.waste < WASTE or _kind(case) == planner.named.PLAN:
        return None
    size = case.footprint(case.cache).block_size
    plain = "/".join(part for part in case.cache.split("/") if not part.startswith("block_size="))
    smaller = [f"{plain}/block_size={n}" for n in (32, 16, 8) if n < size]
    if not smaller:
        return None
    best = min(smaller, key=case.bytes_of)
    why = f"{case.seen.waste:.0%} of the slots in use hold no token, with blocks of {size}"
    change = f"blocks of {best.rpartition('=')[2]}"
    return case.finding(
        "fragmentation", "blocks", why, change, best, case.bytes_of(best), "more scales, where a codec has any"
    )


def repeated_prefixes(case: _Case) -> Finding | None:
    """Prompts begin alike, and are computed and stored again each time: sessions of one pool."""
    repeated, found = case.seen.repeated_rate or 0.0, case.seen.hit_rate or 0.0
    if repeated - found < REPEATED:
        return None
    shared = round(case.tokens * (repeated - found))
    before, alone = case.bytes_of(case.cache), case.bytes_of(case.cache, max(1, case.tokens - shared))
    after = alone + round((before - alone) / max(1.0, case.seen.requests or 2.0))
    why = f"{repeated:.0%} of the prompts' tokens were computed before, {found:.0%} are found"
    change = "sessions of one pool (pool.session()), the common prefix pinned"
    saved = (1 - found) / max(1 / case.tokens, 1 - repeated)  # the last token of a prompt is computed in any case
    first = f", from {case.seen.ttft:.2f} s to about {case.seen.ttft / saved:.2f} s" if case.seen.ttft else ""
    price = f"none in quality; {saved:.1f} times fewer tokens to prefill shorten the time to the first token{first}"
    return case.finding("repeated_prefixes", "reuse", why, change, None, after, price)


def retained_tokens(case: _Case) -> Finding | None:
    """Long texts, all of which stay: a window."""
    if not case.binds or case.tokens < LONG or _kind(case) == "window":
        return None
    window = 1 << max(10, (case.tokens // 4).bit_length() - 1)
    cache = f"window:{window}+4"
    why = f"requests hold {case.tokens:,} tokens each, and the pool is short of room"
    price = "what the window has passed cannot be recalled: measure with `python -m eval retrieval`"
    return case.finding("retained_tokens", "window", why, f"a window of {window:,}", cache, case.bytes_of(cache), price)


def bytes_per_element(case: _Case) -> Finding | None:
    """Everything is stored in the model's dtype: a codec."""
    if not case.binds or _kind(case) in ("window", "offloaded", "disk") or not case.footprint(case.cache).exact:
        return None
    why = f"the pool is short of room, and every element takes {8 * case.model.dtype.itemsize} bits"
    price = f"a measured loss: `python -m eval quality --caches int8,int4`; int8 gains {_gain(case, 'int8'):.1f} times"
    return case.finding("bytes_per_element", "codec", why, "4 bits an element", "int4", case.bytes_of("int4"), price)


def cold_blocks(case: _Case) -> Finding | None:
    """Much of what the device holds is seldom read, or room is short whatever is read: host memory."""
    resident = 1024
    if not case.binds or _kind(case) not in ("paged", "dynamic") or case.tokens < 2 * resident:
        return None
    cache = f"offloaded:{resident}"
    host = int(case.footprint(cache).held([case.tokens]).host[0])
    idle = f", and {case.seen.idle:.0%} of the blocks only wait for reuse" if (case.seen.idle or 0) >= IDLE else ""
    why = (
        f"of {case.tokens:,} tokens a request, {case.tokens - resident:,} are older than the newest {resident:,}{idle}"
    )
    crossing = f"{host / LINK * 1e3:.1f} ms at {LINK / 1e9:.0f} GB/s"
    price = f"{show_bytes(host)} per request and step cross to the device: about {crossing}"
    return case.finding("cold_blocks", "tier", why, "older blocks in host memory", cache, case.bytes_of(cache), price)


RULES: dict[str, Callable[[_Case], Finding | None]] = {
    rule.__name__: rule for rule in (fragmentation, repeated_prefixes, retained_tokens, bytes_per_element, cold_blocks)
}


def _kind(case: _Case) -> str:
    return planner.named.kind_of(case.cache)


def _gain(case: _Case, cache: str) -> float:
    return case.bytes_of(case.cache) / case.bytes_of(cache)


def _elsewhere(case: _Case, device_memory: int | None, weights: str):
    """What binds that no cache changes."""
    seen = case.seen
    if case.binds is False and (seen.occupancy is None or seen.occupancy < EMPTY):
        used = "nothing was refused" if seen.occupancy is None else f"the pool is {seen.occupancy:.0%} full at most"
        yield f"KV memory is not what binds: {used}. A smaller cache would admit no more requests."
    if seen.itl_fixed is not None and seen.itl_fixed >= FIXED:
        yield (
            f"Decode time is not reading of keys and values: {seen.itl_fixed:.0%} of it does not grow with what is resident. "
            "A larger batch, faster weights or a compiled step would help; a codec would not."
        )
    if device_memory is not None:
        count = models.parameters(case.model)
        size = budget.weight_bytes(case.model, count, weights)
        quarter = budget.weight_bytes(case.model, count, "4bit")
        caches = device_memory - size
        if size > device_memory / 2 and quarter < 0.75 * size:
            freed = (size - quarter) // max(1, case.bytes_of(case.cache))
            yield (
                f"Weights take {show_bytes(size)} of {show_bytes(device_memory)} and leave {show_bytes(max(0, caches))}: in 4 "
                f"bits they free {show_bytes(size - quarter)}, room for {freed:,} more requests of {case.tokens:,} tokens."
            )
