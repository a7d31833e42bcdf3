"""What a tier is: where sealed blocks live, and how a kernel gets at those that do not live on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from ..kernels.base import Pages

ColdPages = Callable[[], Pages]


class Tier(ABC):
    """Placement of the blocks of one cache.

    Attributes:
        name: the name used in tables and reports.
        resident_tokens: newest positions of each row that stay on the device; None keeps all of them.
    """

    name: str
    resident_tokens: int | None = None

    @abstractmethod
    def prefetch(self, key: tuple, pages: Pages, ids: np.ndarray, device) -> None:
        """Begin to bring cold pages `ids` of a layer to `device`; `key` names layer and forward pass."""

    @abstractmethod
    def fetch(self, key: tuple, pages: Pages, ids: np.ndarray, device) -> tuple[Pages, np.ndarray]:
        """Pages that a kernel of `device` can read, and the ids under which they hold what `ids` name."""

    def __repr__(self) -> str:
        return self.name
