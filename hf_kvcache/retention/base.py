"""What a retention rule is: which positions of a layer stay, and therefore which ones a query sees."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Retention:
    """A query at position `p` sees the first `sinks` positions and the last `window` ones, its own included.

    Attributes:
        window: positions; None for all.
        sinks: positions at the start of each row that never leave.
        rebase: attend to sinks that the window has left behind as if no position were missing in between.
        native: whether the window is the model's own, so that the model's masks express it too.
    """

    window: int | None = None
    sinks: int = 0
    rebase: bool = False
    native: bool = False

    def within(self, model_window: int | None) -> Retention:
        """This rule on a layer of the model that itself sees only `model_window` positions."""
        if model_window is None or (self.window is not None and self.window + self.sinks <= model_window):
            return self
        return replace(self, window=model_window, sinks=0, rebase=False, native=True)
