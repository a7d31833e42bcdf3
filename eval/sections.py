"""What the report shows of a model: for every suite a heading, pictures and tables, with where each number is from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure

from . import plots
from .choice import Candidate, Choice, Comparison, Model, finite, pareto, plain, scientific

NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """Rows whose first cell is their name.

    Attributes:
        notes: where the numbers are from, line by line.
        best: name of the row that stands out.
        words: whether cells are set like text and not like numbers.
    """

    title: str
    notes: list[str]
    columns: list[str]
    rows: list[list[str]]
    best: str | None = None
    words: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure as SVG for the page, also in `file` beside it."""

    title: str
    notes: list[str]
    file: str
    svg: Markup


@dataclass(frozen=True)
class Section:
    """What one suite says about a model."""

    title: str
    text: str
    pictures: list[Picture]
    tables: list[Table]


class Gallery:
    """The pictures of one model in `folder`: a cache looks alike in all, and every file has a name of its own."""

    def __init__(self, folder: Path, model: Model, number: int):
        self.folder, self.taken = folder, set()
        self.prefix = re.sub(r"[^a-z0-9]+", "-", f"{number} {model.title}".lower()).strip("-")
        self.looks = plots.styles(list(dict.fromkeys(r.cache for part in model.parts for r in part.records)))

    def add(
        self, figure: Figure, stem: str, title: str, shown: Sequence[str], part: Comparison, *notes: str
    ) -> Picture:
        """Save `figure`, drawn from `part`; `shown` is what it shows, for those who cannot see it."""
        name = next(name for name in self._names(stem) if name not in self.taken)
        self.taken.add(name)
        said = [*notes, *_notes(part)]
        svg = plots.save(figure, self.folder / f"{name}.png", f"{title}. {'; '.join(shown)}.", said)
        return Picture(title, said, f"{name}.png", Markup(svg))

    def _names(self, stem: str) -> Iterator[str]:
        yield f"{self.prefix}-{stem}"
        yield from (f"{self.prefix}-{stem}-{i}" for i in range(2, 1000))


def _notes(part: Comparison) -> list[str]:
    return [part.source, f"Protocol: {part.asked}"]


def sections(model: Model, gallery: Gallery) -> list[Section]:
    """What there is to show of a model; suites that were not run are left out."""
    made = [choice(model.choices, gallery), quality(model.choices, gallery), retrieval(model.of("retrieval"), gallery)]
    made += [streaming(model.of("streaming"), gallery), latency(model.of("latency"), gallery)]
    return [section for section in made if section.tables]


# Choice

CHOICE: dict[str, Callable[[Candidate, float | None], str]] = {
    "Bytes, of plain": lambda x, base: _share(x.ratio),
    "Bytes per token": lambda x, base: f"{x.bytes_per_token:,.0f}",
    "KL": lambda x, base: scientific(x.kl),
    "Same top token": lambda x, base: _share(x.top1, 1),
    "Step, ms": lambda x, base: milliseconds(x.itl),
    "Step, of plain": lambda x, base: _ratio(x.itl, base),
    "In budget": lambda x, base: yes(x.affordable),
    "In tolerance": lambda x, base: yes(x.faithful),
    "Pareto-optimal": lambda x, base: yes(x.optimal),
    "Choice": lambda x, base: "recommended" if x.recommended else "",
}


def choice(choices: Sequence[Choice], gallery: Gallery) -> Section:
    """The recommendation at every context, and what it was chosen from."""
    text = (
        "The recommended cache is the smallest one within budget and tolerance; of caches with the same share of bytes "
        "the fastest. A cache is Pareto-optimal when no other has fewer bytes without more loss, or less loss without "
        "more bytes. In the figures the caches on the front are filled, the recommended one is ringed, and what is "
        "asked for is shaded."
    )
    pictures = []
    for made in choices:
        pictures.append(_bytes_picture(made, gallery))
        if any(x.itl for x in made.candidates):
            pictures.append(_time_picture(made, gallery))
    return Section("Choice", text, pictures, [_choice_table(made) for made in choices])


def _choice_table(made: Choice) -> Table:
    base = made.pace and made.pace.itl.get("dynamic")
    rows = [[x.cache, *(cell(x, base) for cell in CHOICE.values())] for x in made.candidates]
    title, best = f"{made.part.title}: {made.limits}", made.best and made.best.cache
    return Table(title, [*_notes(made.part), *_timed(made)], ["Cache", *CHOICE], rows, best)


def _timed(made: Choice) -> list[str]:
    steps = made.pace
    return [f"Steps {steps}: {steps.part.source}. Protocol: {steps.part.asked}"] if steps else []


def _bytes_picture(made: Choice, gallery: Gallery) -> Picture:
    points = {x.cache: (100 * x.ratio, x.kl) for x in made.candidates if math.isfinite(x.kl)}
    limit = 100 * made.limits.share(made.candidates[0])
    figure = _tradeoff(made, points, "bytes, % of the plain cache's", limit, gallery)
    title, stem = f"Loss against bytes: {made.part.title}", f"bytes-{made.part.protocol['context']}"
    return gallery.add(figure, stem, title, _said(points, "% of bytes"), made.part)


def _time_picture(made: Choice, gallery: Gallery) -> Picture:
    points = {x.cache: (1e3 * x.itl, x.kl) for x in made.candidates if x.itl and math.isfinite(x.kl)}
    figure = _tradeoff(made, points, f"decode step, ms, {made.pace}", None, gallery)
    title, stem = f"Loss against time: {made.part.title}", f"time-{made.part.protocol['context']}"
    return gallery.add(figure, stem, title, _said(points, "ms"), made.part, *_timed(made))


def _tradeoff(made: Choice, points: dict, xlabel: str, limit: float | None, gallery: Gallery) -> Figure:
    """Loss against a cost, with the front of these two; `limit` is the largest cost that is allowed."""
    front = pareto({name: (x, max(kl, made.floor)) for name, (x, kl) in points.items()})
    best, limits = made.best and made.best.cache, (limit, made.limits.tolerance)
    return plots.tradeoff(points, front, best, gallery.looks, xlabel=xlabel, floor=made.floor, limits=limits)


def _said(points: dict[str, tuple[float, float]], unit: str) -> list[str]:
    return [f"{name} {x:.0f} {unit}, KL {scientific(y)}" for name, (x, y) in points.items()]


# Quality

QUALITY: dict[str, Callable[[dict], str]] = {
    "KL": lambda m: _with_error(m["kl_mean"], m.get("kl_stderr"), scientific),
    "KL, p99": lambda m: scientific(m.get("kl_p99")),
    "KL, max": lambda m: scientific(m.get("kl_max")),
    "Same top token": lambda m: _share(m.get("top1"), 1),
    "Perplexity": lambda m: _number(m.get("ppl"), ",.2f"),
    "Change, %": lambda m: _perplexity_change(m),
    "First different token": lambda m: _number(m.get("first_difference"), ".3g", "never"),
    "Identical runs": lambda m: _share(m.get("identical")),
    "Bytes, of plain": lambda m: _share(m["bytes"] / m["plain_bytes"]),
    "Compressed": lambda m: _share(m.get("compressed")),
}


def quality(choices: Sequence[Choice], gallery: Gallery) -> Section:
    """All that was measured of the loss, the most faithful cache first."""
    text = (
        "Each context is written through the cache, then true decode steps are scored against the plain cache. KL and "
        "the share of equal top tokens say how far the distributions are apart; perplexity may even fall while they "
        "diverge."
    )
    pictures = [picture for made in choices if (picture := _position_picture(made, gallery))]
    return Section("Quality", text, pictures, [_quality_table(made.part) for made in choices])


def _quality_table(part: Comparison) -> Table:
    records = sorted(part.records, key=lambda record: finite(record.metrics["kl_mean"]))
    rows = [[record.cache, *(cell(record.metrics) for cell in QUALITY.values())] for record in records]
    base = f"Perplexity of the plain cache: {_number(records[0].metrics.get('ppl_plain'), ',.2f')}"
    return Table(f"Quality: {part.title}", [*_notes(part), base], ["Cache", *QUALITY], rows)


def _perplexity_change(metrics: dict) -> str:
    """From the mean change of the negative log-likelihood, whose standard error is paired."""
    if finite(metrics.get("nll_change")) > 50:
        return NOTHING
    change, error = math.expm1(metrics["nll_change"]), metrics.get("nll_stderr")
    return _with_error(change, error and error * (1 + change), lambda x: f"{100 * x:.2f}")


def _position_picture(made: Choice, gallery: Gallery) -> Picture | None:
    """Loss by decode step, of the caches that rise above the noise; None if none does."""
    lines = {
        record.cache: [(_middle(x), max(finite(x["kl"], made.floor), made.floor)) for x in buckets]
        for record in made.part.records
        if (buckets := record.metrics.get("by_position"))
    }
    quiet = [name for name, points in lines.items() if max(y for _, y in points) <= made.floor]
    loud = {name: points for name, points in lines.items() if name not in quiet}
    if not loud:
        return None
    figure = plots.curves(loud, gallery.looks, "decode step", "KL to the plain cache, nats", log=True)
    title, stem = f"Loss by position: {made.part.title}", f"position-{made.part.protocol['context']}"
    said = [f"{name} from {scientific(p[0][1])} to {scientific(p[-1][1])}" for name, p in loud.items()]
    notes = [f"At the noise floor throughout: {', '.join(quiet)}."] if quiet else []
    return gallery.add(figure, stem, title, said, made.part, *notes)


def _middle(bucket: dict) -> float:
    return (bucket["from"] + bucket["to"]) / 2


# Retrieval


def retrieval(parts: Sequence[Comparison], gallery: Gallery) -> Section:
    """Needles found, in all and by depth."""
    text = "A needle is hidden in the context, which is written through the cache before the question is asked."
    pictures = [_needle_picture(part, gallery) for part in parts]
    return Section("Retrieval", text, pictures, [_retrieval_table(part) for part in parts])


def _needle_picture(part: Comparison, gallery: Gallery) -> Picture:
    shares = {r.cache: {x["depth"]: x["right"] / x["n"] for x in r.metrics["by_depth"]} for r in part.records}
    depths = sorted({depth for row in shares.values() for depth in row})
    values = {cache: [row.get(depth) for depth in depths] for cache, row in shares.items()}
    columns = [f"{depth:.0%}" for depth in depths]
    figure = plots.heat_map(values, columns, "depth of the needle in the context")
    said = [f"{cache} {', '.join(map(_share, row))}" for cache, row in values.items()]
    title, stem = f"Right answers by depth: {part.title}", f"needles-{part.protocol['keys']}-{part.protocol['length']}"
    return gallery.add(figure, stem, title, [f"depths {', '.join(columns)}", *said], part)


def _retrieval_table(part: Comparison) -> Table:
    rows = []
    for record in part.records:
        m = record.metrics
        interval = f"{_share(m['low'])} to {_share(m['high'])}"
        rows.append([record.cache, _share(m["accuracy"]), interval, str(m["n"]), _share(m.get("compressed"))])
    columns = ["Cache", "Right answers", "95% interval", "Questions", "Compressed"]
    return Table(f"Right answers: {part.title}", _notes(part), columns, rows)


# Streaming

STREAMING: dict[str, Callable[[dict], str]] = {
    "Perplexity": lambda m: _number(m.get("ppl"), ",.2f"),
    "Recomputed": lambda m: _number(m.get("ppl_recomputed"), ",.2f"),
    "Ratio": lambda m: _number(m.get("ratio"), ",.3f"),
}


def streaming(parts: Sequence[Comparison], gallery: Gallery) -> Section:
    """Texts longer than the window."""
    text = (
        "A text longer than the window, each token predicted through a window of its own. The recomputed perplexity is that "
        "of fresh passes over as much text; a ratio of 1 means that streaming costs nothing."
    )
    pictures = [picture for part in parts if (picture := _streaming_picture(part, gallery))]
    tables = [_table("Streaming", part, STREAMING) for part in parts]
    return Section("Streaming", text, pictures, tables)


def _streaming_picture(part: Comparison, gallery: Gallery) -> Picture | None:
    lines = {}
    for record in part.records:
        buckets = [x for x in record.metrics.get("by_position", []) if math.isfinite(finite(x["ppl"]))]
        lines |= {record.cache: [(_middle(x), x["ppl"]) for x in buckets]} if buckets else {}
    if not lines:
        return None
    figure = plots.curves(lines, gallery.looks, "position in the text, tokens", "perplexity", log=True)
    said = [f"{name} from {points[0][1]:.1f} to {points[-1][1]:.1f}" for name, points in lines.items()]
    return gallery.add(figure, "streaming", f"Perplexity by position: {part.title}", said, part)


# Latency

LINE: dict[str, Callable[[dict], str]] = {
    "Slope, µs per token": lambda m: _number(m.get("slope"), ".2f", scale=1e6),
    "Slope, of plain": lambda m: _number(m.get("slope_ratio"), ".2f"),
    "Intercept, ms": lambda m: _number(m.get("intercept"), ".1f", scale=1e3),
    "Intercept, of plain": lambda m: _number(m.get("intercept_ratio"), ".2f"),
    "Break-even, tokens": lambda m: _number(m.get("break_even"), ",.0f", "never"),
    "Read, GB/s": lambda m: _number(m.get("bandwidth"), ".1f", scale=1e-9),
    "Machine reads, GB/s": lambda m: _number(m.get("read_bandwidth"), ".1f", scale=1e-9),
    "Peak, MB": lambda m: _number(m.get("peak_bytes"), ",.0f", scale=1e-6),
    "First token, ms": lambda m: _number(m.get("ttft"), ",.0f", scale=1e3),
}


def latency(parts: Sequence[Comparison], gallery: Gallery) -> Section:
    """Decode steps and the lines through them."""
    text = (
        "All caches of a context take turns, one decode step each, in one run; a step is the median, the spread its "
        "interquartile range. The line step = slope * length + intercept is fitted to the medians; a cache breaks even "
        "where its line crosses the plain cache's."
    )
    pictures = [_latency_picture(part, gallery) for part in parts]
    return Section("Latency", text, pictures, [_latency_table(part) for part in parts])


def _latency_picture(part: Comparison, gallery: Gallery) -> Picture:
    lines = {r.cache: [(t["context"], 1e3 * t["itl"]) for t in r.metrics["timings"]] for r in part.records}
    figure = plots.curves(lines, gallery.looks, "context, tokens", "decode step, ms")
    said = [f"{name} {points[-1][1]:.1f} ms at {points[-1][0]} tokens" for name, points in lines.items()]
    return gallery.add(figure, f"latency-{part.protocol['batch']}", f"Time by context: {part.title}", said, part)


def _latency_table(part: Comparison) -> Table:
    contexts = part.protocol["contexts"]
    base = {t["context"]: t["itl"] for t in part.metrics("dynamic").get("timings", [])}
    steps = {}
    for n in contexts:
        steps[f"Step at {n}, ms (spread)"] = lambda m, n=n: _step(m, n)
        steps[f"Of plain at {n}"] = lambda m, n=n: _ratio(_timing(m, n).get("itl"), base.get(n))
    return _table("Latency", part, steps | LINE)


def _timing(metrics: dict, context: int) -> dict:
    return next((t for t in metrics["timings"] if t["context"] == context), {})


def _step(metrics: dict, context: int) -> str:
    timing = _timing(metrics, context)
    return f"{milliseconds(timing['itl'])} ({_share(timing.get('spread'))})" if timing else NOTHING


# Where everything is from

ORIGIN = {key: key.capitalize() for key in ("model", "dtype", "attention", "device", "threads", "commit")}
ORIGIN |= {"hf_kvcache": "hf_kvcache", "torch": "Torch", "transformers": "Transformers", "date": "Date"}


def origins(models: Sequence[Model]) -> Table:
    """Every comparison with its protocol, and every place that its records are from."""
    rows = [
        [f"{part.suite}: {part.title}", part.asked, ", ".join(part.caches(run)), *(plain(run.get(x)) for x in ORIGIN)]
        for model in models
        for part in model.parts
        for run in part.runs
    ]
    columns = ["Measurement", "Protocol", "Caches", *ORIGIN.values()]
    return Table("Every measurement on this page", [], columns, rows, words=True)


# Tables and numbers


def _table(heading: str, part: Comparison, cells: dict[str, Callable[[dict], str]]) -> Table:
    rows = [[record.cache, *(cell(record.metrics) for cell in cells.values())] for record in part.records]
    return Table(f"{heading}: {part.title}", _notes(part), ["Cache", *cells], rows)


def _number(value: float | None, form: str, otherwise: str = NOTHING, scale: float = 1.0) -> str:
    return otherwise if math.isinf(finite(value)) else format(value * scale, form)


def _share(value: float | None, digits: int = 0) -> str:
    return _number(value, f".{digits}%")


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}" if value and base else NOTHING


def _with_error(value: float | None, error: float | None, words: Callable[[float | None], str]) -> str:
    return words(value) if error is None else f"{words(value)} ± {words(error)}"


def milliseconds(seconds: float | None) -> str:
    return _number(seconds, ".1f", scale=1e3)


def yes(value: bool) -> str:
    return "yes" if value else "no"
