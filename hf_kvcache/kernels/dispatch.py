"""Which kernel runs: the fastest one that the device and the shapes allow, the reference otherwise."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from . import cpu, reference
from .base import Pages, View

QUERIES = 64  # queries that a decode kernel takes over storage at once; longer inputs are a prefill


def _native(pages: Pages) -> bool:
    return pages.slabs[0].device.type == "cpu" and cpu.load() is not None


def decode(
    q: torch.Tensor, sealed: Pages, open_: Pages, view: View, scale: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over stored pages; see `reference.decode`."""
    pages = sealed if sealed.slabs else open_
    if _native(pages) and cpu.supports(sealed.geometry, sealed.codec, q.shape[2]):
        return cpu.decode(q, sealed, open_, view, scale, softcap)
    return reference.decode(q, sealed, open_, view, scale, softcap)


def write(open_: Pages, k: torch.Tensor, v: torch.Tensor, segments: np.ndarray) -> None:
    """New tokens into open pages; see `reference.write`."""
    (cpu if _native(open_) else reference).write(open_, k, v, segments)


def seal(sealed: Pages, ids: np.ndarray, k: torch.Tensor, v: torch.Tensor, places: np.ndarray) -> None:
    """Whole blocks of the input into sealed pages; see `reference.seal`."""
    native = _native(sealed) and not sealed.codec.lossless and cpu.supports(sealed.geometry, sealed.codec, 1)
    (cpu if native else reference).seal(sealed, ids, k, v, places)


def seal_pages(sealed: Pages, ids: np.ndarray, open_: Pages, sources: np.ndarray) -> None:
    """Open pages into sealed pages; see `reference.seal_pages`."""
    native = _native(sealed) and cpu.supports(sealed.geometry, sealed.codec, 1)
    (cpu if native else reference).seal_pages(sealed, ids, open_, sources)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Plain causal attention of new queries over new keys, `[batch, heads, n, dim]`, by torch's fused kernel.

    Returns `[batch, n, q_heads, v_dim]` in the dtype of `q`.
    """
    one = q.shape[2] == 1  # a single query is the newest one and sees every key
    out = F.scaled_dot_product_attention(q, k, v, is_causal=not one, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)
