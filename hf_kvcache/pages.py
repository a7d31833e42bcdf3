"""Pages with reference counts, and the memory behind them.

A **page** is the bytes of one block in one layer. Nothing here knows which row a page belongs to: that is the business of the
block tables (`blocks.py`), which take pages from a store and give them back. How many there may be, the pool (`pool.py`) says.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .codecs import Codec, Geometry
from .codecs.packing import order_for
from .cold import GROWTH, ColdMemory, DiskSlab
from .errors import CacheInputError, IntegrityError
from .kernels.base import Pages
from .prefix import PrefixIndex

if TYPE_CHECKING:
    from .pool import Lock


class PageStore:
    """Pages of one codec for all layers of a group, on a device or in cold memory, with reference counts.

    A page id means the same block in every layer. Memory comes in **slabs**, one tensor (or part of a file) per layer and
    slab, allocated when a layer first needs it; a slab is never moved, and given back when none of its pages is in use. A
    store that is full grows by a 32nd: at most 3 % is reserved beyond what is used. One reference to each of the pages in
    `named` is the prefix index's, which is told when it is the last one.
    """

    def __init__(
        self,
        codec: Codec,
        layers: int,
        lock: Lock,
        index: PrefixIndex,
        *,
        cold: ColdMemory | None = None,
        poison: bool = False,
    ):
        self.codec, self.lock, self.index, self.cold, self.poison = codec, lock, index, cold, poison
        if cold is not None:
            cold.stores.add(self)
        self.reserve = 0  # pages of the first slab, at least
        self.refs, self.named = np.zeros(0, np.int32), np.zeros(0, bool)
        self.slab_of, self.row_of = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self.free: list[int] = []
        self.retired: list[int] = []  # ids whose slab was given back; reused before new ids are made
        self.slab_sizes: list[int] = []  # 0 where the slab was given back
        self.slab_on_disk: list[bool] = []
        self.pages: list[Pages | None] = [None] * layers
        self._devices: list[torch.device | None] = [None] * layers
        self._signature: str | None = None

    @property
    def used(self) -> int:
        """Pages that somebody refers to."""
        return len(self.refs) - len(self.free) - len(self.retired)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers that have been bound."""
        return sum(pages.layout.nbytes for pages in self.pages if pages is not None)

    def reserved_bytes(self, on_disk: bool) -> int:
        """Bytes of the slabs in memory, or of those on disk, in all layers that have been bound."""
        slabs = zip(self.slab_sizes, self.slab_on_disk, strict=True)
        return self.page_bytes * sum(size for size, where in slabs if where == on_disk)

    def on_disk(self, ids: np.ndarray) -> np.ndarray:
        """`[len(ids)]` which of these pages are in a file."""
        return np.array(self.slab_on_disk, bool)[self.slab_of[ids]]

    def bind(self, layer: int, geometry: Geometry, device: torch.device) -> None:
        """Tell the store what `layer`'s pages look like. A layer that holds no slab yet may be bound again."""
        order = order_for(device)
        layout = self.codec.layout(geometry, order)
        with self.lock:
            if self.holds(layer, geometry, device):
                return  # another thread was first, and may have stored something already
            addresses = np.zeros(len(self.refs), np.int64)
            self.pages[layer] = Pages(self.codec, geometry, layout, order, [], self.slab_of, self.row_of, addresses)
            self._devices[layer] = device if self.cold is None else torch.device("cpu")
            self._signature = None

    def holds(self, layer: int, geometry: Geometry, device: torch.device) -> bool:
        """Whether `layer` is bound to just this."""
        place = device if self.cold is None else torch.device("cpu")
        return self.pages[layer] is not None and (self.pages[layer].geometry, self._devices[layer]) == (geometry, place)

    def device(self, layer: int) -> torch.device | None:
        """Where `layer`'s pages are."""
        return self._devices[layer]

    def is_vacant(self, layer: int) -> bool:
        """Whether `layer` has no memory yet, and may be bound to something else."""
        return self.pages[layer] is None or not any(len(slab) for slab in self.pages[layer].slabs)

    def layer(self, layer: int) -> Pages:
        """The pages of `layer`, with memory behind every id."""
        pages = self.pages[layer]
        if len(pages.slabs) < len(self.slab_sizes):
            with self.lock:
                for number in range(len(pages.slabs), len(self.slab_sizes)):
                    self._add_slab(pages, number, self._devices[layer])
        return pages

    def _add_slab(self, pages: Pages, number: int, device: torch.device) -> None:
        shape = (self.slab_sizes[number], pages.layout.nbytes)
        if self.slab_on_disk[number]:
            slab = DiskSlab(self.cold.file, *shape)
            start = slab.offset
        else:
            slab = self._allocate(shape, device)
            start = slab.data_ptr()
        ids = np.nonzero(self.slab_of == number)[0]
        pages.addresses[ids] = start + self.row_of[ids].astype(np.int64) * pages.layout.nbytes
        pages.slabs.append(slab)

    def _allocate(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        pin = self.cold is not None and torch.cuda.is_available()
        with torch.inference_mode(False):  # pages outlive the pass that needs them first, and are written to in others
            slab = torch.empty(shape, dtype=torch.uint8, device=device, pin_memory=pin)
        if device.type == "cpu" and not pin:
            _ask_for_huge_pages(slab)
        if self.poison:
            slab.fill_(0xFF)
        return slab

    def take(self, count: int) -> list[int]:
        """`count` pages, each with one reference. (Cold memory has made room for its own.)"""
        if count > len(self.free):
            reserve = 0 if any(self.slab_sizes) else self.reserve
            self.grow(max(count - len(self.free), len(self.refs) // GROWTH, reserve))
        taken = [self.free.pop() for _ in range(count)]
        self.refs[taken] = 1
        return taken

    def retain(self, ids: np.ndarray) -> None:
        woken = ids[self.named[ids] & (self.refs[ids] == 1)]
        np.add.at(self.refs, ids, 1)
        if len(woken):
            self.index.wake(self, dict.fromkeys(woken.tolist()))

    def release(self, ids: np.ndarray) -> None:
        """Drop one reference for each of `ids`; pages without any go back to the free list, last freed first used."""
        np.subtract.at(self.refs, ids, 1)
        resting = ids[self.named[ids] & (self.refs[ids] == 1)]
        if len(resting):
            self.index.rest(self, dict.fromkeys(resting[::-1].tolist()))  # the end of a row first
        freed = np.unique(ids[self.refs[ids] == 0])
        if self.poison:
            self._poison(freed)
        self.free.extend(freed[::-1].tolist())

    def name(self, page: int) -> None:
        """The prefix index names this page now, which somebody uses."""
        self.refs[page] += 1
        self.named[page] = True

    def unname(self, page: int) -> None:
        """The prefix index no longer names this page."""
        self.named[page] = False
        self.release(np.array([page], np.int32))

    def trim(self) -> None:
        """Give back the memory of slabs that hold no page in use."""
        for number, size in enumerate(self.slab_sizes):
            ids = np.nonzero(self.slab_of == number)[0]
            if size and not self.refs[ids].any():
                self.slab_sizes[number] = 0
                self.slab_of[ids] = -1
                gone = set(ids.tolist())
                self.free = [i for i in self.free if i not in gone]
                self.retired.extend(gone)
                for pages in self.pages:
                    if pages is not None and number < len(pages.slabs):
                        slab = pages.slabs[number]
                        if isinstance(slab, DiskSlab):
                            slab.free()
                        pages.slabs[number] = torch.empty(
                            (0, pages.layout.nbytes), dtype=torch.uint8, device=slab.device
                        )
                        pages.addresses[ids] = 0

    @property
    def signature(self) -> str | None:
        """Names what the bytes of a page mean in all layers: only pages of stores with one signature can take each other's
        place. None until every layer is bound."""
        if self._signature is None and None not in self.pages:
            said = [(sys.byteorder, self.codec.name, p.order, p.geometry, p.layout) for p in self.pages]
            self._signature = hashlib.sha256(repr(said).encode()).hexdigest()[:16]
        return self._signature

    def raw(self, ids: np.ndarray) -> torch.Tensor:
        """A copy of the bytes of pages `ids`, each with all of its layers one after the other: uint8 `[len(ids), page_bytes]` in
        host memory. One transfer for all layers of a device."""
        parts = []
        for _, layers in itertools.groupby(range(len(self.pages)), key=self.device):
            part = torch.cat([self.layer(layer).raw(ids) for layer in layers], dim=1)
            parts.append(part if part.device.type == "cpu" else empty_host(part.shape).copy_(part))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def put_raw(self, ids: np.ndarray, pages: torch.Tensor) -> None:
        """Store bytes (as of `raw`) into pages `ids`. One transfer for all layers of a device, then one copy for each layer."""
        start = 0
        for device, layers in itertools.groupby(range(len(self.pages)), key=self.device):
            layers = [self.layer(layer) for layer in layers]
            sizes = [layer.layout.nbytes for layer in layers]
            part = pages[:, start : start + sum(sizes)].to(device)
            for layer, bytes_ in zip(layers, part.split(sizes, dim=1), strict=True):
                layer.put_raw(ids, bytes_)
            start += sum(sizes)

    def nbytes(self) -> int:
        """Bytes of the storages that are allocated, counted from the storages themselves, and of the slabs on disk."""
        slabs = [slab for pages in self.pages if pages is not None for slab in pages.slabs]
        on_disk = sum(slab.nbytes for slab in slabs if isinstance(slab, DiskSlab))
        storages = [slab.untyped_storage() for slab in slabs if isinstance(slab, torch.Tensor)]
        return on_disk + sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def expected_bytes(self) -> int:
        """What `nbytes` is once every layer has asked for the memory of its pages."""
        return sum(self.slab_sizes) * self.page_bytes

    def grow(self, count: int, on_disk: bool = False) -> None:
        """`count` more free pages, in a slab of their own."""
        fresh = self.retired[-count:]
        del self.retired[len(self.retired) - len(fresh) :]
        old = len(self.refs)
        fresh = fresh + list(range(old, old + count - len(fresh)))
        extra = count if not old else max(0, max(fresh) + 1 - old)
        self.refs = np.concatenate([self.refs, np.zeros(extra, np.int32)])
        self.named = np.concatenate([self.named, np.zeros(extra, bool)])
        self.slab_of = np.concatenate([self.slab_of, np.full(extra, -1, np.int32)])
        self.row_of = np.concatenate([self.row_of, np.zeros(extra, np.int32)])
        self.slab_of[fresh] = len(self.slab_sizes)
        self.row_of[fresh] = np.arange(count)
        self.slab_sizes.append(count)
        self.slab_on_disk.append(on_disk)
        self.free.extend(reversed(fresh))
        for pages in self.pages:
            if pages is not None:
                pages.slab, pages.row = self.slab_of, self.row_of
                pages.addresses = np.concatenate([pages.addresses, np.zeros(extra, np.int64)])

    def _poison(self, ids: np.ndarray) -> None:
        for pages in filter(None, self.pages):
            for number, slab in enumerate(pages.slabs):
                rows = self.row_of[ids[self.slab_of[ids] == number]]
                if isinstance(slab, DiskSlab):
                    slab.spoil(rows)
                elif len(rows):  # what was given back may be an inference tensor
                    slab[torch.from_numpy(rows.astype(np.int64)).to(slab.device)] = 0xFF

    def check_integrity(self, expected: np.ndarray) -> None:
        """Raise `IntegrityError` unless the counts equal `expected` and every id is used, free or retired, once."""
        wrong = np.nonzero(self.refs != expected)[0]
        if len(wrong):
            i = wrong[0]
            raise IntegrityError(
                f"page {i} of {self.codec} has {self.refs[i]} references, its owners hold {expected[i]}."
            )
        idle = np.sort(np.array(self.free + self.retired, dtype=np.int64))
        if not np.array_equal(idle, np.nonzero(self.refs == 0)[0]):
            raise IntegrityError(f"free list of {self.codec} and reference counts disagree.")


def empty_host(shape: tuple[int, ...] | int) -> torch.Tensor:
    """Bytes in host memory, pinned where there is a device to send them to."""
    return torch.empty(shape, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


HUGE_PAGE, MADV_HUGEPAGE = 1 << 21, 14  # Linux


def _ask_for_huge_pages(slab: torch.Tensor) -> None:
    """Let Linux back what is whole huge pages of a slab by those: decode reads a few percent faster, as fewer addresses
    need translation. Only a hint, and nothing beyond the slab grows."""
    start, end = slab.data_ptr(), slab.data_ptr() + slab.nbytes
    start, end = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
    if sys.platform == "linux" and start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_HUGEPAGE)


@dataclass
class GroupStore:
    """The page stores of one layer group: `open` (the model's dtype), `sealed` (the codec), `cold` (a slower tier, or
    None).
    A lossless codec seals in place: then `open` and `sealed` are one store."""

    open: PageStore
    sealed: PageStore
    cold: PageStore | None
    block_size: int

    def bind(self, place: int, layer: int, geometry: Geometry, device: torch.device) -> None:
        """Have pages of this shape for a layer of the model, the group's number `place`.

        Raises:
            CacheInputError: there are others.
        """
        for store in self.stores:
            if not store.holds(place, geometry, device):
                if not store.is_vacant(place):
                    raise CacheInputError(
                        f"the pool holds layer {layer} as {store.pages[place].geometry}, this cache has {geometry} on {device}: "
                        "caches that share a pool must serve one model in one dtype in one place."
                    )
                store.bind(place, geometry, device)

    @property
    def lossless(self) -> bool:
        return self.open is self.sealed

    @property
    def stores(self) -> list[PageStore]:
        """Each store once."""
        return list(dict.fromkeys(store for store in (self.open, self.sealed, self.cold) if store is not None))

    @property
    def resident(self) -> list[PageStore]:
        """The stores that occupy the device."""
        return list(dict.fromkeys((self.open, self.sealed)))
