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

EXACT = ("dynamic", "static", "paged", "offloaded", "disk")  # kinds that give back what they were given
BUILT_IN = ("dynamic", "static", "hf-fp8", "hf-hqq4", "hf-quanto4")
PLAN = "plan"  # kind of a cache whose choices are in a file
DEFAULT = ("paged", "window:1024+4", "int8", "int4", "int2", "fp8", "offloaded:1024")


def _window(config, argument: str, **options) -> Cache:
    window, _, sinks = (argument or "1024+4").partition("+")
    return SlidingWindowCache(config, window=int(window), sinks=int(sinks or 0), **options)


def _offloaded(config, argument: str, **options) -> Cache:
    return OffloadedCache(config, resident_tokens=int(argument or 1024), **options)


def _disk(config, argument: str, **options) -> Cache:
    return KVCache(config, tier=DiskTier(int(argument or 1024)), **options)


def _quantized(codec: str) -> Callable[..., Cache]:
    return lambda config, argument, **options: QuantizedCache(config, codec=codec, **options)


def _built_in(backend: str, **settings) -> Callable[..., Cache]:
    return lambda config, argument: cache_utils.QuantizedCache(backend=backend, config=config, **settings)


KINDS: dict[str, Callable[..., Cache]] = {
    "dynamic": lambda config, argument: DynamicCache(config=config),
    "static": lambda config, argument: StaticCache(config=config, max_cache_len=int(argument)),
    "hf-fp8": _built_in("fp8"),
    "hf-hqq4": _built_in("hqq", nbits=4, axis_key=1, axis_value=1),
    "hf-quanto4": _built_in("quanto", nbits=4),
    "paged": lambda config, argument, **options: PagedCache(config, **options),
    "window": _window,
    "offloaded": _offloaded,
    "disk": _disk,
    **{name: _quantized(name) for name in CODECS if name != "native"},
}


def cache_factory(name: str) -> Callable[..., Cache]:
    """A function from a model's config to a new cache.

    Raises:
        ValueError: for a name that is none; the message lists the kinds.
        ConfigurationError: for a plan that is none.
    """
    if kind_of(name) == PLAN:
        plan = CachePlan.read(name.removeprefix(f"{PLAN}:")).as_dict()
        return lambda config: KVCache.from_plan(config, plan)
    head, *pairs = name.split("/")
    kind, _, argument = head.partition(":")
    if kind not in KINDS:
        raise ValueError(f"no cache is called {kind!r}; kinds are {', '.join([*KINDS, PLAN])}.")
    options, layers = {}, {}
    for option, value in (pair.split("=", 1) for pair in pairs):
        if option in CODECS:
            layers |= {layer: {"codec": option} for layer in _numbers(value)}
        else:
            options[option] = int(value)
    if layers:
        options["layers"] = layers
    return lambda config: KINDS[kind](config, argument, **options)


def _numbers(text: str) -> list[int]:
    """`0-3+29` as 0, 1, 2, 3, 29."""
    ranges = [[int(end) for end in part.split("-")] for part in text.split("+")]
    return [number for ends in ranges for number in range(ends[0], ends[-1] + 1)]


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
