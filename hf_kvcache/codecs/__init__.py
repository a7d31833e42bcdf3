"""Representations of a sealed block: one codec per file, the contract in `base.py`, the order of codes in
`packing.py`."""

from __future__ import annotations

from ..choices import choose
from .affine import AffineCodec
from .base import Codec, Geometry, PageLayout
from .fp8 import Fp8Codec
from .native import NativeCodec

CODECS = {
    "native": NativeCodec,
    "int8": lambda: AffineCodec(8),
    "int4": lambda: AffineCodec(4),
    "int2": lambda: AffineCodec(2),
    "k8v4": lambda: AffineCodec(8, 4),
    "k4v2": lambda: AffineCodec(4, 2),
    "fp8": Fp8Codec,
}


def codec_for(choice: Codec | str | int | None) -> Codec:
    """A codec from an instance, a name of `CODECS`, a number of bits, or None for native.

    Raises:
        ConfigurationError: for anything else; the message lists the names.
    """
    if not isinstance(choice, Codec):
        choice = {None: "native", 8: "int8", 4: "int4", 2: "int2"}.get(choice, choice)
    return choose("codec", Codec, CODECS, choice, "bits 2, 4, 8")


__all__ = ["CODECS", "AffineCodec", "Codec", "Fp8Codec", "Geometry", "NativeCodec", "PageLayout", "codec_for"]
