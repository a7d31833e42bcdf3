"""Which kernel runs: the fastest one that the device and the shapes allow, the reference otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch

from . import cpu, reference
from .base import Pages, View

QUERIES = 64  # queries that a decode kernel takes over storage at once; longer inputs are a prefill


_plain_torch = ContextVar("plain_torch", default=False)


@contextmanager
def plain_torch() -> Iterator[None]:
    """The reference serves everything inside the `with` (of this thread): what kernels are checked against."""
    token = _plain_torch.set(True)
    try:
        yield
    finally:
        _plain_torch.reset(token)


def _native(pages: Pages) -> bool:
    return pages.slabs[0].device.type == "cpu" and cpu.load() is not None and not _plain_torch.get()


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
