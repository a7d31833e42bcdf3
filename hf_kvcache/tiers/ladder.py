"""Which blocks that the device gives up go to slower tiers, and how they come back bit for bit.

A **blob** is one block in all layers of a group: the bytes of its page one after the other, behind a head that says which block
it is. It is found by the block's key, a SHA-256 over everything that its contents depend on (`prefix.py`): nobody finds what
is in another namespace, nor looks at it. What is read is believed only when its head is, to the byte, the one that this
block would be given now, and the checksum is right. Anything else is a miss, and the block is computed again.

The first tier takes what the device gives up; what it has no room for any more goes on to the next; what the last one gives up
is gone. A blob that came back stays where it is, so a block that is given up again need not be copied again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from ..errors import ConfigurationError
from ..kernels.cpu import checksums
from ..metrics import TierMetrics
from ..pages import PageStore, empty_host
from ..prefix import PRIORITY, Node, Slot
from .blobs import Blobs, DiskBlobs, HostBlobs

FORMAT = 1
ALIGNMENT = 64  # bytes: where a blob's pages begin
STAGING = 8 << 20  # bytes that are copied at a time between pages and blobs; their checksums take a few times as much
FAULTS = (OSError, MemoryError, RuntimeError)  # what a tier may die of; torch's out-of-memory is the last
CHECKSUM = np.dtype("<u8")

logger = logging.getLogger(__name__)


class Ladder:
    """Tiers behind the device for what pools give up: `BlockPool(..., ladder=Ladder(...))`. One may serve several pools.

    A tier that fails (a full disk, a read error) never fails a forward pass: the block is not stored, or not found. That is
    counted in `pool.metrics().tiers` and logged once. Stores and loads happen while their pool is locked.

    Args:
        host_bytes: what host memory may hold (pinned, where there is a CUDA device).
        disk_path: a folder for blobs that the next process finds again; one process's at a time. What it holds is not encrypted.
        disk_bytes: what its files may hold.
        store_after_uses: blocks go down only when so many prompts have begun with them, the one they were computed for
            included: 2 leaves out what nobody ever asked for again.
        offload_min_priority: blocks of a lower `Priority` are dropped. (A block that comes back has the priorities of the session
            that brings it back.)

    Raises:
        ConfigurationError: without any tier, for a number out of range, and for a folder that is in use or cannot be used.
    """

    def __init__(
        self,
        *,
        host_bytes: int = 0,
        disk_path: str | os.PathLike | None = None,
        disk_bytes: int | None = None,
        store_after_uses: int = 1,
        offload_min_priority: int = PRIORITY,
    ):
        if host_bytes < 0 or (not host_bytes and disk_path is None):
            raise ConfigurationError(f"host_bytes={host_bytes} without disk_path: a ladder needs one of them, above 0.")
        if (disk_path is None) != (disk_bytes is None) or (disk_bytes is not None and disk_bytes <= 0):
            raise ConfigurationError(f"disk_path={disk_path!r}, disk_bytes={disk_bytes}: give both, a number above 0.")
        if store_after_uses < 1 or not 0 <= offload_min_priority <= 100:
            raise ConfigurationError(
                f"store_after_uses={store_after_uses} must be at least 1, offload_min_priority={offload_min_priority} within "
                "0 to 100."
            )
        self.store_after_uses, self.offload_min_priority = store_after_uses, offload_min_priority
        self.tiers: list[Blobs] = [HostBlobs(host_bytes)] if host_bytes else []
        if disk_path is not None:
            self.tiers.append(DiskBlobs(Path(disk_path), disk_bytes))
        self._lock, self._said = threading.RLock(), set()

    # ---- finding ----------------------------------------------------------------------------------------------------

    def lookup(self, key: bytes, place: int, signature: str | None) -> bool:
        """Whether a tier has the page of block `key` in group `place`, as stores of this signature hold it. Reads nothing."""
        return self._has(_name(key, place, signature))

    def _has(self, name: str) -> bool:
        return any(tier.lookup(name) for tier in self.tiers)

    # ---- down -------------------------------------------------------------------------------------------------------

    def store(self, slots: Iterable[Slot], level: Callable[[Slot], int]) -> None:
        """Take over pages that an index gives up, as far as they are worth it; their bytes are still in place. Never fails."""
        with self._lock:
            stores: dict[PageStore, list[Slot]] = {}
            for slot in slots:
                if slot.node.uses >= self.store_after_uses and level(slot) >= self.offload_min_priority:
                    stores.setdefault(slot.group.store, []).append(slot)
            for store, slots in stores.items() if self.tiers else ():
                fresh = [slot for slot in slots if not self._is_on_top(slot)]
                for part in _parts(fresh, store):
                    self._store(store, part)

    def _is_on_top(self, slot: Slot) -> bool:
        """Whether the first tier has this page already: then it was just of use."""
        name, top = _name(slot.node.key, slot.place, slot.group.store.signature), self.tiers[0]
        if top.lookup(name):
            top.touch(name)
        return top.lookup(name)

    def _store(self, store: PageStore, slots: list[Slot]) -> None:
        try:
            rows = store.raw(np.array([slot.page for slot in slots])).numpy()
            sums = checksums(rows).astype(CHECKSUM)
            for slot, row, total in zip(slots, rows, sums, strict=True):
                name, head = _name(slot.node.key, slot.place, store.signature), _head(slot.node, slot.place, store)
                self._put(0, name, _blob(head, total.tobytes(), row))
        except FAULTS as error:
            self._failed(self.tiers[0], "store", error)

    def _put(self, depth: int, name: str, blob: np.ndarray) -> None:
        """Enter a blob into tier `depth`; into the next one where that fails or is too small."""
        if depth == len(self.tiers):
            return
        tier = self.tiers[depth]
        if tier.lookup(name):
            tier.touch(name)
            return
        try:
            if self._make_room(depth, blob.nbytes):
                tier.complete_store(name, blob)
                return
        except FAULTS as error:
            self._failed(tier, "store", error)
        self._put(depth + 1, name, blob)

    def _make_room(self, depth: int, nbytes: int) -> bool:
        tier = self.tiers[depth]
        gone = tier.prepare_store(nbytes)
        if gone is None:
            return False
        for name in gone:
            if depth + 1 < len(self.tiers):
                self._put(depth + 1, name, tier.load(name))
            tier.evict(name)
        return True

    # ---- up ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loading(self, wanted: Iterable[tuple[PageStore, int, Iterable[Node]]]) -> Iterator[None]:
        """For the time of the block, keep the blobs of these blocks: `(store, group, blocks)`."""
        with self._lock:
            names = [_name(node.key, place, store.signature) for store, place, nodes in wanted for node in nodes]
            for tier in self.tiers:
                for name in names:
                    tier.prepare_load(name)
            try:
                yield
            finally:
                for tier in self.tiers:
                    for name in names:
                        tier.complete_load(name)

    def load(self, store: PageStore, place: int, nodes: Sequence[Node], ids: np.ndarray) -> np.ndarray:
        """Fill pages `ids` with blocks `nodes`; returns which of them hold now what they should. Never fails."""
        with self._lock:
            good = np.zeros(len(nodes), bool)
            for part in _parts(range(len(nodes)), store):
                try:
                    rows = empty_host((len(part), store.page_bytes))
                    good[part] = [
                        self._read(store, place, nodes[i], row) for i, row in zip(part, rows.numpy(), strict=True)
                    ]
                    kept = np.nonzero(good[part])[0]
                    store.put_raw(ids[part][kept], rows[torch.from_numpy(kept)])
                except FAULTS as error:
                    good[part] = False
                    self._failed(self.tiers[0], "load", error)
            return good

    def _read(self, store: PageStore, place: int, node: Node, row: np.ndarray) -> bool:
        """Fill `row` from the first tier whose blob is sound; those that are not are dropped."""
        name, head = _name(node.key, place, store.signature), _head(node, place, store)
        for tier in self.tiers:
            if not tier.lookup(name):
                continue
            try:
                row[:] = _checked(tier.load(name), head, len(row))
                tier.restores += 1
                return True
            except FAULTS as error:
                self._failed(tier, "load", error)
                tier.drop(name)
        return False

    # ---- all --------------------------------------------------------------------------------------------------------

    def _failed(self, tier: Blobs, what: str, error: BaseException) -> None:
        tier.failures += 1
        if (tier.name, what) not in self._said:
            self._said.add((tier.name, what))
            logger.warning(
                f"hf_kvcache: the {tier.name} tier could not {what} a block ({error}); it is computed again where it is "
                "needed. Further failures are counted in pool.metrics().tiers."
            )

    def clear(self) -> None:
        """Drop all blobs, on disk too, whatever pool and process they are from."""
        with self._lock:
            for tier in self.tiers:
                for name in list(tier.sizes):
                    tier.drop(name)

    def close(self) -> None:
        """Let another ladder have the folder; what is there stays. Afterwards nothing is stored and nothing found."""
        with self._lock:
            for tier in self.tiers:
                tier.close()
            self.tiers = []

    def metrics(self) -> dict[str, TierMetrics]:
        with self._lock:
            return {tier.name: tier.metrics() for tier in self.tiers}

    def check_integrity(self) -> None:
        """Raise `IntegrityError` where a tier's bytes do not add up, or exceed its budget."""
        with self._lock:
            for tier in self.tiers:
                tier.check_integrity()


def _name(key: bytes, place: int, signature: str | None) -> str:
    return f"{key.hex()}-{place}-{signature}"


def _head(node: Node, place: int, store: PageStore) -> bytes:
    """What a blob is of, one line of JSON, filled up so that the pages behind it and their checksum begin at a whole line of the
    processor's cache. It is never taken apart: whoever reads a blob knows what must be there."""
    media = [
        [{"bytes": content.hex()} if isinstance(content, bytes) else content, start, length]
        for content, start, length in node.media
    ]
    said = {
        "format": f"hf_kvcache block {FORMAT}",
        "key": node.key.hex(),
        "group": place,
        "pages": store.signature,
        "page_bytes": store.page_bytes,
        "token_ids": np.frombuffer(node.tokens, "<i8").tolist(),
        "media": media,
    }
    line = json.dumps(said).encode()
    return line.ljust(-(len(line) + 1 + CHECKSUM.itemsize) % ALIGNMENT + len(line)) + b"\n"


def _blob(head: bytes, checksum: bytes, pages: np.ndarray) -> np.ndarray:
    blob = empty_host(len(head) + len(checksum) + len(pages)).numpy()
    start = len(head) + len(checksum)
    blob[:start] = np.frombuffer(head + checksum, np.uint8)
    blob[start:] = pages
    return blob


def _checked(blob: np.ndarray, head: bytes, nbytes: int) -> np.ndarray:
    """The pages in a blob.

    Raises:
        OSError: it is another one, or damaged.
    """
    start = len(head) + CHECKSUM.itemsize
    if len(blob) != start + nbytes or blob[: len(head)].tobytes() != head:
        raise OSError("it is not the blob of this block, or was damaged")
    pages = blob[start:]
    if checksums(pages[None])[0] != blob[len(head) : start].view(CHECKSUM)[0]:
        raise OSError("its checksum is wrong")
    return pages


def _parts(items: Sequence, store: PageStore) -> Iterator[list]:
    """`items`, as many at a time as are copied at once."""
    count = max(1, STAGING // max(1, store.page_bytes))
    for start in range(0, len(items), count):
        yield list(items[start : start + count])
