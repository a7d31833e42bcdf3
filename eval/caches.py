"""Caches by name, as recipes and the command line write them.

A name is `kind[:argument][/option=value ...]`: `paged`, `window:1024+4`, `int4`, `int4/residual=0/block_size=32`,
`offloaded:256`, `dynamic` (the built-in one).
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import DynamicCache
from transformers.cache_utils import Cache

import hf_kvcache

DEFAULT = ("paged", "window:1024+4", "int8", "int4", "int2", "fp8", "offloaded:1024")


def _window(config, argument: str, **options) -> Cache:
    window, _, sinks = (argument or "1024+4").partition("+")
    return hf_kvcache.SlidingWindowCache(config, window=int(window), sinks=int(sinks or 0), **options)


def _offloaded(config, argument: str, **options) -> Cache:
    return hf_kvcache.OffloadedCache(config, resident_tokens=int(argument or 1024), **options)


def _quantized(bits: int | str) -> Callable[..., Cache]:
    return lambda config, argument, **options: hf_kvcache.QuantizedCache(config, bits=bits, **options)


KINDS: dict[str, Callable[..., Cache]] = {
    "dynamic": lambda config, argument: DynamicCache(config=config),
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


def stored_bytes(cache: Cache) -> int:
    """Bytes of the storages behind a cache: ours counted by itself, a built-in one from its tensors."""
    if isinstance(cache, hf_kvcache.KVCache):
        return cache.memory().allocated
    tensors = [t for layer in cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
