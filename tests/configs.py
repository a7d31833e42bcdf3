"""The table of cache configurations that every test of an invariant runs over. A new codec, retention rule or tier gets a
row here; `test_configs.py` fails until it has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from hf_kvcache import (
    BlockPool,
    DiskTier,
    HostTier,
    KVCache,
    OffloadedCache,
    PagedCache,
    QuantizedCache,
    SlidingWindowCache,
    Window,
)


@dataclass(frozen=True)
class Configuration:
    """One way to build a cache.

    Attributes:
        build: makes an empty cache from a model's config.
        error: how far teacher-forced logits may be from those without a cache: the root mean square of the difference
            over that of the logits, on a tiny random Llama. `EXACT` where nothing but the order of additions differs.
        sees: `(window, sinks)` where a query does not see every position.
        rebased: whether sinks are attended at their position inside the cache; then no mask describes the result.
    """

    build: Callable[[object], KVCache]
    error: float
    sees: tuple[int, int] | None = None
    rebased: bool = False

    @property
    def exact(self) -> bool:
        """Whether every stored bit is what the model computed."""
        return self.error == EXACT


EXACT = 1e-5
LONG = 4096  # a window that no test's text is longer than


def staged(resident: int, ring: int) -> HostTier:
    """A host tier that brings blocks back through its staging buffers, as on a GPU."""
    return HostTier(resident, direct=False, ring=ring)


def on_disk(resident: int, **options) -> DiskTier:
    """A disk tier that reads a few blocks at a time, in the folder of temporary files."""
    return DiskTier(resident, **{"chunk_bytes": 2048, **options})


CONFIGURATIONS: dict[str, Configuration] = {
    "paged": Configuration(lambda c: PagedCache(c, block_size=4), EXACT),
    "poisoned": Configuration(lambda c: PagedCache(c, block_size=4, pool=BlockPool(c, poison=True)), EXACT),
    "offloaded": Configuration(lambda c: OffloadedCache(c, block_size=4, resident_tokens=8), EXACT),
    "staged-1": Configuration(lambda c: OffloadedCache(c, block_size=4, tier=staged(8, ring=1)), EXACT),
    "staged-2": Configuration(lambda c: OffloadedCache(c, block_size=4, tier=staged(8, ring=2)), EXACT),
    "disk": Configuration(lambda c: OffloadedCache(c, block_size=4, tier=on_disk(8)), EXACT),
    "disk-after-host": Configuration(
        lambda c: KVCache(
            c,
            block_size=4,
            tier=on_disk(4, ring=1, host_bytes=9000, direct=False),
            pool=BlockPool(c, poison=True),
        ),
        EXACT,
    ),
    "long-window": Configuration(lambda c: SlidingWindowCache(c, block_size=4, window=LONG), EXACT),
    "window": Configuration(
        lambda c: KVCache(c, block_size=4, retention=Window(8, 2, rebase=False)), EXACT, sees=(8, 2)
    ),
    "window-rebased": Configuration(
        lambda c: SlidingWindowCache(c, block_size=4, window=8, sinks=2), EXACT, sees=(8, 2), rebased=True
    ),
    "window-offloaded": Configuration(
        lambda c: KVCache(c, block_size=4, retention=Window(16, 2, rebase=False), tier=HostTier(4)), EXACT, sees=(16, 2)
    ),
    "int8": Configuration(lambda c: QuantizedCache(c, bits=8, block_size=8, residual=8), 0.02),
    "int4": Configuration(lambda c: QuantizedCache(c, bits=4, block_size=8, residual=8), 0.25),
    "int2": Configuration(lambda c: QuantizedCache(c, bits=2, block_size=8, residual=8), 0.9),
    "fp8": Configuration(lambda c: QuantizedCache(c, bits="fp8", block_size=8, residual=8), 0.15),
    "k8v4": Configuration(lambda c: KVCache(c, codec="k8v4", block_size=8, residual=8), 0.15),
    "k4v2": Configuration(lambda c: KVCache(c, codec="k4v2", block_size=8, residual=8), 0.7),
    "int4-no-residual": Configuration(lambda c: QuantizedCache(c, bits=4, block_size=8, residual=0), 0.35),
    "int4-poisoned": Configuration(
        lambda c: QuantizedCache(c, bits=4, block_size=8, residual=4, pool=BlockPool(c, poison=True)), 0.3
    ),
    "int4-window": Configuration(
        lambda c: QuantizedCache(c, bits=4, block_size=8, residual=8, retention=Window(16, 2, rebase=False)),
        0.2,
        sees=(16, 2),
    ),
    "int4-offloaded": Configuration(
        lambda c: QuantizedCache(c, bits=4, block_size=8, residual=8, tier=HostTier(8)), 0.25
    ),
    "int4-staged": Configuration(
        lambda c: QuantizedCache(c, bits=4, block_size=8, residual=4, tier=staged(8, ring=2)), 0.3
    ),
    "int4-disk": Configuration(lambda c: QuantizedCache(c, bits=4, block_size=8, residual=4, tier=on_disk(8)), 0.3),
    "int8-layers": Configuration(
        lambda c: QuantizedCache(
            c, bits=8, block_size=8, residual=8, layers={0: {"codec": "native"}, 1: {"codec": "int4"}}
        ),
        0.06,
    ),
}

every = pytest.mark.parametrize("configuration", CONFIGURATIONS.values(), ids=CONFIGURATIONS)


def only(condition: Callable[[Configuration], bool]):
    """Run a test over the rows for which `condition` holds."""
    rows = {name: row for name, row in CONFIGURATIONS.items() if condition(row)}
    return pytest.mark.parametrize("configuration", rows.values(), ids=rows)
