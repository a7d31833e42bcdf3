"""How many positions stay: one rule per file, the contract in `base.py`."""

from .base import Retention
from .everything import Everything
from .window import Window

RETENTIONS = {"everything": Everything, "window": Window}

__all__ = ["RETENTIONS", "Everything", "Retention", "Window"]
