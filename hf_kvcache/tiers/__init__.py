"""Where sealed blocks live: one tier per file, the contract in `base.py`."""

from .base import Tier
from .device import DeviceTier
from .host import HostTier

TIERS = {"device": DeviceTier, "host": HostTier}

__all__ = ["TIERS", "DeviceTier", "HostTier", "Tier"]
