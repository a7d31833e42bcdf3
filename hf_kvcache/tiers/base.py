"""What a tier is: where sealed blocks live, and how a kernel gets at those that do not live on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import torch

from ..cold import Place
from ..errors import ConfigurationError
from ..kernels.base import Pages, View


class Tier(ABC):
    """Placement of the blocks of one cache.

    Attributes:
        name: the name used in tables and reports.
        resident_tokens: newest positions of each row that stay on the device; None keeps all of them.
        place: where the others are; None where there are none.
        bytes_written, bytes_read: bytes of pages that became cold, and that were brought back, since the cache was made.
    """

    name: str
    resident_tokens: int | None = None
    place: Place | None = None
    bytes_written = 0
    bytes_read = 0

    @abstractmethod
    def prefetch(self, key: tuple[int, int], pages: Pages, view: View, device: torch.device, fresh: np.ndarray) -> None:
        """Begin to bring to `device` what the next `read` is going to ask for. The pages `fresh` are not stored yet."""

    @abstractmethod
    def read(
        self, key: tuple[int, int], pages: Pages, view: View, device: torch.device
    ) -> Iterator[tuple[Pages, View]]:
        """Parts of `view`, with pages that a kernel of `device` can read until the next part is asked for.

        Args:
            key: number of the forward pass, and place of the layer in its group.
            pages: the layer's cold pages.
            view: what is to be read: every entry is one of those pages.

        Raises:
            TierError: pages are not what was stored, or cannot be read.
        """

    def staging_bytes(self, pages: np.ndarray, page_bytes: int, device: torch.device) -> np.ndarray:
        """Bytes on `device` of the buffers to which pages are brought back, at their most, where a layer has as many cold `pages`
        (an array of any shape) of up to `page_bytes` bytes."""
        return np.zeros_like(pages)

    def __repr__(self) -> str:
        return self.name


def cold_ids(view: View) -> np.ndarray:
    """The pages of a view that names cold pages only, row after row."""
    return np.concatenate([ids[:n] for ids, n in zip(view.ids, view.entry_end, strict=True)])


def check_limits(resident_tokens: int, ring: int, **limits: int | None) -> None:
    """Refuse numbers that make no sense."""
    if not isinstance(resident_tokens, int) or resident_tokens < 0:
        raise ConfigurationError(f"resident_tokens={resident_tokens!r} must be a whole number of at least 0 tokens.")
    if ring < 1:
        raise ConfigurationError(f"ring={ring} leaves no buffer to bring blocks back to; use 2.")
    for name, limit in limits.items():
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise ConfigurationError(
                f"{name}={limit!r} must be a whole number of at least 0 bytes, or None for no limit."
            )


class Copies:
    """Brings pages to where kernels read them: on a CPU at once."""

    def begin(self, pages: Pages, ids: np.ndarray, buffer: torch.Tensor):
        """Copy pages `ids` into the first rows of `buffer`, after all that was queued before; returns what `wait` takes, or None
        where it is done."""
        copy_runs(pages, ids, buffer)

    def wait(self, copied) -> None:
        """Have what is queued from now on come after a copy."""


class CudaCopies(Copies):
    """The same in a stream of its own, beside the one that computes; nobody waits for either of them."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    def begin(self, pages: Pages, ids: np.ndarray, buffer: torch.Tensor) -> torch.cuda.Event:
        # The buffer's last reader was queued on the compute stream: the copy must come after it.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        buffer.record_stream(self.stream)  # its memory may be given up while the copy is still under way
        with torch.cuda.stream(self.stream):
            copy_runs(pages, ids, buffer)
            return self.stream.record_event()

    def wait(self, copied: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(copied)


def copies_to(device: torch.device) -> Copies:
    return CudaCopies(device) if device.type == "cuda" else Copies()


def copy_runs(pages: Pages, ids: np.ndarray, buffer: torch.Tensor) -> None:
    """Copy pages `ids` into the first rows of `buffer`, a run of neighbours at a time: a view of pinned memory copies
    asynchronously, an indexed copy of it would not."""
    jumps = np.nonzero((np.diff(pages.row[ids]) != 1) | (np.diff(pages.slab[ids]) != 0))[0] + 1
    for run in np.split(np.arange(len(ids)), jumps):
        row = int(pages.row[ids[run[0]]])
        source = pages.slabs[pages.slab[ids[run[0]]]][row : row + len(run)]
        buffer[run[0] : run[-1] + 1].copy_(source, non_blocking=True)
