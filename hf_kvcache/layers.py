"""One layer's tensors: what a forward pass stores, and what its queries get back.

New tokens are always attended to exactly as they came in, stored ones as they are stored. A pass of one token (or a few)
therefore reads everything from storage; a longer one reads the past from storage as it was before, the new part from its
input, and merges the two. (A lossy codec without a residual seals a block with its last token: that one is read as sealed.)
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from .codecs import Geometry
from .errors import CacheInputError, CacheStateError, TierError, UnsupportedError
from .kernels import dispatch, reference
from .kernels.base import Pages, Rotation, View
from .kernels.merge import merge, with_sink_logits
from .kernels.prefill import causal, prefill
from .passes import LayerGroup, Step, Stored, newest_angles
from .plans import AppendPlan
from .spec import LayerSpec

if TYPE_CHECKING:
    from .storage import Storage


COPIED = 4 << 20  # bytes of pages that are copied at a time on their way to a slower tier


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
            CacheStateError: an earlier pass stopped halfway, or was taken back after recurrent states had seen it.
            CapacityError: the pool has no room; nothing was stored.
            TierError: a slower tier could not be written to; what is stored is as before the pass.
        """
        self._check(k, v)
        storage = self.storage
        if self.columns != storage.columns:
            return self._append(k, v)
        storage.begin(k)
        try:
            return self._append(k, v)
        except TierError:
            raise  # undone already
        except BaseException:
            storage.undo()  # nothing was stored in any layer yet
            raise

    def take_back(self) -> None:
        """Undo the pass that is under way; a pass that every layer has seen stays."""
        if not self.storage.at_rest():
            self.storage.undo()

    def _append(self, k: torch.Tensor, v: torch.Tensor) -> Fresh:
        storage, step = self.storage, self.group.step
        if step is None or self.columns + k.shape[2] != storage.columns or k.shape[0] != storage.batch:
            raise CacheStateError(
                f"layer {self.layer} holds {self.columns} columns and was given {k.shape[2]}, where the pass ends at "
                f"{storage.columns}: an earlier forward pass stopped halfway. Call reset(), or crop() to before it."
            )
        if self.geometry is None:
            self.bind(Geometry(k.shape[1], k.shape[3], v.shape[3], self.block_size, k.dtype), k.device)
        with self._undone_by_faults():
            self._store(step.plan, *((k, v) if step.tokens is None else _compact(k, v, step.tokens)))
        self.columns = storage.columns
        return Fresh(self, step, k, v)

    def _check(self, k: torch.Tensor, v: torch.Tensor) -> None:
        shape = (k.shape[1], k.shape[3], v.shape[3])
        if self.geometry is None:
            if not self.spec.suits(shape):
                raise CacheInputError(
                    f"layer {self.layer} was given (kv_heads, k_dim, v_dim) = {shape}, the config that the cache was built "
                    f"from says {self.spec.shape}: build the cache from this model's config."
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
                if store.is_vacant(self.index) and not store.holds(self.index, geometry, device):
                    store.bind(self.index, geometry, device)

    def bind(self, geometry: Geometry, device: torch.device) -> None:
        """Have pages of this shape on `device`.

        Raises:
            CacheInputError: the pool has others.
        """
        self.group.store.bind(self.index, self.layer, geometry, device)
        self.geometry, self.device = geometry, device

    def take_over(self, columns: int) -> None:
        """Hold columns that another cache has computed and stored."""
        self.columns = columns
        self.geometry = self.group.store.sealed.pages[self.index].geometry
        self.device = self.group.store.sealed.device(self.index)

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
            opened.put_raw(target, opened.raw(source))
        if len(plan.writes):
            dispatch.write(opened, k, v, plan.writes)
        if len(plan.encode_ids):
            self._encode(store.sealed.layer(self.index), plan.encode_ids, k, v, plan.encode_places)
        if len(plan.cold_ids):
            self._encode_cold(store.cold.layer(self.index), plan.cold_ids, k, v, plan.cold_places)
        if plan.seals.size:
            source, target = plan.seals
            dispatch.seal_pages(store.sealed.layer(self.index), target, opened, source)
        if plan.demotes.size:
            (source, target), sealed, cold = plan.demotes, store.sealed.layer(self.index), store.cold.layer(self.index)
            for part in self._parts_of(target, cold):
                cold.put_raw(target[part], sealed.raw(source[part]))

    def _parts_of(self, ids: np.ndarray, cold: Pages) -> list[slice]:
        """Slices of `ids` whose pages a copy of may be in memory; they are on their way to a slower tier."""
        self.group.tier.bytes_written += len(ids) * cold.layout.nbytes
        step = max(1, COPIED // cold.layout.nbytes)
        return [slice(start, start + step) for start in range(0, len(ids), step)]

    def _encode_cold(self, cold: Pages, ids: np.ndarray, k: torch.Tensor, v: torch.Tensor, places: np.ndarray) -> None:
        for part in self._parts_of(ids, cold):
            if not cold.in_file(ids[part]).any():
                self._encode(cold, ids[part], k, v, places[part])
                continue
            n = len(ids[part])
            pages = cold.over(torch.empty((n, cold.layout.nbytes), dtype=torch.uint8, device=k.device))
            self._encode(pages, np.arange(n, dtype=np.int32), k, v, places[part])
            cold.put_raw(ids[part], pages.slabs[0])

    def _encode(self, pages, ids: np.ndarray, k: torch.Tensor, v: torch.Tensor, places: np.ndarray) -> None:
        if not pages.codec.lossless:
            dispatch.seal(pages, ids, k, v, places)
            return
        full, slot = np.full(len(ids), self.block_size, np.int32), np.zeros(len(ids), np.int32)
        dispatch.write(pages, k, v, np.ascontiguousarray(np.stack([*places.T, full, ids, slot], axis=1)))

    # ---- attending ------------------------------------------------------------------------------------------------

    def check_positions(self, fresh: Fresh, position_ids: torch.Tensor | None) -> None:
        """generate() trusts a cache that is handed in, and a session shares what it holds. Where the new tokens' positions do
        not follow on from what the cache holds, it would go silently wrong: undo the pass and say so.

        Raises:
            CacheStateError: they do not; the cache is as before the pass.
        """
        step, storage = fresh.step, self.storage
        if step.checked or step.q_len == 1 or not storage.checks_positions:
            return
        if position_ids is None or position_ids.dim() != 2:
            return
        step.checked = True
        last, held = position_ids[:, -1].tolist(), step.seen[:, -1].tolist()
        if len(last) == 1:
            last = last * len(held)
        wrong = [row for row in range(len(held)) if held[row] and last[row] + 1 != held[row]]
        if wrong:
            row, before = wrong[0], int(step.before[wrong[0]])
            storage.undo()
            raise CacheStateError(
                f"row {row} holds {before} tokens, and the {step.q_len} columns given end at position {last[row]}: they do "
                "not follow on (the cache holds the whole prompt already, or another text, or use_cache=False; by hand, padding "
                "needs position_ids). Call cache.prepare(input_ids, attention_mask) before generate(), or reset()."
            )

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
        cold, rest = step.split(view, stored.n_cold)
        with self._undone_by_faults():
            arriving = self._bring_back(cold, step, q.device)
            part = dispatch.decode(q, sealed, opened, rest, scale, softcap)
            for pages, view in arriving:
                part = merge(part, dispatch.decode(q, pages, opened, view, scale, softcap))
        return part

    def _bring_back(self, view: View, step: Step, device: torch.device) -> Iterator[tuple[Pages, View]]:
        """Parts of a view of cold entries, with pages that a kernel can read; the next layer's begin their way as well."""
        cold, tier = self.group.store.cold, self.group.tier
        arriving = tier.read((step.number, self.index), cold.layer(self.index), view, device)
        following = self.index + 1
        if following < len(cold.pages) and cold.pages[following] is not None:
            # What this pass made cold reaches the next layer's pages only when that layer appends.
            fresh = np.concatenate([step.plan.demotes[1], step.plan.cold_ids])
            there = self.group.store.sealed.device(following)
            tier.prefetch((step.number, following), cold.layer(following), view, there, fresh)
        return arriving

    @contextlib.contextmanager
    def _undone_by_faults(self):
        """A fault of a slower tier in this block undoes the pass, and is told with the layer and the block."""
        try:
            yield
        except TierError as error:
            where, recurrent = self._block_at(error.offset), self.storage.recurrent
            self.storage.undo()
            again = ", but for recurrent states, which have seen it:" if recurrent else ": repeat it, or"
            raise TierError(
                f"layer {self.layer}{where}: {error}. The cache is as before this pass{again} reset() the cache and prefill "
                "again."
            ) from error

    def _block_at(self, offset: int | None) -> str:
        """Which block of which row is at a place of the spill file."""
        table, pages = self.group.table, self.group.store.cold.pages[self.index]
        for row in range(table.rows if offset is not None else 0):
            ids = table.ids[row, : table.n_cold[row]]
            found = np.nonzero(pages.in_file(ids) & (pages.addresses[ids] == offset))[0]
            if len(found):
                return f", block {found[0]} of row {row}"
        return ""

    def _over_input(self, q, fresh: Fresh, step: Step, rope, scale: float, softcap: float | None):
        """`(out, lse)` over the new tokens as they came in, row by row where columns are missing."""
        batch, heads, m, _ = q.shape
        n = fresh.k.shape[2]
        turned = None if rope is None else newest_angles(rope, m).apply(q)
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
                self.take_back()
                raise UnsupportedError(
                    f"{rule!r} is shorter than the {int(step.seen.max())} tokens here, and this attention reads keys and "
                    "values directly, so that it would also see what the window has passed. Call hf_kvcache.enable(model) "
                    "first; where that fails, use a cache that keeps everything."
                )
            storage.materialisations += 1
            with self._undone_by_faults():
                fresh.materialised = self._materialise(fresh, step)
        return fresh.materialised

    def _materialise(self, fresh: Fresh, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        stored = step.now or step.past
        if stored is None and fresh.k.shape[2] == self.storage.columns:
            return fresh.k.contiguous(), fresh.v.contiguous()  # what a handle's strides promise
        g, storage, new = self.geometry, self.storage, fresh.k.shape[2]
        shape = (storage.batch, g.kv_heads, storage.columns)
        k, v = (fresh.k.new_zeros((*shape, dim)) for dim in (g.k_dim, g.v_dim))
        lengths = step.before if step.now is None else self.group.table.length
        for b in range(storage.batch):
            columns = storage.token_columns(b)[: lengths[b]].to(k.device)
            for pages, view in self._parts(stored, b) if stored is not None else ():
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
