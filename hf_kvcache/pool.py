"""Pages with reference counts, and the pool that limits them.

A **page** is the bytes of one block in one layer. Nothing here knows which row a page belongs to: that is the business of the
block tables (`blocks.py`), which take pages from a store and give them back.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .codecs import Codec, Geometry
from .codecs.packing import order_for
from .errors import CapacityError, ConfigurationError, IntegrityError
from .kernels.base import Pages

GROWTH = 32  # a full store grows by a 32nd: at most 3 % is reserved beyond what is used, and nothing stored ever moves


class PageStore:
    """Pages of one codec for all layers of a group, in one place (a device or a host), with reference counts.

    A page id means the same block in every layer. Memory comes in **slabs**, one tensor per layer and slab, allocated
    when a layer first needs it; a slab is never moved, and given back when none of its pages is in use.
    """

    def __init__(self, codec: Codec, layers: int, lock: _Lock, *, host: bool = False, poison: bool = False):
        self.codec, self.lock, self.host, self.poison = codec, lock, host, poison
        self.reserve = 0  # pages of the first slab, at least
        self.refs = np.zeros(0, np.int32)
        self.slab_of, self.row_of = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self.free: list[int] = []
        self.retired: list[int] = []  # ids whose slab was given back; reused before new ids are made
        self.slab_sizes: list[int] = []  # 0 where the slab was given back
        self.pages: list[Pages | None] = [None] * layers
        self._devices: list[torch.device | None] = [None] * layers

    @property
    def used(self) -> int:
        """Pages that some table refers to."""
        return len(self.refs) - len(self.free) - len(self.retired)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers that have been bound."""
        return sum(pages.layout.nbytes for pages in self.pages if pages is not None)

    def bind(self, layer: int, geometry: Geometry, device: torch.device) -> None:
        """Tell the store what `layer`'s pages look like. A layer that holds no slab yet may be bound again."""
        order = order_for(device)
        layout = self.codec.layout(geometry, order)
        with self.lock:
            addresses = np.zeros(len(self.refs), np.int64)
            self.pages[layer] = Pages(self.codec, geometry, layout, order, [], self.slab_of, self.row_of, addresses)
            self._devices[layer] = torch.device("cpu") if self.host else device

    def holds(self, layer: int, geometry: Geometry, device: torch.device) -> bool:
        """Whether `layer` is bound to just this."""
        place = torch.device("cpu") if self.host else device
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
        shape, pin = (self.slab_sizes[number], pages.layout.nbytes), self.host and torch.cuda.is_available()
        slab = torch.empty(shape, dtype=torch.uint8, device=device, pin_memory=pin)
        if device.type == "cpu" and not pin:
            _ask_for_huge_pages(slab)
        if self.poison:
            slab.fill_(0xFF)
        ids = np.nonzero(self.slab_of == number)[0]
        pages.addresses[ids] = slab.data_ptr() + self.row_of[ids].astype(np.int64) * pages.layout.nbytes
        pages.slabs.append(slab)

    def take(self, count: int) -> list[int]:
        """`count` pages, each with one reference."""
        if count > len(self.free):
            reserve = 0 if any(self.slab_sizes) else self.reserve
            self._grow(max(count - len(self.free), len(self.refs) // GROWTH, reserve))
        taken = [self.free.pop() for _ in range(count)]
        self.refs[taken] = 1
        return taken

    def retain(self, ids: np.ndarray) -> None:
        np.add.at(self.refs, ids, 1)

    def release(self, ids: np.ndarray) -> None:
        """Drop one reference for each of `ids`; pages without any go back to the free list, last freed first used."""
        np.subtract.at(self.refs, ids, 1)
        freed = np.unique(ids[self.refs[ids] == 0])
        if self.poison:
            self._poison(freed)
        self.free.extend(freed[::-1].tolist())

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
                        pages.slabs[number] = pages.slabs[number][:0].clone()
                        pages.addresses[ids] = 0

    def nbytes(self) -> int:
        """Bytes of the storages that are allocated, counted from the storages themselves."""
        slabs = [slab for pages in self.pages if pages is not None for slab in pages.slabs]
        return sum({s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in slabs}.values())

    def _grow(self, count: int) -> None:
        fresh = self.retired[-count:]
        del self.retired[len(self.retired) - len(fresh) :]
        old = len(self.refs)
        fresh = fresh + list(range(old, old + count - len(fresh)))
        extra = count if not old else max(0, max(fresh) + 1 - old)
        self.refs = np.concatenate([self.refs, np.zeros(extra, np.int32)])
        self.slab_of = np.concatenate([self.slab_of, np.full(extra, -1, np.int32)])
        self.row_of = np.concatenate([self.row_of, np.zeros(extra, np.int32)])
        self.slab_of[fresh] = len(self.slab_sizes)
        self.row_of[fresh] = np.arange(count)
        self.slab_sizes.append(count)
        self.free.extend(reversed(fresh))
        for pages in self.pages:
            if pages is not None:
                pages.slab, pages.row = self.slab_of, self.row_of
                pages.addresses = np.concatenate([pages.addresses, np.zeros(extra, np.int64)])

    def _poison(self, ids: np.ndarray) -> None:
        for pages in filter(None, self.pages):
            for number, slab in enumerate(pages.slabs):
                rows = self.row_of[ids[self.slab_of[ids] == number]]
                slab[torch.from_numpy(rows.astype(np.int64)).to(slab.device)] = 0xFF

    def check_integrity(self, expected: np.ndarray) -> None:
        """Raise `IntegrityError` unless the counts equal `expected` and every id is used, free or retired, once."""
        wrong = np.nonzero(self.refs != expected)[0]
        if len(wrong):
            i = wrong[0]
            raise IntegrityError(f"page {i} of {self.codec} has {self.refs[i]} references, tables hold {expected[i]}.")
        idle = np.sort(np.array(self.free + self.retired, dtype=np.int64))
        if not np.array_equal(idle, np.nonzero(self.refs == 0)[0]):
            raise IntegrityError(f"free list of {self.codec} and reference counts disagree.")


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


@dataclass(frozen=True)
class Demand:
    """Pages of each store that an append takes, and those that it frees once its forward pass is over (a sealed block's
    open page, a cold block's device page): a full pool still seals."""

    open: int = 0
    sealed: int = 0
    cold: int = 0
    open_freed: int = 0
    sealed_freed: int = 0


class _Lock:
    """A re-entrant lock that also takes back the pages of caches that were dropped, once nobody is at work inside it."""

    def __init__(self):
        self._lock, self._depth = threading.RLock(), 0
        self._dropped: deque[list[tuple[PageStore, np.ndarray]]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error) -> None:
        if self._depth == 1:
            while self._dropped:
                for store, ids in self._dropped.popleft():
                    store.release(ids)
        self._depth -= 1
        self._lock.release()

    def give_back(self, held: list[tuple[PageStore, np.ndarray]]) -> None:
        """Release `held` now, or when whoever is inside leaves."""
        self._dropped.append(held)
        if self._lock.acquire(blocking=False):
            try:
                if self._depth == 0:
                    with self:
                        pass
            finally:
                self._lock.release()


class BlockPool:
    """Pages for any number of caches of one model, with an optional limit.

    Args:
        config: the model's config; caches of another model are refused.
        capacity_tokens: slots that each group of layers may hold (rounded down to blocks). Groups that keep every position
            on the device reserve them at once, in one slab per layer (a lossy codec: as sealed pages).
        capacity_bytes: bytes that all pages in use on the device may hold.
        poison: fill fresh and freed pages with NaN, so that reading a slot that holds no token shows. For tests.

    Raises:
        ConfigurationError: for a limit that is not positive.
    """

    def __init__(self, config=None, *, capacity_tokens=None, capacity_bytes=None, poison=False):
        for name, value in (("capacity_tokens", capacity_tokens), ("capacity_bytes", capacity_bytes)):
            if value is not None and value <= 0:
                raise ConfigurationError(f"{name}={value} leaves no room for a single token; give a positive number.")
        self.config, self.capacity_tokens, self.capacity_bytes, self.poison = (
            config,
            capacity_tokens,
            capacity_bytes,
            poison,
        )
        self.groups: dict[tuple, GroupStore] = {}
        self.tables = weakref.WeakSet()  # the `BlockTable`s that take pages from here
        self.lock = _Lock()

    def group(self, layers: tuple[int, ...], codec: Codec, block_size: int, tiered: bool, native: Codec) -> GroupStore:
        """The stores for `layers` with this codec and block size; made at the first call, shared afterwards."""
        with self.lock:
            key = (layers, codec.name, block_size, tiered)
            if key not in self.groups:
                make = lambda codec, host: PageStore(codec, len(layers), self.lock, host=host, poison=self.poison)  # noqa: E731
                open_ = make(native, False)
                sealed = open_ if codec.lossless else make(codec, False)
                self.groups[key] = GroupStore(open_, sealed, make(codec, True) if tiered else None, block_size)
            return self.groups[key]

    def expect_everything(self, group: GroupStore) -> None:
        """A table of `group` is going to keep every position on the device: where there is a limit in tokens, have the first
        slab hold them all, so that no later step allocates."""
        if self.capacity_tokens is not None:
            group.sealed.reserve = self.capacity_tokens // group.block_size

    def reserve(self, demands: Sequence[tuple[GroupStore, Demand]]) -> list[tuple[list[int], list[int], list[int]]]:
        """Take `(open, sealed, cold)` pages for every group, or none at all.

        Raises:
            CapacityError: when a limit would be passed; nothing was taken.
        """
        with self.lock:
            if self.capacity_tokens is not None:
                for group, demand in demands:
                    self._check_tokens(group, demand.open + demand.sealed - demand.open_freed - demand.sealed_freed)
            if self.capacity_bytes is not None:
                self._check_bytes(demands)
            return [
                (group.open.take(d.open), group.sealed.take(d.sealed), group.cold.take(d.cold) if d.cold else [])
                for group, d in demands
            ]

    def _check_tokens(self, group: GroupStore, blocks: int) -> None:
        limit = self.capacity_tokens // group.block_size
        used = sum(store.used for store in group.resident)
        if used + blocks > limit:
            free = (limit - used) * group.block_size
            raise CapacityError(
                f"{blocks} more blocks of {group.block_size} tokens are needed, {limit - used} of {limit} are free "
                f"(capacity_tokens={self.capacity_tokens}): at most {free} more tokens fit. Shorten the input, crop or "
                "reset a cache of this pool, or give the pool more.",
                needed=blocks * group.block_size,
                available=free,
                unit="tokens",
            )

    def _check_bytes(self, demands: Sequence[tuple[GroupStore, Demand]]) -> None:
        used = sum(store.used * store.page_bytes for group in self.groups.values() for store in group.resident)
        needed = sum(
            (d.open - d.open_freed) * group.open.page_bytes + (d.sealed - d.sealed_freed) * group.sealed.page_bytes
            for group, d in demands
        )
        if used + needed > self.capacity_bytes:
            raise CapacityError(
                f"{needed} more bytes are needed, {self.capacity_bytes - used} of {self.capacity_bytes} are free. "
                "Shorten the input, crop or reset a cache of this pool, choose fewer bits, or give the pool more.",
                needed=needed,
                available=self.capacity_bytes - used,
                unit="bytes",
            )

    def trim(self) -> None:
        """Give back the memory of slabs that no table uses."""
        with self.lock:
            for group in self.groups.values():
                for store in group.stores:
                    store.trim()

    def nbytes(self) -> int:
        """Bytes of all storages, counted once each."""
        return sum(store.nbytes() for group in self.groups.values() for store in group.stores)

    def check_integrity(self) -> None:
        """Recount every reference from the tables.

        Raises:
            IntegrityError: when a count, a free list or a table contradicts another.
        """
        with self.lock:
            tables = list(self.tables)
            for group in self.groups.values():
                for store in group.stores:
                    expected = np.zeros(len(store.refs), np.int32)
                    for table in tables:
                        if table.group is group:
                            np.add.at(expected, table.references(store), 1)
                    store.check_integrity(expected)
            for table in tables:
                table.check_integrity()
