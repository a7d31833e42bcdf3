"""Old blocks in host memory, brought back a layer ahead of the attention that reads them."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import numpy as np
import torch

from ..errors import ConfigurationError
from ..kernels.base import Pages
from .base import Tier


class HostTier(Tier):
    """Sealed blocks older than `resident_tokens` move to host memory once, and are only read from there afterwards.

    On CUDA they lie in pinned memory; while a layer attends, the next layer's cold blocks travel on a copy stream into
    one of `ring` staging buffers, and the attention over them waits on that copy's event only. Where host and device
    are the same memory (the CPU), kernels read the host's pages where they are and nothing is copied back.

    Args:
        resident_tokens: newest positions of each row that stay on the device.
        ring: staging buffers; 2 let one layer's copy overlap with another's attention.
        direct: read host pages in place; None decides by device.

    Raises:
        ConfigurationError: for a negative number of tokens or a ring without buffers.
    """

    name = "host"

    def __init__(self, resident_tokens: int = 1024, *, ring: int = 2, direct: bool | None = None):
        if not isinstance(resident_tokens, int) or resident_tokens < 0:
            raise ConfigurationError(
                f"resident_tokens={resident_tokens!r} must be a whole number of at least 0 tokens."
            )
        if ring < 1:
            raise ConfigurationError(f"ring={ring} leaves no buffer to bring blocks back to; use 2.")
        self.resident_tokens, self.ring, self.direct = resident_tokens, ring, direct
        self._staged: OrderedDict[tuple, tuple[Pages, torch.cuda.Event | None]] = OrderedDict()
        self._spare: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def _reads_in_place(self, device: torch.device) -> bool:
        return device.type == "cpu" if self.direct is None else self.direct

    def prefetch(self, key: tuple, pages: Pages, ids: np.ndarray, device: torch.device) -> None:
        if self._reads_in_place(device) or key in self._staged or not len(ids):
            return
        while len(self._staged) >= self.ring:
            _, (old, _) = self._staged.popitem(last=False)
            self._spare.append(old.slabs[0])
        buffer = self._buffer(len(ids), pages.layout.nbytes, device)
        event = None
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)
            # The buffer's last reader was queued on the compute stream: the copy must come after it.
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                _copy_runs(pages, ids, buffer)
                event = self._stream.record_event()
        else:
            _copy_runs(pages, ids, buffer)
        self._staged[key] = (_staged_pages(pages, buffer, len(ids)), event)

    def fetch(self, key: tuple, pages: Pages, ids: np.ndarray, device: torch.device) -> tuple[Pages, np.ndarray]:
        if self._reads_in_place(device):
            return pages, ids
        self.prefetch(key, pages, ids, device)
        staged, event = self._staged[key]
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)
        return staged, np.arange(len(ids), dtype=np.int32)

    def _buffer(self, count: int, nbytes: int, device: torch.device) -> torch.Tensor:
        """A staging buffer for `count` pages: a spare one where it fits, else a new one with room to grow."""
        spare, self._spare = self._spare, []
        for buffer in spare:
            if buffer.shape[0] >= count and buffer.shape[1] == nbytes and buffer.device == device:
                return buffer
        return torch.empty((count + count // 8 + 1, nbytes), dtype=torch.uint8, device=device)


def _copy_runs(pages: Pages, ids: np.ndarray, buffer: torch.Tensor) -> None:
    """Copy pages `ids` into the first rows of `buffer`, a run of neighbours at a time: a view of pinned memory copies
    asynchronously, an indexed copy of it would not."""
    jumps = (np.diff(pages.row[ids]) != 1) | (np.diff(pages.slab[ids]) != 0)
    starts = np.concatenate([[0], np.nonzero(jumps)[0] + 1, [len(ids)]])
    for start, stop in itertools.pairwise(starts):
        row = int(pages.row[ids[start]])
        source = pages.slabs[pages.slab[ids[start]]][row : row + stop - start]
        buffer[start:stop].copy_(source, non_blocking=True)


def _staged_pages(pages: Pages, buffer: torch.Tensor, count: int) -> Pages:
    addresses = buffer.data_ptr() + np.arange(count, dtype=np.int64) * pages.layout.nbytes
    slab, row = np.zeros(count, np.int32), np.arange(count, dtype=np.int32)
    return Pages(pages.codec, pages.geometry, pages.layout, pages.order, [buffer], slab, row, addresses)
