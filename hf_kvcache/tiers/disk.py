"""Old blocks in a file, read back a few chunks ahead of the attention that reads them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from .. import files
from ..cold import Place, SpillFile
from ..errors import ConfigurationError, TierError
from ..kernels.base import Pages, View
from .base import Tier, check_limits, copy_runs

CHUNK = 4 << 20  # bytes: the overhead of a part of attention is small beside it, and processor caches still hold it
SMALL = 1 << 18  # bytes: cutting a layer into smaller parts than this only costs


class DiskTier(Tier):
    """Sealed blocks older than `resident_tokens` move once: to host memory until `host_bytes` are full, then to a file.

    The attention over them goes chunk by chunk. A thread reads ahead: while one chunk is attended to the next ones are read
    into the other buffers of the `ring`, at the end of a layer those of the next layer, so that memory stays the same whatever
    the length of the text. Every page has a checksum, which is compared as the page is read.

    Args:
        resident_tokens: newest positions of each row that stay on the device. Those of a pass that is under way come on top.
        path: folder of the spill file; made where it is missing. None for the folder of temporary files, which on some systems
            is memory.
        host_bytes: bytes of host memory that all cold blocks of a pool may take up first; None for no limit. On a CPU, which
            computes in that memory, raising it is no different from raising `resident_tokens`.
        disk_bytes: bytes of pages that their file may hold; gaps between them may add to the file. None for what the file
            system has left.
        ring: buffers of at most `chunk_bytes` (or of one block of each row, where that is more).
        chunk_bytes: bytes that are read, and attended to, at a time.
        direct: read pages in host memory; None decides by device.

    Raises:
        ConfigurationError: for numbers that make no sense, a folder that cannot be written to, a file system without
            `disk_bytes` of room, or an operating system without positional reads.
    """

    name = "disk"

    def __init__(
        self,
        resident_tokens: int = 1024,
        path: str | os.PathLike | None = None,
        *,
        host_bytes: int | None = 0,
        disk_bytes: int | None = None,
        ring: int = 3,
        chunk_bytes: int = CHUNK,
        direct: bool | None = None,
    ):
        check_limits(resident_tokens, ring, host_bytes=host_bytes, disk_bytes=disk_bytes, chunk_bytes=chunk_bytes)
        self.resident_tokens, self.ring, self.chunk_bytes, self.direct = resident_tokens, ring, chunk_bytes, direct
        folder = Path(tempfile.gettempdir() if path is None else path).absolute()
        _check_folder(folder, disk_bytes)
        self.host_bytes, self.disk_bytes, self.place = host_bytes, disk_bytes, Place(host_bytes, folder, disk_bytes)
        self._plan: tuple[View, int, list[_Chunk]] | None = None
        self._waiting: deque[tuple[tuple, Pages, _Chunk]] = deque()
        self._started: deque[_Read] = deque()  # in the order in which they will be asked for
        self._in_use: _Read | None = None
        self._lent = 0
        self._newest = (-1, -1)
        self._stream: torch.cuda.Stream | None = None

    def prefetch(self, key: tuple[int, int], pages: Pages, view: View, device: torch.device, fresh: np.ndarray) -> None:
        if key <= self._newest:
            return  # layers that share keys and values come back to earlier ones: what followed those was read then
        self._newest = key
        for chunk in self._chunks(view, pages):
            if np.isin(chunk.ids, fresh).any():
                break
            self._waiting.append((key, pages, chunk))
        self._start()

    def read(
        self, key: tuple[int, int], pages: Pages, view: View, device: torch.device
    ) -> Iterator[tuple[Pages, View]]:
        self._newest = max(self._newest, key)
        chunks = self._chunks(view, pages)
        ahead = [(read.key, read.chunk) for read in self._started] + [(k, chunk) for k, _, chunk in self._waiting]
        if self._in_use is not None or ahead != [(key, chunk) for chunk in chunks[: len(ahead)]]:
            self._forget()
            ahead = []
        self._waiting.extend((key, pages, chunk) for chunk in chunks[len(ahead) :])
        self._start()
        return self._arriving(len(chunks), device)

    def _arriving(self, count: int, device: torch.device) -> Iterator[tuple[Pages, View]]:
        for _ in range(count):
            self._start()
            read = self._in_use = self._started.popleft()
            try:
                pages = read.pages()
            except TierError:
                self._forget()
                raise
            yield (pages if self._reads_in_place(device) else self._copied(pages, device)), read.chunk.view
            self._in_use = None
            self._give_back(read)

    def _chunks(self, view: View, pages: Pages) -> list[_Chunk]:
        """What is read at a time: the same entries of all rows, so that a page that rows share is read once. As many as the
        ring has buffers, so that reading overlaps with attending and the ring holds no more than a layer; more of `chunk_bytes`
        where they would be larger. The layers of a pass share them."""
        nbytes = pages.layout.nbytes
        if self._plan is None or self._plan[0] is not view or self._plan[1] != nbytes:
            entries, of_all_rows = int(view.entry_end.max()), nbytes * len(view.ids)
            step = int(self._step(entries, of_all_rows))
            self._plan = view, nbytes, [_chunk(view, pages, i, i + step) for i in range(0, entries, step)]
        return self._plan[2]

    def _step(self, entries, nbytes: int):
        """How many of `entries` of each row, `nbytes` bytes in all rows, are read at a time."""
        least = np.maximum(-(-entries // self.ring), SMALL // nbytes)
        return np.maximum(1, np.minimum(least, self.chunk_bytes // nbytes))

    def _start(self) -> None:
        """Begin to read what waits, as far as there are buffers. What is in memory already needs none."""
        while self._waiting and self._lent < self.ring:
            key, pages, chunk = self._waiting.popleft()
            read = _Read(key, pages, chunk)
            if len(chunk.filed):
                read.begin()
                self._lent += 1
                self.bytes_read += len(chunk.filed) * pages.layout.nbytes
            self._started.append(read)

    def _give_back(self, read: _Read) -> None:
        if read.buffer is not None:
            read.file.take_back(read.buffer)
            self._lent -= 1

    def _forget(self) -> None:
        """Drop what was begun and will not be asked for: its pass did not go on."""
        self._waiting.clear()
        if self._in_use is not None:
            self._started.appendleft(self._in_use)
            self._in_use = None
        while self._started:
            read = self._started.popleft()
            if read.future is not None and not read.future.cancel():
                read.future.exception()  # whatever it is, it is no longer wanted; but the buffer is written to until then
            self._give_back(read)

    # ---- devices other than the host --------------------------------------------------------------------------------

    def _reads_in_place(self, device: torch.device) -> bool:
        return device.type == "cpu" if self.direct is None else self.direct

    def staging_bytes(self, pages: np.ndarray, page_bytes: int, device: torch.device) -> np.ndarray:
        """Two chunks: one is attended to while the next arrives. (What is read from the file lies in host memory.)"""
        if self._reads_in_place(device):
            return np.zeros_like(pages)
        return 2 * np.minimum(pages, self._step(pages, page_bytes)) * page_bytes

    def _copied(self, pages: Pages, device: torch.device) -> Pages:
        """Pages on `device`, on CUDA copied in a stream of its own, whose memory the copy need not wait for."""
        ids, shape = np.arange(len(pages.row)), (len(pages.row), pages.layout.nbytes)
        if device.type != "cuda":
            buffer = torch.empty(shape, dtype=torch.uint8, device=device)
            copy_runs(pages, ids, buffer)
            return pages.over(buffer)
        self._stream, current = self._stream or torch.cuda.Stream(device), torch.cuda.current_stream(device)
        with torch.cuda.stream(self._stream):
            buffer = torch.empty(shape, dtype=torch.uint8, device=device)
            copy_runs(pages, ids, buffer)
        buffer.record_stream(current)
        self._stream.synchronize()  # the staging buffer is read into again
        return pages.over(buffer)


@dataclass(eq=False)
class _Chunk:
    """A part of a view.

    Attributes:
        ids: the pages that the part names; the ids of its view are places in here.
        filed: places of those that are in a file, in the order in which they are read.
        slabs: number of each slab that they are in, their places among them, and their rows.
    """

    view: View
    ids: np.ndarray
    filed: np.ndarray
    slabs: list[tuple[int, np.ndarray, np.ndarray]]


def _chunk(view: View, pages: Pages, start: int, stop: int) -> _Chunk:
    """Entries `[start, stop)` of every row."""
    begin, end = (np.minimum(view.entry_end, bound).astype(np.int32) for bound in (start, stop))
    ids = np.unique(np.concatenate([row[a:b] for row, a, b in zip(view.ids, begin, end, strict=True)]))
    table = view.ids.copy()
    for row, a, b in zip(table, begin, end, strict=True):
        row[a:b] = np.searchsorted(ids, row[a:b])
    filed = np.nonzero(pages.in_file(ids))[0]
    numbers, rows = pages.slab[ids[filed]], pages.row[ids[filed]]
    places = {int(number): np.nonzero(numbers == number)[0] for number in np.unique(numbers)}
    slabs = [(number, place, rows[place]) for number, place in places.items()]
    return _Chunk(replace(view, ids=table, entry_begin=begin, n_sealed=end, entry_end=end), ids, filed, slabs)


@dataclass(eq=False)
class _Read:
    """A chunk of a layer's pages on its way: what comes from a file is read into the rows of a buffer."""

    key: tuple[int, int]
    source: Pages
    chunk: _Chunk
    file: SpillFile | None = None
    buffer: torch.Tensor | None = None
    future: Future | None = None

    def begin(self) -> None:
        """Have the thread read."""
        ids, slabs = self.chunk.ids[self.chunk.filed], self.source.slabs
        sums = np.empty(len(ids), np.uint64)
        for number, places, rows in self.chunk.slabs:
            sums[places] = slabs[number].sums[rows]
        self.file = slabs[number].file
        self.buffer = self.file.lend(len(ids) * self.source.layout.nbytes)
        self.future = self.file.submit(self.source.addresses[ids], sums, self._rows())

    def _rows(self) -> torch.Tensor:
        nbytes = self.source.layout.nbytes
        return self.buffer[: len(self.chunk.filed) * nbytes].view(-1, nbytes)

    def pages(self) -> Pages:
        """All of the chunk's pages in memory, once they are there, numbered as the view does."""
        pages, ids, filed = self.source, self.chunk.ids, self.chunk.filed
        if self.future is None:
            return replace(pages, slab=pages.slab[ids], row=pages.row[ids], addresses=pages.addresses[ids])
        self.future.result()
        read = pages.over(self._rows())
        if len(filed) == len(ids):
            return read
        slab, row, addresses = pages.slab[ids] + 1, pages.row[ids], pages.addresses[ids]
        slab[filed], row[filed], addresses[filed] = 0, read.row, read.addresses
        return replace(pages, slabs=[*read.slabs, *pages.slabs], slab=slab, row=row, addresses=addresses)


def _check_folder(folder: Path, disk_bytes: int | None) -> None:
    if not hasattr(os, "preadv"):
        raise ConfigurationError("this system has no positional reads (os.preadv): use HostTier.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.remove_leftovers(folder)
        path, file = files.temporary(folder, "spill")
        with contextlib.closing(file):
            path.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigurationError(
            f"blocks cannot be kept in {folder}: {error.strerror}. Give a folder that can be written to."
        ) from error
    if disk_bytes is not None and disk_bytes > free:
        raise ConfigurationError(
            f"disk_bytes={disk_bytes} is more than the {free} bytes that are free in {folder}: give less, or another folder."
        )
