"""Levers by instance or by name, alike for codecs, retention rules and tiers."""

from __future__ import annotations

import inspect
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


def described(what: str, names: Mapping[str, Callable], choice: object) -> list:
    """`choice` as JSON: its name among `names`, and the arguments by which it is made again. Folders are left out: where they
    are is no business of somebody else's machine.

    Raises:
        ConfigurationError: for a choice that is not among `names`.
    """
    kind = type(choice)
    name = next((name for name, make in names.items() if make is kind), None)
    if name is None:
        raise ConfigurationError(
            f"{what} {choice!r} is of a class that has no name, so nobody could make it again; names are {', '.join(names)}."
        )
    arguments = {key: getattr(choice, key) for key in inspect.signature(kind).parameters if not key.endswith("path")}
    return [name, arguments]
