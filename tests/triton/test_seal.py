"""Writing and sealing on CUDA, interpreted: the bytes that `reference.write` and the codecs' own encoding give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_kvcache.codecs import CODECS, codec_for
from hf_kvcache.codecs.base import Geometry
from hf_kvcache.codecs.packing import PLANAR
from hf_kvcache.kernels import cuda, reference
from hf_kvcache.kernels.base import Pages

from ..kernels.pages import empty_pages, extreme_elements


def copy_of(pages: Pages) -> Pages:
    """Pages of the same content elsewhere."""
    other = empty_pages(pages.codec, pages.geometry, len(pages.slab), order=pages.order)
    for slab, source in zip(other.slabs, pages.slabs, strict=True):
        slab.copy_(source)
    return other


def same_bytes(a: Pages, b: Pages) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.slabs, b.slabs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 50])
def test_write(dtype: torch.dtype, block_size: int) -> None:
    pages = empty_pages(codec_for("native"), Geometry(2, 20, 36, block_size, dtype), 6, order=PLANAR)
    expected = copy_of(pages)
    k, v = (torch.randn(2, block_size, 2, dim).to(dtype).transpose(1, 2) for dim in (20, 36))
    segments = np.array([[0, 0, 9, 4, 7], [1, 3, 5, 2, 0], [1, 8, 1, 0, 15], [0, 0, block_size, 3, 0]], dtype=np.int32)
    cuda.write(pages, k, v, segments)
    reference.write(expected, k, v, segments)
    assert same_bytes(pages, expected)
    channels_apart = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (-k, -v))
    cuda.write(pages, *channels_apart, segments[:2].copy())
    reference.write(expected, -k, -v, segments[:2])
    assert same_bytes(pages, expected)


KINDS = ("outliers", "plain", "narrow", "tiny", "huge", "constant", "zero", "signed zeros")
LOSSY = [name for name in CODECS if name != "native"]


@pytest.mark.parametrize(
    ("block_size", "k_dim", "v_dim", "kinds"), [(64, 64, 128, 1), (16, 36, 20, len(KINDS)), (24, 96, 80, 1)]
)
@pytest.mark.parametrize("codec", LOSSY)
def test_seal_writes_what_the_codec_encodes(codec: str, block_size: int, k_dim: int, v_dim: int, kinds: int) -> None:
    k, v = (torch.stack([extreme_elements(x, 1, block_size + 3, dim) for x in KINDS[:kinds]]) for dim in (k_dim, v_dim))
    geometry = Geometry(1, k_dim, v_dim, block_size, torch.float32)
    sealed = empty_pages(codec_for(codec), geometry, kinds + 1, order=PLANAR)
    ids = np.random.default_rng(0).permutation(kinds).astype(np.int32)
    places = np.array([[row, 3] for row in range(kinds)], dtype=np.int32)
    cuda.seal(sealed, ids, k, v, places)
    assert_fields(sealed.gather(ids), sealed.codec.encode(k[:, :, 3:], v[:, :, 3:], PLANAR))


@pytest.mark.parametrize("codec", LOSSY)
def test_seal_pages_writes_what_the_codec_encodes(codec: str) -> None:
    geometry = Geometry(2, 32, 64, 16, torch.bfloat16)
    open_ = empty_pages(codec_for("native"), geometry, 4, order=PLANAR)
    sealed = empty_pages(codec_for(codec), geometry, 3, order=PLANAR)
    k, v = (torch.randn(2, 2, 16, dim).to(geometry.dtype) for dim in (32, 64))
    ids, sources = np.array([2, 0], dtype=np.int32), np.array([3, 1], dtype=np.int32)
    open_.scatter(sources, {"k": k, "v": v})
    cuda.seal_pages(sealed, ids, open_, sources)
    assert_fields(sealed.gather(ids), sealed.codec.encode(k, v, PLANAR))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", ["k4v2", "fp8"])
def test_seal_in_half_precision(codec: str, dtype: torch.dtype) -> None:
    k, v = (torch.randn(1, 40, 2, dim).to(dtype).transpose(1, 2) for dim in (64, 32))
    sealed = empty_pages(codec_for(codec), Geometry(2, 64, 32, 16, dtype), 3, order=PLANAR)
    ids, places = np.array([2, 0], dtype=np.int32), np.array([[0, 3], [0, 19]], dtype=np.int32)
    cuda.seal(sealed, ids, k, v, places)
    blocks = (torch.stack([x[0, :, t : t + 16] for t in (3, 19)]) for x in (k, v))
    assert_fields(sealed.gather(ids), sealed.codec.encode(*blocks, PLANAR))


def assert_fields(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal bits, but for the sign of a zero point or scale that is zero: which of two zeros torch calls the smaller one
    depends on their order."""
    for name, field in expected.items():
        a, b = actual[name].contiguous(), field.contiguous()
        if not name.endswith(("scale", "zero")):
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        for kind, x, y in zip(KINDS, a, b, strict=False):
            assert torch.equal(x, y), (name, kind)
