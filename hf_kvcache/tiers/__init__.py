"""Where sealed blocks live. Cold ones of a cache, which attention still reads: one tier per file, the contract in `base.py`.
Those that a pool gave up: `ladder.py`, in the stores of `blobs.py`."""

from __future__ import annotations

from ..choices import choose
from .base import Tier
from .device import DeviceTier
from .disk import DiskTier
from .host import HostTier
from .ladder import Ladder

TIERS = {"device": DeviceTier, "host": HostTier, "disk": DiskTier}


def tier_for(choice: Tier | str | None) -> Tier:
    """A tier from an instance, a name of `TIERS` (with its defaults), or None for the device.

    Raises:
        ConfigurationError: for anything else; the message lists the names.
    """
    return choose("tier", Tier, TIERS, "device" if choice is None else choice, "a HostTier(...)")


__all__ = ["TIERS", "DeviceTier", "DiskTier", "HostTier", "Ladder", "Tier", "tier_for"]
