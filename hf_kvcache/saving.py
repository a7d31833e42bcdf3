"""A cache in a file of saved state (`savefile.py`), and back: its block tables, and the bytes of the pages that they refer to.

| tensor | what it holds |
|---|---|
| `rows.<group>` | int64 `[5, rows]`: cold blocks, cold and sealed ones, all blocks, tokens seen, positions dropped |
| `blocks.<group>` | int32 `[2, blocks]`, row after row: positions in a block, and which of its store's pages it is |
| `pages.<layer>.<store>` | uint8 `[pages, page bytes]`: sealed, cold and open pages, each once, however many rows share it |
| `cut.<layer>.<store>`, `slots.<group>.<store>` | the pages in the model's dtype that are not full, without their empty slots |
| `valid` | uint8 `[rows, columns]`: the columns that hold a token, where not all do |
| `tokens`, `tokens.rows`, `tokens.mask` | ids row after row, how many each row has, and the padding mask of the prompt |
| `state.<layer>.<n>.conv`, `.recurrent` | what a layer with linear attention keeps |

Nothing but positions that the cache holds gets into a file: empty slots and gaps between fields may have other texts in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np
import torch

from . import savefile
from .choices import described, made
from .codecs import CODECS, Codec, Geometry, NativeCodec
from .codecs.packing import ORDERS
from .errors import ConfigurationError, SavedStateError
from .kernels.base import Pages
from .layers import LayerStorage
from .pages import GroupStore, PageStore
from .passes import LayerGroup
from .pool import Demand
from .retention import RETENTIONS
from .savefile import Entry, SavedFile
from .spec import LayerSpec
from .storage import Storage
from .tiers import TIERS, Tier

KIND = "cache"
CODEC_CLASSES = {type(make()).__name__: type(make()) for make in CODECS.values()}
NUMBERS = ("n_cold", "n_sealed", "n_entries", "length", "gap")
COMPUTES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
MAX_BLOCK = 1 << 16  # positions: a page is allocated whole for a single one of them, and a file could say any number


# ---- models and choices ----------------------------------------------------------------------------------------------


def check_model(saved: SavedFile, model: torch.nn.Module, fingerprint: str) -> None:
    """Raise `SavedStateError` unless it was this model that computed what a file holds."""
    if saved.description["fingerprint"] != fingerprint:
        raise SavedStateError(
            f"{saved.name} was computed by a {saved.description['model']} with fingerprint "
            f"{saved.description['fingerprint'][:12]}, this {type(model).__name__} has {fingerprint[:12]}: other weights, "
            "config, dtype or adapters. Load it with the model that computed it, or compute it again with this one."
        )


def choices_said(choices: dict, layers: dict) -> dict:
    """A cache's choices as JSON, the ones for single layers too. (Equal tiers are one or two: that decides what is one group.)

    Raises:
        ConfigurationError: a choice is of a class of the caller's own.
    """
    tiers: list[Tier] = []

    def said(key: str, value):
        if value is None or isinstance(value, (str, int)):
            return value
        if key == "tier":
            if not any(tier is value for tier in tiers):
                tiers.append(value)
            return next(number for number, tier in enumerate(tiers) if tier is value)
        return described(key, CODEC_CLASSES if key == "codec" else RETENTIONS, value)

    each = [[layer, {key: said(key, value) for key, value in own.items()}] for layer, own in layers.items()]
    both = {key: said(key, value) for key, value in choices.items()} | {"layers": each}
    both["tiers"] = [described("tier", TIERS, tier) for tier in tiers]
    try:
        json.dumps(both)
    except TypeError as error:
        raise ConfigurationError(f"the cache's choices {both} cannot be written down: {error}.") from error
    return both


def choices_from(said: dict) -> dict:
    """The arguments for `KVCache` that `choices_said` was given."""
    tiers = [made(TIERS, *tier) for tier in said["tiers"]]

    def choice(key: str, value):
        if isinstance(value, list):
            return made(CODEC_CLASSES if key == "codec" else RETENTIONS, *value)
        return tiers[value] if key == "tier" and isinstance(value, int) else value

    layers = {layer: {key: choice(key, value) for key, value in own.items()} for layer, own in said["layers"]}
    return {key: choice(key, said[key]) for key in ("retention", "codec", "tier")} | {"layers": layers}


def codec_said(codec: Codec) -> list:
    return described("codec", CODEC_CLASSES, codec)


def codec_from(said: list) -> Codec:
    return made(CODEC_CLASSES, *said)


def layer_devices(model: torch.nn.Module, layers: int) -> list[torch.device]:
    """Where each layer computes: where the weights are of the module that says it is that layer."""
    first = next(model.parameters()).device
    devices = [first] * layers
    for module in model.modules():
        number, weight = getattr(module, "layer_idx", None), next(module.parameters(), None)
        if isinstance(number, int) and number < layers and weight is not None:
            devices[number] = weight.device
    return devices


# ---- pages -----------------------------------------------------------------------------------------------------------


def pages_said(pages: Pages) -> list:
    """The shape of a layer's pages as JSON."""
    g = pages.geometry
    return [g.kv_heads, g.k_dim, g.v_dim, str(g.dtype).removeprefix("torch."), pages.order]


def pages_from(said: list, spec: LayerSpec, block_size: int) -> tuple[Geometry, str]:
    """The shape of a layer's pages, and the order of their codes.

    Raises:
        ValueError: it is none, or not one for this layer.
    """
    *shape, dtype, order = said
    require(all(type(n) is int and n > 0 for n in (*shape, block_size)), f"a page of {shape}, {block_size} positions")
    require(block_size <= MAX_BLOCK, f"blocks of {block_size} positions")
    require(spec.stores and spec.suits(tuple(shape)), f"pages of {shape}, where the model's config says {spec.shape}")
    require(order in ORDERS, f"a packed order {order!r}")
    return Geometry(*shape, block_size, COMPUTES[dtype]), order


def require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def page_entry(store: PageStore, place: int, ids: np.ndarray) -> Entry:
    """Pages `ids` of a group's layer number `place`."""
    pages = store.layer(place)
    step = max(1, savefile.PART // pages.layout.nbytes)

    def parts() -> Iterator[np.ndarray]:
        for start in range(0, len(ids), step):
            rows, end = pages.raw(ids[start : start + step]).cpu(), 0
            for field in pages.layout.fields.values():
                rows[:, end : field.offset] = 0  # between fields there is whatever was in memory
                end = field.offset + field.nbytes
            rows[:, end:] = 0
            yield rows.numpy()

    return Entry("U8", (len(ids), pages.layout.nbytes), parts)


def put_pages(pages: Pages, ids: np.ndarray, rows: np.ndarray, order: str) -> None:
    """Store the bytes of pages, packed in any order."""
    raw = torch.from_numpy(rows)
    if order != pages.order:
        fields = pages.codec.layout(pages.geometry, order).views(raw)
        packed = pages.over(torch.zeros((len(ids), pages.layout.nbytes), dtype=torch.uint8))
        packed.scatter(np.arange(len(ids)), pages.codec.reorder(fields, pages.geometry, order, pages.order))
        raw = packed.slabs[0]
    pages.put_raw(ids, raw)


class Held(NamedTuple):
    """Pages of one store that a table refers to: their ids, those that are cut last, and the slots in use of each of those."""

    ids: np.ndarray
    slots: np.ndarray

    @property
    def whole(self) -> np.ndarray:
        return self.ids[: len(self.ids) - len(self.slots)]

    @property
    def cut(self) -> np.ndarray:
        return self.ids[len(self.ids) - len(self.slots) :]


def _cut_entry(store: PageStore, place: int, held: Held) -> Entry:
    fields = store.layer(place).gather(held.cut)
    parts = [fields[name][i, :, :n].contiguous().reshape(-1) for i, n in enumerate(held.slots) for name in ("k", "v")]
    return Entry.of(torch.cat(parts).view(torch.uint8))


def _cut_bytes(geometry: Geometry, slots: np.ndarray) -> int:
    return int(slots.sum()) * geometry.kv_heads * (geometry.k_dim + geometry.v_dim) * geometry.dtype.itemsize


def _put_cut(pages: Pages, ids: np.ndarray, slots: np.ndarray, data: torch.Tensor) -> None:
    g, at = pages.geometry, 0
    raw = torch.zeros((len(ids), pages.layout.nbytes), dtype=torch.uint8)
    fields, data = pages.layout.views(raw), data.view(g.dtype)
    for i, n in enumerate(slots.tolist()):
        for name, dim in (("k", g.k_dim), ("v", g.v_dim)):
            count = g.kv_heads * n * dim
            fields[name][i, :, :n] = data[at : at + count].view(g.kv_heads, n, dim)
            at += count
    pages.put_raw(ids, raw)


# ---- saving ----------------------------------------------------------------------------------------------------------


def save(file: BinaryIO, storage: Storage, said: dict, entries: dict[str, Entry]) -> None:
    """Write everything that a cache holds, at rest; `said` and `entries` are what `cache.py` knows beside it."""
    groups = []
    for number, group in enumerate(storage.groups):
        group.table.settle()
        held = _held(group)
        layers = members(storage, group)
        groups.append(
            {
                "layers": [layer.layer for layer in layers],
                "pages": [pages_said(group.store.sealed.pages[layer.index]) for layer in layers],
                "held": {name: [len(each.whole), len(each.cut)] for name, each in held.items()},
                "slack": group.table.slack,
                "tokens_sealed": int(group.table.tokens_sealed),
            }
        )
        entries = entries | _table_entries(number, group, held) | _page_entries(group, layers, held)
    if storage.valid is not None:
        entries["valid"] = Entry.of(storage.valid.astype(np.uint8))
    size = {"batch": storage.batch, "columns": storage.columns, "foreign_mask": storage.foreign_mask}
    savefile.write(file, {"kind": KIND, **said, **size, "groups": groups}, entries)


def members(storage: Storage, group: LayerGroup) -> list[LayerStorage]:
    return [layer for layer in storage.layers if layer is not None and layer.group is group]


def _names(store: GroupStore) -> dict[PageStore, str]:
    """The name of each store in a file. (Where sealing is in place, open pages are in the sealed ones' store.)"""
    names: dict[PageStore, str] = {}
    for name in ("sealed", "cold", "open"):
        if getattr(store, name) is not None:
            names.setdefault(getattr(store, name), name)
    return names


def _held(group: LayerGroup) -> dict[str, Held]:
    """What a table refers to, by name of the store, in the order in which rows come to it."""
    table, size = group.table, group.store.block_size
    used: dict[PageStore, dict[int, int]] = {store: {} for store in _names(group.store)}
    for r in range(table.rows):
        for store, lo, hi in table.ranges(r):
            for page, n in zip(
                table.ids[r, lo:hi].tolist(), np.diff(table.first[r, lo : hi + 1]).tolist(), strict=True
            ):
                used[store][page] = max(n, used[store].get(page, 0))
    held = {}
    for store, name in _names(group.store).items():
        cut = {page: n for page, n in used[store].items() if n < size and isinstance(store.codec, NativeCodec)}
        ids = [page for page in used[store] if page not in cut] + list(cut)
        held[name] = Held(np.array(ids, np.int32), np.array(list(cut.values()), np.int32))
    return held


def _table_entries(number: int, group: LayerGroup, held: dict[str, Held]) -> dict[str, Entry]:
    table, names = group.table, _names(group.store)
    numbers = {names[store]: {page: i for i, page in enumerate(held[names[store]].ids.tolist())} for store in names}
    counts, pages = [], []
    for r in range(table.rows):
        for store, lo, hi in table.ranges(r):
            counts += np.diff(table.first[r, lo : hi + 1]).tolist()
            pages += [numbers[names[store]][page] for page in table.ids[r, lo:hi].tolist()]
    entries = {
        f"rows.{number}": Entry.of(np.stack([getattr(table, name).astype(np.int64) for name in NUMBERS])),
        f"blocks.{number}": Entry.of(np.array([counts, pages], np.int32)),
    }
    return entries | {f"slots.{number}.{name}": Entry.of(each.slots) for name, each in held.items() if len(each.slots)}


def _page_entries(group: LayerGroup, layers: Sequence[LayerStorage], held: dict[str, Held]) -> dict[str, Entry]:
    entries = {}
    for store, name in _names(group.store).items():
        for layer in layers:
            if len(held[name].whole):
                entries[f"pages.{layer.layer}.{name}"] = page_entry(store, layer.index, held[name].whole)
            if len(held[name].cut):
                entries[f"cut.{layer.layer}.{name}"] = _cut_entry(store, layer.index, held[name])
    return entries


# ---- loading ---------------------------------------------------------------------------------------------------------


def restore(saved: SavedFile, storage: Storage, devices: Sequence[torch.device]) -> None:
    """Have an empty storage, built by the same choices, hold what a file holds.

    Raises:
        SavedStateError: the file is damaged, or contradicts itself; nothing is held.
        CapacityError: the pool has no room; nothing is held and nothing was evicted.
        CacheInputError: the pool holds another model's pages.
    """
    with saved.understanding():
        batch, columns = saved.description["batch"], saved.description["columns"]
        require(type(batch) is type(columns) is int and min(batch, columns) > 0, f"{batch} rows of {columns} columns")
        valid = saved.array("valid", (batch, columns), "U8").astype(bool) if "valid" in saved.table else None
        lengths = np.broadcast_to(np.int64(columns), batch) if valid is None else valid.sum(axis=1)
        said = saved.description["groups"]
        parts = [
            _Part(saved, *each, storage, lengths) for each in zip(said, storage.groups, range(len(said)), strict=True)
        ]
        foreign_mask = bool(saved.description["foreign_mask"])
    for part in parts:
        part.bind(devices)
    with storage.pool.lock:
        taken = storage.pool.reserve([(part.group.store, part.demand()) for part in parts])
        for part, pages in zip(parts, taken, strict=True):
            part.enter(*pages)
    try:
        for part in parts:
            part.fill()
    except BaseException:
        storage.reset()
        raise
    storage.columns, storage.batch, storage.valid, storage.foreign_mask = columns, batch, valid, foreign_mask
    for part in parts:
        for layer in part.layers:
            layer.take_over(columns)


class _Part:
    """What a file holds of one group of layers: its table, checked, and how many pages of which shape."""

    def __init__(
        self, saved: SavedFile, said: dict, group: LayerGroup, number: int, storage: Storage, lengths: np.ndarray
    ):
        self.saved, self.group, self.said = saved, group, said
        self.layers = members(storage, group)
        require(said["layers"] == [layer.layer for layer in self.layers], f"layers {said['layers']}")
        self.shapes = [
            pages_from(pages, layer.spec, group.store.block_size)
            for pages, layer in zip(said["pages"], self.layers, strict=True)
        ]
        require(
            all(type(n) is int and n >= 0 for n in (said["slack"], said["tokens_sealed"])), "its numbers of positions"
        )
        self._read_table(number, lengths)
        self._check_pages()

    def _targets(self) -> dict[str, PageStore]:
        """Where the pages of each store of the file go: without a slower tier, cold ones to the sealed ones."""
        store = self.group.store
        return {"sealed": store.sealed, "cold": store.cold or store.sealed, "open": store.open}

    def _read_table(self, number: int, lengths: np.ndarray) -> None:
        saved, size = self.saved, self.group.store.block_size
        numbers = saved.array(f"rows.{number}", (len(NUMBERS), len(lengths)), "I64")
        counts, pages = saved.array(f"blocks.{number}", (2, None), "I32")
        self.numbers = dict(zip(NUMBERS, numbers, strict=True))
        cold, sealed, n, length, gap = numbers
        order = (cold >= 0) & (cold <= sealed) & (sealed <= n) & (n <= len(counts)) & (length == lengths) & (gap >= 0)
        require(order.all() and n.sum() == len(counts), "the numbers of its rows")
        require(
            ((counts >= 1) & (counts <= size)).all(),
            f"blocks of {counts.tolist()} positions, each must hold 1 to {size}",
        )
        ends = np.cumsum(n)[:-1]
        self.counts, self.numbered = np.split(counts, ends), np.split(pages, ends)
        opened = "sealed" if self.group.store.lossless else "open"
        self.names = [
            np.repeat(["cold", "sealed", opened], [c, s - c, e - s]) for c, s, e in zip(cold, sealed, n, strict=True)
        ]
        self.slots = {
            name: saved.array(f"slots.{number}.{name}", (cut,), "I32") if cut else np.zeros(0, np.int32)
            for name, (_, cut) in self.said["held"].items()
        }
        for r in range(len(lengths)):
            self._check_row(r, int(sealed[r]), int(length[r]), int(gap[r]))

    def _check_row(self, r: int, sealed: int, length: int, gap: int) -> None:
        """What `BlockTable.check_integrity` demands, and that no query will look for a position that was dropped."""
        table, counts = self.group.table, self.counts[r]
        require(counts.sum() + gap == length, f"row {r}: {counts.sum()} positions kept, {gap} dropped, of {length}")
        require(
            (counts[sealed:-1] == table.group.block_size).all(), f"row {r}: an open block before the last is not full"
        )
        if gap:
            require(table.window is not None, f"row {r}: {gap} positions dropped without a window")
            first = np.concatenate([[0], np.cumsum(counts)])
            sink_end = int(first[np.searchsorted(first[:-1], table.sinks)])
            require(length + 1 - table.window >= sink_end + gap, f"row {r}: {gap} positions dropped from its window")

    def _check_pages(self) -> None:
        """Every page of the file is some block's, and every block's is there, with as many slots as the block needs."""
        size, numbered, counts = self.group.store.block_size, np.concatenate(self.numbered), np.concatenate(self.counts)
        names = np.concatenate(self.names)
        self.held: dict[str, int] = {}
        for name, store in self._targets().items():
            whole, cut = self.said["held"].get(name, (0, 0))
            slots = self.slots.get(name, np.zeros(0, np.int32))
            require(
                all(type(n) is int and n >= 0 for n in (whole, cut)) and len(slots) == cut, f"{whole} + {cut} pages"
            )
            own = numbered[names == name]
            require(whole + cut <= len(own), f"{whole} + {cut} pages of {len(own)} {name} blocks")
            require(np.array_equal(np.unique(own), np.arange(whole + cut)), f"pages of its {name} blocks")
            there = np.concatenate([np.full(whole, size, np.int32), slots])
            require((counts[names == name] <= there[own]).all() and (slots >= 1).all(), f"slots of its {name} blocks")
            require(not cut or isinstance(store.codec, NativeCodec), f"{store.codec} pages that are cut")
            self.held[name] = whole + cut
            for layer, (geometry, order) in zip(self.layers, self.shapes, strict=True):
                if whole:
                    page = store.codec.layout(geometry, order).nbytes
                    self.saved.expect(f"pages.{layer.layer}.{name}", (whole, page))
                if cut:
                    self.saved.expect(f"cut.{layer.layer}.{name}", (_cut_bytes(geometry, slots),))

    def bind(self, devices: Sequence[torch.device]) -> None:
        for layer, (geometry, _) in zip(self.layers, self.shapes, strict=True):
            layer.bind(geometry, devices[layer.layer])

    def demand(self) -> Demand:
        to_sealed = 0 if self.group.store.cold is not None else self.held["cold"]
        return Demand(self.held["open"], self.held["sealed"] + to_sealed, self.held["cold"] - to_sealed)

    def enter(self, opened: list[int], sealed: list[int], cold: list[int]) -> None:
        """Have the table refer to pages that were taken for it."""
        if self.group.store.cold is None:
            sealed, cold = sealed[: self.held["sealed"]], sealed[self.held["sealed"] :]
            self.numbers["n_cold"] = np.zeros_like(self.numbers["n_cold"])
        self.ids = {
            name: np.array(ids, np.int32) for name, ids in (("open", opened), ("sealed", sealed), ("cold", cold))
        }
        rows = []
        for names, numbered in zip(self.names, self.numbered, strict=True):
            rows.append(np.zeros(len(names), np.int32))
            for name, ids in self.ids.items():
                rows[-1][names == name] = ids[numbered[names == name]]
        table = self.group.table
        table.restore(rows, self.counts, self.numbers)
        table.slack, table.tokens_sealed = max(table.slack, self.said["slack"]), self.said["tokens_sealed"]
        for name, store in self._targets().items():
            store.release(self.ids[name])  # the table has its own references now

    def fill(self) -> None:
        """Read the pages of every layer."""
        for layer, (geometry, order) in zip(self.layers, self.shapes, strict=True):
            for name, store in self._targets().items():
                ids, slots = self.ids[name], self.slots.get(name, ())
                whole = len(ids) - len(slots)
                if whole:
                    pages, at = store.layer(layer.index), 0
                    page = store.codec.layout(geometry, order).nbytes
                    for rows in self.saved.rows(f"pages.{layer.layer}.{name}", (whole, page)):
                        put_pages(pages, ids[at : at + len(rows)], rows, order)
                        at += len(rows)
                if len(slots):
                    size = _cut_bytes(geometry, slots)
                    data = self.saved.tensor(f"cut.{layer.layer}.{name}", (size,), "U8")
                    _put_cut(store.layer(layer.index), ids[whole:], slots, data)
