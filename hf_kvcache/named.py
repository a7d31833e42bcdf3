"""Caches by name, as command lines write them: ours and the built-in ones beside which they are measured.

A name is `kind[:argument][/option=value ...]`: `paged`, `window:1024+4`, `offloaded:256`, `disk:256`, `int4`,
`k4v2/residual=128`, `dynamic` (the built-in one). A codec as an option gives layers one of their own: in
`int2/block_size=32/int8=0-3+29` the first four layers and the last of thirty have 8 bits. `plan:PATH` is the cache that a
plan describes (`plan_file.py`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from transformers import DynamicCache, StaticCache, cache_utils
from transformers.cache_utils import Cache

from .cache import KVCache, OffloadedCache, PagedCache, QuantizedCache, SlidingWindowCache
from .codecs import CODECS
from .plan_file import CachePlan
from .tiers import DiskTier

NUMBERS = {  # kinds that take numbers after a colon, and how they are written
    "static": "static:LENGTH",
    "window": "window:WINDOW+SINKS",
    "offloaded": "offloaded:TOKENS",
    "disk": "disk:TOKENS",
}
EXACT = ("dynamic", "static", "paged", "offloaded", "disk")  # kinds that give back what they were given
BUILT_IN = ("dynamic", "static", "hf-fp8", "hf-hqq4", "hf-quanto4")
PLAN = "plan"  # kind of a cache whose choices are in a file
DEFAULT = ("paged", "window:1024+4", "int8", "int4", "int2", "fp8", "offloaded:1024")


def _static(config, length: int | None = None) -> Cache:
    if length is None:
        raise ValueError("a static cache has a length: write static:4096.")
    return StaticCache(config=config, max_cache_len=length)


def _window(config, *numbers: int, **options) -> Cache:
    window, sinks = (*numbers, 0)[:2] if numbers else (1024, 4)
    return SlidingWindowCache(config, window=window, sinks=sinks, **options)


def _offloaded(config, resident_tokens: int = 1024, **options) -> Cache:
    return OffloadedCache(config, resident_tokens=resident_tokens, **options)


def _disk(config, resident_tokens: int = 1024, **options) -> Cache:
    return KVCache(config, tier=DiskTier(resident_tokens), **options)


def _quantized(codec: str) -> Callable[..., Cache]:
    return lambda config, **options: QuantizedCache(config, codec=codec, **options)


def _built_in(backend: str, **settings) -> Callable[..., Cache]:
    return lambda config: cache_utils.QuantizedCache(backend=backend, config=config, **settings)


KINDS: dict[str, Callable[..., Cache]] = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": _static,
    "hf-fp8": _built_in("fp8"),
    "hf-hqq4": _built_in("hqq", nbits=4, axis_key=1, axis_value=1),
    "hf-quanto4": _built_in("quanto", nbits=4),
    "paged": lambda config, **options: PagedCache(config, **options),
    "window": _window,
    "offloaded": _offloaded,
    "disk": _disk,
    **{name: _quantized(name) for name in CODECS if name != "native"},
}


def cache_factory(name: str) -> Callable[..., Cache]:
    """A function from a model's config to a new cache.

    Raises:
        ValueError: for a name that is none; the message lists the kinds, or says how this one is written.
        ConfigurationError: for a plan that is none.
    """
    if kind_of(name) == PLAN:
        plan = CachePlan.read(name.removeprefix(f"{PLAN}:")).as_dict()
        return lambda config: KVCache.from_plan(config, plan)
    head, *pairs = name.split("/")
    kind, _, argument = head.partition(":")
    if kind not in KINDS:
        raise ValueError(f"no cache is called {kind!r}; kinds are {', '.join([*KINDS, PLAN])}.")
    numbers = _numbers(kind, argument, name)
    options = _options(pairs, name)
    return lambda config: KINDS[kind](config, *numbers, **options)


def _numbers(kind: str, argument: str, name: str) -> list[int]:
    """`1024+4` of a window as 1024, 4."""
    if not argument:
        return []
    if kind not in NUMBERS:
        instead = "" if kind in BUILT_IN else f"; write {kind}/block_size={argument}"
        raise ValueError(f"{name!r}: {kind} takes no number after a colon{instead}.")
    parts = argument.split("+")
    if len(parts) > NUMBERS[kind].count("+") + 1:
        raise ValueError(f"{name!r} has {len(parts)} numbers; write {NUMBERS[kind]}.")
    return [_number(part, name, NUMBERS[kind]) for part in parts]


def _options(pairs: list[str], name: str) -> dict:
    """`residual=128` as a keyword of a cache, `int8=0-3` as a codec of these layers."""
    options, layers = {}, {}
    for pair in pairs:
        option, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} in {name!r} is no option: write option=value.")
        if option in CODECS:
            layers |= {layer: {"codec": option} for layer in _layers(value, name)}
        else:
            options[option] = _number(value, name, f"{option}=64")
    return options | ({"layers": layers} if layers else {})


def _layers(text: str, name: str) -> list[int]:
    """`0-3+29` as 0, 1, 2, 3, 29."""
    ranges = [[_number(end, name, "int8=0-3+29") for end in part.split("-")] for part in text.split("+")]
    return [number for ends in ranges for number in range(ends[0], ends[-1] + 1)]


def _number(text: str, name: str, written: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} in {name!r} must be a whole number; write {written}.") from None


def kind_of(name: str) -> str:
    """`window` of `window:1024+4/block_size=32`."""
    return name.split("/")[0].split(":")[0]


def is_exact(name: str) -> bool:
    """Whether a cache gives back what it was given, whatever the length. (A codec of its own in some layer undoes that.)"""
    codecs = {option.split("=")[0] for option in name.split("/")[1:]} & CODECS.keys() - {"native"}
    return kind_of(name) in EXACT and not codecs


def is_available(name: str) -> bool:
    """Whether the packages and the transformers release that a built-in cache needs are here."""
    kind = kind_of(name)
    if kind == "hf-fp8":
        return hasattr(cache_utils, "Fp8QuantizedLayer")
    package = {"hf-hqq4": "hqq", "hf-quanto4": "optimum.quanto"}.get(kind)
    try:
        return package is None or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
