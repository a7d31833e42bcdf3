"""The CUDA decode kernels against `reference.py`, interpreted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_kvcache.codecs import CODECS
from hf_kvcache.codecs.packing import LANES, PLANAR
from hf_kvcache.kernels import cuda, reference
from hf_kvcache.kernels.merge import merge

from ..kernels.pages import Stored, random_queries, random_stored

# Queries and probabilities meet packed codes in float16, float16 pages too. (The interpreter multiplies bfloat16 in float32.)
RATIO = {"float": 1e-5, "half": 1e-3}


def check(
    stored: Stored, q: torch.Tensor, scale: float, softcap: float | None = None, ratio: float | None = None
) -> None:
    g, codec = stored.sealed.geometry, stored.sealed.codec
    assert cuda.supports(g, codec, q.shape[2])
    arguments = (q, stored.sealed, stored.open_, stored.view, scale, softcap)
    (out, lse), (expected, expected_lse) = cuda.decode(*arguments), reference.decode(*arguments)
    assert out.dtype == lse.dtype == torch.float32
    empty = expected_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty) and (out[empty] == 0).all()
    exact = codec.name == "native" and g.dtype != torch.float16
    ratio = ratio or RATIO["float" if exact else "half"]
    assert (out - expected).norm() <= ratio * expected.norm()
    assert (lse - expected_lse)[~empty].abs().max() <= 5 * ratio


@pytest.fixture(autouse=True)
def multiprocessors(monkeypatch):
    """As many as make several splits of a context, some of them empty."""
    monkeypatch.setattr(cuda, "_multiprocessors", lambda device: 3)


# A covering sample: every value of every column meets every codec.
SHAPES = [
    dict(k_dim=64, block_size=16, group=3, lengths=(100, 33, 1), kv_heads=1),
    dict(k_dim=128, block_size=64, group=4, lengths=(200,), window=70, sinks=4),
    dict(k_dim=80, block_size=16, group=8, lengths=(60,), sinks=20, window=17, rotary_dim=80, q_len=2, kv_heads=1),
    dict(
        k_dim=96,
        v_dim=64,
        block_size=32,
        group=3,
        lengths=(150,),
        sinks=5,
        window=9,
        rotary_dim=32,
        interleaved=True,
        partial=True,
    ),
    dict(
        k_dim=256,
        block_size=8,
        group=1,
        lengths=(30,),
        q_len=16,
        partial=True,
        softcap=30.0,
        kv_heads=1,
        dtype=torch.float16,
    ),
    dict(k_dim=32, block_size=128, group=1, lengths=(300,), dtype=torch.bfloat16, partial=True),
    dict(k_dim=64, v_dim=128, block_size=64, group=4, lengths=(130,), q_len=5, dtype=torch.float16, softcap=20.0),
    dict(k_dim=36, v_dim=20, block_size=24, group=2, lengths=(60, 0, 7), q_len=2, kv_heads=1, causal=False),
    dict(k_dim=64, block_size=512, group=2, lengths=(600,), kv_heads=1, dtype=torch.bfloat16),
]


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: "-".join(f"{k}{v}" for k, v in shape.items()).replace("torch.", "")
)
@pytest.mark.parametrize("codec", CODECS)
def test_decode(codec: str, shape: dict) -> None:
    shape = dict(shape)
    group, softcap = shape.pop("group"), shape.pop("softcap", None)
    stored = random_stored(codec, order=PLANAR, **shape)
    check(stored, random_queries(stored, group), shape["k_dim"] ** -0.5, softcap)


@pytest.mark.parametrize("count", [1, 100])
def test_any_number_of_splits(count: int, monkeypatch) -> None:
    monkeypatch.setattr(cuda, "_multiprocessors", lambda device: count)
    stored = random_stored("int4", lengths=(300, 20), block_size=16, kv_heads=1, sinks=40, window=100, order=PLANAR)
    check(stored, random_queries(stored, 2), 0.125)


@pytest.mark.parametrize("codec", ["native", "int8"])
def test_a_single_part_needs_no_merging(codec: str, monkeypatch) -> None:
    monkeypatch.setattr(cuda, "_multiprocessors", lambda device: 1)
    stored = random_stored(codec, lengths=(64, 40), block_size=16, kv_heads=1, order=PLANAR)
    sealed_only = stored.view.narrowed(stored.view.entry_begin, stored.view.n_sealed)
    check(replace(stored, view=sealed_only), random_queries(stored, 2), 0.125)


@pytest.mark.parametrize("magnitude", [1e-4, 1e-2, 1e2])
@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "fp8"])
def test_any_magnitude(codec: str, magnitude: float) -> None:
    """Scores stay the same when queries shrink as keys grow. The smallest scales leave float16 few bits."""
    stored = random_stored(codec, lengths=(130,), block_size=64, kv_heads=1, magnitude=magnitude, order=PLANAR)
    check(stored, random_queries(stored, 4) / magnitude, 0.125, ratio=2e-3 if magnitude < 1e-3 else None)


@pytest.mark.parametrize("codec", ["native", "int4"])
def test_entry_ranges_merge_to_the_whole(codec: str) -> None:
    stored = random_stored(
        codec, lengths=(100, 70), partial=True, sinks=20, window=50, q_len=3, kv_heads=1, order=PLANAR
    )
    q, view = random_queries(stored, 3), stored.view
    cut = (view.entry_end // np.array([2, 5])).astype(np.int32)
    parts = [
        cuda.decode(q, stored.sealed, stored.open_, part, 0.125)
        for part in (view.narrowed(view.entry_begin, cut), view.narrowed(cut, view.entry_end), view.narrowed(cut, cut))
    ]
    expected = reference.decode(q, stored.sealed, stored.open_, view, 0.125)
    assert all((a - b).norm() <= 1e-3 * b.norm() for a, b in zip(merge(*parts), expected, strict=True))


def test_queries_that_see_nothing() -> None:
    stored = random_stored("int8", lengths=(64, 64), q_len=3, kv_heads=1, order=PLANAR)
    stored.view.begin[0, 1] = stored.view.end[0, 1]
    stored.view.end[1] = stored.view.begin[1]
    check(stored, random_queries(stored, 2), 0.125)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_query(dtype: torch.dtype) -> None:
    stored = random_stored("native", lengths=(40, 20), q_len=2, kv_heads=1, order=PLANAR)
    q = random_queries(stored, 2).to(dtype)
    for layout in (q, q.transpose(-1, -2).contiguous().transpose(-1, -2), q[:1].expand(2, -1, -1, -1), 0 * q):
        check(stored, layout, 0.125)


def test_places_follow_slabs_that_come_and_go() -> None:
    stored = random_stored("native", lengths=(60,), kv_heads=1, order=PLANAR)
    pages, q = stored.open_, random_queries(stored, 2)
    # A layer may catch up with its store: known ids get a slab, and addresses in the array that is there.
    second, addresses = pages.slab == 1, pages.addresses.copy()
    slab = pages.slabs.pop()
    pages.addresses[second] = 0
    cuda._places(pages)
    pages.slabs.append(slab)
    pages.addresses[second] = addresses[second]
    check(stored, q, 0.125)
    # A store may give back its first slab.
    pages.slabs[0] = pages.slabs[0][:0].clone()
    base, offsets = cuda._places(pages)
    assert base is slab
    assert (base.data_ptr() + 64 * offsets.numpy() == addresses)[second].all()


def test_pages_in_another_order_are_refused() -> None:
    stored = random_stored("int4", lengths=(60,), kv_heads=1, order=LANES)
    with pytest.raises(ValueError, match="'planar' order"):
        cuda.decode(random_queries(stored, 2), stored.sealed, stored.open_, stored.view, 0.125)


def test_more_queries_than_a_grid_has_programs(monkeypatch) -> None:
    stored = random_stored(
        "native", lengths=(40,), q_len=21, window=9, sinks=3, rotary_dim=64, kv_heads=1, order=PLANAR
    )
    monkeypatch.setattr(cuda, "MAX_GRID", 1)
    check(stored, random_queries(stored, 2), 0.125)
