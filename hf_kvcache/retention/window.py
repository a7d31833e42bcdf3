"""A sliding window with attention sinks (StreamingLLM, Xiao et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigurationError
from .base import Retention


@dataclass(frozen=True)
class Window(Retention):
    """The last `window` positions and the first `sinks` ones.

    Keys arrive rotated by their absolute position, so distances inside the window are right as they are; only the sinks
    drift away from the query as positions in between are dropped. With `rebase` the sinks are attended with the query
    turned back by the number of dropped positions, which gives the positions *inside the cache* that StreamingLLM uses.
    That needs the model's rotary parameters: `KVCache` reads them from the config, and uses the plain window where they
    cannot be read (no rotary embedding, one that changes with the length, layers without any). `repr(cache)` says
    which.

    Raises:
        ConfigurationError: for a window below 1 or a negative number of sinks.
    """

    window: int = 1024
    sinks: int = 4
    rebase: bool = True

    def __post_init__(self):
        if not isinstance(self.window, int) or self.window < 1:
            raise ConfigurationError(
                f"window={self.window!r} must be a whole number of at least 1 token (1024 is usual)."
            )
        if not isinstance(self.sinks, int) or self.sinks < 0:
            raise ConfigurationError(f"sinks={self.sinks!r} must be a whole number of at least 0 tokens (4 is usual).")

    def __repr__(self) -> str:
        return f"window {self.window} + {self.sinks} sinks"
