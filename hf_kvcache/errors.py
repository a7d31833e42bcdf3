"""Every error this package raises on purpose. Each message names the value, the limit and the way out."""


class KVCacheError(Exception):
    """Base of all errors of the package: catch this to catch them all."""


class ConfigurationError(KVCacheError, ValueError):
    """A cache was asked for that cannot be built (a bad number, an impossible combination)."""


class CacheInputError(KVCacheError, ValueError):
    """What a model or a caller handed to a cache does not fit what the cache holds; nothing was changed."""


class CacheStateError(KVCacheError, RuntimeError):
    """The operation is not possible in the state that the cache is in; nothing was changed."""


class CapacityError(KVCacheError, RuntimeError):
    """The pool has no room for what was asked; every live sequence is as it was.

    Attributes:
        needed: what the operation needed beyond what is in use, in `unit`.
        available: what was left, in `unit`.
        unit: `"tokens"` or `"bytes"`.
    """

    def __init__(self, message: str, *, needed: int, available: int, unit: str):
        super().__init__(message)
        self.needed, self.available, self.unit = needed, available, unit


class UnsupportedError(KVCacheError, NotImplementedError):
    """A model or a call needs something that this cache cannot do; the message names what can."""


class IntegrityError(KVCacheError, AssertionError):
    """`check_integrity()` found bookkeeping that contradicts itself: always a bug in this package."""
