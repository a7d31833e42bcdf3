"""Every position stays."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Retention


@dataclass(frozen=True)
class Everything(Retention):
    """Full attention; a model's own sliding layers still keep no more than their window."""

    def __repr__(self) -> str:
        return "everything"
