"""What a request of any length holds in a cache, without a tensor: the cache's own block tables are asked.

`BlockTable.prepare` says which pages an append takes before any is taken. On an empty table that is what a request of that
length holds once it is prefilled, and step by step it comes to the same; bytes are those of the page layouts to which the
layers are bound. So nothing here repeats a rule of the allocation, and a length costs microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ..cache import KVCache
from ..cold import UNLIMITED, Place
from ..passes import LayerGroup
from ..spec import LayerSpec, specs_from_config


class Held(NamedTuple):
    """What requests hold, `[requests]` unless said otherwise.

    Attributes:
        device: bytes stored on the device; `staging`, those of the buffers there to which a slower tier's pages are brought back.
        cold: `[places, requests]` bytes in the slower tiers, by the memory that they share.
        tokens, slots: positions stored, and slots of their blocks, counted once for each group of layers with a table of its
            own, as a pool's metrics do.
        host_limits: `[places]` bytes of host memory that each place has for all of a pool; what is beyond them is on disk.
    """

    device: np.ndarray
    staging: np.ndarray
    cold: np.ndarray
    tokens: np.ndarray
    slots: np.ndarray
    host_limits: np.ndarray

    @property
    def needed(self) -> np.ndarray:
        """Bytes that the device must have."""
        return self.device + self.staging

    @property
    def host(self) -> np.ndarray:
        """Bytes in host memory of requests that are alone in their pool."""
        return np.minimum(self.cold, self.host_limits[:, None]).sum(axis=0)

    @property
    def disk(self) -> np.ndarray:
        """Bytes on disk of requests that are alone in their pool."""
        return self.cold.sum(axis=0) - self.host

    def together(self, requests: np.ndarray) -> Held:
        """What requests hold in one pool: `[r, n]` names `r` of those here in each of `n` cases."""
        return Held(*(part[..., requests].sum(axis=-2) for part in self[:-1]), self.host_limits)


class Footprint(Protocol):
    """How much requests hold by their length. What does not depend on the length (`states.py`) is not in it.

    Attributes:
        block_size: positions that are taken at a time.
        exact: whether all of it is in the model's dtype.
    """

    block_size: int
    exact: bool

    def held(self, lengths: Sequence[int]) -> Held:
        """What a request of each of these lengths holds."""

    def peak(self, length: int) -> int:
        """Device bytes that a request has needed at its highest by the time it has `length` tokens."""


class PagedFootprint:
    """The footprint of one of our caches.

    Args:
        cache: an empty cache, which is the footprint's from now on.
        dtype: of the model's keys and values.
        device: where they would be; it decides the packed order. Nothing is allocated there.
        shards: processes that share the heads of a layer (`shard`).
    """

    def __init__(self, cache: KVCache, dtype: torch.dtype, device: torch.device, shards: int = 1):
        self.cache, self.device = bind(cache, dtype, device, shards), device
        self.groups, self.block_size = cache.storage.groups, cache.block_size
        self.exact = all(group.store.lossless for group in self.groups)
        self.places = list(dict.fromkeys(group.tier.place for group in self.groups if group.tier.place is not None))
        self._peaks: dict[int, int] = {}

    def held(self, lengths: Sequence[int]) -> Held:
        lengths = np.asarray(lengths, np.int64)
        device, staging, tokens, slots = (np.zeros(len(lengths), np.int64) for _ in range(4))
        cold = np.zeros((len(self.places), len(lengths)), np.int64)
        for group, pages, kept in self._pages(lengths):
            store = group.store
            device += pages[:, 0] * store.open.page_bytes + pages[:, 1] * store.sealed.page_bytes
            if store.cold is not None:
                cold[self.places.index(group.tier.place)] += pages[:, 2] * store.cold.page_bytes
                staging += self._staging(group, pages[:, 2])
            tokens += kept
            slots += pages.sum(axis=1) * store.block_size
        return Held(device, staging, cold, tokens, slots, np.array([host_limit(p) for p in self.places], np.int64))

    def peak(self, length: int) -> int:
        """The highest of each store within the last block: before that there was less of everything."""
        if length not in self._peaks:
            self._peaks[length] = self._peak(length)
        return self._peaks[length]

    def _peak(self, length: int) -> int:
        lengths = np.arange(max(0, length - self.cache.block_size), length + 1)
        most = 0
        for group, pages, _ in self._pages(lengths):
            opened, sealed = pages[:, 0], pages[:, 1]
            if group.store.lossless:  # one store has both
                opened, sealed = opened + sealed, np.zeros_like(sealed)
            most += int(opened.max()) * group.store.open.page_bytes + int(sealed.max()) * group.store.sealed.page_bytes
            if group.store.cold is not None:
                most += int(self._staging(group, pages[:, 2]).max())
        return most

    def _staging(self, group: LayerGroup, cold: np.ndarray) -> np.ndarray:
        """Bytes on the device to which as many cold pages are brought back."""
        widest = max(pages.layout.nbytes for pages in group.store.cold.pages if pages is not None)
        return group.tier.staging_bytes(cold, widest, self.device)

    def anatomy(self, length: int) -> dict[str, int]:
        """Where a request's bytes go: `scales` of the codes, the `tail` that a lossy codec leaves in the model's dtype, and
        `rounding`, slots of it that hold no token."""
        parts = dict.fromkeys(("scales", "tail", "rounding"), 0)
        for group, pages, kept in self._pages(np.array([length])):
            store, (opened, sealed, cold) = group.store, pages[0].tolist()
            parts["scales"] += (sealed + cold) * sum(
                _scale_bytes(p.layout) for p in store.sealed.pages if p is not None
            )
            parts["tail"] += 0 if store.lossless else opened * store.open.page_bytes
            empty = (opened + sealed + cold) * store.block_size - int(kept[0])
            parts["rounding"] += empty * store.open.page_bytes // store.block_size
        return parts

    def _pages(self, lengths: np.ndarray):
        """For every group: `[requests, 3]` open, sealed and cold pages, and `[requests]` positions kept."""
        for group in self.groups:
            plans, _ = group.table.prepare(len(lengths), lengths, keep_new=False)
            pages = np.array([(p.new_open, p.new_sealed, p.cold) for p in plans], np.int64).reshape(-1, 3)
            kept = [p.count - (p.skip_to - p.skip_from) * group.store.block_size for p in plans]
            yield group, pages, np.array(kept, np.int64)


class PlainFootprint:
    """The footprint of transformers' `DynamicCache`: every token in the model's dtype, a window's newest `window - 1`."""

    def __init__(self, config, dtype: torch.dtype, shards: int = 1):
        specs = [spec for spec in specs_from_config(config) if spec.stores]
        self.layers = [(token_bytes(spec, dtype, shards), spec) for spec in specs]
        self.block_size, self.exact = 1, True

    def held(self, lengths: Sequence[int]) -> Held:
        lengths = np.asarray(lengths, np.int64)
        device = sum((each * _kept(spec, lengths) for each, spec in self.layers), np.zeros_like(lengths))
        windows = {spec.window: spec for _, spec in self.layers}.values()
        tokens = sum((_kept(spec, lengths) for spec in windows), np.zeros_like(lengths))
        cold, limits = np.zeros((0, len(lengths)), np.int64), np.zeros(0, np.int64)
        return Held(device, np.zeros_like(lengths), cold, tokens, tokens, limits)

    def peak(self, length: int) -> int:
        """A step copies a layer's keys, then its values, into a longer tensor: both exist for a moment."""
        n = np.array([length])
        keys = [each * spec.k_dim // (spec.k_dim + spec.v_dim) * int(_kept(spec, n)[0]) for each, spec in self.layers]
        return int(self.held(n).device[0]) + max(keys, default=0)


def host_limit(place: Place) -> int:
    """Bytes of host memory that a place fills before anything of it is on disk."""
    return UNLIMITED if place.folder is None or place.host_bytes is None else min(place.host_bytes, UNLIMITED)


def bind(cache: KVCache, dtype: torch.dtype, device: torch.device, shards: int = 1) -> KVCache:
    """Tell an empty cache's layers what they will be given, as its pages' sizes follow from that."""
    for layer in filter(None, cache.storage.layers):
        layer.spec = replace(layer.spec, kv_heads=shard(layer.spec.kv_heads, shards))
        layer.expect(dtype, device)
    return cache


def shard(heads: int, shards: int) -> int:
    """KV heads that each of `shards` tensor-parallel processes holds. Fewer heads than processes are held more than once;
    where they do not divide, every process holds them all."""
    if heads % shards == 0:
        return heads // shards
    return 1 if shards % heads == 0 else heads


def token_bytes(spec: LayerSpec, dtype: torch.dtype, shards: int = 1) -> int:
    """Bytes of one token in one layer, in the model's dtype."""
    return shard(spec.kv_heads, shards) * (spec.k_dim + spec.v_dim) * dtype.itemsize


def _kept(spec: LayerSpec, lengths: np.ndarray) -> np.ndarray:
    return lengths if spec.window is None else np.minimum(lengths, spec.window - 1)


def _scale_bytes(layout) -> int:
    return sum(field.nbytes for name, field in layout.fields.items() if name.endswith(("_scale", "_zero")))
