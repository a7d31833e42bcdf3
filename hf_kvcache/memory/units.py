"""Sizes and token counts as people write them, and back."""

from __future__ import annotations

import re

from ..errors import ConfigurationError

BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_bytes(text: str) -> int:
    """Bytes: `24GiB` is 24 x 1024^3, `24GB` is 24 x 1000^3, `24G` means GiB, a bare number bytes.

    Raises:
        ConfigurationError: for anything else, and for what is not positive or too large.
    """
    found = re.fullmatch(r"\s*(-?[\d.]+)\s*([kmgt]?)(i?)(b?)\s*", text, flags=re.I)
    number = _number(found[1]) if found else None
    if number is None:
        raise ConfigurationError(f"{text!r} is not a size; write 24GiB, 24GB or a number of bytes.")
    units = DECIMAL if found[4] and not found[3] and found[2] else BINARY
    return _whole(text, number * units[found[2].lower()], "a size", 1 << 60)


def parse_tokens(text: str) -> int:
    """Tokens: `32k` is 32 x 1024 = 32,768, as context lengths are named; `1M` is 1,048,576.

    Raises:
        ConfigurationError: for anything else, and for what is not positive or too large.
    """
    found = re.fullmatch(r"\s*(-?[\d.,_]+)\s*([km]?)\s*", text, flags=re.I)
    number = _number(re.sub("[,_]", "", found[1])) if found else None
    if number is None:
        raise ConfigurationError(f"{text!r} is not a number of tokens; write 32768 or 32k.")
    return _whole(text, number * BINARY[found[2].lower()], "a number of tokens", 1 << 40)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole(text: str, value: float, what: str, most: int) -> int:
    if value < 1:
        raise ConfigurationError(f"{text!r} is {what} that leaves no room: give a positive one.")
    if value > most:
        raise ConfigurationError(f"{_cut(text)} is {what} beyond any that there is: give at most {most:,}.")
    return int(value)


def _cut(text: str) -> str:
    return repr(text if len(text) <= 24 else f"{text[:20]}...")


def show_bytes(count: float) -> str:
    """`131,072 B`, `128.0 KiB`, `4.00 GiB`: three digits or more."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            value = count / size
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f} {unit}"
    return f"{count:,.0f} B"
