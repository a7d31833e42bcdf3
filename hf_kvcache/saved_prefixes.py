"""The blocks that a pool's prefix index names, in a file of saved state (`savefile.py`), and back into a pool.

Blocks are written in order of what they are worth: what would be given up last comes first, and no block before the one that it
follows. A pool with less room takes the first of them. What is on a ladder is not in the file.

| tensor | what it holds |
|---|---|
| `blocks` | int64 `[n, 2]`: which tree a block belongs to, and which block it follows (-1: none) |
| `keys` | uint8 `[n, 32]`: its key in the index, which follows from the one before it and its tokens |
| `tokens` | int64: the ids of each block |
| `numbers` | int32: for each group of layers of a block's tree which of the group's pages is its own, -1 where it has none |
| `levels`, `seconds` | int32 and float64 `[n]`: its priority, NaN for no time |
| `pages.<group>.<layer>` | uint8 `[pages, page bytes]` |

Salts are in the keys of the trees, by their SHA-256 only; token ids are in the file as they are.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
import torch

from . import savefile
from .codecs import Geometry, NativeCodec
from .errors import CacheStateError, ConfigurationError, SavedStateError
from .identity import Identity
from .pages import GroupStore
from .pool import Demand
from .prefix import PRIORITY, Group, Node, PrefixIndex, Root, block_key
from .savefile import Entry, SavedFile
from .saving import codec_from, codec_said, layer_devices, page_entry, pages_from, pages_said, put_pages, require
from .spec import specs_from_config

if TYPE_CHECKING:
    from .pool import BlockPool

KIND = "prefix store"


class Restored(NamedTuple):
    """What became of the blocks of a file: `entered` into the index, `known` there already, `left_out` for want of room."""

    entered: int
    known: int
    left_out: int


# ---- saving ----------------------------------------------------------------------------------------------------------


def save(file: BinaryIO, pool: BlockPool) -> None:
    """Write all of a pool's prefix index, and the pages that it names. Nobody else uses the pool meanwhile."""
    with pool.lock:
        index, model = pool.prefixes, pool.model
        if not index.roots or pool.identity is None:
            raise CacheStateError(
                "the pool's prefix index is empty: there is nothing to save. It is filled by session.generate(model, ...)."
            )
        places = {group.sealed: number for number, group in enumerate(pool.groups.values())}
        roots = list(index.roots.values())
        nodes = _by_value(index)
        order = {node: i for i, node in enumerate(nodes)} | dict.fromkeys(roots, -1)
        number_of = {root: i for i, root in enumerate(roots)}
        numbers, taken = [], [[] for _ in places]
        tree = {}
        for node in nodes:
            tree[node] = tree.get(node.parent, node.parent)
            for slot, group in zip(node.slots, tree[node].groups, strict=True):
                pages = taken[places[group.store]]
                numbers.append(-1 if slot is None else len(pages))
                pages += [] if slot is None else [slot.page]
        entries = {
            "blocks": Entry.of(np.array([(number_of[tree[node]], order[node.parent]) for node in nodes], np.int64)),
            "keys": Entry.of(np.frombuffer(b"".join(node.key for node in nodes), np.uint8).reshape(-1, 32).copy()),
            "tokens": Entry.of(np.frombuffer(b"".join(node.tokens for node in nodes), np.int64).copy()),
            "numbers": Entry.of(np.array(numbers, np.int32)),
            "levels": Entry.of(np.array([_priority(index, node)[0] for node in nodes], np.int32)),
            "seconds": Entry.of(np.array([_priority(index, node)[1] for node in nodes], np.float64)),
        }
        groups = []
        for number, ((layers, *_), group) in enumerate(pool.groups.items()):
            held = [(place, layer) for place, layer in enumerate(layers) if group.sealed.pages[place] is not None]
            groups.append(
                {
                    "layers": layers,
                    "codec": codec_said(group.sealed.codec),
                    "block_size": group.block_size,
                    "count": len(taken[number]),
                    "pages": [pages_said(group.sealed.pages[place]) for place, _ in held],
                }
            )
            for place, layer in held if taken[number] else ():
                entries[f"pages.{number}.{layer}"] = page_entry(group.sealed, place, np.array(taken[number], np.int32))
        description = {
            "kind": KIND,
            "weights": pool.identity.weights.hex(),
            "model": type(model).__name__ if model is not None else "model",
            "groups": groups,
            "roots": [
                [root.key.hex(), root.block_size, [[places[g.store], g.window, g.sinks] for g in root.groups]]
                for root in roots
            ],
            "media": {str(i): [_medium_said(m) for m in node.media] for i, node in enumerate(nodes) if node.media},
        }
        savefile.write(file, description, entries)


def _priority(index: PrefixIndex, node: Node) -> tuple[int, float]:
    """Level and seconds (NaN for none) of a block, as of now."""
    rested = [slot.rested for slot in node.slots if slot is not None and slot.order is not None]
    if node.seconds is not None and rested and max(rested) + node.seconds <= index.clock():
        return PRIORITY, math.nan
    return node.level, math.nan if node.seconds is None else node.seconds


def _by_value(index: PrefixIndex) -> list[Node]:
    """All blocks, the last ones to be given up first, each one behind the one that it follows."""
    nodes: list[Node] = list(index.roots.values())
    for node in nodes:
        nodes.extend(node.children.values())
    worth: dict[Node, tuple] = {}
    for node in reversed(nodes):  # a block is worth as much as what needs it
        orders = [math.inf if slot.order is None else slot.order for slot in node.slots if slot is not None]
        own = (node.pins > 0, _priority(index, node)[0], max(orders, default=-1))
        worth[node] = max([own, *(worth[child] for child in node.children.values())])
    found, number = [], itertools.count()

    def candidates(node: Node) -> list[tuple]:
        return [(tuple(-n for n in worth[child]), next(number), child) for child in node.children.values()]

    queue = [entry for root in index.roots.values() for entry in candidates(root)]
    heapq.heapify(queue)
    while queue:
        node = heapq.heappop(queue)[-1]
        found.append(node)
        for entry in candidates(node):
            heapq.heappush(queue, entry)
    return found


def _medium_said(medium: tuple) -> list:
    content, place, length = medium
    return ["bytes", content.hex(), place, length] if isinstance(content, bytes) else ["str", content, place, length]


def _medium_from(said: list) -> tuple:
    kind, content, place, length = said
    require(
        kind in ("bytes", "str") and type(content) is str and type(place) is type(length) is int, f"a medium {said}"
    )
    return (bytes.fromhex(content) if kind == "bytes" else content), place, length


# ---- loading ---------------------------------------------------------------------------------------------------------


class _Block(NamedTuple):
    """A block of a file, its key recomputed; `numbers` has its page in each group of its tree, or None."""

    root: int
    parent: int
    key: bytes
    tokens: bytes
    media: tuple
    numbers: list[int | None]
    level: int
    seconds: float | None


class _Pages(NamedTuple):
    """A group of layers of a file, its pages not read yet. (What sessions share has no slower tier.)"""

    layers: tuple[int, ...]
    codec: object
    block_size: int
    count: int
    shapes: list[tuple[Geometry, str]]


def load(saved: SavedFile, pool: BlockPool, model: torch.nn.Module) -> Restored:
    """Enter the blocks of a file into a pool's prefix index, as far as there is room without giving anything up.

    Raises:
        SavedStateError: the file is damaged, or contradicts itself, or another model's; the pool is unchanged.
        CacheInputError: the pool holds another model's pages.
    """
    if pool.config is None:
        raise ConfigurationError(
            "prefixes are loaded into a pool that has the model's config: BlockPool(model.config, ...)."
        )
    with saved.understanding():
        if saved.description["weights"] != Identity.of(model).weights.hex():
            raise SavedStateError(
                f"{saved.name} was computed by a {saved.description['model']} with other weights, config or dtype than this "
                f"{type(model).__name__}: load it with that model, or let sessions compute their prefixes again."
            )
        groups = _read_groups(saved, specs_from_config(pool.config))
        roots = _read_roots(saved, groups)
        blocks = _read_blocks(saved, roots, groups)
    saved.verify()
    devices = layer_devices(model, max(layer for group in groups for layer in group.layers) + 1)
    with pool.lock:
        pool.bind(model)
        stores = [_store(pool, group, devices) for group in groups]
        return _enter(saved, pool, groups, stores, roots, blocks)


def _read_groups(saved: SavedFile, specs: Sequence) -> list[_Pages]:
    groups = []
    for number, said in enumerate(saved.description["groups"]):
        layers, codec, size = tuple(said["layers"]), codec_from(said["codec"]), said["block_size"]
        require(bool(layers) and list(layers) == sorted({int(layer) for layer in layers}), f"layers {layers}")
        require(layers[0] >= 0 and layers[-1] < len(specs), f"layers {layers} of {len(specs)}")
        require(type(said["count"]) is int and said["count"] >= 0, f"{said['count']} pages")
        shapes = []
        if said["count"]:
            shapes = [pages_from(pages, specs[layer], size) for pages, layer in zip(said["pages"], layers, strict=True)]
        for layer, (geometry, order) in zip(layers, shapes, strict=bool(shapes)):
            saved.expect(f"pages.{number}.{layer}", (said["count"], codec.layout(geometry, order).nbytes))
        groups.append(_Pages(layers, codec, size, said["count"], shapes))
    return groups


def _read_roots(saved: SavedFile, groups: list[_Pages]) -> list[tuple[bytes, int, list]]:
    roots = []
    for key, size, own in saved.description["roots"]:
        for number, window, sinks in own:
            require(type(number) is int and 0 <= number < len(groups), f"a group {number}")
            require(groups[number].block_size == size and type(size) is int, f"blocks of {size} positions")
            require(window is None or (type(window) is int and window > 0), f"a window of {window}")
            require(type(sinks) is int and sinks >= 0, f"{sinks} sinks")
        require(len({number for number, *_ in own}) == len(own) > 0, "groups of a tree")
        roots.append((bytes.fromhex(key), size, own))
    require(len({key for key, *_ in roots}) == len(roots) and all(len(key) == 32 for key, *_ in roots), "its trees")
    return roots


def _read_blocks(saved: SavedFile, roots: list[tuple], groups: list[_Pages]) -> list[_Block]:
    """The blocks of a file: every one follows an earlier one of its tree, has the key that its tokens give it, and pages that
    nobody else has."""
    which = saved.array("blocks", (None, 2), "I64")
    n = len(which)
    keys = saved.array("keys", (n, 32), "U8")
    levels, seconds = saved.array("levels", (n,), "I32"), saved.array("seconds", (n,), "F64")
    tokens, numbers = saved.array("tokens", (None,), "I64"), saved.array("numbers", (None,), "I32").tolist()
    require(((levels >= 0) & (levels <= 100) & ~(seconds <= 0)).all(), "priorities")
    media = {int(i): tuple(map(_medium_from, own)) for i, own in saved.description["media"].items()}
    blocks, token, at, used = [], 0, 0, [0] * len(groups)
    for i, (root, parent) in enumerate(which.tolist()):
        require(0 <= root < len(roots) and -1 <= parent < i, f"block {i} follows {parent}")
        require(parent < 0 or blocks[parent].root == root, f"block {i} is in two trees")
        key, size, own = roots[root]
        text = np.ascontiguousarray(tokens[token : token + size], "<i8").tobytes()
        key = block_key(blocks[parent].key if parent >= 0 else key, text, media.get(i, ()))
        require(key == keys[i].tobytes(), f"the key of block {i}")
        mine = [None if number == -1 else number for number in numbers[at : at + len(own)]]
        for (group, window, _), number in zip(own, mine, strict=True):
            require(number == used[group] if number is not None else window is not None, f"the pages of block {i}")
            used[group] += number is not None
        token, at = token + size, at + len(own)
        until = None if math.isnan(seconds[i]) else float(seconds[i])
        blocks.append(_Block(root, parent, key, text, media.get(i, ()), mine, int(levels[i]), until))
    require(token == len(tokens) and at == len(numbers), "more tokens or pages than blocks")
    require(used == [group.count for group in groups] and len({block.key for block in blocks}) == n > 0, "its blocks")
    return blocks


def _store(pool: BlockPool, group: _Pages, devices: Sequence[torch.device]) -> GroupStore:
    store = pool.group(group.layers, group.codec, group.block_size, None, NativeCodec())
    for place, (geometry, _) in enumerate(group.shapes):
        store.bind(place, group.layers[place], geometry, devices[group.layers[place]])
    return store


def _enter(
    saved: SavedFile, pool: BlockPool, groups, stores: list[GroupStore], roots, blocks: list[_Block]
) -> Restored:
    trees = [
        pool.prefixes.root(key, size, [Group(stores[number].sealed, window, sinks) for number, window, sinks in own])
        for key, size, own in roots
    ]
    for tree, (_, _, own) in zip(trees, roots, strict=True):
        if [(group.store, group.window, group.sinks) for group in tree.groups] != [
            (stores[n].sealed, *rest) for n, *rest in own
        ]:
            raise saved.refused("a tree of the same name in this pool has other groups of layers")
        for number, window, _ in own:
            if window is None:
                pool.expect_everything(stores[number])
    known = _known(trees, blocks)
    missing = [_missing(block, node) for block, node in zip(blocks, known, strict=True)]
    counts = np.zeros((len(blocks) + 1, len(groups)), np.int64)
    for i, (block, numbers) in enumerate(zip(blocks, missing, strict=True)):
        for (group, *_), number in zip(roots[block.root][2], numbers, strict=True):
            counts[i + 1, group] = number is not None
    counts = counts.cumsum(axis=0)

    def demands(n: int) -> list[tuple[GroupStore, Demand]]:
        return [(store, Demand(sealed=int(count))) for store, count in zip(stores, counts[n], strict=True)]

    fit = bisect.bisect_left(range(1, len(blocks) + 1), True, key=lambda n: not pool.has_room(demands(n)))
    while fit and missing[fit - 1] == [None] * len(missing[fit - 1]) and known[fit - 1] is None:
        fit -= 1  # it has no pages, and would lead nowhere
    taken = [np.array(sealed, np.int32) for _, sealed, _ in pool.reserve(demands(fit))]
    try:
        pages = _read_pages(saved, groups, stores, roots, blocks[:fit], missing, taken)
    except BaseException:
        for store, ids in zip(stores, taken, strict=True):
            store.sealed.release(ids)
        pool.trim()
        raise
    nodes: list[Node] = []
    for block, own, before in zip(blocks[:fit], pages, known, strict=False):
        parent = nodes[block.parent] if block.parent >= 0 else trees[block.root]
        nodes.append(pool.publish(trees[block.root], parent, block.tokens, block.media, own))
        if before is None and (block.level, block.seconds) != (PRIORITY, None):
            pool.prefixes.prioritise(nodes[-1], block.level, block.seconds)
    for block, own in zip(
        reversed(blocks[:fit]), reversed(pages), strict=True
    ):  # what is worth least comes to rest first
        for group, page in zip(trees[block.root].groups, own, strict=True):
            if page is not None:
                group.store.release(np.array([page], np.int32))
    there = sum(node is not None for node in known)
    entered = sum(node is None for node in known[:fit])
    return Restored(entered, there, len(blocks) - there - entered)


def _known(trees: list[Root], blocks: list[_Block]) -> list[Node | None]:
    """The blocks that the index has already."""
    known: list[Node | None] = []
    for block in blocks:
        parent = known[block.parent] if block.parent >= 0 else trees[block.root]
        known.append(None if parent is None else parent.children.get(block.key))
    return known


def _missing(block: _Block, node: Node | None) -> list[int | None]:
    """The pages of a block that the index has not."""
    return [number if node is None or node.slots[place] is None else None for place, number in enumerate(block.numbers)]


def _read_pages(saved, groups, stores, roots, blocks, missing, taken) -> list[list[int | None]]:
    """Read the missing pages of `blocks` into those that were taken for them; returns each block's own."""
    where = [np.full(group.count, -1, np.int64) for group in groups]
    left, pages = [iter(ids.tolist()) for ids in taken], []
    for block, numbers in zip(blocks, missing, strict=False):
        pages.append([])
        for (group, *_), number in zip(roots[block.root][2], numbers, strict=True):
            pages[-1].append(None if number is None else next(left[group]))
            if number is not None:
                where[group][number] = pages[-1][-1]
    for number, (group, store) in enumerate(zip(groups, stores, strict=True)):
        for place, (geometry, order) in enumerate(group.shapes if len(taken[number]) else ()):
            shape, at = (group.count, group.codec.layout(geometry, order).nbytes), 0
            for rows in saved.rows(f"pages.{number}.{group.layers[place]}", shape):
                ids = where[number][at : at + len(rows)]
                at += len(rows)
                if (ids >= 0).any():
                    put_pages(store.sealed.layer(place), ids[ids >= 0].astype(np.int32), rows[ids >= 0], order)
    return pages
