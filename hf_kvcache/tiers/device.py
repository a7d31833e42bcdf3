"""Everything stays where the model computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..kernels.base import Pages, View
from .base import Tier


class DeviceTier(Tier):
    """No block ever moves."""

    name = "device"

    def prefetch(self, key: tuple[int, int], pages: Pages, view: View, device: torch.device, fresh: np.ndarray) -> None:
        """Nothing is cold."""

    def read(
        self, key: tuple[int, int], pages: Pages, view: View, device: torch.device
    ) -> Iterator[tuple[Pages, View]]:
        yield pages, view
