"""Every error this package raises on purpose. Each message names the value, the limit and the way out."""

from __future__ import annotations


class KVCacheError(Exception):
    """Base of all errors of the package: catch this to catch them all."""


class ConfigurationError(KVCacheError, ValueError):
    """A cache was asked for that cannot be built (a bad number, an impossible combination)."""


class CacheInputError(KVCacheError, ValueError):
    """What a model or a caller handed to a cache does not fit what the cache holds; nothing was changed."""


class CacheStateError(KVCacheError, RuntimeError):
    """The operation is not possible in the state that the cache is in; nothing was changed."""


class CapacityError(KVCacheError, RuntimeError):
    """The pool has no room for what was asked; every live sequence is as it was, and nothing was evicted. (The recurrent states
    that some models have beside keys and values have seen a refused pass: such a cache says that it must be reset.)

    Attributes:
        needed: what the operation needed beyond what is in use, in `unit`.
        available: what was left, in `unit`: free, or held only by the prefix index (`evictable` of it) and not pinned.
        unit: `"tokens"` or `"bytes"`.
        longest: tokens that the longest row could have had after the refused pass.
    """

    def __init__(
        self, message: str, *, needed: int, available: int, unit: str, evictable: int = 0, longest: int | None = None
    ):
        super().__init__(
            message if longest is None else f"{message} The longest context that fits is {longest} tokens."
        )
        self.message, self.needed, self.available, self.unit = message, needed, available, unit
        self.evictable, self.longest = evictable, longest

    def with_longest(self, longest: int) -> CapacityError:
        """The same error, saying how long the context may be."""
        numbers = {name: getattr(self, name) for name in ("needed", "available", "unit", "evictable")}
        return CapacityError(self.message, **numbers, longest=longest)


class TierError(KVCacheError, OSError):
    """Blocks could not be written to a slower tier, or not be read back as they were; the cache is as before the pass, which
    may be repeated. (Not where the model has recurrent states: they have seen the pass, and the cache must be reset.)

    Attributes:
        offset: where in its file, in bytes; None where that is not known.
    """

    def __init__(self, message: str, offset: int | None = None):
        super().__init__(message)
        self.offset = offset


class UnsupportedError(KVCacheError, NotImplementedError):
    """A model or a call needs something that this cache cannot do; the message names what can."""


class SavedStateError(KVCacheError, RuntimeError):
    """Saved state could not be written or read: no such place, a full disk, another model or format version, a damaged file. What
    was there before a save still is; what a cache or pool holds is unchanged."""


class IntegrityError(KVCacheError, AssertionError):
    """`check_integrity()` found bookkeeping that contradicts itself: always a bug in this package."""
