"""Which kernel runs: the fastest one that the device and the shapes allow, the reference otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import numpy as np
import torch

from . import cpu, cuda, reference
from .base import Pages, View

QUERIES = 64  # queries that read themselves from storage too; of longer inputs the new part is read as it came in


_plain_torch = ContextVar("plain_torch", default=False)


@contextmanager
def plain_torch() -> Iterator[None]:
    """The reference serves everything inside the `with` (of this thread): what kernels are checked against."""
    token = _plain_torch.set(True)
    try:
        yield
    finally:
        _plain_torch.reset(token)


def _native(pages: Pages, x: torch.Tensor) -> ModuleType | None:
    """The native kernels of the device on which `pages` and `x` are; None where there are none, or `x` is elsewhere."""
    device = pages.slabs[0].device
    if _plain_torch.get() or x.device != device:
        return None
    if device.type == "cpu":
        return cpu if cpu.load() is not None else None
    return cuda if device.type == "cuda" and cuda.available() else None


def decode(
    q: torch.Tensor, sealed: Pages, open_: Pages, view: View, scale: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over stored pages; see `reference.decode`."""
    kernels = _native(sealed if sealed.slabs else open_, q)
    if kernels is not None and kernels.supports(sealed.geometry, sealed.codec, q.shape[2]):
        return kernels.decode(q, sealed, open_, view, scale, softcap)
    return reference.decode(q, sealed, open_, view, scale, softcap)


def write(open_: Pages, k: torch.Tensor, v: torch.Tensor, segments: np.ndarray) -> None:
    """New tokens into open pages; see `reference.write`."""
    (_native(open_, k) or reference).write(open_, k, v, segments)


def seal(sealed: Pages, ids: np.ndarray, k: torch.Tensor, v: torch.Tensor, places: np.ndarray) -> None:
    """Whole blocks of the input into sealed pages; see `reference.seal`."""
    _sealing(sealed, k).seal(sealed, ids, k, v, places)


def seal_pages(sealed: Pages, ids: np.ndarray, open_: Pages, sources: np.ndarray) -> None:
    """Open pages into sealed pages; see `reference.seal_pages`."""
    _sealing(sealed, open_.slabs[0]).seal_pages(sealed, ids, open_, sources)


def _sealing(sealed: Pages, source: torch.Tensor) -> ModuleType:
    kernels = None if sealed.codec.lossless else _native(sealed, source)
    return kernels if kernels is not None and kernels.supports(sealed.geometry, sealed.codec, 1) else reference
