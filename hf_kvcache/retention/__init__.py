"""How many positions stay: one rule per file, the contract in `base.py`."""

from __future__ import annotations

from ..errors import ConfigurationError
from .base import Retention
from .everything import Everything
from .window import Window

RETENTIONS = {"everything": Everything, "window": Window}


def retention_for(choice: Retention | str | None) -> Retention:
    """A rule from an instance, a name of `RETENTIONS` (with its defaults), or None for everything.

    Raises:
        ConfigurationError: for anything else; the message lists the names.
    """
    if isinstance(choice, Retention):
        return choice
    name = "everything" if choice is None else choice
    if name not in RETENTIONS:
        raise ConfigurationError(
            f"retention {choice!r} is unknown; use a Window(...) or one of {', '.join(RETENTIONS)}."
        )
    return RETENTIONS[name]()


__all__ = ["RETENTIONS", "Everything", "Retention", "Window", "retention_for"]
