"""Where cold pages are: in host memory up to a limit, then in a file.

The stores of cold pages (`pages.py`) do not care: a slab is a tensor or a `DiskSlab`, and a page that has moved stays where it
is. Every cold page is read at every step, so that none of them would gain by being moved again.

A spill file is read with plain positional reads into buffers that are used again, and is not mapped into memory: pages of a
mapping count as this process's own, so that a context larger than memory would look (and, under a limit, be) as large as it is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from . import files
from .errors import CapacityError, TierError
from .kernels import cpu

if TYPE_CHECKING:
    from .pages import PageStore

GROWTH = 32  # a store that is full grows by a 32nd, where the limits allow
UNLIMITED = 1 << 62  # bytes
ALIGNMENT = 4096  # bytes: slabs begin at a page of the file system

Wanted = list[tuple["PageStore", int]]  # pages that stores are going to take


@dataclass(frozen=True)
class Place:
    """Where a tier keeps what is not on the device: host memory up to `host_bytes` (None: without a limit), then a file in
    `folder` (None: nowhere) of at most `disk_bytes` of pages (None: what the file system has left)."""

    host_bytes: int | None = None
    folder: Path | None = None
    disk_bytes: int | None = None


class ColdMemory:
    """What is left of a `Place`, for all stores of a pool that keep pages there."""

    def __init__(self, place: Place):
        self.place = place
        self.stores: weakref.WeakSet[PageStore] = weakref.WeakSet()
        self._file: SpillFile | None = None

    @property
    def file(self) -> SpillFile:
        """The spill file, which the first slab on disk makes."""
        if self._file is None:
            self._file = SpillFile(self.place.folder)
        return self._file

    def refusal(self, wanted: Wanted) -> CapacityError | None:
        """The error of pages that do not fit. Changes nothing."""
        room = self._room()
        left = dict(room)
        if self._divide(wanted, left) is not None:
            return None
        place, needed = self.place, sum(pages * store.page_bytes for store, pages in _short(wanted))
        limits = [f"{room[False]} bytes are left of host_bytes={place.host_bytes}"]
        if place.folder is not None:
            limit = "what the file system has" if place.disk_bytes is None else f"disk_bytes={place.disk_bytes}"
            limits.append(f"{room[True]} of {limit} in {place.folder}")
        return CapacityError(
            f"{needed} more bytes of cold blocks are needed, {' and '.join(limits)}. Shorten the input, choose fewer bits, crop "
            "or reset a cache of this pool, or give the tier more (host_bytes, disk_path, disk_bytes).",
            needed=needed,
            available=sum(room.values()),
            unit="bytes",
        )

    def make_room(self, wanted: Wanted) -> None:
        """Let every store have as many free pages as it is going to take. `refusal` must have said None."""
        room = self._room()
        for store, pages, on_disk in self._divide(wanted, room):
            spare = min(max(0, len(store.refs) // GROWTH - pages), _pages(room[on_disk], store))
            room[on_disk] -= spare * store.page_bytes
            store.grow(pages + spare, on_disk)

    def _room(self) -> dict[bool, int]:
        """Bytes left, by whether they are on disk."""
        host, folder, disk = self.place.host_bytes, self.place.folder, self.place.disk_bytes
        used = {where: sum(store.reserved_bytes(where) for store in self.stores) for where in (False, True)}
        room = {False: UNLIMITED if host is None else max(0, host - used[False]), True: 0}
        if folder is not None:
            free = shutil.disk_usage(folder).free if folder.exists() else 0
            room[True] = free if disk is None else min(free, max(0, disk - used[True]))
        return room

    def _divide(self, wanted: Wanted, room: dict[bool, int]) -> list[tuple[PageStore, int, bool]] | None:
        """`(store, pages, on disk)` to grow by, host memory first; takes that from `room`. None where it does not fit."""
        parts = []
        for store, short in _short(wanted):
            for on_disk in (False, True):
                pages = min(short, _pages(room[on_disk], store))
                if pages:
                    parts.append((store, pages, on_disk))
                    room[on_disk] -= pages * store.page_bytes
                    short -= pages
            if short:
                return None
        return parts


def _short(wanted: Wanted) -> Iterable[tuple[PageStore, int]]:
    return [(store, pages - len(store.free)) for store, pages in wanted if pages > len(store.free)]


def _pages(room: int, store: PageStore) -> int:
    """Pages of `store` that `room` bytes hold."""
    return room // (store.page_bytes or 1)  # a layer whose shape no config tells has no size before it has come


class SpillFile:
    """A file of slabs that goes with this process, the thread that reads it, and the buffers that it reads into.

    The file keeps its name while it is in use, so that it is seen what takes up the disk, and its lock: what a killed process
    leaves behind is removed when the next tier is made for the same folder.

    Raises:
        TierError: the file cannot be made.
    """

    def __init__(self, folder: Path):
        try:
            self.path, file = files.temporary(folder, "spill")
        except OSError as error:
            raise TierError(f"no spill file can be made in {folder}: {error.strerror}.") from error
        self._descriptor, self._process = file.fileno(), os.getpid()
        self._closing = weakref.finalize(self, _remove, file, self.path, self._process)
        self._gaps: dict[int, int] = {}  # bytes that are free, by where they begin
        self._end = 0
        self._spare: list[torch.Tensor] = []
        self._reader: ThreadPoolExecutor | None = None

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return self._end

    # ---- extents: the pool's lock is held ---------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Where `nbytes` bytes are free from now on not: the first gap that is large enough, or the end."""
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        start = next((start for start in sorted(self._gaps) if self._gaps[start] >= nbytes), None)
        if start is None:
            start, self._end = self._end, self._end + nbytes
        elif (rest := self._gaps.pop(start) - nbytes) > 0:
            self._gaps[start + nbytes] = rest
        return start

    def release(self, start: int, nbytes: int) -> None:
        """Give an extent back; the file becomes shorter where it was the last one."""
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for other, size in list(self._gaps.items()):
            if other + size == start or start + nbytes == other:
                start, nbytes = min(start, other), nbytes + self._gaps.pop(other)
        if start + nbytes < self._end:
            self._gaps[start] = nbytes
            return
        self._end = start
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):  # what stays is used again, or goes with the file
                os.ftruncate(self._descriptor, start)

    # ---- bytes ------------------------------------------------------------------------------------------------------

    def write(self, offsets: np.ndarray, pages: np.ndarray) -> None:
        """Write `pages` (uint8 `[n, nbytes]`) at `offsets` (int64 `[n]`).

        Raises:
            TierError: the disk is full, or another error of the operating system.
        """
        self._check_process()
        for start, stop in files.runs(offsets, pages.shape[1]):
            data, offset = memoryview(np.ascontiguousarray(pages[start:stop])).cast("B"), int(offsets[start])
            try:
                while len(data):
                    written = os.pwrite(self._descriptor, data, offset)
                    data, offset = data[written:], offset + written
            except OSError as error:
                raise TierError(
                    f"{len(data)} bytes could not be written at {offset} of {self.path}: {error.strerror}", offset
                ) from error

    def read(self, offsets: np.ndarray, sums: np.ndarray, pages: torch.Tensor) -> None:
        """Fill `pages` (uint8 `[n, nbytes]`) from `offsets` (int64 `[n]`) and compare with their checksums (uint64 `[n]`). What
        is not right is read once more.

        Raises:
            TierError: an error of the operating system, a file that ends early, or bytes that are not what was written.
        """
        self._check_process()
        native = cpu.read_pages if cpu.load() is not None else files.read_rows
        if native(self._descriptor, offsets, sums, pages.numpy()) is None:
            return
        wrong = files.read_rows(self._descriptor, offsets, sums, pages.numpy())
        if wrong is not None:
            row, reason = wrong
            size, offset = pages.shape[1], int(offsets[row])
            raise TierError(f"{size} bytes at {offset} of {self.path} could not be read, twice: {reason}", offset)

    def submit(self, *arguments):
        """`read` in the thread that reads ahead; returns its future."""
        self._check_process()
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "hf_kvcache reads ahead")
        return self._reader.submit(self.read, *arguments)

    def lend(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least `nbytes` bytes, pinned where there is a device that copies from it."""
        with contextlib.suppress(IndexError):  # there are no more; several threads may be taking them
            while len(buffer := self._spare.pop()) < nbytes:
                pass
            return buffer
        with torch.inference_mode(False):
            return torch.empty(nbytes + nbytes // 8, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def take_back(self, buffer: torch.Tensor) -> None:
        """The end of a loan."""
        self._spare.append(buffer)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise TierError(
                f"{self.path} belongs to process {self._process}, which was forked: a cache on disk serves the process that "
                "filled it. Make another one here"
            )


def _remove(file, path: Path, process: int) -> None:
    file.close()
    if os.getpid() == process:  # a forked process has its own copy of everything but the file
        path.unlink(missing_ok=True)


class DiskSlab:
    """Pages in a spill file, in the place of a tensor of them: uint8 `[rows, page_bytes]`, read and written by rows.

    Attributes:
        offset: where in the file row 0 begins.
        sums: `[rows]` the checksums of what was written; until then, what no bytes have.
    """

    device = torch.device("cpu")

    def __init__(self, file: SpillFile, rows: int, page_bytes: int):
        self.file, self.page_bytes = file, page_bytes
        self.offset = file.allocate(rows * page_bytes)
        self.sums = np.zeros(rows, np.uint64)

    def __len__(self) -> int:
        return len(self.sums)

    @property
    def nbytes(self) -> int:
        return len(self) * self.page_bytes

    def offsets(self, rows: np.ndarray) -> np.ndarray:
        return self.offset + rows.astype(np.int64) * self.page_bytes

    def view(self, dtype: torch.dtype) -> DiskSlab:
        """Bytes are read and written, whatever they stand for."""
        return self

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        rows, pages = rows.numpy(), torch.empty((len(rows), self.page_bytes), dtype=torch.uint8)
        self.file.read(self.offsets(rows), self.sums[rows], pages)
        return pages

    def __setitem__(self, rows: torch.Tensor, pages: torch.Tensor) -> None:
        rows, pages = rows.numpy(), pages.view(torch.uint8).numpy()
        self.file.write(self.offsets(rows), pages)
        self.sums[rows] = cpu.checksums(pages)

    def spoil(self, rows: np.ndarray) -> None:
        """Have a later read of these rows fail."""
        self.sums[rows] = 0

    def free(self) -> None:
        self.file.release(self.offset, self.nbytes)
