"""What a codec is, and how the bytes of one page are laid out.

A **page** is the storage of one block for one layer: the keys and values of `block_size` positions for all KV heads. A
codec says which fields a page has and how exact keys and values become those fields. Nothing else knows about bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

FIELD_ALIGNMENT = 64  # bytes: a cache line, and a whole AVX-512 register


@dataclass(frozen=True)
class Geometry:
    """Shape of one layer's pages: `kv_heads` heads, keys of `k_dim` and values of `v_dim` channels, `block_size`
    positions, and the dtype in which the model computes."""

    kv_heads: int
    k_dim: int
    v_dim: int
    block_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Field:
    """One tensor of a page: `shape` of `dtype`, `offset` bytes from the start of the page."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PageLayout:
    """The fields of a page and its size in bytes. This is the one place where page bytes are computed."""

    fields: dict[str, Field]
    nbytes: int

    @classmethod
    def pack(cls, **fields: tuple[tuple[int, ...], torch.dtype]) -> PageLayout:
        """Lay the fields out one after the other, each on its own cache line."""
        placed, offset = {}, 0
        for name, (shape, dtype) in fields.items():
            placed[name] = Field(offset, tuple(shape), dtype)
            offset += -(-placed[name].nbytes // FIELD_ALIGNMENT) * FIELD_ALIGNMENT
        return cls(placed, offset)

    def views(self, slab: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of `slab` (uint8 `[pages, nbytes]`): one tensor `[pages, *shape]` per field, sharing its memory."""
        return {
            name: slab[:, f.offset : f.offset + f.nbytes].view(f.dtype).view(slab.shape[0], *f.shape)
            for name, f in self.fields.items()
        }


class Codec(ABC):
    """How keys and values are represented once their block is sealed.

    Attributes:
        name: the name used in tables, plans and on the command line.
        lossless: whether `decode(encode(x))` is `x`; then a sealed block may be opened again and appended to.
        k_bits, v_bits: bits per element of the codes of keys and values, scales not counted.
    """

    name: str
    lossless: bool = False
    k_bits: int
    v_bits: int

    @abstractmethod
    def layout(self, geometry: Geometry, order: str) -> PageLayout:
        """The page of this codec. `order` names the packed order of the codes (see `packing.py`).

        Raises:
            ConfigurationError: when the block size does not suit the codec.
        """

    @abstractmethod
    def encode(self, k: torch.Tensor, v: torch.Tensor, order: str) -> dict[str, torch.Tensor]:
        """Fields `[pages, *shape]` of exact keys `[pages, kv_heads, block_size, k_dim]` and values `[..., v_dim]`."""

    @abstractmethod
    def decode(
        self, fields: dict[str, torch.Tensor], geometry: Geometry, order: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse, as near as the codec allows: float32 keys and values, shapes as in `encode`."""

    def reorder(
        self, fields: dict[str, torch.Tensor], geometry: Geometry, order: str, new: str
    ) -> dict[str, torch.Tensor]:
        """Fields `[pages, *shape]` that were packed in `order`, packed in the order `new`: the same codes. (Here for codecs that
        have one order only.)"""
        return fields

    def __repr__(self) -> str:
        return self.name
