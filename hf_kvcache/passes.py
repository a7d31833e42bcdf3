"""A forward pass as a group of layers sees it: what is appended, and which stored positions every query may attend to.

Planned once by the first layer that appends, shared by all layers of the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from .blocks import BlockTable
from .kernels import dispatch
from .kernels.base import Rotation, View
from .pages import GroupStore
from .plans import AppendPlan
from .pool import BlockPool
from .retention import Retention
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
    views: dict[tuple, View | tuple[View, View]] = field(default_factory=dict)
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
            self.views[key] = replace(view, begin=begin, end=end, rope=rope and newest_angles(rope, m))
        return self.views[key]

    def split(self, view: View, n_cold: np.ndarray) -> tuple[View, View]:
        """The cold entries of `view`, and the others. Kept for the pass, as above."""
        key = (id(view), "split")
        if key not in self.views:
            cold = replace(view, n_sealed=n_cold, entry_end=n_cold)
            self.views[key] = cold, view.narrowed(n_cold, view.entry_end)
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


def newest_angles(rope: Rotation, m: int) -> Rotation:
    return replace(rope, cos=rope.cos[:, -m:], sin=rope.sin[:, -m:])
