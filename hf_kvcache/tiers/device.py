"""Everything stays where the model computes."""

from __future__ import annotations

import numpy as np

from ..kernels.base import Pages
from .base import Tier


class DeviceTier(Tier):
    """No block ever moves."""

    name = "device"

    def prefetch(self, key: tuple, pages: Pages, ids: np.ndarray, device) -> None:
        """Nothing is cold."""

    def fetch(self, key: tuple, pages: Pages, ids: np.ndarray, device) -> tuple[Pages, np.ndarray]:
        return pages, ids
