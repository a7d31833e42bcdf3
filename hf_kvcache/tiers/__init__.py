"""Where sealed blocks live: one tier per file, the contract in `base.py`."""

from __future__ import annotations

from ..errors import ConfigurationError
from .base import Tier
from .device import DeviceTier
from .host import HostTier

TIERS = {"device": DeviceTier, "host": HostTier}


def tier_for(choice: Tier | str | None) -> Tier:
    """A tier from an instance, a name of `TIERS` (with its defaults), or None for the device.

    Raises:
        ConfigurationError: for anything else; the message lists the names.
    """
    if isinstance(choice, Tier):
        return choice
    name = "device" if choice is None else choice
    if name not in TIERS:
        raise ConfigurationError(f"tier {choice!r} is unknown; use a HostTier(...) or one of {', '.join(TIERS)}.")
    return TIERS[name]()


__all__ = ["TIERS", "DeviceTier", "HostTier", "Tier", "tier_for"]
