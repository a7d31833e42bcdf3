"""Old blocks in host memory, brought back a layer ahead of the attention that reads them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..cold import Place
from ..kernels.base import Pages, View
from .base import Copies, Tier, check_limits, cold_ids, copies_to


class HostTier(Tier):
    """Sealed blocks older than `resident_tokens` move to host memory once, and are only read from there afterwards.

    On CUDA they lie in pinned memory; while a layer attends, the next layer's cold blocks travel on a copy stream into
    one of `ring` staging buffers, and the attention over them waits on that copy's event only. Where host and device
    are the same memory (the CPU), kernels read the host's pages where they are and nothing is copied back.

    Args:
        resident_tokens: newest positions of each row that stay on the device.
        host_bytes: bytes that all cold blocks of a pool may take up; None for no limit.
        ring: staging buffers; 2 let one layer's copy overlap with another's attention.
        direct: read host pages in place; None decides by device.

    Raises:
        ConfigurationError: for a negative number of tokens or bytes, or a ring without buffers.
    """

    name = "host"

    def __init__(
        self,
        resident_tokens: int = 1024,
        *,
        host_bytes: int | None = None,
        ring: int = 2,
        direct: bool | None = None,
    ):
        check_limits(resident_tokens, ring, host_bytes=host_bytes)
        self.resident_tokens, self.ring, self.direct = resident_tokens, ring, direct
        self.host_bytes, self.place = host_bytes, Place(host_bytes)
        self._staged: OrderedDict[tuple, _Staged] = OrderedDict()
        self._spare: list[torch.Tensor] = []
        self._copies: Copies | None = None

    def _reads_in_place(self, device: torch.device) -> bool:
        return device.type == "cpu" if self.direct is None else self.direct

    def staging_bytes(self, pages: np.ndarray, page_bytes: int, device: torch.device) -> np.ndarray:
        """A layer's cold pages in each buffer of the ring."""
        if self._reads_in_place(device):
            return np.zeros_like(pages)
        return np.where(pages > 0, self.ring * _with_room(pages) * page_bytes, 0)

    def prefetch(self, key: tuple[int, int], pages: Pages, view: View, device: torch.device, fresh: np.ndarray) -> None:
        if self.ring > 1 and not self._reads_in_place(device):  # a single buffer is still being read
            ids = cold_ids(view)
            self._stage(key, pages, ids[~np.isin(ids, fresh)], device)

    def read(
        self, key: tuple[int, int], pages: Pages, view: View, device: torch.device
    ) -> Iterator[tuple[Pages, View]]:
        if self._reads_in_place(device):
            return iter([(pages, view)])
        ids = cold_ids(view)
        staged = self._stage(key, pages, ids, device)
        self._wait(staged)
        order = np.argsort(staged.ids)
        places, table = order[np.searchsorted(staged.ids, ids, sorter=order)], view.ids.copy()
        for row, part in zip(table, np.split(places, np.cumsum(view.entry_end)[:-1]), strict=True):
            row[: len(part)] = part
        return iter([(pages.over(staged.buffer[: len(staged.ids)]), replace(view, ids=table))])

    def _stage(self, key: tuple, pages: Pages, ids: np.ndarray, device: torch.device) -> _Staged:
        """Bring what is not there yet of `ids` into the buffer of `key`."""
        self._copies = self._copies or copies_to(device)
        staged = self._staged.get(key)
        if staged is None:
            while len(self._staged) >= self.ring:
                self._spare.append(self._staged.popitem(last=False)[1].buffer)
            buffer = self._buffer(len(ids), pages.layout.nbytes, device)
            staged = self._staged[key] = _Staged(buffer, np.zeros(0, ids.dtype))
        missing = np.setdiff1d(ids, staged.ids)
        done = len(staged.ids)
        if done + len(missing) > len(staged.buffer):
            wider = self._buffer(done + len(missing), pages.layout.nbytes, device)
            self._wait(staged)
            wider[:done].copy_(staged.buffer[:done])
            staged.buffer = wider
        if len(missing):
            staged.copied = self._copies.begin(pages, missing, staged.buffer[done:])
            staged.ids = np.concatenate([staged.ids, missing])
            self.bytes_read += len(missing) * pages.layout.nbytes
        return staged

    def _wait(self, staged: _Staged) -> None:
        if staged.copied is not None:
            self._copies.wait(staged.copied)

    def _buffer(self, count: int, nbytes: int, device: torch.device) -> torch.Tensor:
        """A staging buffer for `count` pages: a spare one where it fits, else a new one with room to grow."""
        spare, self._spare = self._spare, []
        for buffer in spare:
            if buffer.shape[0] >= count and buffer.shape[1] == nbytes and buffer.device == device:
                return buffer
        return torch.empty((_with_room(count), nbytes), dtype=torch.uint8, device=device)


def _with_room(pages):
    """Rows of a staging buffer: with room for pages that become cold later."""
    return pages + pages // 8 + 1


@dataclass
class _Staged:
    """A staging buffer, the pages that its rows hold, and the copy after which they do."""

    buffer: torch.Tensor
    ids: np.ndarray
    copied: object = None
