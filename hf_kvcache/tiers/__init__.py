"""Where sealed blocks live: one tier per file, the contract in `base.py`."""

from __future__ import annotations

from ..choices import choose
from .base import Tier
from .device import DeviceTier
from .disk import DiskTier
from .host import HostTier

TIERS = {"device": DeviceTier, "host": HostTier, "disk": DiskTier}


def tier_for(choice: Tier | str | None) -> Tier:
    """A tier from an instance, a name of `TIERS` (with its defaults), or None for the device.

    Raises:
        ConfigurationError: for anything else; the message lists the names.
    """
    return choose("tier", Tier, TIERS, "device" if choice is None else choice, "a HostTier(...)")


__all__ = ["TIERS", "DeviceTier", "DiskTier", "HostTier", "Tier", "tier_for"]
