"""Block tables: which row holds which blocks, where new tokens go, and what is let go.

Nothing here touches keys or values. A `BlockTable` decides (`AppendPlan`); `storage.py` carries the plan out on each layer's
tensors. All layers of a group see the same tokens, so one table serves them all.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .errors import IntegrityError
from .pages import GroupStore, PageStore
from .plans import Actions, AppendPlan, RowPlan
from .pool import BlockPool, Demand

ROW_ARRAYS = ("ids", "first", "n_cold", "n_sealed", "n_entries", "length", "gap")


class Attached(NamedTuple):
    """A row that begins with blocks of the prefix index: `pages` in order, `dropped` positions left out behind those of the
    sinks, `length` tokens in all."""

    pages: list[int]
    dropped: int
    length: int


class BlockTable:
    """The block tables of a batch for one layer group (see `kernels/base.py` for entries and stored indices).

    Args:
        group, pool: where pages come from.
        window: positions that a query sees, itself included; None for all. Blocks wholly outside are let go.
        sinks: first positions that stay whatever the window.
        residual: newest positions that stay in the model's dtype.
        resident: newest positions that stay on the device; None keeps all.

    Attributes:
        length: `[rows]` tokens seen (logical).
        gap: `[rows]` positions dropped between the sinks' blocks and the rest.
    """

    def __init__(
        self,
        group: GroupStore,
        pool: BlockPool,
        *,
        window: int | None = None,
        sinks: int = 0,
        residual: int = 0,
        resident: int | None = None,
    ):
        self.group, self.pool = group, pool
        self.window, self.sinks, self.residual, self.resident = window, sinks, residual, resident
        self.slack = self.least_slack = 0  # positions kept beyond the window: tokens may have to be taken back
        self._before: tuple | None = None
        self._pending: list[tuple[PageStore, np.ndarray]] = []  # let go, but this forward's attention still reads them
        self.tokens_sealed = 0
        self._start(0)
        with pool.lock:
            pool.tables.add(self)

    def _start(self, rows: int) -> None:
        with self.pool.lock:  # what looks at the pool looks at all of its tables
            self.ids = np.zeros((rows, 8), np.int32)
            self.first = np.zeros((rows, 9), np.int32)
            self.n_cold, self.n_sealed, self.n_entries = (np.zeros(rows, np.int32) for _ in range(3))
            self.length, self.gap = np.zeros(rows, np.int64), np.zeros(rows, np.int64)

    @property
    def rows(self) -> int:
        return len(self.length)

    @property
    def kept(self) -> np.ndarray:
        """`[rows]` positions stored."""
        return self.first[np.arange(self.rows), self.n_entries]

    # ---- appending ------------------------------------------------------------------------------------------------

    def prepare(self, rows: int, counts: np.ndarray, *, keep_new: bool) -> tuple[list[RowPlan], Demand]:
        """Work out an append of `counts` tokens, without entering anything.

        `keep_new` stores every new token even where the window has already moved past it, so that this forward's
        queries can read all of them from storage.
        """
        if self.rows != rows:  # nothing is stored yet: the caller has checked
            self._start(rows)
        self.settle()
        plans = [self._plan_row(r, int(counts[r]), keep_new) for r in range(rows)]
        opened, old, demoted = self._moving(plans)
        return plans, Demand(
            open=sum(p.copy + p.new_open for p in plans),
            sealed=sum(p.new_sealed for p in plans) + len(opened),
            cold=sum(p.cold for p in plans) + demoted,
            open_freed=sum(page < 0 or count == self.group.open.refs[page] for page, count in opened.items()),
            sealed_freed=sum(count == self.group.sealed.refs[page] for page, count in old.items()),
        )

    def _moving(self, plans: list[RowPlan]) -> tuple[Counter, Counter, int]:
        """Pages that leave their store, and in how many rows: open ones to be sealed, sealed ones to become cold; and how
        many blocks become cold in all. A block that rows share is sealed, and moved, once for all of them."""
        opened, old, fresh = Counter(), Counter(), set()
        for r, plan in enumerate(plans):
            cold, sealed, stop = int(self.n_cold[r]), int(self.n_sealed[r]), int(self.n_cold[r]) + plan.demote
            ids = self.ids[r].tolist()
            if plan.copy:  # the row gets a page of its own before it is moved on
                ids[int(self.n_entries[r]) - 1] = -1 - r
            if not self.group.lossless:
                opened.update(ids[sealed : sealed + plan.seal])
            old.update(ids[cold : min(stop, sealed)])
            fresh.update(ids[max(cold, sealed) : stop])
        return opened, old, len(old) + len(fresh)

    def _plan_row(self, r: int, count: int, keep_new: bool) -> RowPlan:
        if count == 0:
            return RowPlan(0)
        size, n, sealed = self.group.block_size, int(self.n_entries[r]), int(self.n_sealed[r])
        kept = int(self.first[r, n])
        used = kept - int(self.first[r, n - 1]) if n > sealed else size
        plan = RowPlan(count, fill=min(count, size - used))
        plan.blocks, plan.tail = divmod(count - plan.fill, size)
        if self.window is not None and not keep_new:
            self._plan_skip(plan, int(self.length[r]))
        if plan.skip_to > plan.skip_from and n > self._sink_entries(r):
            # Blocks are left out behind the recent entries, so these are outside the window too: one gap, not two.
            n = self._sink_entries(r)
            sealed, kept = min(sealed, n), int(self.first[r, n])
            plan.forget, plan.lost, plan.fill = True, plan.fill, 0
        plan.copy = plan.fill > 0 and self.group.open.refs[self.ids[r, n - 1]] > 1
        after = kept + plan.fill + plan.stored * size + plan.tail
        self._plan_sealing(plan, r, n, sealed, after)
        return plan

    def _plan_sealing(self, plan: RowPlan, r: int, n: int, sealed: int, after: int) -> None:
        """Oldest first: open entries that are full and old enough, then new blocks straight away; likewise the cold."""
        size = self.group.block_size
        start = int(self.first[r, n]) + plan.fill  # where the new blocks begin
        is_full = n == sealed or start - int(self.first[r, n - 1]) == size
        end = lambda e: start if e == n - 1 else int(self.first[r, e + 1])  # noqa: E731
        plan.seal = sum(end(e) <= after - self.residual for e in range(sealed, n if is_full else n - 1))
        if plan.seal == n - sealed:
            plan.direct = max(0, min(plan.stored, (after - self.residual - start) // size))
        if self.resident is not None:
            warm = range(int(self.n_cold[r]), sealed + plan.seal)
            plan.demote = sum(end(e) <= after - self.resident for e in warm)
            if plan.demote == len(warm):
                plan.cold = max(0, min(plan.direct, (after - self.resident - start) // size))

    def _plan_skip(self, plan: RowPlan, length: int) -> None:
        """New blocks that neither the next query nor the sinks need."""
        size, start = self.group.block_size, length + plan.fill
        needed = length + plan.count + 1 - self.window - self.slack
        plan.skip_from = min(plan.blocks, max(0, -(-(self.sinks - start) // size)))
        plan.skip_to = max(plan.skip_from, min(plan.blocks, (needed - start) // size))

    def commit(self, plans: list[RowPlan], pages: tuple[list[int], list[int], list[int]]) -> AppendPlan:
        """Enter the planned blocks into the tables, using up `pages`, and say what each layer has to do."""
        self._remember(plans)
        opened, sealed, cold = (iter(ids) for ids in pages)
        actions = Actions()
        for r, plan in enumerate(plans):
            if plan.count:
                self._append_row(r, plan, opened, sealed, cold, actions)
        table = lambda rows, width: np.array(rows, np.int32).reshape(-1, width)  # noqa: E731
        columns = lambda rows: np.ascontiguousarray(table(rows, 2).T)  # noqa: E731
        encodes, colds = table(actions.encodes, 3), table(actions.colds, 3)
        return AppendPlan(
            counts=np.array([p.count for p in plans], np.int32),
            copies=columns(actions.copies),
            writes=table(actions.writes, 5),
            encode_ids=np.ascontiguousarray(encodes[:, 0]),
            encode_places=np.ascontiguousarray(encodes[:, 1:]),
            cold_ids=np.ascontiguousarray(colds[:, 0]),
            cold_places=np.ascontiguousarray(colds[:, 1:]),
            seals=columns(actions.seals),
            demotes=columns(actions.demotes),
            complete=not any(
                p.skip_to > p.skip_from or (not self.group.lossless and (p.direct or (p.seal and p.fill)))
                for p in plans
            ),
        )

    def _append_row(self, r: int, plan: RowPlan, opened, sealed, cold, actions: Actions) -> None:
        size = self.group.block_size
        if plan.forget:
            self._drop_entries(r, self._sink_entries(r), int(self.n_entries[r]))
        n = int(self.n_entries[r])
        self._reserve_entries(n + plan.stored + 1)
        if plan.fill:
            if plan.copy:
                shared = self.ids[r, n - 1 : n].copy()
                self.ids[r, n - 1] = next(opened)
                actions.copies.append((shared[0], self.ids[r, n - 1]))
                self._let_go(self.group.open, shared)
            slot = int(self.first[r, n] - self.first[r, n - 1])
            actions.writes.append((r, 0, plan.fill, self.ids[r, n - 1], slot))
            self.first[r, n] += plan.fill
        self._seal_entries(r, plan.seal, sealed, actions)
        self._demote_entries(r, plan.demote, cold, actions)
        done = 0
        for block in range(plan.blocks):
            if plan.skip_from <= block < plan.skip_to:
                continue
            start = plan.fill + plan.lost + block * size
            if done < plan.cold:
                page = next(cold)
                actions.colds.append((page, r, start))
            elif done < plan.direct:
                page = next(sealed)
                actions.encodes.append((page, r, start))
            else:
                page = next(opened)
                actions.writes.append((r, start, size, page, 0))
            self._push(r, page, size)
            done += 1
        if plan.tail:
            page = next(opened)
            actions.writes.append((r, plan.count - plan.tail, plan.tail, page, 0))
            self._push(r, page, plan.tail)
        self.n_sealed[r] += plan.direct
        self.n_cold[r] += plan.cold
        self.tokens_sealed += plan.direct * size
        self.length[r] += plan.count
        self.gap[r] += plan.lost + (plan.skip_to - plan.skip_from) * size

    def _push(self, r: int, page: int, count: int) -> None:
        n = int(self.n_entries[r])
        self.ids[r, n] = page
        self.first[r, n + 1] = self.first[r, n] + count
        self.n_entries[r] = n + 1

    def _seal_entries(self, r: int, count: int, sealed, actions: Actions) -> None:
        for e in range(int(self.n_sealed[r]), int(self.n_sealed[r]) + count):
            if not self.group.lossless:
                self._move(r, e, self.group.open, self.group.sealed, sealed, actions.seals)
        self.n_sealed[r] += count
        self.tokens_sealed += count * self.group.block_size

    def _demote_entries(self, r: int, count: int, cold, actions: Actions) -> None:
        for e in range(int(self.n_cold[r]), int(self.n_cold[r]) + count):
            self._move(r, e, self.group.sealed, self.group.cold, cold, actions.demotes)
        self.n_cold[r] += count

    def _move(self, r: int, e: int, source: PageStore, target: PageStore, pages, moves: list) -> None:
        """Entry `e` of row `r` becomes a page of `target`: the one that another row's same block became, or a new one."""
        old = self.ids[r, e : e + 1].copy()
        page = next((new for was, new in moves if was == old[0]), None)
        if page is None:
            page = next(pages)
            moves.append((old[0], page))
        else:
            target.retain(np.array([page]))
        self.ids[r, e] = page
        self._let_go(source, old)

    def _reserve_entries(self, entries: int) -> None:
        rows, width = self.ids.shape
        if entries > width:
            wider = max(entries, 2 * width)
            self.ids = np.concatenate([self.ids, np.zeros((rows, wider - width), np.int32)], axis=1)
            self.first = np.concatenate([self.first, np.zeros((rows, wider - width), np.int32)], axis=1)

    def _remember(self, plans: list[RowPlan]) -> None:
        """Keep what a `commit` of `plans` changes: the numbers of each row, and the entries from the first one on that may
        be sealed, moved or written (all of them where a row forgets its window)."""
        first = self.n_sealed if self.resident is None else self.n_cold
        lo = 0 if any(p.forget for p in plans) else max(0, int(min(first.min(), self.n_entries.min() - 1)))
        hi = int(self.n_entries.max())
        numbers = {name: getattr(self, name).copy() for name in ROW_ARRAYS[2:]}
        entries = self.ids[:, lo:hi].copy(), self.first[:, lo : hi + 1].copy()
        self._before = (lo, hi, *entries, numbers, self.tokens_sealed)

    def undo(self) -> None:
        """Be as before the last `commit`. What it let go is still there: until the next pass it is only pending."""
        lo, hi, ids, first, numbers, self.tokens_sealed = self._before
        with self.pool.lock:
            held = [(store, self.references(store)) for store in self.group.stores]
            self._pending.clear()
            self.ids[:, lo:hi], self.first[:, lo : hi + 1] = ids, first
            for name, array in numbers.items():
                setattr(self, name, array)
            for store in self.group.stores:
                store.retain(self.references(store))
            for store, ids in held:
                store.release(ids)

    # ---- letting go -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Free what the last forward still read, and drop the blocks that no later query sees."""
        self._free_pending()
        if self.window is not None:
            with self.pool.lock:
                for r in range(self.rows):
                    self._drop_outside(r)
                self._free_pending()

    def _free_pending(self) -> None:
        if self._pending:
            with self.pool.lock:
                for store, ids in self._pending:
                    store.release(ids)
            self._pending.clear()

    def _let_go(self, store: PageStore, ids: np.ndarray) -> None:
        self._pending.append((store, ids))

    def _sink_entries(self, r: int) -> int:
        return int(np.searchsorted(self.first[r, : self.n_entries[r]], self.sinks))

    def _drop_outside(self, r: int) -> None:
        needed = int(
            self.length[r] + 1 - self.window - self.slack - self.gap[r]
        )  # stored index of the oldest position still seen
        if needed <= 0:
            return
        sink_entries, n = self._sink_entries(r), int(self.n_entries[r])
        until = sink_entries + int(np.searchsorted(self.first[r, sink_entries + 1 : n + 1], needed, side="right"))
        if until > sink_entries:
            self._drop_entries(r, sink_entries, until)

    def _drop_entries(self, r: int, start: int, stop: int) -> None:
        """Take entries `[start, stop)` out of row `r`; their positions join the gap."""
        n, dropped = int(self.n_entries[r]), int(self.first[r, stop] - self.first[r, start])
        for store, lo, hi in self.ranges(r):
            lo, hi = max(lo, start), min(hi, stop)
            if hi > lo:
                self._let_go(store, self.ids[r, lo:hi].copy())
        self.ids[r, start : n - (stop - start)] = self.ids[r, stop:n].copy()
        self.first[r, start : n + 1 - (stop - start)] = self.first[r, stop : n + 1] - dropped
        for bound in (self.n_cold, self.n_sealed, self.n_entries):
            bound[r] -= max(0, min(int(bound[r]), stop) - start)
        self.gap[r] += dropped

    def ranges(self, r: int) -> list[tuple[PageStore, int, int]]:
        """Which store holds which entries of row `r`."""
        cold, sealed, n = int(self.n_cold[r]), int(self.n_sealed[r]), int(self.n_entries[r])
        parts = [(self.group.cold, 0, cold), (self.group.sealed, cold, sealed), (self.group.open, sealed, n)]
        return [part for part in parts if part[2] > part[1]]

    def cannot_crop(self, lengths: np.ndarray) -> int | None:
        """The first row that cannot go back to `lengths[row]` tokens because its window has moved on, or None."""
        for r in range(self.rows):
            sink_end = int(self.first[r, self._sink_entries(r)])
            target = int(lengths[r])
            if self.gap[r] and target > sink_end and target + 1 - self.window < sink_end + int(self.gap[r]):
                return r
        return None

    def crop(self, lengths: np.ndarray) -> None:
        """Cut row `r` back to `lengths[r]` tokens, exactly: nothing is recoded. `cannot_crop` must have said None."""
        self._free_pending()
        with self.pool.lock:
            for r in range(self.rows):
                if lengths[r] < self.length[r]:
                    self._crop_row(r, int(lengths[r]))
            self._free_pending()

    def _crop_row(self, r: int, target: int) -> None:
        sink_end = int(self.first[r, self._sink_entries(r)])
        stored = target if target <= sink_end else target - int(self.gap[r])
        n = int(np.searchsorted(self.first[r, : self.n_entries[r]], stored))  # entries that begin before the cut
        for store, lo, hi in self.ranges(r):
            if hi > max(lo, n):
                self._let_go(store, self.ids[r, max(lo, n) : hi].copy())
        self.n_entries[r] = n
        self.first[r, n] = stored
        partial = n > 0 and stored - int(self.first[r, n - 1]) < self.group.block_size
        self.n_sealed[r] = min(int(self.n_sealed[r]), n - (self.group.lossless and partial and n > self.n_cold[r]))
        self.n_cold[r] = min(int(self.n_cold[r]), n)
        self.length[r] = target
        if target <= sink_end:
            self.gap[r] = 0

    # ---- rows -----------------------------------------------------------------------------------------------------

    def select(self, rows: np.ndarray) -> None:
        """Make row `i` what row `rows[i]` was: beams, batch selection, repetition. Moves no block."""
        self.settle()
        with self.pool.lock:
            old = [(store, self.references(store)) for store in self.group.stores]
            for name in ROW_ARRAYS:
                setattr(self, name, np.ascontiguousarray(getattr(self, name)[rows]))
            for store in self.group.stores:
                store.retain(self.references(store))
            for store, ids in old:
                store.release(ids)

    def fork(self) -> BlockTable:
        """A table with the same rows that shares every block; either side copies an open block before writing to it."""
        self.settle()
        twin = BlockTable(
            self.group,
            self.pool,
            window=self.window,
            sinks=self.sinks,
            residual=self.residual,
            resident=self.resident,
        )
        twin.slack, twin.least_slack, twin.tokens_sealed = self.slack, self.least_slack, self.tokens_sealed
        with self.pool.lock:
            for name in ROW_ARRAYS:
                setattr(twin, name, getattr(self, name).copy())
            for store in self.group.stores:
                store.retain(twin.references(store))
        return twin

    def clear(self) -> None:
        """Let go of everything and forget the batch."""
        self.slack = self.least_slack
        self._free_pending()
        with self.pool.lock:
            held = [(store, self.references(store)) for store in self.group.stores]
            self._start(0)
            for store, ids in held:
                store.release(ids)

    def references(self, store: PageStore) -> np.ndarray:
        """Page ids of `store` that this table holds, one per reference."""
        parts = [self.ids[r, lo:hi] for r in range(self.rows) for owner, lo, hi in self.ranges(r) if owner is store]
        parts += [ids for owner, ids in self._pending if owner is store]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def __del__(self):
        # A pool outlives its caches; what a dropped cache held goes back to it. (At exit there is nothing to give back to.)
        # Garbage may be collected in the middle of the pool's own work, so the pool is only told, and does it when it can.
        if hasattr(self, "ids") and not sys.is_finalizing():
            held = [(store, ids) for store in self.group.stores if len(ids := self.references(store))]
            self.pool.lock.give_back(held)

    # ---- sharing --------------------------------------------------------------------------------------------------

    def keep_beyond_window(self, positions: int) -> None:
        """Keep so many positions more than the window from now on."""
        self.least_slack = positions
        self.slack = max(self.slack, positions)

    def attach(self, rows: Sequence[Attached]) -> None:
        """Become a batch of rows that share sealed blocks with others. A last block that a row takes up in part is open
        for it where the codec is lossless: it is copied before it is written to."""
        size = self.group.block_size
        with self.pool.lock:
            held = [(store, self.references(store)) for store in self.group.stores]
            self._pending.clear()
            self._start(len(rows))
            for r, row in enumerate(rows):
                n, stored = len(row.pages), row.length - row.dropped
                self._reserve_entries(n + 1)
                self.ids[r, :n] = row.pages
                self.first[r, : n + 1] = np.minimum(np.arange(n + 1) * size, stored)
                self.n_entries[r], self.length[r], self.gap[r] = n, row.length, row.dropped
                self.n_sealed[r] = n - (self.group.lossless and stored % size > 0)
            self.group.sealed.retain(self.ids[np.arange(self.ids.shape[1]) < self.n_entries[:, None]])
            for store, ids in held:
                store.release(ids)

    def restore(
        self, ids: Sequence[np.ndarray], counts: Sequence[np.ndarray], numbers: Mapping[str, np.ndarray]
    ) -> None:
        """Become a batch that was saved: for each row the pages of its entries and the positions in each, and the other numbers
        of all rows by name. Takes a reference for every entry."""
        with self.pool.lock:
            self._start(len(ids))
            self.n_entries[:] = [len(row) for row in ids]
            self._reserve_entries(max(self.n_entries, default=0) + 1)
            for r, (pages, positions) in enumerate(zip(ids, counts, strict=True)):
                self.ids[r, : len(pages)] = pages
                self.first[r, 1 : len(pages) + 1] = np.cumsum(positions)
            for name, array in numbers.items():
                getattr(self, name)[:] = array
            for store in self.group.stores:
                store.retain(self.references(store))

    def sealed_until(self, r: int) -> int:
        """Positions of row `r` before the first one that is still open."""
        return int(self.length[r] - (self.first[r, self.n_entries[r]] - self.first[r, self.n_sealed[r]]))

    def sealed_blocks(self, r: int, start: int) -> dict[int, int]:
        """Pages of row `r` that will never change, by number of the block in the text, from block `start` on. What does
        not begin at a multiple of the block size, or is not full, is none."""
        size, lo, hi = self.group.block_size, int(self.n_cold[r]), int(self.n_sealed[r])
        first = self.first[r, lo : hi + 1].astype(np.int64)
        position = first[:-1] + np.where(np.arange(lo, hi) >= self._sink_entries(r), self.gap[r], 0)
        good = (np.diff(first) == size) & (position % size == 0) & (position >= start * size)
        return dict(zip((position[good] // size).tolist(), self.ids[r, lo:hi][good].tolist(), strict=True))

    # ---- reading --------------------------------------------------------------------------------------------------

    def places(self):
        """A function from positions `[rows, n]` to stored indices, as of now. A dropped position becomes the first one
        that is kept behind the gap."""
        if not self.gap.any():
            return lambda positions: positions
        sink_end = np.array([self.first[r, self._sink_entries(r)] for r in range(self.rows)])[:, None]
        gap = self.gap[:, None].copy()
        return lambda positions: np.where(positions <= sink_end, positions, np.maximum(sink_end, positions - gap))

    def check_integrity(self) -> None:
        """Raise `IntegrityError` when a row's numbers contradict each other."""
        size = self.group.block_size
        for r in range(self.rows):
            n = int(self.n_entries[r])
            counts = np.diff(self.first[r, : n + 1])
            if self.first[r, 0] != 0 or (n and (counts.min() < 1 or counts.max() > size)):
                raise IntegrityError(f"row {r}: blocks of {counts.tolist()} positions, each must hold 1 to {size}.")
            if not 0 <= self.n_cold[r] <= self.n_sealed[r] <= n:
                raise IntegrityError(f"row {r}: {self.n_cold[r]} cold, {self.n_sealed[r]} sealed, {n} blocks.")
            if self.first[r, n] + self.gap[r] != self.length[r]:
                raise IntegrityError(f"row {r}: {self.first[r, n]} kept + {self.gap[r]} dropped != {self.length[r]}.")
            if (counts[self.n_sealed[r] : n - 1] != size).any():
                raise IntegrityError(f"row {r}: an open block before the last one is not full.")
