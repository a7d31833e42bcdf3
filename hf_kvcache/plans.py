"""What a block table decides before tokens are appended: row by row, then as one plan that every layer carries out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class AppendPlan:
    """What one forward pass appends, for every layer of a group to carry out. All arrays are int32.

    Attributes:
        counts: `[rows]` new tokens per row.
        copies: `[2, n]` open pages to copy before they are written, sources then targets: copy-on-write.
        writes: `[n, 5]` row, first new token, number, open page, first slot.
        encode_ids, encode_places: whole blocks stored straight from the input: `[n]` sealed page; `[n, 2]` row, first
            token.
        cold_ids, cold_places: the same for blocks that go straight to the slower tier.
        seals: `[2, n]` open pages, sealed pages.
        demotes: `[2, n]` sealed pages, cold pages.
        complete: whether storage holds every new token exactly; else only this forward's input does.
    """

    counts: np.ndarray
    copies: np.ndarray
    writes: np.ndarray
    encode_ids: np.ndarray
    encode_places: np.ndarray
    cold_ids: np.ndarray
    cold_places: np.ndarray
    seals: np.ndarray
    demotes: np.ndarray
    complete: bool


@dataclass
class RowPlan:
    """Blocks that one row's append makes. `fill` tokens go to the last open page (or `lost` are dropped with it); the
    rest is whole blocks, of which `skip_from:skip_to` are not stored, then `tail` tokens. Of the stored blocks the
    first `direct` are sealed at once, the first `cold` of those in the slower tier; `seal` open entries are sealed,
    `demote` sealed entries become cold. With `forget`, the entries behind the sinks are dropped first."""

    count: int
    fill: int = 0
    lost: int = 0
    forget: bool = False
    copy: bool = False
    skip_from: int = 0
    skip_to: int = 0
    blocks: int = 0
    tail: int = 0
    direct: int = 0
    cold: int = 0
    seal: int = 0
    demote: int = 0

    @property
    def stored(self) -> int:
        return self.blocks - (self.skip_to - self.skip_from)

    @property
    def new_open(self) -> int:
        """Open pages of the new blocks."""
        return self.stored - self.direct + (self.tail > 0)

    @property
    def new_sealed(self) -> int:
        """Pages of the new blocks that are sealed at once and stay on the device."""
        return self.direct - self.cold


@dataclass
class Actions:
    """The lists an `AppendPlan` is made of, while rows add to them."""

    copies: list = field(default_factory=list)
    writes: list = field(default_factory=list)
    encodes: list = field(default_factory=list)
    colds: list = field(default_factory=list)
    seals: list = field(default_factory=list)
    demotes: list = field(default_factory=list)
