"""What a cache holds: groups of layers with one block table each, and the tensor work of a forward pass.

A forward pass goes through here in two halves per layer, as the models do it: `LayerStorage.append` stores the new keys
and values, `LayerStorage.attend` answers the queries. The first layer to append plans the pass for all of them
(`Storage.begin`); after that a layer only copies, encodes and calls one kernel.

New tokens are always attended to exactly as they came in, stored ones as they are stored. A pass of one token (or a
few) therefore reads everything from storage; a longer one reads the past from storage as it was before, the new part
from its input, and merges the two.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from .blocks import AppendPlan, BlockPool, BlockTable, GroupStore
from .codecs import Geometry
from .errors import CacheInputError, CacheStateError, CapacityError, UnsupportedError
from .kernels import dispatch, reference
from .kernels.base import Pages, Rotation, View
from .kernels.merge import merge, with_sink_logits
from .kernels.prefill import causal, prefill
from .retention import Retention
from .spec import LayerSpec
from .tiers import Tier

RotaryAngles = Callable[[np.ndarray, torch.device], Rotation]  # positions to turn back, [batch, q_len] -> angles


class Stored(NamedTuple):
    """A view of a group's storage, how many entries of each row are in the slower tier, and where positions are."""

    view: View
    n_cold: np.ndarray
    places: Callable[[np.ndarray], np.ndarray]


@dataclass
class Step:
    """One forward pass, for all layers of a group.

    Attributes:
        plan: what every layer appends.
        q_len: columns of the pass.
        tokens: for each row the columns that hold a token; None when all do.
        now: storage after the append, when storage alone answers the pass; else None.
        past: storage before the append, when it held anything and the new part is read from its input; else None.
        seen: `[batch, q_len]` tokens up to and including each query's own.
        before: `[batch]` tokens before the pass.
        window, sinks: what each query sees: the newest `window` positions (None for all) and the first `sinks`.
    """

    plan: AppendPlan
    q_len: int
    tokens: list[torch.Tensor] | None
    now: Stored | None
    past: Stored | None
    seen: np.ndarray
    before: np.ndarray
    window: int | None
    sinks: int
    narrowed: dict[int, Step] = field(default_factory=dict)
    rotations: dict[torch.device, Rotation] = field(default_factory=dict)
    views: dict[tuple, View] = field(default_factory=dict)
    number: int = field(default_factory=itertools.count().__next__)
    checked: bool = False

    def newest(self, view: View, m: int, rope: Rotation | None) -> View:
        """`view` for the newest `m` queries only (some models ask for the last one alone), with their angles.

        Kept for the pass: the layers share it, and kernels keep what they made of it.
        """
        if m == self.q_len and rope is None:
            return view
        key = (id(view), m, id(rope))
        if key not in self.views:
            begin, end = (np.ascontiguousarray(x[:, -m:]) for x in (view.begin, view.end))
            self.views[key] = replace(view, begin=begin, end=end, rope=rope and _newest_angles(rope, m))
        return self.views[key]


class LayerGroup:
    """Layers that share a block table: the same retention, codec and tier."""

    def __init__(
        self,
        retention: Retention,
        tier: Tier,
        store: GroupStore,
        pool: BlockPool,
        residual: int,
        angles: RotaryAngles | None,
    ):
        self.retention, self.tier, self.store = retention, tier, store
        self.table = BlockTable(
            store,
            pool,
            window=retention.window,
            sinks=retention.sinks,
            residual=0 if store.lossless else residual,
            resident=tier.resident_tokens,
        )
        self.angles = angles if retention.rebase else None
        self.step: Step | None = None

    def begin(self, row_plans: list, pages: tuple, q_len: int, valid: np.ndarray | None) -> None:
        """Enter the planned blocks and work out what every query sees."""
        table = self.table
        before, had_past = table.length.copy(), q_len > 1 and table.length.any()
        past = _view(table, copy=True) if had_past else None
        plan = table.commit(row_plans, pages)
        if valid is None:
            seen, tokens = before[:, None] + np.arange(1, q_len + 1), None
        else:
            seen = before[:, None] + np.cumsum(valid, axis=1)
            tokens = [torch.from_numpy(np.nonzero(row)[0]) for row in valid]
        now = None
        if q_len == 1 or (had_past and q_len <= dispatch.QUERIES and plan.complete):
            now, past = _view(table), None
        window, sinks = self.retention.window, self.retention.sinks
        now, past = (_with_ranges(stored, seen, window, sinks) for stored in (now, past))
        self.step = Step(plan, q_len, tokens, now, past, seen, before, window, sinks)

    def narrow(self, step: Step, window: int) -> Step:
        """The same pass for a model layer that looks back over fewer positions than the group keeps, and at no sinks."""
        if window not in step.narrowed:
            now, past = (_with_ranges(stored, step.seen, window, 0) for stored in (step.now, step.past))
            step.narrowed[window] = replace(step, now=now, past=past, window=window, sinks=0)
        return step.narrowed[window]

    def turned_back(self, step: Step, device: torch.device) -> Rotation | None:
        """Angles from each query's position to the one it has inside the cache; None where no position was dropped."""
        if self.angles is None or not step.sinks:
            return None
        if device not in step.rotations:
            dropped = np.maximum(step.seen - step.window - step.sinks, 0)
            step.rotations[device] = self.angles(dropped, device) if dropped.any() else None
        return step.rotations[device]


def _view(table: BlockTable, copy: bool = False) -> Stored:
    arrays = (table.ids, table.first, table.n_sealed, table.n_entries, table.n_cold)
    ids, first, n_sealed, n_entries, n_cold = (x.copy() if copy else x for x in arrays)
    none = np.zeros((table.rows, 0), np.int32)
    return Stored(View(ids, first, np.zeros_like(n_cold), n_sealed, n_entries, none, none), n_cold, table.places())


def _with_ranges(stored: Stored | None, seen: np.ndarray, window: int | None, sinks: int) -> Stored | None:
    """The view with the range of every query."""
    if stored is None:
        return None
    oldest = np.zeros_like(seen) if window is None else np.maximum(seen - window, 0)
    begin, end = (np.ascontiguousarray(stored.places(x), dtype=np.int32) for x in (oldest, seen))
    return stored._replace(view=replace(stored.view, begin=begin, end=end, sinks=sinks))


class Fresh:
    """What a layer returns for a pass: the new keys and values as they came in, and where the rest of them is."""

    __slots__ = ("k", "layer", "materialised", "step", "v")

    def __init__(self, layer: LayerStorage, step: Step, k: torch.Tensor, v: torch.Tensor):
        self.layer, self.step, self.k, self.v = layer, step, k, v
        self.materialised: tuple[torch.Tensor, torch.Tensor] | None = None


class LayerStorage:
    """One layer's share of a `Storage`: its pages in the group's stores.

    Attributes:
        columns: columns appended so far; equal in all layers between two passes.
    """

    def __init__(self, storage: Storage, group: LayerGroup, index: int, spec: LayerSpec, layer: int):
        # A proxy, because the storage refers to its layers: without a cycle, `del cache` frees everything at once.
        self.storage = weakref.proxy(storage)
        self.group, self.index, self.spec, self.layer = group, index, spec, layer
        self.block_size, self.columns = group.store.block_size, 0
        self.geometry: Geometry | None = None  # None until the first append shows the true shapes
        self.device: torch.device | None = None

    # ---- appending ------------------------------------------------------------------------------------------------

    def append(self, k: torch.Tensor, v: torch.Tensor) -> Fresh:
        """Store `k` `[batch, kv_heads, q_len, k_dim]` and `v` `[..., v_dim]`.

        Raises:
            CacheInputError: another shape, dtype, device or batch size than the cache holds; nothing was stored.
            CacheStateError: an earlier pass stopped halfway.
            CapacityError: the pool has no room; nothing was stored.
        """
        self._check(k, v)
        storage = self.storage
        if self.columns == storage.columns:
            storage.begin(k)
        step = self.group.step
        if step is None or self.columns + k.shape[2] != storage.columns or k.shape[0] != storage.batch:
            raise CacheStateError(
                f"layer {self.layer} holds {self.columns} columns and was given {k.shape[2]}, where the pass ends at "
                f"{storage.columns}: an earlier forward pass stopped halfway. Call reset(), or crop() to before it."
            )
        if self.geometry is None:
            self._bind(k, v)
        self._store(step.plan, *((k, v) if step.tokens is None else _compact(k, v, step.tokens)))
        self.columns = storage.columns
        return Fresh(self, step, k, v)

    def _check(self, k: torch.Tensor, v: torch.Tensor) -> None:
        shape = (k.shape[1], k.shape[3], v.shape[3])
        if self.geometry is None:
            spec = self.spec
            expected = (spec.kv_heads, spec.k_dim, spec.v_dim)
            if spec.kv_heads is not None and shape != expected:
                raise CacheInputError(
                    f"layer {self.layer} was given (kv_heads, k_dim, v_dim) = {shape}, the config that the cache was built "
                    f"from says {expected}: build the cache from this model's config."
                )
            return
        g = self.geometry
        if shape != (g.kv_heads, g.k_dim, g.v_dim):
            raise CacheInputError(
                f"layer {self.layer} holds (kv_heads, k_dim, v_dim) = {(g.kv_heads, g.k_dim, g.v_dim)} and was given {shape}: "
                "use one cache per model."
            )
        if k.dtype != g.dtype or v.dtype != g.dtype:
            raise CacheInputError(
                f"layer {self.layer} holds {g.dtype} and was given {k.dtype} / {v.dtype}: reset() the cache before the "
                "model changes its dtype."
            )
        if k.device != self.device:
            raise CacheInputError(
                f"layer {self.layer} lives on {self.device} and was given {k.device}: reset() the cache before the model "
                "moves."
            )

    def expect(self, dtype: torch.dtype, device: torch.device) -> None:
        """Before the first pass: what the config says of the pages, so that the pool can count their bytes."""
        spec = self.spec
        if self.geometry is None and spec.kv_heads is not None:
            geometry = Geometry(spec.kv_heads, spec.k_dim, spec.v_dim, self.block_size, dtype)
            for store in self.group.store.stores:
                if store.pages[self.index] is None:
                    store.bind(self.index, geometry, device)

    def _bind(self, k: torch.Tensor, v: torch.Tensor) -> None:
        geometry = Geometry(k.shape[1], k.shape[3], v.shape[3], self.block_size, k.dtype)
        for store in self.group.store.stores:
            if not store.holds(self.index, geometry, k.device):
                if not store.is_vacant(self.index):
                    raise CacheInputError(
                        f"the pool holds layer {self.layer} as {store.pages[self.index].geometry}, this cache has {geometry} "
                        f"on {k.device}: caches that share a pool must serve one model in one dtype in one place."
                    )
                store.bind(self.index, geometry, k.device)
        self.geometry, self.device = geometry, k.device

    def plain_bytes(self) -> int:
        """Bytes that a plain cache holds for the same columns of this layer."""
        if self.geometry is None:
            return 0
        g, columns = self.geometry, self.columns
        if self.spec.window is not None:
            columns = min(columns, self.spec.window - 1)
        return self.storage.batch * columns * g.kv_heads * (g.k_dim + g.v_dim) * g.dtype.itemsize

    def _store(self, plan: AppendPlan, k: torch.Tensor, v: torch.Tensor) -> None:
        store = self.group.store
        opened = store.open.layer(self.index)
        if plan.copies.size:
            source, target = plan.copies
            opened.scatter(target, opened.gather(source))
        if len(plan.writes):
            dispatch.write(opened, k, v, plan.writes)
        if len(plan.encode_ids):
            self._encode(store.sealed.layer(self.index), plan.encode_ids, k, v, plan.encode_places)
        if len(plan.cold_ids):
            self._encode(store.cold.layer(self.index), plan.cold_ids, k, v, plan.cold_places)
        if plan.seals.size:
            source, target = plan.seals
            dispatch.seal_pages(store.sealed.layer(self.index), target, opened, source)
        if plan.demotes.size:
            source, target = plan.demotes
            store.cold.layer(self.index).scatter(target, store.sealed.layer(self.index).gather(source))

    def _encode(self, pages, ids: np.ndarray, k: torch.Tensor, v: torch.Tensor, places: np.ndarray) -> None:
        if not pages.codec.lossless:
            dispatch.seal(pages, ids, k, v, places)
            return
        full, slot = np.full(len(ids), self.block_size, np.int32), np.zeros(len(ids), np.int32)
        dispatch.write(pages, k, v, np.ascontiguousarray(np.stack([*places.T, full, ids, slot], axis=1)))

    # ---- attending ------------------------------------------------------------------------------------------------

    def attend(
        self,
        fresh: Fresh,
        q: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the newest queries `q` `[batch, q_heads, m, k_dim]` over everything the layer holds.

        Args:
            fresh: what `append` returned in this pass (this layer's, or the one it shares keys and values with).
            scale: factor of the scores.
            window: positions that the model's layer looks back over, where it says so.
            softcap: the scores become `softcap * tanh(scores / softcap)`.
            s_aux: `[q_heads]` a logit per head that takes part in the softmax and carries no value.

        Returns:
            `[batch, m, q_heads, v_dim]` in the dtype of `q`. Queries of columns without a token get zeros or noise.
        """
        step = self._current(fresh)
        if window is not None and (step.window is None or window < step.window):
            step = self.group.narrow(step, window)
        rope = self.group.turned_back(step, q.device)
        if step.now is not None:
            part = self._over_storage(q, step, step.now, rope, scale, softcap)
        else:
            plain = step.tokens is None and step.past is None and softcap is None and s_aux is None
            n = fresh.k.shape[2]
            if plain and (step.window is None or step.window >= n) and q.shape[2] in (1, n):
                return causal(q, fresh.k, fresh.v, scale)
            part = self._over_input(q, fresh, step, rope, scale, softcap)
            if step.past is not None:
                part = merge(self._over_storage(q, step, step.past, rope, scale, softcap), part)
        if s_aux is not None:
            part = with_sink_logits(part, s_aux)
        return part[0].to(q.dtype)

    def _over_storage(self, q, step: Step, stored: Stored, rope: Rotation | None, scale: float, softcap: float | None):
        """`(out, lse)` over the pages of a view; the slower tier's pages are one more part."""
        store = self.group.store
        opened, sealed = store.open.layer(self.index), store.sealed.layer(self.index)
        view = step.newest(stored.view, q.shape[2], rope)
        if not stored.n_cold.any():
            return dispatch.decode(q, sealed, opened, view, scale, softcap)
        far, pages = self._bring_back(view, stored.n_cold, step, q.device)
        return merge(
            dispatch.decode(q, pages, opened, far, scale, softcap),
            dispatch.decode(q, sealed, opened, view.narrowed(stored.n_cold, view.entry_end), scale, softcap),
        )

    def _bring_back(self, view: View, n_cold: np.ndarray, step: Step, device: torch.device) -> tuple[View, Pages]:
        """The cold entries of a view and pages that a kernel can read; the next layer's begin their way as well."""
        cold, tier = self.group.store.cold, self.group.tier
        ids = np.concatenate([view.ids[r, :n] for r, n in enumerate(n_cold)])
        pages, moved = tier.fetch((step.number, self.index), cold.layer(self.index), ids, device)
        following = self.index + 1
        if following < len(cold.pages) and cold.pages[following] is not None:
            # What this pass made cold reaches the next layer's pages only when that layer appends.
            settled = ids[~np.isin(ids, np.concatenate([step.plan.demotes[1], step.plan.cold_ids]))]
            tier.prefetch((step.number, following), cold.layer(following), settled, device)
        table = view.ids
        if moved is not ids:
            table = view.ids.copy()
            for r, part in enumerate(np.split(moved, np.cumsum(n_cold)[:-1])):
                table[r, : len(part)] = part
        return replace(view, ids=table, n_sealed=n_cold, entry_end=n_cold), pages

    def _over_input(self, q, fresh: Fresh, step: Step, rope, scale: float, softcap: float | None):
        """`(out, lse)` over the new tokens as they came in, row by row where columns are missing."""
        batch, heads, m, _ = q.shape
        n = fresh.k.shape[2]
        turned = None if rope is None else _newest_angles(rope, m).apply(q)
        out = q.new_zeros((batch, m, heads, fresh.v.shape[3]), dtype=torch.float32)
        lse = q.new_full((batch, m, heads), -torch.inf, dtype=torch.float32)
        for b in range(batch):
            tokens = slice(None) if step.tokens is None else step.tokens[b].to(q.device)
            queries = slice(None) if step.tokens is None else tokens[tokens >= n - m] - (n - m)
            if step.tokens is not None and not len(queries):
                continue  # a chunk of padding only
            out[b, queries], lse[b, queries] = prefill(
                q[b, :, queries],
                fresh.k[b, :, tokens],
                fresh.v[b, :, tokens],
                scale,
                window=step.window,
                sinks=max(0, step.sinks - int(step.before[b])),
                turned=None if turned is None else turned[b, :, queries],
                softcap=softcap,
            )
        return out, lse

    def materialise(self, fresh: Fresh) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values `[batch, kv_heads, columns, dim]` in the model's dtype, for whoever cannot read pages.

        Columns without a token, and positions that a model's own window has passed, are zero.

        Raises:
            UnsupportedError: a retention rule has passed positions that the caller's mask would still show.
        """
        if fresh.materialised is None:
            step, storage, rule = self._current(fresh), self.storage, self.group.retention
            if rule.window is not None and not rule.native and step.seen.max() > rule.window + rule.sinks:
                raise UnsupportedError(
                    f"{rule!r} is shorter than the {int(step.seen.max())} tokens here, and this attention reads keys and "
                    "values directly, so that it would also see what the window has passed. Call hf_kvcache.enable(model) "
                    "first; where that fails, use a cache that keeps everything."
                )
            storage.materialisations += 1
            fresh.materialised = self._materialise(fresh, step)
        return fresh.materialised

    def _materialise(self, fresh: Fresh, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        stored = step.now or step.past
        if stored is None:
            return fresh.k.contiguous(), fresh.v.contiguous()  # what a handle's strides promise
        g, storage, new = self.geometry, self.storage, fresh.k.shape[2]
        shape = (storage.batch, g.kv_heads, storage.columns)
        k, v = (fresh.k.new_zeros((*shape, dim)) for dim in (g.k_dim, g.v_dim))
        lengths = step.before if step.now is None else self.group.table.length
        for b in range(storage.batch):
            columns = storage.token_columns(b)[: lengths[b]].to(k.device)
            for pages, view in self._parts(stored, b):
                keys, values, index = reference.stored(pages, self.group.store.open.layer(self.index), view, b)
                position = columns[self._positions(stored, b, int(lengths[b]), index.cpu().numpy()).to(k.device)]
                k[b, :, position], v[b, :, position] = keys.to(k.dtype), values.to(v.dtype)
        if step.now is None:
            k[:, :, -new:], v[:, :, -new:] = fresh.k, fresh.v
        return k, v

    def _parts(self, stored: Stored, b: int):
        """The pages and narrowed views that hold row `b`: the slower tier's, then the rest."""
        view, n_cold, store = stored.view, stored.n_cold, self.group.store
        if n_cold[b]:
            yield store.cold.layer(self.index), replace(view, n_sealed=n_cold, entry_end=n_cold)
        if view.entry_end[b] > n_cold[b]:
            yield store.sealed.layer(self.index), view.narrowed(n_cold, view.entry_end)

    def _positions(self, stored: Stored, b: int, length: int, index: np.ndarray) -> torch.Tensor:
        """Positions of stored indices: those behind the sinks' blocks are `gap` further on."""
        view, n = stored.view, int(stored.view.entry_end[b])
        gap = length - int(view.first[b, n])
        sink_end = int(view.first[b, np.searchsorted(view.first[b, :n], self.group.retention.sinks)])
        return torch.from_numpy(np.where(index < sink_end, index, index + gap))

    def _current(self, fresh: Fresh) -> Step:
        if fresh.step is not self.group.step:
            raise CacheStateError(
                "these keys and values belong to an earlier forward pass: the cache has changed since. Read them (for "
                "example with .clone()) before the next pass."
            )
        return fresh.step


def _compact(k: torch.Tensor, v: torch.Tensor, tokens: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Move each row's tokens to the front, so that plans can name them by number."""
    width = max((len(t) for t in tokens), default=0)
    index = torch.zeros((len(tokens), width), dtype=torch.int64)
    for row, t in enumerate(tokens):
        index[row, : len(t)] = t
    index = index.to(k.device)[:, None, :, None]
    return tuple(x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (k, v))


def _newest_angles(rope: Rotation, m: int) -> Rotation:
    return replace(rope, cos=rope.cos[:, -m:], sin=rope.sin[:, -m:])


class Storage:
    """Everything a cache holds: shared by its layers, unknown to transformers.

    Attributes:
        layers: a `LayerStorage` for each model layer that stores keys and values, else None.
        columns: columns of the padded batch seen so far (what transformers calls the sequence length).
        batch: rows; 0 before the first pass.
        padding: the padding mask of the pass that is about to begin, `[batch, columns]`, when the model's masks told.
    """

    def __init__(self, pool: BlockPool, groups: list[LayerGroup]):
        self.pool, self.groups = pool, groups
        self.layers: list[LayerStorage | None] = []
        self.materialisations = 0
        self.in_generate = False  # set once generate() has been given the cache: then positions can be checked
        self._forget()

    def _forget(self) -> None:
        self.columns, self.batch = 0, 0
        self._valid: np.ndarray | None = None
        self._shared = False
        self.padding: np.ndarray | None = None

    # ---- passes ---------------------------------------------------------------------------------------------------

    def begin(self, k: torch.Tensor) -> None:
        """Plan the pass that `k` `[batch, kv_heads, q_len, k_dim]` opens, for all layers; or raise and change
        nothing."""
        batch, _, q_len, _ = k.shape
        if self._halfway():
            raise CacheStateError(
                f"layers {self._halfway()} stopped halfway through an earlier forward pass. Call reset(), or crop() to before it."
            )
        if self.columns and batch != self.batch != 1:
            raise CacheInputError(
                f"the cache holds {self.batch} rows and was given {batch}. Use a cache per batch, "
                "batch_repeat_interleave(n) for n beams or samples of each row, or batch_select_indices(rows)."
            )
        valid = self._new_columns(batch, q_len)
        counts = np.full(batch, q_len) if valid is None else valid.sum(axis=1)
        for layer in filter(None, self.layers):
            layer.expect(k.dtype, k.device)
        self._shared = bool(self.columns) and batch > self.batch  # one prefilled row for several beams or samples
        if self._shared:
            self.select(np.zeros(batch, np.int64))
        try:
            self._plan(batch, q_len, counts, valid)
        except CapacityError:
            self._as_before()
            raise
        self.batch, self.columns = batch, self.columns + q_len
        if valid is not None or self.valid is not None:
            self._enter_columns(valid, q_len)

    def undo(self) -> None:
        """Take back the pass that some layers have begun, whatever it sealed, moved or dropped."""
        for group in self.groups:
            group.table.undo()
        self._set_columns(self.columns - self.groups[0].step.q_len)
        for group in self.groups:
            group.step = None
        self._as_before()

    def _as_before(self) -> None:
        """What a pass changes before it stores anything."""
        if not self.columns:
            self.reset()
        elif self._shared:
            self.select(np.zeros(1, np.int64))

    def _plan(self, batch: int, q_len: int, counts: np.ndarray, valid: np.ndarray | None) -> None:
        with self.pool.lock:
            keep_new = q_len == 1 or (self.columns > 0 and q_len <= dispatch.QUERIES)
            planned = [group.table.prepare(batch, counts, keep_new=keep_new) for group in self.groups]
            pages = self.pool.reserve([(g.store, demand) for g, (_, demand) in zip(self.groups, planned, strict=True)])
            for group, (row_plans, _), taken in zip(self.groups, planned, pages, strict=True):
                group.begin(row_plans, taken, q_len, valid)

    def _new_columns(self, batch: int, q_len: int) -> np.ndarray | None:
        """Which of the pass's columns hold a token, from the padding mask that the model's masks were made from."""
        padding, self.padding = self.padding, None
        if padding is None:
            return None
        if padding.shape != (batch, self.columns + q_len):
            raise CacheInputError(
                f"the attention mask covers {padding.shape} (rows, columns), the cache needs "
                f"{(batch, self.columns + q_len)}: it must cover what is cached as well as what is new."
            )
        new = padding[:, self.columns :]
        return None if new.all() else new

    def _enter_columns(self, valid: np.ndarray | None, q_len: int) -> None:
        """Note which of the newest columns hold a token, in an array that doubles when it is full."""
        if self.valid is None:
            self._valid = np.ones((self.batch, self.columns), bool)
        if self._valid.shape[1] < self.columns:
            self._valid = np.pad(self._valid, ((0, 0), (0, self.columns)), constant_values=True)
        self._valid[:, self.columns - q_len : self.columns] = True if valid is None else valid

    @property
    def valid(self) -> np.ndarray | None:
        """`[batch, columns]` which columns hold a token; None while every one does."""
        return None if self._valid is None else self._valid[:, : self.columns]

    @valid.setter
    def valid(self, valid: np.ndarray | None) -> None:
        self._valid = None if valid is None else valid.copy()

    def token_columns(self, row: int) -> torch.Tensor:
        """The columns of the batch that hold row `row`'s tokens."""
        if self.valid is None:
            return torch.arange(self.columns)
        return torch.from_numpy(np.nonzero(self.valid[row])[0])

    def same_past(self, padding: np.ndarray) -> bool:
        """Whether a padding mask agrees with what is cached about the columns that are cached."""
        past = padding[:, : self.columns]
        if self.batch == 1 and len(past) > 1 and self.columns:
            past = past[:1]
        return bool(past.all()) if self.valid is None else np.array_equal(past, self.valid)

    # ---- rows and columns -----------------------------------------------------------------------------------------

    def crop(self, columns: int) -> None:
        """Cut back to the first `columns` columns.

        Raises:
            CacheStateError: a window has moved on so far that positions it would need again are gone; nothing changed.
        """
        if self._halfway():
            self.undo()
        columns = min(columns, self.columns)
        self.check_crop(columns)
        self.crop_rows(columns, self._lengths(columns))

    def _halfway(self) -> list[int]:
        """Layers that the last pass did not reach, though earlier ones did."""
        return [x.layer for x in self.layers if x is not None and 0 < x.columns < self.columns]

    def check_crop(self, columns: int) -> None:
        """Raise what `crop` would raise."""
        lengths = self._lengths(columns)
        for table in (group.table for group in self.groups):
            row = table.cannot_crop(lengths)
            if row is not None:
                raise CacheStateError(
                    f"row {row} has {table.length[row]} tokens and cannot go back to {lengths[row]}: its window of "
                    f"{table.window} has dropped {table.gap[row]} positions that would be needed again. Crop less, or "
                    "reset() and prefill again."
                )

    def can_crop(self, lengths: np.ndarray) -> bool:
        """Whether every row can go back to `lengths[row]` tokens."""
        return all(group.table.cannot_crop(lengths) is None for group in self.groups)

    def _lengths(self, columns: int) -> np.ndarray:
        """Tokens of each row in the first `columns` columns."""
        return np.full(self.batch, columns) if self.valid is None else self.valid[:, :columns].sum(axis=1)

    def crop_rows(self, columns: int, lengths: np.ndarray) -> None:
        """Cut row `r` back to `lengths[r]` tokens and the batch to `columns`; `can_crop` must have allowed it."""
        if columns == 0:
            self.reset()
            return
        for group in self.groups:
            group.table.crop(lengths)
            group.step = None
        if columns < self.columns // 2:
            self.pool.trim()
        self._set_columns(columns)

    def _set_columns(self, columns: int) -> None:
        self.columns = columns
        for layer in filter(None, self.layers):
            if layer.columns:
                layer.columns = columns

    def select(self, rows: np.ndarray) -> None:
        """Row `i` becomes what row `rows[i]` was."""
        if self.columns == 0:
            return
        if np.array_equal(rows, np.arange(self.batch)):
            return
        if len(rows) == 0 or rows.min() < 0 or rows.max() >= self.batch:
            raise CacheInputError(f"rows {rows.tolist()} are not all among the cache's {self.batch} rows.")
        for group in self.groups:
            group.table.select(rows)
            group.step = None
        self.batch = len(rows)
        self.valid = None if self.valid is None else self.valid[rows]

    def reset(self) -> None:
        """Give every block back and be as new."""
        for group in self.groups:
            group.table.clear()
            group.step = None
        self._forget()
        for layer in self.layers:
            if layer is not None:
                layer.columns, layer.geometry, layer.device = 0, None, None
        self.pool.trim()

    def adopt(self, other: Storage) -> None:
        """Become a copy of `other` (built alike) that shares its blocks."""
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            mine.table.clear()
            mine.table = theirs.table.fork()
        self.columns, self.batch = other.columns, other.batch
        self.valid = other.valid
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if mine is not None:
                mine.columns, mine.geometry, mine.device = theirs.columns, theirs.geometry, theirs.device

    def record_past(self) -> None:
        """Drop nothing until the next `crop`: speculative tokens may have to be taken back."""
        for group in self.groups:
            group.table.keep_all = True
