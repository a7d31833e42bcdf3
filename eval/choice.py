"""Merging records into comparisons, and choosing a cache for a budget of bytes and a tolerance of loss.

A `Comparison` holds records of one suite, model, dtype and protocol: only such records may stand in one table. Where
they are from several commits or machines, or where their controls failed, `warnings` says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_kvcache import named
from hf_kvcache.scoring import NOISE

from .quality import NOISE_LIMIT, RECHUNKED
from .records import Record

ALIKE = ("device", "threads", "attention", "commit", "hf_kvcache", "torch", "transformers")


def plain(value: object) -> str:
    """A value of a protocol or a run in words."""
    if isinstance(value, (list, tuple)):
        return " / ".join(map(plain, value))
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def finite(value: float | None, otherwise: float = math.inf) -> float:
    """`value`, or `otherwise` where it is missing, infinite or not a number."""
    return value if value is not None and math.isfinite(value) else otherwise


def scientific(value: float | None) -> str:
    """A KL divergence for people: `4.2e-3`."""
    if math.isinf(finite(value)):
        return "not finite"
    if 0.1 <= value < 10:
        return f"{value:#.2g}"
    return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")


@dataclass(frozen=True)
class Comparison:
    """Records of one suite, model, dtype and protocol, in the order in which they were measured."""

    suite: str
    protocol: dict
    records: list[Record]

    def metrics(self, cache: str) -> dict:
        """What was measured on a cache; empty where nothing was."""
        return next((record.metrics for record in self.records if record.cache == cache), {})

    @property
    def runs(self) -> list[dict]:
        """Where the records are from, each place once."""
        return list({_place(record.run): record.run for record in self.records}.values())

    def caches(self, run: dict) -> list[str]:
        """The caches that were measured at the place of `run`."""
        return [record.cache for record in self.records if _place(record.run) == _place(run)]

    @property
    def title(self) -> str:
        """What the records are of; for quality with the context, which sentences begin with."""
        asked = self.protocol
        if self.suite == "quality":
            chunks = asked.get("prefill_chunk")
            return f"{asked['context']} tokens of context" + (f", prefilled in chunks of {chunks}" if chunks else "")
        if self.suite == "retrieval":
            needles = "1 needle" if asked["keys"] == 1 else f"{asked['keys']} needles"
            return f"{needles} in {asked['length']} tokens of {asked['haystack']}"
        if self.suite == "latency":
            return f"decode steps, batch {asked['batch']}"
        return f"{asked['tokens']} tokens through a window" if "tokens" in asked else self.suite

    @property
    def asked(self) -> str:
        """The protocol in words."""
        return ", ".join(f"{key.replace('_', ' ')} {plain(value)}" for key, value in self.protocol.items())

    @property
    def source(self) -> str:
        """Model, dtype, device, commit, versions and date in words; where rows differ, all of them."""
        said = {key: _several(record.run.get(key) for record in self.records) for key in self.records[0].run}
        start = [short_name(said["model"]), said["dtype"], said["device"], f"{said['threads']} threads"]
        software = [f"{key} {said[key]}" for key in ("attention", "commit", "torch", "transformers")]
        return " · ".join([*start, *software, said["date"]])


def _place(run: dict) -> str:
    return json.dumps(run | {"date": None}, sort_keys=True)


def _several(values) -> str:
    return " / ".join(dict.fromkeys(map(plain, values)))


def short_name(model: str) -> str:
    """A hub id as it is, the last part of a path."""
    is_path = model.count("/") > 1 or model.startswith(("/", "."))
    return (model.rstrip("/").split("/")[-1] if is_path else model) or "unnamed model"


def compare(records: Sequence[Record]) -> list[Comparison]:
    """Records that may stand in one table together; of a suite, shorter contexts and smaller batches first."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        key = json.dumps([record.suite, record.run["model"], record.run["dtype"], _shared(record)], sort_keys=True)
        groups.setdefault(key, []).append(record)
    found = [Comparison(group[0].suite, _shared(group[0]), group) for group in groups.values()]
    sizes = ("context", "length", "batch")
    return sorted(found, key=lambda part: (part.suite, *(part.protocol.get(size) or 0 for size in sizes)))


def _shared(record: Record) -> dict:
    """The protocol that a record shares with those beside it: the control differs by its prefill, on purpose."""
    return record.protocol | ({"prefill_chunk": None} if record.cache == RECHUNKED else {})


def warnings(part: Comparison) -> list[str]:
    """What a reader must know before believing the numbers of a comparison."""
    found = [
        f"{key} differs between caches: {_several(run.get(key) for run in part.runs)}."
        for key in ALIKE
        if len({plain(run.get(key)) for run in part.runs}) > 1
    ]
    control = part.metrics(RECHUNKED).get("kl_mean", 0.0)
    if not finite(control) <= NOISE_LIMIT:
        said = f"the control ({RECHUNKED}) has KL {scientific(control)}, above {scientific(NOISE_LIMIT)}"
        found.append(f"{said}: the arithmetic is coarse or the measurement broken, and losses near it are noise.")
    found += [
        f"{record.cache} had compressed nothing when it was measured, so its loss says nothing."
        for record in part.records
        if _idle(record)
    ]
    return [f"{part.title}: {text}" for text in found]


def _idle(record: Record) -> bool:
    """Whether a lossy cache was measured before it lost anything."""
    return record.metrics.get("compressed") == 0 and not named.is_exact(record.cache)


@dataclass(frozen=True)
class Limits:
    """What is asked for: `budget` is a share of the plain bytes or, above 1, bytes per token; `tolerance` a KL."""

    budget: float
    tolerance: float

    def share(self, candidate: Candidate) -> float:
        """The budget as a share of the plain cache's bytes."""
        return self.budget if self.budget <= 1 else self.budget * candidate.ratio / candidate.bytes_per_token

    def __str__(self) -> str:
        share = f"{self.budget:.0%} of a plain cache's bytes"
        share = share if self.budget <= 1 else f"{self.budget:g} bytes per token"
        return f"at most {share} at a KL of at most {self.tolerance:g}"


@dataclass(frozen=True)
class Candidate:
    """A cache and what the choice depends on.

    Attributes:
        ratio: its bytes over the plain cache's.
        kl, kl_stderr, top1: mean divergence from the plain cache, its standard error, share of equal top tokens.
        itl: median decode step in seconds, None where it was not timed.
        affordable, faithful: within the budget; within the tolerance, and measured when it had something to lose.
        optimal: no other cache has fewer bytes and no more loss, or less loss and no more bytes.
    """

    cache: str
    ratio: float
    bytes_per_token: float
    kl: float
    kl_stderr: float | None
    top1: float | None
    itl: float | None
    affordable: bool = False
    faithful: bool = False
    optimal: bool = False
    recommended: bool = False


@dataclass(frozen=True)
class Pace:
    """Decode steps to set beside a comparison of quality: `itl` by cache at `context`, the nearest that was timed."""

    part: Comparison
    context: int
    itl: dict[str, float]

    def __str__(self) -> str:
        return f"at {self.context} tokens, batch {self.part.protocol['batch']}"


def pace(parts: Sequence[Comparison], context: int) -> Pace | None:
    """Timings of the smallest batch at the context nearest to `context`; None without any."""
    timed = [(part, n) for part in parts if part.suite == "latency" for n in part.protocol["contexts"]]
    if not timed:
        return None
    part, nearest = min(timed, key=lambda x: (x[0].protocol["batch"], abs(x[1] - context)))
    itl = {r.cache: t["itl"] for r in part.records for t in r.metrics["timings"] if t["context"] == nearest}
    return Pace(part, nearest, itl)


def pareto(points: dict[str, tuple[float, float]]) -> list[str]:
    """The names of points that no other is as good as in both coordinates and better than in one; smaller is better."""
    beats = lambda a, b: a != b and a[0] <= b[0] and a[1] <= b[1]  # noqa: E731
    return [name for name, point in points.items() if not any(beats(other, point) for other in points.values())]


@dataclass(frozen=True)
class Choice:
    """A comparison of quality with its candidates, smallest first, of which at most one is recommended.

    Attributes:
        floor: the KL below which a difference is noise.
    """

    part: Comparison
    pace: Pace | None
    limits: Limits
    floor: float
    candidates: list[Candidate]

    @property
    def best(self) -> Candidate | None:
        return next((x for x in self.candidates if x.recommended), None)

    @property
    def verdict(self) -> str:
        """The recommendation as a sentence; where nothing fits, what comes closest."""
        start, best = f"At {self.part.title}", self.best
        if best is None:
            return f"{start} no cache fits {self.limits}. {self._closest()}"
        said = f"{start}: {best.cache} holds {best.ratio:.0%} of the bytes at KL {scientific(best.kl)}"
        if best.top1 is not None:
            said += f", with the same top token in {best.top1:.1%} of steps"
        if best.itl and self.pace.itl.get("dynamic"):
            said += f" and {best.itl / self.pace.itl['dynamic']:.2f} times the plain cache's time per token"
        return f"{said}."

    @property
    def warnings(self) -> list[str]:
        """A recommendation that another sample might not repeat."""
        best = self.best
        if best is None or not best.kl_stderr or best.kl + 2 * best.kl_stderr <= self.limits.tolerance:
            return []
        near = f"{scientific(best.kl)} ± {scientific(best.kl_stderr)}"
        return [f"{self.part.title}: {best.cache} is within the tolerance by less than two standard errors ({near})."]

    def _closest(self) -> str:
        faithful = min((x for x in self.candidates if x.faithful), key=lambda x: x.ratio, default=None)
        affordable = min((x for x in self.candidates if x.affordable), key=lambda x: x.kl, default=None)
        said = []
        if faithful:
            said.append(
                f"The smallest within the tolerance is {faithful.cache} with {faithful.ratio:.0%} of the bytes."
            )
        if affordable:
            said.append(
                f"The most faithful within the budget is {affordable.cache} with KL {scientific(affordable.kl)}."
            )
        return " ".join(said) or "None is within either limit."


def noise_floor(parts: Sequence[Comparison]) -> float:
    """The largest divergence of a control among comparisons of one model, or that of float32 if it is larger."""
    return max([NOISE, *(finite(part.metrics(RECHUNKED).get("kl_mean"), 0.0) for part in parts)])


def choose(part: Comparison, steps: Pace | None, floor: float, limits: Limits) -> Choice:
    """Recommend the smallest cache within both limits.

    Caches with the same share of bytes in whole percent are tied, and the fastest of them wins. The control is no
    candidate, and losses below the noise floor are equal.
    """
    found = [_candidate(record, part, steps, limits) for record in part.records if record.cache != RECHUNKED]
    front = pareto({x.cache: (x.ratio, max(x.kl, floor)) for x in found})
    fitting = [x for x in found if x.affordable and x.faithful]
    best = min(fitting, key=lambda x: (round(x.ratio, 2), x.itl or math.inf, x.ratio), default=None)
    marked = [replace(x, optimal=x.cache in front, recommended=x is best) for x in found]
    return Choice(part, steps, limits, floor, sorted(marked, key=lambda x: x.ratio))


def _candidate(record: Record, part: Comparison, steps: Pace | None, limits: Limits) -> Candidate:
    measured = record.metrics
    tokens = part.protocol["windows"] * part.protocol["context"]
    candidate = Candidate(
        cache=record.cache,
        ratio=measured["bytes"] / measured["plain_bytes"],
        bytes_per_token=measured.get("bytes_per_token", measured["bytes"] / tokens),
        kl=finite(measured["kl_mean"]),
        kl_stderr=measured.get("kl_stderr"),
        top1=measured.get("top1"),
        itl=steps.itl.get(record.cache) if steps else None,
    )
    affordable = candidate.ratio <= limits.share(candidate)
    faithful = candidate.kl <= limits.tolerance and not _idle(record)
    return replace(candidate, affordable=affordable, faithful=faithful)


@dataclass(frozen=True)
class Model:
    """All that was measured on one model and dtype, and the choice for every comparison of quality."""

    name: str
    dtype: str
    parts: list[Comparison]
    choices: list[Choice]

    @property
    def title(self) -> str:
        return f"{short_name(self.name)}, {self.dtype}"

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before believing the numbers or following the recommendations."""
        found = [text for part in self.parts for text in warnings(part)]
        if self.choices and not any(part.metrics(RECHUNKED) for part in self.of("quality")):
            found.append(f"No control ({RECHUNKED}) was measured: the noise floor is taken to be {scientific(NOISE)}.")
        return found + [text for made in self.choices for text in made.warnings]

    def of(self, suite: str) -> list[Comparison]:
        return [part for part in self.parts if part.suite == suite]


def by_model(parts: Sequence[Comparison], limits: Limits) -> list[Model]:
    """Comparisons by model and dtype: what is never mixed."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for part in parts:
        groups.setdefault((part.runs[0]["model"], part.runs[0]["dtype"]), []).append(part)
    return [Model(*key, group, _choices(group, limits)) for key, group in groups.items()]


def _choices(parts: Sequence[Comparison], limits: Limits) -> list[Choice]:
    """A choice for every comparison of quality; one of nothing but the control offers none."""
    offers = [part for part in parts if part.suite == "quality" and any(r.cache != RECHUNKED for r in part.records)]
    floor = noise_floor(parts)
    return [choose(part, pace(parts, part.protocol["context"]), floor, limits) for part in offers]
