"""Key/value caches for Hugging Face Transformers that are smaller and faster than the built-in ones.

import hf_kvcache

model = hf_kvcache.enable(model)
cache = hf_kvcache.QuantizedCache(model.config, bits=4)
model.generate(**inputs, **hf_kvcache.cache_kwarg(cache))
"""

from . import memory
from .attention import enable
from .cache import (
    KVCache,
    OffloadedCache,
    PagedCache,
    QuantizedCache,
    SlidingWindowCache,
    cache_kwarg,
)
from .codecs import AffineCodec, Fp8Codec, NativeCodec
from .errors import (
    CacheInputError,
    CacheStateError,
    CapacityError,
    ConfigurationError,
    IntegrityError,
    KVCacheError,
    SavedStateError,
    TierError,
    UnsupportedError,
)
from .memory import diagnose
from .metrics import PoolMetrics, ReuseMetrics, TierMetrics
from .pool import BlockPool
from .prefix import Media, Priority
from .retention import Everything, Window
from .session import Pin, Session
from .tiers import DeviceTier, DiskTier, HostTier, Ladder
from .usage import MemoryReport

__version__ = "0.1.0"

__all__ = [
    "AffineCodec",
    "BlockPool",
    "CacheInputError",
    "CacheStateError",
    "CapacityError",
    "ConfigurationError",
    "DeviceTier",
    "DiskTier",
    "Everything",
    "Fp8Codec",
    "HostTier",
    "IntegrityError",
    "KVCache",
    "KVCacheError",
    "Ladder",
    "Media",
    "MemoryReport",
    "NativeCodec",
    "OffloadedCache",
    "PagedCache",
    "Pin",
    "PoolMetrics",
    "Priority",
    "QuantizedCache",
    "ReuseMetrics",
    "SavedStateError",
    "Session",
    "SlidingWindowCache",
    "TierError",
    "TierMetrics",
    "UnsupportedError",
    "Window",
    "cache_kwarg",
    "diagnose",
    "enable",
    "memory",
]
