"""Levers by instance or by name, alike for codecs, retention rules and tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from .errors import ConfigurationError

T = TypeVar("T")


def choose(what: str, base: type[T], names: Mapping[str, Callable[[], T]], choice: T | str, hint: str) -> T:
    """`choice` itself if it is a `base`, else what `names` makes of it, with its defaults.

    Raises:
        ConfigurationError: for anything else; the message has `hint` and lists the names.
    """
    if isinstance(choice, base):
        return choice
    if choice not in names:
        raise ConfigurationError(f"{what} {choice!r} is unknown; use {hint} or one of {', '.join(names)}.")
    return names[choice]()
