"""Pictures of results: PNGs, and for the report (`python -m eval report`) the same figures as SVG inside the page."""

from __future__ import annotations

import html
import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from matplotlib.transforms import Bbox

from hf_kvcache.scoring import NOISE, readable

INK, MUTED = "#24292f", "#7d858f"  # ink becomes the page's text colour, muted is readable on light and dark
PALETTE = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
)  # Okabe and Ito's, without yellow and black
MARKERS = "osD^vPX"
OFFSETS = [
    (x, y) for far in (9, 16, 24) for x in (far, 0, -far) for y in (0, far, -far) if x or y
]  # of labels, in points
WIDTH = 5.2  # inches: as wide as a phone's screen, so that text stays readable there
STYLE = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "hf_kvcache",
}


def _label(kl: float) -> str:
    return "0" if kl <= NOISE else readable(kl)


def bars(rows: list[dict], path: Path) -> Path:
    """Bytes, time per token and loss of each cache (`compare_caches` rows), side by side; returns `path`."""
    names = [row["cache"] for row in rows]
    panels = [
        ("KV cache, MB", [row["bytes"] / 1e6 for row in rows], False),
        ("time per token, ms", [row["itl"] * 1e3 for row in rows], False),
        ("KL to the plain cache, nats", [max(row["loss"]["kl_mean"], NOISE) for row in rows], True),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(12, 0.4 * len(rows) + 1.4), sharey=True, layout="constrained")
    for axis, (title, values, log) in zip(axes, panels, strict=True):
        drawn = axis.barh(names, values, color=["#888888"] + ["#3b6ea5"] * (len(rows) - 1))
        axis.bar_label(drawn, [_label(v) if log else f"{v:.0f}" for v in values], padding=3, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
        if log:
            axis.set_xscale("log")
            axis.set_xlim(NOISE / 2, None)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A colour and a marker per cache, the same in every figure; built-in caches are grey."""
    built_in = [name for name in names if name.split("/")[0] in ("dynamic", "static") or name.startswith("hf-")]
    ours = [name for name in names if name not in built_in]
    looks = {name: (MUTED, MARKERS[i % len(MARKERS)]) for i, name in enumerate(built_in)}
    return looks | {name: (PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(ours)}


@contextmanager
def _canvas(height: float, **axis_settings) -> Iterator[tuple[Figure, Axes]]:
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(WIDTH, height), layout="constrained")
        axis.set(**axis_settings)
        yield figure, axis


def tradeoff(
    points: dict[str, tuple[float, float]],
    front: Sequence[str],
    best: str | None,
    looks: dict[str, tuple[str, str]],
    *,
    xlabel: str,
    floor: float,
    limits: tuple[float | None, float],
) -> Figure:
    """KL (log) against a cost, both smaller is better: `points` is `{cache: (cost, kl)}`.

    Caches on the Pareto front are filled and joined, `best` is ringed, what `limits` (cost or None, KL) allow is
    shaded. A KL below `floor` is drawn on it: the difference is noise.
    """
    points = {name: (x, max(kl, floor)) for name, (x, kl) in points.items()}
    with _canvas(4.0, xlabel=xlabel, ylabel="KL to the plain cache, nats", yscale="log") as (figure, axis):
        costs = [x for x, _ in points.values()]
        room = 0.2 * (max(costs) - min(costs) or max(costs))
        left, right = 0 if limits[0] else min(costs) - room, max(costs) + room
        axis.set(xlim=(left, right), ylim=(floor / 3, 4 * max(limits[1], *(kl for _, kl in points.values()))))
        axis.fill_between(
            [left, min(right, limits[0] or right)], floor / 3, limits[1], color=PALETTE[0], alpha=0.08, lw=0
        )
        axis.axhline(floor, color=MUTED, linewidth=1, linestyle=":")
        axis.annotate("noise floor", (left, floor), (4, -4), textcoords="offset points", va="top", fontsize=8)
        corners = sorted(points[name] for name in front)
        axis.step(*zip(*corners, strict=True), where="post", color=MUTED, linewidth=1)
        for name, (x, y) in points.items():
            colour, marker = looks[name]
            face = colour if name in front else "none"
            axis.plot(x, y, marker, color=colour, markerfacecolor=face, markersize=7, zorder=3, label=name)
        if best in points:
            axis.plot(*points[best], "o", color=INK, markerfacecolor="none", markersize=14, markeredgewidth=1.4)
        _plain_log(axis)
        _label_points(figure, axis, points, corners)
    return figure


def curves(
    series: dict[str, list[tuple[float, float]]],
    looks: dict[str, tuple[str, str]],
    xlabel: str,
    ylabel: str,
    log: bool = False,
) -> Figure:
    """A line per cache, `{cache: [(x, y), ...]}`, named where it ends."""
    with _canvas(4.0, xlabel=xlabel, ylabel=ylabel, yscale="log" if log else "linear") as (figure, axis):
        for name, points in series.items():
            colour, marker = looks[name]
            style = "--" if colour == MUTED else "-"
            axis.plot(*zip(*points, strict=True), style, color=colour, marker=marker, markersize=4, label=name)
        if log:
            _plain_log(axis)
        else:
            axis.set_ylim(0, None)
        _label_ends(axis, series, looks)
    return figure


def heat_map(values: dict[str, list[float | None]], columns: Sequence[str], xlabel: str) -> Figure:
    """Shares from 0 to 1 as coloured cells with their number: `{cache: [share per column, or None]}`."""
    with _canvas(0.34 * len(values) + 1.1, xlabel=xlabel) as (figure, axis):
        cells = [[float("nan") if x is None else x for x in row] for row in values.values()]
        mesh = axis.pcolormesh(cells, cmap="cividis", vmin=0, vmax=1)
        axis.set_xticks([j + 0.5 for j in range(len(columns))], columns)
        axis.set_yticks([i + 0.5 for i in range(len(values))], list(values))
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        axis.invert_yaxis()
        for i, row in enumerate(cells):
            for j, share in enumerate(row):
                if share == share:  # measured, not NaN
                    ink = "#ffffff" if sum(mesh.cmap(share)[:3]) < 1.5 else "#111111"
                    axis.text(j + 0.5, i + 0.5, f"{share:.0%}", ha="center", va="center", color=ink, fontsize=8.5)
    return figure


def save(figure: Figure, path: Path, alt: str, source: Sequence[str]) -> str:
    """Write a PNG that says where its numbers are from; return the figure as SVG for a page."""
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with plt.rc_context(STYLE):
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
        lines = [line for note in source for line in textwrap.wrap(note, 105)]
        figure.supxlabel("\n".join(lines), fontsize=6, color=MUTED)
        figure.savefig(path, dpi=150)
    plt.close(figure)
    return _for_page(text.getvalue(), path.stem, alt)


def _for_page(svg: str, prefix: str, alt: str) -> str:
    """An `<svg>` element with ids of its own, as wide as its place, that names itself to screen readers."""
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1)


def _plain_log(axis: Axes) -> None:
    """Powers of ten as 1e-3: the page's font has no superscripts of Matplotlib's."""
    words = lambda value, _: f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")  # noqa: E731
    axis.yaxis.set_major_formatter(FuncFormatter(words))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _label_points(figure: Figure, axis: Axes, points: dict[str, tuple[float, float]], corners: Sequence) -> None:
    """Names beside their points, where they cover least of points, names, borders and the steps through `corners`."""
    figure.draw_without_rendering()
    spots = _spots({name: tuple(axis.transData.transform(point)) for name, point in points.items()})
    turns = [axis.transData.transform(point) for point in _staircase(corners)]
    taken = [text.get_window_extent() for text in axis.texts]
    taken += [Bbox([start, end]).padded(1) for start, end in pairwise(turns)]
    taken += [Bbox.from_extents(x - 7, y - 7, x + 7, y + 7) for x, y in spots]
    text = {"textcoords": "offset points", "fontsize": 8.5, "linespacing": 1.3}
    for spot, names in spots.items():
        label = axis.annotate("\n".join(names), axis.transData.inverted().transform(spot), (0, 0), **text)
        label.set_in_layout(False)
        size = label.get_window_extent().size
        boxes = {offset: _box(spot, size, np.array(offset) * figure.dpi / 72) for offset in OFFSETS}
        costs = {offset: _covered(box, taken, axis.bbox) + np.abs(offset).sum() for offset, box in boxes.items()}
        offset = min(costs, key=costs.get)
        x, y = np.sign(offset)
        label.set(position=offset, ha=("center", "left", "right")[x], va=("center", "bottom", "top")[y])
        taken.append(boxes[offset])


def _spots(pixels: dict[str, tuple[float, float]]) -> dict[tuple[float, float], list[str]]:
    """Names by where their label belongs: points too close for labels of their own share one."""
    spots: dict[tuple[float, float], list[str]] = {}
    for name, here in pixels.items():
        near = next((spot for spot in spots if max(np.abs(np.subtract(spot, here))) < 8), here)
        spots.setdefault(near, []).append(name)
    return spots


def _staircase(corners: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """All points where the line through `corners` turns: it goes right, then down."""
    turns = list(corners[:1])
    for (_, y), corner in pairwise(corners):
        turns += [(corner[0], y), corner]
    return turns


def _box(spot: tuple[float, float], size: Sequence[float], offset: Sequence[float]) -> Bbox:
    """Where a label of `size` is that lies beside `spot`, in the direction of `offset`."""
    start = np.add(spot, offset) + (np.sign(offset) - 1) / 2 * size
    return Bbox([start, start + size])


def _covered(box: Bbox, taken: Sequence[Bbox], inside: Bbox) -> float:
    """How much a label in `box` would cover of what is `taken`, or lie outside of the axes; in pixels."""
    outside = _shared(box, box) - _shared(box, inside)
    return 2 * outside + sum(_shared(box, other) for other in taken)


def _shared(one: Bbox, other: Bbox) -> float:
    part = Bbox.intersection(one, other)
    return part.width * part.height if part else 0.0


def _label_ends(axis: Axes, series: dict[str, list[tuple[float, float]]], looks: dict[str, tuple[str, str]]) -> None:
    """Names beside the last points, apart where lines end close to each other."""
    axis.set(xlim=axis.get_xlim(), ylim=axis.get_ylim())  # the leaders must not widen them
    to_axes = axis.transData + axis.transAxes.inverted()
    ends = sorted((to_axes.transform(points[-1])[1], name) for name, points in series.items())
    for (_, name), height in zip(ends, _apart([height for height, _ in ends], 0.055), strict=True):
        leader = {"arrowstyle": "-", "color": looks[name][0], "linewidth": 0.8, "relpos": (0, 0.5)}
        leader |= {"shrinkA": 1, "shrinkB": 3}  # points between the line's ends and what it joins
        place = {"xytext": (1.06, height), "textcoords": "axes fraction", "va": "center"}
        axis.annotate(name, series[name][-1], **place, fontsize=8.5, arrowprops=leader)


def _apart(heights: Sequence[float], step: float) -> list[float]:
    """Ascending `heights` at least `step` apart: those too close are spread around their mean."""
    blocks: list[tuple[float, int]] = []  # middle and number of heights that touch
    for height in heights:
        middle, count = height, 1
        while blocks and middle - blocks[-1][0] < step * (count + blocks[-1][1]) / 2:
            below, others = blocks.pop()
            middle, count = (middle * count + below * others) / (count + others), count + others
        blocks.append((middle, count))
    return [middle + step * (i - (count - 1) / 2) for middle, count in blocks for i in range(count)]
