"""Pictures of results."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .quality import NOISE, readable


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


def latency(timings: list, lines: list, path: Path) -> Path:
    """Decode step against context length, one line per cache (`latency.Timing`s of the first batch size); returns `path`."""
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    batch = timings[0].batch
    for name in dict.fromkeys(t.cache for t in timings):
        points = [t for t in timings if t.cache == name and t.batch == batch]
        style = "--" if name in ("dynamic", "static") or name.startswith("hf-") else "-"
        axis.plot([t.context for t in points], [t.itl * 1e3 for t in points], style, marker="o", label=name)
    axis.set(xlabel="context, tokens", ylabel="decode step, ms", title=f"batch {batch}", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
