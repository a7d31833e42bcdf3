"""Pages with reference counts, and the pool that limits and shares them.

A **page** is the bytes of one block in one layer. Nothing here knows which row a page belongs to: that is the business of the
block tables (`blocks.py`), which take pages from a store and give them back. The prefix index (`prefix.py`) is one more
owner: a page that only it refers to stays findable, and makes room when a limit would be passed.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from . import capacity
from .codecs import Codec, Geometry
from .codecs.packing import order_for
from .errors import CacheInputError, CacheStateError, CapacityError, ConfigurationError, IntegrityError
from .identity import Identity
from .kernels.base import Pages
from .metrics import PoolMetrics, ReuseCounter
from .prefix import Node, PrefixIndex, Root

GROWTH = 32  # a full store grows by a 32nd: at most 3 % is reserved beyond what is used, and nothing stored ever moves


class PageStore:
    """Pages of one codec for all layers of a group, in one place (a device or a host), with reference counts.

    A page id means the same block in every layer. Memory comes in **slabs**, one tensor per layer and slab, allocated
    when a layer first needs it; a slab is never moved, and given back when none of its pages is in use. One reference to
    each of the pages in `named` is the prefix index's, which is told when it is the last one.
    """

    def __init__(
        self, codec: Codec, layers: int, lock: _Lock, index: PrefixIndex, *, host: bool = False, poison: bool = False
    ):
        self.codec, self.lock, self.index, self.host, self.poison = codec, lock, index, host, poison
        self.reserve = 0  # pages of the first slab, at least
        self.refs, self.named = np.zeros(0, np.int32), np.zeros(0, bool)
        self.slab_of, self.row_of = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self.free: list[int] = []
        self.retired: list[int] = []  # ids whose slab was given back; reused before new ids are made
        self.slab_sizes: list[int] = []  # 0 where the slab was given back
        self.pages: list[Pages | None] = [None] * layers
        self._devices: list[torch.device | None] = [None] * layers

    @property
    def used(self) -> int:
        """Pages that somebody refers to."""
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
            if self.holds(layer, geometry, device):
                return  # another thread was first, and may have stored something already
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
        with torch.inference_mode(False):  # pages outlive the pass that needs them first, and are written to in others
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
        self.named = np.concatenate([self.named, np.zeros(extra, bool)])
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
            raise IntegrityError(
                f"page {i} of {self.codec} has {self.refs[i]} references, its owners hold {expected[i]}."
            )
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

    @property
    def blocks(self) -> int:
        """Blocks more on the device, once the pass is over."""
        return self.open + self.sealed - self.open_freed - self.sealed_freed

    def nbytes(self, group: GroupStore) -> int:
        """The same in bytes."""
        opened, sealed = self.open - self.open_freed, self.sealed - self.sealed_freed
        return opened * group.open.page_bytes + sealed * group.sealed.page_bytes


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
    """Pages for any number of caches of one model, in any number of threads, with an optional limit.

    What its sessions (`session`) have computed stays findable after they are done. With a limit it is given up, least
    useful first, when a cache needs the room; without one it stays until `drop_prefixes()`.

    Args:
        config: the model's config; caches of another model are refused.
        capacity_tokens: slots that each group of layers may hold (rounded down to blocks). Groups that keep every position
            on the device reserve them at once, in one slab per layer (a lossy codec: as sealed pages).
        capacity_bytes: bytes that all pages in use on the device may hold.
        memory_fraction: this share of the device memory that is free now, with `model` loaded, less what one measured
            pass of `model` needs beside it (`capacity.py`), as `capacity_bytes`.
        model: the model of `memory_fraction`.
        block_size: positions per block of the caches that do not say otherwise.
        poison: fill fresh and freed pages with NaN, so that reading a slot that holds no token shows. For tests.
        clock: seconds, for priorities and metrics. For tests.

    Raises:
        ConfigurationError: for a limit that is not positive.
    """

    def __init__(
        self,
        config=None,
        *,
        capacity_tokens: int | None = None,
        capacity_bytes: int | None = None,
        memory_fraction: float | None = None,
        model: torch.nn.Module | None = None,
        block_size: int = 16,
        poison: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        if memory_fraction is not None:
            if capacity_bytes is not None or model is None:
                raise ConfigurationError(
                    f"memory_fraction={memory_fraction} takes the place of capacity_bytes, and is measured with the loaded "
                    "model: pass model=... with it, and no capacity_bytes."
                )
            capacity_bytes = capacity.budget(model, memory_fraction)
        for name, value in (("capacity_tokens", capacity_tokens), ("capacity_bytes", capacity_bytes)):
            if value is not None and value <= 0:
                raise ConfigurationError(f"{name}={value} leaves no room for a single token; give a positive number.")
        self.config, self.block_size, self.poison = config, block_size, poison
        self.capacity_tokens, self.capacity_bytes = capacity_tokens, capacity_bytes
        self.groups: dict[tuple, GroupStore] = {}
        self.tables = weakref.WeakSet()  # the `BlockTable`s that take pages from here
        self.lock = _Lock()
        self.prefixes = PrefixIndex(clock)
        self.reuse = ReuseCounter()
        self.failures = 0
        self._model: tuple[Identity, weakref.ref] | None = None  # whose keys and values are here

    def group(self, layers: tuple[int, ...], codec: Codec, block_size: int, tiered: bool, native: Codec) -> GroupStore:
        """The stores for `layers` with this codec and block size; made at the first call, shared afterwards."""
        with self.lock:
            key = (layers, codec.name, block_size, tiered)
            if key not in self.groups:
                make = lambda codec, host: PageStore(  # noqa: E731
                    codec, len(layers), self.lock, self.prefixes, host=host, poison=self.poison
                )
                open_ = make(native, False)
                sealed = open_ if codec.lossless else make(codec, False)
                self.groups[key] = GroupStore(open_, sealed, make(codec, True) if tiered else None, block_size)
            return self.groups[key]

    def expect_everything(self, group: GroupStore) -> None:
        """A table of `group` is going to keep every position on the device: where there is a limit in tokens, have the first
        slab hold them all, so that no later step allocates."""
        if self.capacity_tokens is not None:
            group.sealed.reserve = self.capacity_tokens // group.block_size

    # ---- room -------------------------------------------------------------------------------------------------------

    def reserve(self, demands: Sequence[tuple[GroupStore, Demand]]) -> list[tuple[list[int], list[int], list[int]]]:
        """Take `(open, sealed, cold)` pages for every group, or none at all. Evicts what must make room for them.

        Raises:
            CapacityError: when a limit would be passed; nothing was taken and nothing evicted.
        """
        with self.lock:
            error = self._refusal(demands)
            if error is not None:
                self.failures += 1
                raise error
            for group, demand in demands:
                while self._tokens_short(group, demand) > 0:
                    self._evict([group.sealed], "capacity")
            while self._bytes_short(demands) > 0:
                self._evict([group.sealed for group in self.groups.values()], "capacity")
            return [
                (group.open.take(d.open), group.sealed.take(d.sealed), group.cold.take(d.cold) if d.cold else [])
                for group, d in demands
            ]

    def fits(self, demands: Sequence[tuple[GroupStore, Demand]]) -> bool:
        """Whether `reserve` would succeed. Changes nothing."""
        with self.lock:
            return self._refusal(demands) is None

    def can_admit(self, lengths: Sequence[int], **choices) -> bool:
        """Whether rows of `lengths` tokens (prompt and answer) have room now, without any reuse, in a session with
        these choices; evicting what is not in use where necessary. Takes and evicts nothing."""
        return self.session(**choices).can_admit(lengths)

    def _tokens_short(self, group: GroupStore, demand: Demand) -> int:
        """Blocks beyond `capacity_tokens` that a group would hold."""
        if self.capacity_tokens is None:
            return 0
        return sum(store.used for store in group.resident) + demand.blocks - self.capacity_tokens // group.block_size

    def _bytes_short(self, demands: Sequence[tuple[GroupStore, Demand]]) -> int:
        """Bytes beyond `capacity_bytes` that the pool would hold."""
        if self.capacity_bytes is None:
            return 0
        return self.bytes_used() + sum(demand.nbytes(group) for group, demand in demands) - self.capacity_bytes

    def bytes_used(self) -> int:
        """Bytes of all pages in use on the device."""
        return sum(store.used * store.page_bytes for group in self.groups.values() for store in group.resident)

    def _refusal(self, demands: Sequence[tuple[GroupStore, Demand]]) -> CapacityError | None:
        """The error of an append that does not fit, even if all that can be evicted were."""
        way_out = "or reset a cache of this pool, unpin a prefix, or give the pool more."
        for group, demand in demands:
            short, evictable = self._tokens_short(group, demand), self.prefixes.evictable(group.sealed)
            if short > evictable:
                limit, size = self.capacity_tokens // group.block_size, group.block_size
                free = demand.blocks - short
                return CapacityError(
                    f"{demand.blocks} more blocks of {size} tokens are needed, {free} of {limit} are free and {evictable} "
                    f"evictable (capacity_tokens={self.capacity_tokens}): at most {(free + evictable) * size} more tokens "
                    f"fit. Shorten the input, crop {way_out}",
                    needed=demand.blocks * size,
                    available=(free + evictable) * size,
                    evictable=evictable * size,
                    unit="tokens",
                )
        short = self._bytes_short(demands)
        stores = {group.sealed: group.block_size for group in self.groups.values()}
        blocks = sum(self.prefixes.evictable(store) for store in stores)
        evictable = sum(self.prefixes.evictable(store) * store.page_bytes for store in stores)
        if short > evictable:
            needed = sum(demand.nbytes(group) for group, demand in demands)
            free = needed - short
            return CapacityError(
                f"{needed} more bytes are needed ({sum(d.blocks for _, d in demands)} blocks), {free} of "
                f"{self.capacity_bytes} are free and {evictable} evictable ({blocks} blocks). Shorten the input, choose "
                f"fewer bits, crop {way_out}",
                needed=needed,
                available=free + evictable,
                evictable=evictable,
                unit="bytes",
            )
        return None

    def _evict(self, stores: list[PageStore], reason: str) -> None:
        gone = self.prefixes.evict(stores, reason)
        if not gone:
            raise IntegrityError(f"nothing is left to evict in {stores}, though room was counted there.")
        self._unname(gone)

    def _unname(self, gone: list[tuple[PageStore, int]]) -> None:
        for store, page in gone:
            store.unname(page)

    def trim(self) -> None:
        """Give back the memory of slabs that nothing uses."""
        with self.lock:
            for group in self.groups.values():
                for store in group.stores:
                    store.trim()

    def nbytes(self) -> int:
        """Bytes of all storages, counted once each."""
        return sum(store.nbytes() for group in self.groups.values() for store in group.stores)

    # ---- reuse ------------------------------------------------------------------------------------------------------

    def session(self, **options):
        """A cache that finds what other sessions of this pool have computed; see `Session` for the options."""
        from .session import Session  # speaks transformers, which nothing else here does

        return Session(self, **options)

    def bind(self, model: torch.nn.Module) -> Identity:
        """Say which weights fill this pool; at the first time for good.

        Raises:
            CacheInputError: when other weights have filled it.
        """
        identity = Identity.of(model)
        with self.lock:
            if self._model is not None and self._model[0].weights != identity.weights:
                raise CacheInputError(
                    f"this {type(model).__name__} has other weights than the model whose keys and values the pool holds (or "
                    "they were changed): use a pool for each model, or reset the sessions and call drop_prefixes()."
                )
            self._model = identity, weakref.ref(model)
            return identity

    @property
    def identity(self) -> Identity | None:
        """What filled this pool, as it was last seen; None before a session has seen a model."""
        return self._model and self._model[0]

    @property
    def model(self) -> torch.nn.Module | None:
        """The model that was last seen, while it exists."""
        return self._model and self._model[1]()

    def publish(self, root: Root, parent: Node, tokens: bytes, media: tuple, pages: Sequence[int | None]) -> Node:
        """Enter a block into the prefix index (see `PrefixIndex.insert`), which then shares its pages."""
        node, named = self.prefixes.insert(root, parent, tokens, media, pages)
        for store, page in named:
            store.name(page)
        return node

    def drop_prefixes(self) -> None:
        """Forget all prefixes, pinned ones too, and which model computed them.

        Raises:
            CacheStateError: while a cache uses a shared block; nothing was dropped.
        """
        with self.lock:
            used = sum(store.refs[page] > 1 for store, page in self.prefixes.slots)
            if used:
                raise CacheStateError(
                    f"{used} cached blocks are in use: reset the sessions that hold them (or let go of them) before "
                    "drop_prefixes()."
                )
            self._unname(self.prefixes.drop("dropped"))
            self._model = None
            self.trim()

    # ---- looking ----------------------------------------------------------------------------------------------------

    def metrics(self) -> PoolMetrics:
        """Numbers of this moment; see `PoolMetrics`. For whoever runs the pool: a tenant's own are its sessions'."""
        with self.lock:
            stores = {store: group.block_size for group in self.groups.values() for store in group.stores}
            shares = [self.bytes_used() / self.capacity_bytes] if self.capacity_bytes else []
            if self.capacity_tokens:
                shares += [
                    sum(store.used for store in group.resident) * group.block_size / self.capacity_tokens
                    for group in self.groups.values()
                ]
            return PoolMetrics(
                blocks_used=sum(store.used for store in stores),
                blocks_shared=sum(int((store.refs - store.named > 1).sum()) for store in stores),
                blocks_cached=len(self.prefixes.slots),
                blocks_evictable=sum(self.prefixes.evictable(store) for store in stores),
                blocks_pinned=sum(slot.node.pins > 0 for slot in self.prefixes.slots.values()),
                resident_tokens=sum(int(table.kept.sum()) for table in list(self.tables)),
                resident_slots=sum(store.used * size for store, size in stores.items()),
                bytes_used=self.bytes_used(),
                bytes_allocated=self.nbytes(),
                occupancy=max(shares, default=None),
                reuse=self.reuse.metrics(),
                evictions=self.prefixes.evicted.copy(),
                allocation_failures=self.failures,
                block_lifetime=self.prefixes.lifetimes.copy(),
                reuse_gap=self.prefixes.gaps.copy(),
            )

    def check_integrity(self) -> None:
        """Recount every reference, from the tables and from the prefix index.

        Raises:
            IntegrityError: when a count, a free list, a table or the index contradicts another.
        """
        with self.lock:
            tables = list(self.tables)
            for group in self.groups.values():
                for store in group.stores:
                    expected = np.zeros(len(store.refs), np.int32)
                    for table in tables:
                        if table.group is group:
                            np.add.at(expected, table.references(store), 1)
                    named = [page for owner, page in self.prefixes.slots if owner is store]
                    if sorted(named) != np.nonzero(store.named)[0].tolist():
                        raise IntegrityError(f"{store.codec} and the prefix index disagree about the pages it names.")
                    expected[named] += 1
                    store.check_integrity(expected)
            for table in tables:
                table.check_integrity()
            self.prefixes.check_integrity(lambda store, page: store.refs[page] > 1)
