"""Caches by name, as recipes and the command line write them.

A name is `kind[:argument][/option=value ...]`: `paged`, `window:1024+4`, `int4`, `int4/residual=0/block_size=32`,
`offloaded:256`, `dynamic` (the built-in one).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from transformers import DynamicCache, QuantizedCache, StaticCache, cache_utils
from transformers.cache_utils import Cache

import hf_kvcache

BUILT_IN = ("dynamic", "static", "hf-fp8", "hf-hqq4", "hf-quanto4")
DEFAULT = ("paged", "window:1024+4", "int8", "int4", "int2", "fp8", "offloaded:1024")


def _window(config, argument: str, **options) -> Cache:
    window, _, sinks = (argument or "1024+4").partition("+")
    return hf_kvcache.SlidingWindowCache(config, window=int(window), sinks=int(sinks or 0), **options)


def _offloaded(config, argument: str, **options) -> Cache:
    return hf_kvcache.OffloadedCache(config, resident_tokens=int(argument or 1024), **options)


def _quantized(bits: int | str) -> Callable[..., Cache]:
    return lambda config, argument, **options: hf_kvcache.QuantizedCache(config, bits=bits, **options)


def _built_in(backend: str, **settings) -> Callable[..., Cache]:
    return lambda config, argument: QuantizedCache(backend=backend, config=config, **settings)


KINDS: dict[str, Callable[..., Cache]] = {
    "dynamic": lambda config, argument: DynamicCache(config=config),
    "static": lambda config, argument: StaticCache(config=config, max_cache_len=int(argument)),
    "hf-fp8": _built_in("fp8"),
    "hf-hqq4": _built_in("hqq", nbits=4, axis_key=1, axis_value=1),
    "hf-quanto4": _built_in("quanto", nbits=4),
    "paged": lambda config, argument, **options: hf_kvcache.PagedCache(config, **options),
    "window": _window,
    "offloaded": _offloaded,
    "int8": _quantized(8),
    "int4": _quantized(4),
    "int2": _quantized(2),
    "fp8": _quantized("fp8"),
}


def cache_factory(name: str) -> Callable[..., Cache]:
    """A function from a model's config to a new cache.

    Raises:
        ValueError: for a name that is none; the message lists the kinds.
    """
    head, *pairs = name.split("/")
    kind, _, argument = head.partition(":")
    if kind not in KINDS:
        raise ValueError(f"no cache is called {kind!r}; kinds are {', '.join(KINDS)}.")
    options = dict(pair.split("=", 1) for pair in pairs)
    return lambda config: KINDS[kind](config, argument, **{k: int(v) for k, v in options.items()})


def is_available(name: str) -> bool:
    """Whether the packages and the transformers release that a built-in cache needs are here."""
    kind = name.split(":")[0]
    if kind == "hf-fp8":
        return hasattr(cache_utils, "Fp8QuantizedLayer")
    package = {"hf-hqq4": "hqq", "hf-quanto4": "optimum.quanto"}.get(kind)
    try:
        return package is None or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def stored_bytes(cache: Cache) -> int:
    """Bytes of the storages behind a cache: ours counted by itself, a built-in one from its tensors."""
    if isinstance(cache, hf_kvcache.KVCache):
        return cache.memory().allocated
    tensors = [t for layer in cache.layers for value in vars(layer).values() for t in _tensors(value)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _tensors(value) -> list[torch.Tensor]:
    """Tensors in an attribute of a layer: itself, or the parts of a quantised one (scales, zero points, codes)."""
    if isinstance(value, torch.Tensor):
        parts = [getattr(value, name, None) for name in ("_data", "_scale", "_shift")]
        inner = [t for part in parts if part is not None for t in _tensors(part)]
        return inner or [value]
    if isinstance(value, tuple | list):
        return [t for item in value for t in _tensors(item)]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    return []
