"""Everything a cache holds: groups of layers with one block table each, and the batch that they all see.

A forward pass goes through in two halves per layer, as the models do it: `LayerStorage.append` stores the new keys and values,
`LayerStorage.attend` answers the queries (`layers.py`). The first layer to append plans the pass for all of them
(`Storage.begin`); after that a layer only copies, encodes and calls one kernel.
"""

from __future__ import annotations

import bisect

import numpy as np
import torch

from .blocks import Attached
from .compiled import ticket_for
from .errors import CacheInputError, CacheStateError, CapacityError
from .kernels import dispatch
from .layers import LayerStorage
from .pages import GroupStore
from .passes import LayerGroup
from .pool import BlockPool, Demand

SPECULATION = 256  # more than any assistant proposes at once


class Storage:
    """Everything a cache holds: shared by its layers, unknown to transformers.

    Attributes:
        layers: a `LayerStorage` for each model layer that stores keys and values, else None.
        columns: columns of the padded batch seen so far (what transformers calls the sequence length).
        batch: rows; 0 before the first pass.
        padding: the padding mask of the pass that is about to begin, `[batch, columns]`, when the model's masks told.
        foreign_mask: whether the model's masks were ever told to be something else than causal, sliding, or hiding padding:
            then what is held of a token depends on more than the tokens before it.
        recurrent: whether the cache has states of linear attention beside this, which see a pass before it is planned and cannot
            go back.
        spoiled: whether they have seen a pass that was refused or taken back: only `KVCache.reset` makes that good.
        ticket, told: for compiled passes (`compiled.py`): how they find this object, and, while one is traced, the
            padding mask that its first layer passes on.
    """

    def __init__(self, pool: BlockPool, groups: list[LayerGroup]):
        self.pool, self.groups = pool, groups
        self.layers: list[LayerStorage | None] = []
        self.materialisations = 0
        self.checks_positions = False  # whether they must follow on: in generate(), and in a session
        self.recurrent = self.spoiled = False
        self.ticket, self.told = ticket_for(self), None
        self._forget()

    def _forget(self) -> None:
        self.columns, self.batch = 0, 0
        self._valid: np.ndarray | None = None
        self._shared = False
        self.padding: np.ndarray | None = None
        self.foreign_mask = False

    # ---- passes ---------------------------------------------------------------------------------------------------

    def begin(self, k: torch.Tensor) -> None:
        """Plan the pass that `k` `[batch, kv_heads, q_len, k_dim]` opens, for all layers; or raise and change
        nothing."""
        batch, _, q_len, _ = k.shape
        padding, self.padding = self.padding, None
        self.check_states()
        self.spoiled = self.recurrent  # until the pass is planned: layers before the first one here may have seen it
        if self._halfway():
            raise CacheStateError(
                f"layers {self._halfway()} stopped halfway through an earlier forward pass. Call reset(), or crop() to before it."
            )
        if self.columns and batch != self.batch != 1:
            raise CacheInputError(
                f"the cache holds {self.batch} rows and was given {batch}. Use a cache per batch, "
                "batch_repeat_interleave(n) for n beams or samples of each row, or batch_select_indices(rows)."
            )
        valid = self._new_columns(padding, batch, q_len)
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
        self.spoiled = False

    def check_states(self) -> None:
        """Raise `CacheStateError` where recurrent states are ahead of what is stored."""
        if self.spoiled:
            raise CacheStateError(
                "a forward pass was refused or taken back, and the model's recurrent states had seen it already: reset() the "
                "cache and prefill again."
            )

    def undo(self) -> None:
        """Take back the pass that some layers have begun, whatever it sealed, moved or dropped. (All but recurrent states.)"""
        self.spoiled = self.recurrent
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
            try:
                pages = self.pool.reserve(
                    [(g.store, demand) for g, (_, demand) in zip(self.groups, planned, strict=True)]
                )
            except CapacityError as error:
                raise error.with_longest(self._longest(batch, q_len, valid, keep_new)) from None
            for group, (row_plans, _), taken in zip(self.groups, planned, pages, strict=True):
                group.begin(row_plans, taken, q_len, valid)

    def rehearse(self, counts: np.ndarray) -> None:
        """Go through a pass of `counts[row]` tokens as `begin` does, and store nothing: pages are taken, and exist as numbers
        until a layer asks for their memory. For planners; the layers must `expect` something.

        Raises:
            CapacityError: the pool has no room; nothing was taken.
        """
        batch, q_len = len(counts), int(max(counts))
        self._plan(batch, q_len, counts, None)
        self.batch, self.columns = batch, self.columns + q_len
        for layer in filter(None, self.layers):
            layer.columns = self.columns

    def demands(self, counts: np.ndarray, keep_new: bool = False) -> list[tuple[GroupStore, Demand]]:
        """What a pass of `counts[row]` tokens would take from the pool."""
        return [(g.store, g.table.prepare(len(counts), counts, keep_new=keep_new)[1]) for g in self.groups]

    def _longest(self, batch: int, q_len: int, valid: np.ndarray | None, keep_new: bool) -> int:
        """Tokens that the longest row can have after a pass of fewer columns, found by bisection."""
        tokens = np.broadcast_to(np.arange(q_len + 1), (batch, q_len + 1))
        if valid is not None:
            tokens = np.concatenate([np.zeros((batch, 1), int), np.cumsum(valid, axis=1)], axis=1)
        fits = lambda n: self.pool.fits(self.demands(tokens[:, n], keep_new))  # noqa: E731
        n = bisect.bisect_left(range(1, q_len + 1), True, key=lambda n: not fits(n))
        return max(int((group.table.length + tokens[:, n]).max()) for group in self.groups)

    def _new_columns(self, padding: np.ndarray | None, batch: int, q_len: int) -> np.ndarray | None:
        """Which of the pass's columns hold a token, from the padding mask that the model's masks were made from."""
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
        self.settle()
        columns = min(columns, self.columns)
        self.check_crop(columns)
        self.crop_rows(columns, self._lengths(columns))

    def _halfway(self) -> list[int]:
        """Layers that the last pass did not reach, though earlier ones did."""
        return [x.layer for x in self.layers if x is not None and 0 < x.columns < self.columns]

    def settle(self) -> None:
        """Between passes: take back one that stopped halfway."""
        if self._halfway():
            self.undo()

    def at_rest(self) -> bool:
        """Whether every layer has seen every pass."""
        return all(layer.columns == self.columns for layer in self.layers if layer is not None)

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
        self.settle()
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

    def attach(self, rows: list[list[Attached]], columns: int, valid: np.ndarray | None) -> None:
        """Become a batch that begins with blocks of the prefix index: a list of rows for each group, `columns` columns of
        which `valid` hold a token (None where all do)."""
        self.settle()
        for group, attached in zip(self.groups, rows, strict=True):
            group.table.attach(attached)
            group.step = None
        self.columns, self.batch, self.valid, self.foreign_mask = columns, len(rows[0]), valid, False
        for layer in filter(None, self.layers):
            layer.take_over(columns)

    def adopt(self, other: Storage) -> None:
        """Become a copy of `other` (built alike) that shares its blocks."""
        other.settle()
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            mine.table.clear()
            mine.table = theirs.table.fork()
        self.columns, self.batch = other.columns, other.batch
        self.valid, self.foreign_mask, self.spoiled = other.valid, other.foreign_mask, other.spoiled
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if mine is not None:
                mine.columns, mine.geometry, mine.device = theirs.columns, theirs.geometry, theirs.device

    def record_past(self) -> None:
        """Keep `SPECULATION` positions beyond every window from now on: speculative tokens may have to be taken back."""
        for group in self.groups:
            group.table.slack = max(SPECULATION, group.table.least_slack)
