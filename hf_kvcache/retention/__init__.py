"""How many positions stay: one rule per file, the contract in `base.py`."""

from __future__ import annotations

from ..choices import choose
from .base import Retention
from .everything import Everything
from .window import Window

RETENTIONS = {"everything": Everything, "window": Window}


def retention_for(choice: Retention | str | None) -> Retention:
    """A rule from an instance, a name of `RETENTIONS` (with its defaults), or None for everything.

    Raises:
        ConfigurationError: for anything else; the message lists the names.
    """
    return choose("retention", Retention, RETENTIONS, "everything" if choice is None else choice, "a Window(...)")


__all__ = ["RETENTIONS", "Everything", "Retention", "Window", "retention_for"]
