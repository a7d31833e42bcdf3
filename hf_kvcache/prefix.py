"""Which stored blocks hold which tokens: a tree of full blocks per namespace, and the order in which they are given up.

A **node** is one full block of tokens after one particular prefix. Its key is a SHA-256 over the parent's key and its own
tokens; the key of a tree's root is a SHA-256 over everything else that the contents depend on (`digest`). A child is
taken only when its token ids are equal as well, so what is in another namespace, or merely has the same hash, is never
found. For each group of layers a node names the page with the block's keys and values.

The index owns one reference to each page that it names, and is told when a page has no other owner (`rest`) and when it
has one again (`wake`). A page at rest stays findable until somebody needs its room: then pages of the lowest priority go
first, among those the ones that came to rest first, and the tail of a chain before its head. A block without its head is
worth nothing, so what goes takes everything behind it along. Pages of a group with a window are worth something on their
own, and go one by one. Nothing here knows tensors; pages are numbers, stores are names. What was given up may still be on a
slower tier (`tiers/ladder.py`): a match goes on into it where it is told what is there.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .errors import IntegrityError
from .metrics import Histogram

PRIORITY = 35  # of a block that nobody gave one
LAST_CHILDREN = 64  # blocks that a partial block is compared with, newest first
ID_BYTES = 8


def digest(**fields) -> bytes:
    """SHA-256 of named values (None, bytes, str, int, or tuples of those), each with its name, type and length: different
    fields never give the same bytes, whatever the values are."""
    return hashlib.sha256(b"".join(_tagged(name) + _tagged(fields[name]) for name in sorted(fields))).digest()


def _tagged(value) -> bytes:
    if isinstance(value, tuple):
        kind, body = b"t", b"".join(map(_tagged, value))
    else:
        kind = {type(None): b"n", bytes: b"b", str: b"s", int: b"i", bool: b"o"}[type(value)]
        body = value if isinstance(value, bytes) else str(value).encode()
    return kind + len(body).to_bytes(8, "little") + body


class Media(NamedTuple):
    """An image, a sound, ... behind placeholder tokens: `content` (a hash of it) stands at positions
    `[start, start + length)` of the text. It becomes part of the identity of every block that it reaches into, together
    with its length and its place in that block. The hash must cover what the model is given: the picture as it was
    processed, not only the file that it came from."""

    content: bytes | str
    start: int
    length: int


class Priority(NamedTuple):
    """Blocks with tokens of `[start, stop)` (None: to the end) are given up in order of `level`, 0 first, 100 last, and
    count as 35 again once they have been at rest for `seconds` (None: never)."""

    start: int
    stop: int | None
    level: int
    seconds: float | None = None


@dataclass(frozen=True)
class Group:
    """A group of layers: the store of its pages, the positions that a query sees (None for all), and the first ones that
    it always sees."""

    store: Hashable
    window: int | None = None
    sinks: int = 0


@dataclass(eq=False, slots=True)
class Slot:
    """A page that the index names, in one group of one node.

    Attributes:
        order: when it came to rest, as a running number; None while somebody uses the page.
        rested: the same on the clock.
        waiting: children whose page in this group, or one behind it, is at rest. They go first.
        ticket: number of its valid entry in the queue; None while it is not queued.
    """

    node: Node
    place: int
    group: Group
    page: int
    born: float
    order: int | None = None
    rested: float = 0.0
    waiting: int = 0
    ticket: int | None = None

    @property
    def holds(self) -> bool:
        """Whether anything at or behind it is at rest."""
        return self.order is not None or self.waiting > 0


@dataclass(eq=False, slots=True)
class Node:
    """A full block. `slots` has a page for each group, or None; `depth` counts blocks from the start, its own included;
    `uses` the prompts that began with it, the one it was computed for included."""

    key: bytes
    parent: Node | None
    tokens: bytes = b""
    media: tuple = ()
    depth: int = 0
    slots: list[Slot | None] = field(default_factory=list)
    children: dict[bytes, Node] = field(default_factory=dict)
    pins: int = 0
    uses: int = 1
    level: int = PRIORITY
    seconds: float | None = None

    @property
    def alive(self) -> bool:
        return self.parent is not None or self.depth == 0


@dataclass(eq=False, slots=True)
class Root(Node):
    """The start of every text in one namespace."""

    block_size: int = 16
    groups: tuple[Group, ...] = ()

    def cut(self, tokens: np.ndarray, media: Sequence[Media], start: int = 0) -> Iterator[tuple[bytes, tuple]]:
        """Ids and media of each full block of a text, from block `start` on."""
        size = self.block_size
        for block in range(start, len(tokens) // size):
            part = np.ascontiguousarray(tokens[block * size : (block + 1) * size], "<i8")
            yield part.tobytes(), self.media_in(block, media)

    def media_in(self, block: int, media: Sequence[Media]) -> tuple:
        """What of `media` reaches into a block, each with its place relative to the block."""
        first, last = block * self.block_size, (block + 1) * self.block_size
        return tuple(
            (m.content, m.start - first, m.length) for m in media if m.start < last and m.start + m.length > first
        )


Below = Callable[[bytes, int], bool]  # whether a slower tier has a block's page, by key and group


class Match:
    """The longest chain of blocks that begins as a text does; the last one perhaps only in part.

    Attributes:
        nodes: the chain. Those that are on a slower tier only stand at its end, and in no tree.
        length: tokens of the text that it holds.
    """

    def __init__(self, root: Root, nodes: list[Node], length: int, below: Below | None = None):
        self.root, self.nodes, self.length, self._below = root, nodes, length, below
        self._runs = {place: self._run(place) for place, group in enumerate(root.groups) if group.window is not None}

    def _run(self, place: int) -> np.ndarray:
        """For each block how many blocks in a row, itself the last, have a page in this group."""
        below = self._below or (lambda key, place: False)
        there = np.array([node.slots[place] is not None or below(node.key, place) for node in self.nodes], bool)
        index = np.arange(1, len(there) + 1)
        return index - np.maximum.accumulate(np.where(there, 0, index)) if len(there) else index

    def longest(self, limit: int) -> int:
        """Tokens, at most `limit`, after which every group has what the next query sees."""
        length, size = min(limit, self.length), self.root.block_size
        while length > 0 and not all(self._covers(place, length) for place in self._runs):
            length = (length - 1) // size * size
        return max(0, length)

    def _covers(self, place: int, length: int) -> bool:
        sinks, recent = self.kept(place, length)
        run = self._runs[place]
        return run[recent.stop - 1] >= len(recent) and (not sinks or run[sinks.stop - 1] >= len(sinks))

    def kept(self, place: int, length: int) -> tuple[range, range]:
        """The blocks that a group needs after `length` tokens: those of its sinks, and those of its window."""
        group, size = self.root.groups[place], self.root.block_size
        end = -(-length // size)
        if group.window is None:
            return range(0), range(end)
        sinks = min(end, -(-group.sinks // size))
        first = max(0, length + 1 - group.window) // size
        return (range(0), range(end)) if first <= sinks else (range(sinks), range(min(first, end), end))

    def pages(self, place: int, blocks: Iterable[int]) -> list[int]:
        return [self.nodes[block].slots[place].page for block in blocks]

    def needed(self, place: int, length: int) -> list[Node]:
        """The blocks that a group needs after `length` tokens."""
        return [self.nodes[block] for blocks in self.kept(place, length) for block in blocks]

    def is_complete(self, length: int) -> bool:
        """Whether the index itself has a page wherever one is needed after `length` tokens."""
        places = range(len(self.root.groups))
        return all(node.slots[place] is not None for place in places for node in self.needed(place, length))


class PrefixIndex:
    """All trees of a pool.

    Args:
        clock: seconds, never running backwards.

    Attributes:
        hashed, compared: blocks whose key was computed, and blocks that were compared token by token, ever: what looking
            up costs, in counted work.
        evicted: pages given up, by reason.
        lifetimes, gaps: seconds from when a page was entered to when it was given up, and from when it came to rest to
            when it was used again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.roots: dict[bytes, Root] = {}
        self.slots: dict[tuple[Hashable, int], Slot] = {}
        self.hashed = self.compared = 0
        self.evicted: Counter[str] = Counter()
        self.lifetimes, self.gaps = Histogram(), Histogram()
        self._evictable: Counter[Hashable] = Counter()
        self._queues: dict[Hashable, list[tuple[int, int, int, Slot]]] = {}  # heaps; level, order, ticket
        self._expiries: list[tuple[float, int, Slot]] = []  # a heap; when, ticket
        self._orders, self._tickets = itertools.count(), itertools.count()

    # ---- finding and entering ---------------------------------------------------------------------------------------

    def root(self, namespace: bytes, block_size: int, groups: Sequence[Group]) -> Root:
        """The tree of a namespace, perhaps an empty one. What the other arguments say belongs into `namespace` as well."""
        new = Root(namespace, None, block_size=block_size, groups=tuple(groups))
        return self.roots.get(namespace, new)

    def match(
        self,
        root: Root,
        tokens: np.ndarray,
        media: Sequence[Media] = (),
        partial: bool = True,
        below: Below | None = None,
    ) -> Match:
        """The longest chain that begins as `tokens` do, its last block perhaps only in part; with the whole blocks that are
        `below`, where that is given, before the last token, which is computed in any case. Changes nothing."""
        node, nodes = root, []
        for part, there in root.cut(tokens, media):
            child = self._child(node, part, there)
            if child is None:
                break
            nodes.append(child)
            node = child
        if below is not None:
            nodes += self._chain_below(root, node, tokens[:-1], media, below)
            node = nodes[-1] if nodes else root
        length = len(nodes) * root.block_size
        if partial and length < len(tokens):
            child, more = self._most_alike(root, node, tokens[length : length + root.block_size], media)
            if more:
                nodes.append(child)
                length += more
        return Match(root, nodes, length, below)

    def _chain_below(self, root: Root, node: Node, tokens: np.ndarray, media, below: Below) -> list[Node]:
        """The blocks behind `node` as far as a slower tier has all groups that keep every position. (Those with a window need
        no block before it: where there are no others, any block may be the next one that is there.)"""
        full = [place for place, group in enumerate(root.groups) if group.window is None]
        nodes, useful = [], 0
        for part, there in root.cut(tokens, media, node.depth):
            self.hashed += 1
            node = Node(block_key(node.key, part, there), node, part, there, node.depth + 1, [None] * len(root.groups))
            if not all(below(node.key, place) for place in full):
                break
            nodes.append(node)
            if full or any(below(node.key, place) for place in range(len(root.groups))):
                useful = len(nodes)
        return nodes[:useful]

    def _child(self, node: Node, tokens: bytes, media: tuple) -> Node | None:
        self.hashed += 1
        child = node.children.get(block_key(node.key, tokens, media))
        return child if child is not None and child.tokens == tokens and child.media == media else None

    def _most_alike(self, root: Root, node: Node, tokens: np.ndarray, media) -> tuple[Node | None, int]:
        """The child that has most of `tokens` in common from its first one on, before any media, and how many."""
        own, best, most = root.media_in(node.depth, media), None, 0
        for child in itertools.islice(reversed(node.children.values()), LAST_CHILDREN):
            self.compared += 1
            limit = min([len(tokens)] + [max(0, place) for _, place, _ in own + child.media])
            differ = np.nonzero(np.frombuffer(child.tokens, "<i8")[:limit] != tokens[:limit])[0]
            same = int(differ[0]) if len(differ) else limit
            if same > most:
                best, most = child, same
        return best, most

    def insert(
        self, root: Root, parent: Node, tokens: bytes, media: tuple, pages: Sequence[int | None]
    ) -> tuple[Node, list[tuple[Hashable, int]]]:
        """Enter a block behind `parent`, or find it there: what was first stays, only missing pages are filled in.

        Returns:
            the node, and each `(store, page)` that the index names from now on: the caller gives it a reference.
        """
        root = self.roots.setdefault(root.key, root)  # an empty tree is not kept
        parent = parent if parent.depth else root
        node, named = self._child(parent, tokens, media), []
        if node is None:
            key = block_key(parent.key, tokens, media)
            node = Node(key, parent, tokens, media, parent.depth + 1, [None] * len(root.groups))
            parent.children[key] = node
        for place, (group, page) in enumerate(zip(root.groups, pages, strict=True)):
            if page is not None and node.slots[place] is None:
                slot = node.slots[place] = Slot(node, place, group, page, self.clock())
                if self.slots.setdefault((group.store, page), slot) is not slot:
                    raise IntegrityError(f"page {page} of {group.store} stands for two different blocks.")
                named.append((group.store, page))
        return node, named

    # ---- use and rest -----------------------------------------------------------------------------------------------

    def rest(self, store: Hashable, pages: Iterable[int]) -> None:
        """Nobody else refers to these pages any more; the first of them go first."""
        for page in pages:
            slot = self.slots[store, page]
            held = slot.holds
            slot.order, slot.rested = next(self._orders), self.clock()
            self._count(slot, 1)
            self._update(slot, held)

    def wake(self, store: Hashable, pages: Iterable[int]) -> None:
        """Somebody refers to these pages again."""
        for page in pages:
            slot = self.slots[store, page]
            self.gaps.add(self.clock() - slot.rested)
            self._unrest(slot)

    def _unrest(self, slot: Slot) -> None:
        held = slot.holds
        if slot.order is not None:
            self._count(slot, -1)
            slot.order = None
        self._update(slot, held)

    def _count(self, slot: Slot, change: int) -> None:
        """A page at rest joins those that may be given up, or leaves them; a pinned one is never among them."""
        if not slot.node.pins:
            self._evictable[slot.group.store] += change

    def evictable(self, store: Hashable) -> int:
        """Pages of a store that can be given up, now or once those behind them have been."""
        return self._evictable[store]

    # ---- keeping ----------------------------------------------------------------------------------------------------

    def pin(self, nodes: Iterable[Node]) -> None:
        """Keep these blocks until as many `unpin`; a chain is pinned from its first block on."""
        for node in nodes:
            self._pin(node, 1)

    def unpin(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._pin(node, -1)

    def _pin(self, node: Node, change: int) -> None:
        resting = [slot for slot in node.slots if slot is not None and slot.order is not None]
        for slot in resting:
            self._count(slot, -1)
        node.pins += change
        for slot in resting:
            self._count(slot, 1)
            self._enqueue(slot)

    def prioritise(self, node: Node, level: int, seconds: float | None = None) -> None:
        """Give a block a priority (see `Priority`)."""
        node.level, node.seconds = level, seconds
        for slot in filter(None, node.slots):
            slot.ticket = None
            self._enqueue(slot)

    # ---- giving up --------------------------------------------------------------------------------------------------

    def evict(self, stores: Iterable[Hashable], reason: str) -> list[Slot]:
        """Give up the page at rest that is worth least in any of `stores`, and what is worth nothing without it.

        Returns:
            the slots whose pages the index no longer names: the caller takes its references back. Empty when nothing
            in these stores can be given up.
        """
        self._expire()
        first = [queue[0] for queue in map(self._queue, stores) if queue]
        if not first:
            return []
        slot = min(first)[-1]
        return self._remove(slot.node, reason) if slot.group.window is None else self._remove_page(slot, reason)

    def drop(self, reason: str) -> list[Slot]:
        """Give up everything, pinned or not; returns what `evict` returns."""
        nodes = [node for root in self.roots.values() for node in root.children.values()]
        return [slot for node in nodes for slot in self._remove(node, reason)]

    def _remove(self, node: Node, reason: str) -> list[Slot]:
        """Take out a node and all behind it, the last ones first."""
        nodes, above = [node], node.parent
        for each in nodes:
            nodes.extend(each.children.values())
        gone = []
        for each in reversed(nodes):
            gone += [self._forget(slot, reason) for slot in each.slots if slot is not None]
            del each.parent.children[each.key]
            each.parent = None
        self._prune(above)
        return gone

    def _remove_page(self, slot: Slot, reason: str) -> list[Slot]:
        gone = [self._forget(slot, reason)]
        self._prune(slot.node)
        return gone

    def _prune(self, node: Node) -> None:
        """Take out a node that has no pages and leads nowhere; so, perhaps, does the one before it."""
        while node.depth and not node.children and not any(node.slots):
            node.parent.children.pop(node.key)
            node.parent, node = None, node.parent
        if not node.depth and not node.children:
            self.roots.pop(node.key)

    def _forget(self, slot: Slot, reason: str) -> Slot:
        if slot.order is not None:
            self.evicted[reason] += 1
            self.lifetimes.add(self.clock() - slot.born)
        self._unrest(slot)
        slot.node.slots[slot.place] = None
        del self.slots[slot.group.store, slot.page]
        return slot

    # ---- the order of giving up -------------------------------------------------------------------------------------

    def level(self, slot: Slot) -> int:
        """The priority that a page at rest has now."""
        seconds = slot.node.seconds
        return PRIORITY if seconds is not None and slot.rested + seconds <= self.clock() else slot.node.level

    def _update(self, slot: Slot, held: bool) -> None:
        """A slot has changed, which `held` before: queue it if it may go, and tell those before it in the chain."""
        self._enqueue(slot)
        while slot.group.window is None and slot.holds != held and slot.node.parent.depth:
            change = 1 if slot.holds else -1
            slot = slot.node.parent.slots[slot.place]
            held = slot.holds
            slot.waiting += change
            self._enqueue(slot)

    def _enqueue(self, slot: Slot) -> None:
        behind = slot.waiting and slot.group.window is None
        if slot.order is None or slot.node.pins or behind:
            slot.ticket = None
        elif slot.ticket is None:
            slot.ticket = next(self._tickets)
            seconds = slot.node.seconds
            if seconds is not None and slot.rested + seconds > self.clock():
                heapq.heappush(self._expiries, (slot.rested + seconds, slot.ticket, slot))
            queue = self._queues.setdefault(slot.group.store, [])
            heapq.heappush(queue, (self.level(slot), slot.order, slot.ticket, slot))
            self._tidy(queue)
            self._tidy(self._expiries)

    def _expire(self) -> None:
        """Queue pages whose time is over as those without a priority."""
        while self._expiries and self._expiries[0][0] <= self.clock():
            _, ticket, slot = heapq.heappop(self._expiries)
            if slot.ticket == ticket:
                slot.ticket = None
                self._enqueue(slot)

    def _queue(self, store: Hashable) -> list:
        """A store's queue with a valid first entry, or empty."""
        queue = self._queues.get(store, [])
        while queue and not _valid(queue[0]):
            heapq.heappop(queue)
        return queue

    def _tidy(self, heap: list) -> None:
        """Leave out the entries that are no longer valid, when they are most of a heap."""
        if len(heap) > 64 + 2 * sum(self._evictable.values()):
            heap[:] = filter(_valid, heap)
            heapq.heapify(heap)

    # ---- checking ---------------------------------------------------------------------------------------------------

    def check_integrity(self, has_other_owner: Callable[[Hashable, int], bool]) -> None:
        """Recount everything.

        Raises:
            IntegrityError: when the tree, the pages and the queues contradict each other.
        """
        nodes = list(self.roots.values())
        for node in nodes:
            nodes.extend(node.children.values())
        slots = {(s.group.store, s.page): s for node in nodes for s in node.slots if s is not None}
        evictable = Counter(s.group.store for s in slots.values() if s.order is not None and not s.node.pins)
        if slots != self.slots or +self._evictable != evictable:
            raise IntegrityError("the prefix index has lost count of its pages.")
        queued = {entry[-1] for queue in self._queues.values() for entry in queue if _valid(entry)}
        for (store, page), slot in slots.items():
            if (slot.order is not None) == has_other_owner(store, page):
                raise IntegrityError(f"page {page} of {store} is at rest in the prefix index, or in use, but not both.")
            full, children = slot.group.window is None, [c.slots[slot.place] for c in slot.node.children.values()]
            waiting = sum(c is not None and c.holds for c in children) if full else 0
            ready = slot.order is not None and not slot.node.pins and not waiting
            if slot.waiting != waiting or (slot in queued) != ready:
                raise IntegrityError(f"page {page} of {store} is not where it belongs in the order of giving up.")
        for node in nodes:
            for child in node.children.values():
                wanted = (block_key(node.key, child.tokens, child.media), node, node.depth + 1)
                incomplete = [
                    s for s, g in zip(child.slots, self._groups(child), strict=True) if not s and not g.window
                ]
                if (
                    (child.key, child.parent, child.depth) != wanted
                    or incomplete
                    or (node.depth and child.pins > node.pins)
                ):
                    raise IntegrityError(f"block {child.depth} of a chain does not follow on from the one before it.")

    def _groups(self, node: Node) -> tuple[Group, ...]:
        while node.parent is not None:
            node = node.parent
        return node.groups


def block_key(parent: bytes, tokens: bytes, media: tuple) -> bytes:
    """Of a block: the number of ids is fixed by the namespace, so nothing can be taken for something else."""
    return hashlib.sha256(parent + tokens + (_tagged(media) if media else b"")).digest()


def _valid(entry: tuple) -> bool:
    """Whether an entry of a heap is the one that its slot holds a ticket for."""
    return entry[-1].ticket == entry[-2]
