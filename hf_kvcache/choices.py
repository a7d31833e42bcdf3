"""Levers by instance, by name or from a file, alike for codecs, retention rules and tiers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

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
    arguments = {key: getattr(choice, key) for key in inspect.signature(kind).parameters if not _is_folder(key)}
    return [name, arguments]


def made(names: Mapping[str, Callable[..., T]], name: Any, arguments: Any) -> T:
    """What `described` wrote down, or somebody by hand. As it may be from anywhere, it names no folder to be made and written to.

    Raises:
        ValueError: for a name that is not among `names`, arguments that it does not take, and folders.
        ConfigurationError: for arguments that make no sense.
    """
    if not isinstance(name, str) or name not in names:
        raise ValueError(f"the name {name!r} is unknown, use one of {', '.join(names)}")
    folders = {key: value for key, value in arguments.items() if _is_folder(key)}
    if folders:
        raise ValueError(
            f"{name!r} has {folders}, and no file may say which folder is written to: leave that out here, and where the cache "
            "is made give it tier=DiskTier(path=...)"
        )
    try:
        return names[name](**arguments)
    except TypeError as error:
        raise ValueError(f"{name!r} does not take {arguments}: {error}") from error


def _is_folder(argument: str) -> bool:
    return argument.endswith("path")
