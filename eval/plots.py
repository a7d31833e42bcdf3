"""Pictures of results."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def bars(rows: list[dict], path: Path) -> Path:
    """Bytes, time per token and loss of each cache (`compare_caches` rows), side by side; returns `path`."""
    names = [row["cache"] for row in rows]
    panels = [
        ("KV cache, MB", [row["bytes"] / 1e6 for row in rows], False),
        ("time per token, ms", [row["itl"] * 1e3 for row in rows], False),
        ("KL to the plain cache, nats", [max(row["loss"]["kl_mean"], 1e-9) for row in rows], True),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(12, 0.4 * len(rows) + 1.4), sharey=True, layout="constrained")
    for axis, (title, values, log) in zip(axes, panels, strict=True):
        drawn = axis.barh(names, values, color=["#888888"] + ["#3b6ea5"] * (len(rows) - 1))
        axis.bar_label(drawn, [f"{v:.1e}" if log else f"{v:.0f}" for v in values], padding=3, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
        if log:
            axis.set_xscale("log")
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
