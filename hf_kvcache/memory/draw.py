"""Memory against context for each cache, with the device's limit as a line. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import ConfigurationError
from .planner import Planner

POINTS = 33
PALETTE = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
)  # Okabe and Ito's, without yellow and black
STYLES = ("-", "-.")
MUTED = "#7d858f"
GIB = 1 << 30


def draw(
    planner: Planner,
    path: str | Path,
    *,
    requests: int = 1,
    context: int | None = None,
    device_memory: int | None = None,
) -> Path:
    """Draw what `requests` requests of the same length need in all, up to the model's limit; returns `path`.

    Args:
        context: a length to mark, and to draw to where the model has no limit.
        device_memory: bytes; drawn as a line, with what of it may be planned with.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise ConfigurationError("a plot needs matplotlib: pip install matplotlib, or leave --plot out.") from error
    longest = planner.model.limit or 8 * (context or 4096)
    contexts = np.unique(np.linspace(1, longest, POINTS).astype(int))
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axis = figure.subplots()
    lines = {name: [planner.needed(name, int(n), requests) / GIB for n in contexts] for name in planner.footprints}
    ours = [name for name in lines if name != "dynamic"]
    for name, needed in lines.items():
        place = ours.index(name) if name in ours else 0
        colour, style = (
            (PALETTE[place % len(PALETTE)], STYLES[place // len(PALETTE) % 2]) if name in ours else (MUTED, "--")
        )
        axis.plot(contexts, needed, style, color=colour, linewidth=1.6)
    axis.plot(contexts, [planner.beside(int(n), requests) / GIB for n in contexts], ":", color=MUTED, linewidth=1.2)
    lines["all but caches"] = [planner.beside(longest, requests) / GIB]
    if device_memory is not None:
        _limit(axis, contexts, device_memory, planner.memory_fraction)
    top = max(needed[-1] for needed in lines.values())
    if device_memory is not None:
        top = max(min(top, 2 * device_memory / GIB), 1.08 * device_memory / GIB)
    axis.set(xlim=(contexts[0], contexts[-1]), ylim=(0, 1.05 * top))
    axis.set(xlabel="tokens of each request", ylabel="memory of a device, GiB")
    axis.set_title(f"{planner.model.name}, {requests} request{'s' if requests > 1 else ''}", fontsize=10.5, loc="left")
    axis.set_xticks(np.linspace(0, longest, 9)[1:] if longest % 8192 == 0 else contexts[:: POINTS // 4][1:])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"))
    axis.spines[["top", "right"]].set_visible(False)
    if context:
        axis.axvline(context, color=MUTED, linewidth=0.8, alpha=0.6)
    _label_ends(axis, contexts, lines, 1.05 * top)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the plot cannot be written to {path} ({error}): give a file such as plan.png."
        ) from None
    return Path(path)


def _limit(axis, contexts: np.ndarray, device_memory: int, fraction: float) -> None:
    size = device_memory / GIB
    axis.axhline(size, color="#24292f", linewidth=1.2)
    axis.axhspan(size * fraction, size, color="#24292f", alpha=0.08, linewidth=0)
    text = f"the device: {size:.0f} GiB, margin below"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axis.annotate(text, (contexts[0], size), (6, 4), textcoords="offset points", fontsize=8.5, bbox=box)


def _label_ends(axis, contexts: np.ndarray, lines: dict[str, list[float]], top: float) -> None:
    """Names beside the ends of the lines, or where they leave the picture at the top, apart from each other."""
    ends = []
    for name, needed in lines.items():
        if len(needed) > 1 and needed[-1] > top:
            inside = next(i for i, y in enumerate(needed) if y > top)
            ends.append((1.0, name, float(contexts[inside])))
        else:
            ends.append((min(1.0, needed[-1] / top), name, float(contexts[-1])))
    ends.sort(key=lambda end: (end[0], -end[2]))  # who leaves first is named highest
    heights = [height for height, *_ in ends]
    for i in range(len(heights) - 2, -1, -1):  # from the top down: at least a line of text apart
        heights[i] = min(heights[i], heights[i + 1] - 0.052)
    shift = max(0.0, -heights[0])
    heights = [height + shift for height in heights]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + 0.052)
    for (end, name, x), height in zip(ends, heights, strict=True):
        axis.annotate(
            name,
            (x, end * top),
            (1.05, height),
            textcoords="axes fraction",
            fontsize=8.5,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": MUTED,
                "linewidth": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 2,
            },
        )
