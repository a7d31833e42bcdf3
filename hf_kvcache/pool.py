"""The pool that pages (`pages.py`) are taken from: it limits them, and shares what caches have in common.

The prefix index (`prefix.py`) is one more owner of pages beside the block tables (`blocks.py`): a page that only it refers to
stays findable, and makes room when a limit would be passed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from . import capacity
from .codecs import Codec
from .cold import ColdMemory, Place, Wanted
from .errors import CacheInputError, CacheStateError, CapacityError, ConfigurationError, IntegrityError
from .identity import Identity
from .metrics import PoolMetrics, ReuseCounter
from .pages import GroupStore, PageStore
from .prefix import Below, Match, Node, PrefixIndex, Root, Slot
from .tiers.ladder import Ladder

if TYPE_CHECKING:
    from .saved_prefixes import Restored


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


class Lock:
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
        ladder: slower tiers that take over what is given up for lack of room, and from where it comes back.
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
        ladder: Ladder | None = None,
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
        self.config, self.block_size, self.ladder, self.poison = config, block_size, ladder, poison
        self.capacity_tokens, self.capacity_bytes = capacity_tokens, capacity_bytes
        self.groups: dict[tuple, GroupStore] = {}
        self.cold: dict[Place, ColdMemory] = {}
        self.tables = weakref.WeakSet()  # the `BlockTable`s that take pages from here
        self.lock = Lock()
        self.prefixes = PrefixIndex(clock)
        self.reuse = ReuseCounter()
        self.failures = 0
        self._model: tuple[Identity, weakref.ref] | None = None  # whose keys and values are here

    def group(
        self, layers: tuple[int, ...], codec: Codec, block_size: int, place: Place | None, native: Codec
    ) -> GroupStore:
        """The stores for `layers` with this codec, block size and place of cold pages (None: there are none); made at the
        first call, shared afterwards."""
        with self.lock:
            key = (layers, codec.name, block_size, place)
            if key not in self.groups:
                make = lambda codec, cold: PageStore(  # noqa: E731
                    codec, len(layers), self.lock, self.prefixes, cold=cold, poison=self.poison
                )
                open_ = make(native, None)
                sealed = open_ if codec.lossless else make(codec, None)
                if place is not None and place not in self.cold:
                    self.cold[place] = ColdMemory(place)
                cold = None if place is None else make(codec, self.cold[place])
                self.groups[key] = GroupStore(open_, sealed, cold, block_size)
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
            for memory, wanted in self._cold_wanted(demands):
                memory.make_room(wanted)
            for group, demand in demands:
                self._evict([group.sealed], self._tokens_short(group, demand), lambda store: 1)
            stores = [group.sealed for group in self.groups.values()]
            self._evict(stores, self._bytes_short(demands), lambda store: store.page_bytes)
            return [
                (group.open.take(d.open), group.sealed.take(d.sealed), group.cold.take(d.cold) if d.cold else [])
                for group, d in demands
            ]

    def fits(self, demands: Sequence[tuple[GroupStore, Demand]]) -> bool:
        """Whether `reserve` would succeed. Changes nothing."""
        with self.lock:
            return self._refusal(demands) is None

    def has_room(self, demands: Sequence[tuple[GroupStore, Demand]]) -> bool:
        """Whether `reserve` would succeed without evicting anything."""
        with self.lock:
            tokens = max((self._tokens_short(group, demand) for group, demand in demands), default=0)
            return max(tokens, self._bytes_short(demands)) <= 0

    def can_admit(self, lengths: Sequence[int], **choices) -> bool:
        """Whether rows of `lengths` tokens (prompt and answer) have room now, without any reuse, in a session with
        these choices; evicting what is not in use where necessary. Takes and evicts nothing."""
        return self.session(**choices).can_admit(lengths)

    def _cold_wanted(self, demands: Sequence[tuple[GroupStore, Demand]]) -> list[tuple[ColdMemory, Wanted]]:
        """What each place of cold pages must have room for."""
        wanted = [(group.cold, demand.cold) for group, demand in demands if demand.cold]
        memories = dict.fromkeys(store.cold for store, _ in wanted)
        return [(memory, [(s, pages) for s, pages in wanted if s.cold is memory]) for memory in memories]

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
        for memory, wanted in self._cold_wanted(demands):
            if (error := memory.refusal(wanted)) is not None:
                return error
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

    def _evict(self, stores: list[PageStore], short: int, size: Callable[[PageStore], int]) -> None:
        """Give up pages at rest until `short` more are free in `stores`, where a page counts `size`; all at once, so that what
        goes down the ladder goes together."""
        gone: list[Slot] = []
        while short > 0:
            slots = self.prefixes.evict(stores, "capacity")
            if not slots:
                raise IntegrityError(f"nothing is left to evict in {stores}, though room was counted there.")
            freed = [slot.group.store for slot in slots if slot.group.store.refs[slot.page] == 1]
            short -= sum(size(store) for store in freed if store in stores)
            gone += slots
        try:
            if gone and self.ladder is not None:
                self.ladder.store(gone, self.prefixes.level)
        finally:  # also where somebody interrupts it: the index has let go of them
            self._unname(gone)

    def _unname(self, gone: list[Slot]) -> None:
        for slot in gone:
            slot.group.store.unname(slot.page)

    def trim(self) -> None:
        """Give back the memory of slabs that nothing uses."""
        with self.lock:
            for group in self.groups.values():
                for store in group.stores:
                    store.trim()

    def nbytes(self) -> int:
        """Bytes of all storages, counted once each, and of spill files."""
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

    def below(self, root: Root) -> Below:
        """What the ladder has of a namespace."""
        signatures = [group.store.signature for group in root.groups]
        return lambda key, place: self.ladder.lookup(key, place, signatures[place])

    @contextlib.contextmanager
    def recalled(self, root: Root, needs: Sequence[tuple[Match, int]]) -> Iterator[None]:
        """For the time of the block, the index has what `needs` (matches, and how many tokens of each) are made of, and keeps it:
        what is on the ladder comes back, as far as it can be read, if there is room for all of it."""
        held: list[tuple[PageStore, np.ndarray]] = []
        with self.lock:
            try:
                missing = self._hold(needs, held)
                if any(missing):
                    self._restore(root, needs, missing, held)
                yield
            finally:
                for store, ids in held:
                    store.release(ids)

    def _hold(self, needs: Sequence[tuple[Match, int]], held: list) -> list[dict[bytes, Node]]:
        """Refer to the pages that are there; returns, for each group, the blocks whose pages are not, by key."""
        missing: list[dict[bytes, Node]] = []
        for place, group in enumerate(needs[0][0].root.groups):
            nodes = [node for match, length in needs for node in match.needed(place, length)]
            pages = np.array([node.slots[place].page for node in nodes if node.slots[place] is not None], np.int32)
            group.store.retain(pages)
            held.append((group.store, pages))
            missing.append({node.key: node for node in nodes if node.slots[place] is None})
        return missing

    def _restore(self, root: Root, needs: Sequence[tuple[Match, int]], missing: list[dict], held: list) -> None:
        """Take pages for the blocks of `missing`, have the ladder fill them, and enter them into the index."""
        groups = {group.sealed: group for group in self.groups.values()}
        demands = [
            (groups[group.store], Demand(sealed=len(nodes))) for group, nodes in zip(root.groups, missing, strict=True)
        ]
        wanted = [(group.store, place, list(missing[place].values())) for place, group in enumerate(root.groups)]
        with self.ladder.loading(wanted):
            if not self.fits(demands):
                return
            restored: dict[tuple[bytes, int], int] = {}
            taken = [np.array(pages, np.int32) for _, pages, _ in self.reserve(demands)]
            held += [(group.store, pages) for group, pages in zip(root.groups, taken, strict=True)]
            for (store, place, nodes), pages in zip(wanted, taken, strict=True):
                good = self.ladder.load(store, place, nodes, pages)
                found = zip(nodes, pages.tolist(), good, strict=True)
                restored |= {(node.key, place): page for node, page, ok in found if ok}
        for match, _ in needs:
            self._enter_restored(root, match, restored)

    def _enter_restored(self, root: Root, match: Match, restored: dict[tuple[bytes, int], int]) -> None:
        """Publish a chain as far as its last restored page, or to the first block that lacks a group with every position."""
        places = range(len(root.groups))
        stop = max(
            (n for n, node in enumerate(match.nodes, 1) if any((node.key, p) in restored for p in places)), default=0
        )
        node = self.prefixes.root(root.key, root.block_size, root.groups)
        for wanted in match.nodes[:stop]:
            pages = [restored.pop((wanted.key, place), None) for place in places]
            lacks = any(page is None and root.groups[place].window is None for place, page in enumerate(pages))
            if lacks and wanted.key not in node.children:
                break
            node = self.publish(root, node, wanted.tokens, wanted.media, pages)

    def drop_prefixes(self) -> None:
        """Forget all prefixes, pinned ones too, and which model computed them; and everything on the ladder.

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
            if self.ladder is not None:
                self.ladder.clear()
            self._model = None
            self.trim()

    def save(self, path_or_url: str | os.PathLike) -> None:
        """Write all that sessions can find in the pool itself to a file, with its pages, for `load`, in this process or another
        one; what is on a ladder is not in the file. What was at `path_or_url` (a path, or a URL of any file system that fsspec
        knows) before is replaced in one step. Other threads wait.

        The file has token ids, keys and values in it, so it is as secret as the texts are. Of salts it has digests only.

        Raises:
            CacheStateError: there is nothing to save.
            SavedStateError: the file could not be written; what was there before still is.
        """
        from . import saved_prefixes, savefile  # which need this module

        with savefile.writing(path_or_url) as file:
            saved_prefixes.save(file, self)

    def load(self, path_or_url: str | os.PathLike, model: torch.nn.Module) -> Restored:
        """Have sessions find what `save` has written, beside what they find already, as far as there is room: what would be
        evicted last comes first, and nothing is evicted for it. (Pins are not in a file; the times of priorities start anew.)

        Returns:
            how many blocks were `entered`, were `known` before, and were `left_out`.

        Raises:
            SavedStateError: no such file, or it is damaged, or of another model or format version; nothing has changed.
            CacheInputError: the pool holds another model's keys and values.
        """
        from . import saved_prefixes, savefile

        with savefile.reading(path_or_url) as file:
            return saved_prefixes.load(savefile.SavedFile(file, path_or_url, saved_prefixes.KIND), self, model)

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
                tiers={} if self.ladder is None else self.ladder.metrics(),
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
            if self.ladder is not None:
                self.ladder.check_integrity()
