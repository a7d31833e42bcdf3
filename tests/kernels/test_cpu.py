"""The native CPU kernels against `reference.py` and against the codecs' own encoding, on every instruction set at hand."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import multiprocessing
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_kvcache import files
from hf_kvcache.codecs import CODECS, codec_for
from hf_kvcache.codecs.base import Geometry
from hf_kvcache.kernels import cpu, reference
from hf_kvcache.kernels.base import Pages
from hf_kvcache.kernels.merge import merge

from .pages import empty_pages, extreme_elements, random_queries, random_stored

pytestmark = pytest.mark.skipif(cpu.load() is None, reason=cpu.status())

INTEGERS = ("int8", "int4", "int2", "k8v4", "k4v2")
ISAS = range(cpu.load().hfkv_isa_count()) if cpu.load() else ()


@pytest.fixture(autouse=True, params=ISAS)
def isa(request):
    library = cpu.load()
    library.hfkv_force_isa(request.param)
    yield request.param
    library.hfkv_force_isa(ISAS[-1])


def assert_same(
    codec: str, actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Values are about 1 in size. Elements that are floats are exact to float32 rounding; integer codes meet queries and
    probabilities rounded to 16 bits."""
    ratio, largest, lse_largest = (2e-4, 1e-3, 5e-4) if codec in INTEGERS else (2e-6, 1e-5, 1e-5)
    (out, lse), (expected_out, expected_lse) = actual, expected
    assert out.dtype == lse.dtype == torch.float32 and out.is_contiguous() and lse.is_contiguous()
    empty = expected_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty) and (out[empty] == 0).all()
    error = out - expected_out
    assert error.norm() <= ratio * expected_out.norm()
    assert error.abs().max() <= largest
    assert (lse - expected_lse)[~empty].abs().max() <= lse_largest


# A covering sample: every value of every column meets every codec, not every combination.
SHAPES = [
    dict(k_dim=64, block_size=16, group=3, lengths=(300, 77, 1)),
    dict(k_dim=64, block_size=64, group=3, lengths=(500,), q_len=5, dtype=torch.bfloat16),
    dict(k_dim=32, block_size=32, group=1, lengths=(90, 200), window=50, dtype=torch.float16),
    dict(k_dim=128, block_size=64, group=4, lengths=(200, 64), window=70, sinks=4),
    dict(k_dim=80, block_size=16, group=8, lengths=(100,), sinks=20, window=17, rotary_dim=80, q_len=2),
    dict(
        k_dim=96,
        v_dim=64,
        block_size=32,
        group=3,
        lengths=(150, 40),
        sinks=5,
        window=9,
        rotary_dim=32,
        interleaved=True,
        partial=True,
    ),
    dict(k_dim=256, block_size=8, group=1, lengths=(70, 90), q_len=16, partial=True, softcap=30.0),
    dict(k_dim=20, v_dim=8, block_size=8, group=3, lengths=(61, 9), q_len=5, window=20, sinks=3),
    dict(k_dim=8, v_dim=20, block_size=128, group=4, lengths=(300,), dtype=torch.bfloat16, partial=True),
    dict(
        k_dim=64,
        v_dim=96,
        block_size=64,
        group=3,
        lengths=(330, 70),
        q_len=70,
        window=100,
        sinks=2,
        rotary_dim=64,
        softcap=20.0,
    ),
    dict(k_dim=64, v_dim=128, block_size=16, group=8, lengths=(64,), q_len=64, dtype=torch.float16),
    dict(k_dim=36, block_size=16, group=2, lengths=(33, 0, 7), q_len=2, dtype=torch.float16, causal=False),
    dict(k_dim=320, block_size=512, group=2, lengths=(600,), kv_heads=1),
]


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: "-".join(f"{k}{v}" for k, v in shape.items()).replace("torch.", "")
)
@pytest.mark.parametrize("codec", CODECS)
def test_decode(codec: str, shape: dict) -> None:
    shape = dict(shape)
    group, softcap = shape.pop("group"), shape.pop("softcap", None)
    stored = random_stored(codec, **shape)
    q, scale = random_queries(stored, group), shape["k_dim"] ** -0.5
    arguments = (q, stored.sealed, stored.open_, stored.view, scale, softcap)
    assert cpu.supports(stored.sealed.geometry, stored.sealed.codec, q.shape[2])
    assert_same(codec, cpu.decode(*arguments), reference.decode(*arguments))


@pytest.mark.parametrize("threads", (1, 2, 3, 8))
@pytest.mark.parametrize("lengths", ((5000,), (3000, 20, 800), (40,)), ids=str)
def test_splits_do_not_show(threads: int, lengths: tuple[int, ...]) -> None:
    stored = random_stored("int4", lengths=lengths, kv_heads=3, block_size=64)
    arguments = (random_queries(stored, 4), stored.sealed, stored.open_, stored.view, 0.125)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        actual = cpu.decode(*arguments)
    finally:
        torch.set_num_threads(before)
    assert_same("int4", actual, reference.decode(*arguments))


@pytest.mark.parametrize("codec", ("native", "int8"))
def test_entry_ranges_merge_to_the_whole(codec: str) -> None:
    stored = random_stored(codec, lengths=(200, 130), partial=True, sinks=20, window=90, q_len=3)
    q, view = random_queries(stored, 3), stored.view
    cut = (view.entry_end // np.array([2, 5])).astype(np.int32)
    parts = [
        cpu.decode(q, stored.sealed, stored.open_, part, 0.125)
        for part in (view.narrowed(view.entry_begin, cut), view.narrowed(cut, view.entry_end), view.narrowed(cut, cut))
    ]
    assert_same(codec, merge(*parts), reference.decode(q, stored.sealed, stored.open_, view, 0.125))


def test_queries_that_see_nothing() -> None:
    stored = random_stored("int8", lengths=(64, 64), q_len=3)
    stored.view.begin[0, 1] = stored.view.end[0, 1]
    stored.view.end[1] = stored.view.begin[1]
    arguments = (random_queries(stored, 2), stored.sealed, stored.open_, stored.view, 0.125)
    assert_same("int8", cpu.decode(*arguments), reference.decode(*arguments))


@pytest.mark.parametrize("codec", INTEGERS)
@pytest.mark.parametrize("outliers", (1.0, 1500.0))
def test_rounding_adds_less_than_a_fifth_to_the_error_of_the_codec(codec: str, outliers: float) -> None:
    stored = random_stored(codec, lengths=(1000,), block_size=64, outliers=outliers)
    q = random_queries(stored, 3)
    q[..., ::9] /= outliers  # queries of models with such channels are small there
    arguments = (q, stored.sealed, stored.open_, stored.view, 0.125)
    decoded = reference.decode(*arguments)[0]
    scores = torch.einsum("hgd,hnd->hgn", q.view(2, 3, 64), stored.k[0]) * 0.125
    exact = (scores.softmax(-1) @ stored.v[0]).view_as(decoded)
    assert (cpu.decode(*arguments)[0] - decoded).norm() < (decoded - exact).norm() / 5


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64))
def test_any_query(dtype: torch.dtype) -> None:
    stored = random_stored("native", lengths=(100, 50), q_len=4)
    q = random_queries(stored, 2).to(dtype)
    for layout in (q, q.contiguous(), q.transpose(-1, -2).contiguous().transpose(-1, -2), q.expand(2, -1, -1, -1)):
        arguments = (layout, stored.sealed, stored.open_, stored.view, 0.125)
        assert_same("native", cpu.decode(*arguments), reference.decode(*arguments))


def test_a_large_score_does_not_overflow() -> None:
    stored = random_stored("native", lengths=(100,))
    arguments = (1000 * random_queries(stored, 2), stored.sealed, stored.open_, stored.view, 1.0)
    (out, _), (expected, _) = cpu.decode(*arguments), reference.decode(*arguments)
    assert (out - expected).abs().max() < 1e-2  # scores near 1e5 have a spacing of 1e-2


@pytest.mark.skipif(platform.system() != "Linux", reason="places pages before an inaccessible one")
@pytest.mark.parametrize("codec", CODECS)
def test_nothing_is_read_beyond_a_page(codec: str) -> None:
    for dim, block_size in ((20, 8), (64, 16), (36, 24)):
        stored = random_stored(codec, lengths=(50, 31), k_dim=dim, block_size=block_size, dtype=torch.bfloat16)
        q, view = random_queries(stored, 3), stored.view
        expected = reference.decode(q, stored.sealed, stored.open_, view, 0.2)
        sealed, kept = _before_a_wall(stored.sealed)
        open_, also_kept = (sealed, ()) if stored.open_ is stored.sealed else _before_a_wall(stored.open_)
        assert_same(codec, cpu.decode(q, sealed, open_, view, 0.2), expected)
        del kept, also_kept


@pytest.mark.parametrize("nbytes", (0, 1, 3, 4, 64, 1000, 4099, 24576))
def test_checksums(nbytes: int, monkeypatch) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (5, nbytes), dtype=np.uint8)
    rows[1:2] = 255
    for some in (rows, rows[::2], rows[:0]):
        native, plain = cpu.checksums(some), files.checksums(some)
        assert native.dtype == plain.dtype == np.uint64 and np.array_equal(native, plain)
    monkeypatch.setattr(cpu, "load", lambda: None)
    assert np.array_equal(cpu.checksums(rows), files.checksums(rows))


@pytest.mark.parametrize("nbytes", (64, 24576, 300_000))
def test_pages_are_read_and_checked(nbytes: int, tmp_path) -> None:
    """Runs of neighbours, jumps, pages larger than what is read at a time; the first page that is not right."""
    rows = np.random.default_rng(0).integers(0, 256, (30, nbytes), dtype=np.uint8)
    (tmp_path / "pages").write_bytes(rows.tobytes())
    order = np.array([3, 4, 5, *range(10, 30), 0, 2, 1])
    offsets, sums, out = order.astype(np.int64) * nbytes, files.checksums(rows)[order], np.zeros_like(rows[order])
    with open(tmp_path / "pages", "r+b") as file:
        for read in (cpu.read_pages, files.read_rows):
            out[:] = 0
            assert read(file.fileno(), offsets, sums, out) is None and np.array_equal(out, rows[order])
        for wrong in (0, 7, len(order) - 1):
            broken = sums.copy()
            broken[wrong:] += 1
            assert cpu.read_pages(file.fileno(), offsets, broken, out) == wrong
            assert files.read_rows(file.fileno(), offsets, broken, out)[0] == wrong
        file.truncate(15 * nbytes + nbytes // 2)
        early = int(np.nonzero(order == 15)[0][0])
        assert cpu.read_pages(file.fileno(), offsets, sums, out) == early
        assert files.read_rows(file.fileno(), offsets, sums, out)[0] == early
    assert cpu.read_pages(-1, offsets, sums, out) == 0 and files.read_rows(-1, offsets, sums, out)[0] == 0


def _before_a_wall(pages: Pages) -> tuple[Pages, list[mmap.mmap]]:
    """`pages` with every one ending where memory ends. The copies live as long as the list."""
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    size, addresses, kept = mmap.PAGESIZE, [], []
    for slab, row in zip(pages.slab, pages.row, strict=True):
        data = bytes(pages.slabs[slab][int(row)].numpy())
        room = -(-len(data) // size) * size
        memory = mmap.mmap(-1, room + size)
        memory[room - len(data) : room] = data
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert libc.mprotect(start + room, size, 0) == 0
        addresses.append(start + room - len(data))
        kept.append(memory)
    return replace(pages, addresses=np.array(addresses, dtype=np.int64)), kept


def test_two_threads_at_once() -> None:
    def check(seed: int) -> None:
        stored = random_stored("int4", lengths=(1500 + 100 * seed,), block_size=64, seed=seed)
        arguments = (random_queries(stored, 3, seed), stored.sealed, stored.open_, stored.view, 0.125)
        expected = reference.decode(*arguments)
        for _ in range(20):
            assert_same("int4", cpu.decode(*arguments), expected)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, range(4)))


@pytest.mark.skipif(platform.system() != "Linux", reason="forks")
def test_a_forked_child_decodes() -> None:
    stored = random_stored("int8", lengths=(2000,), block_size=64)
    arguments = (random_queries(stored, 3), stored.sealed, stored.open_, stored.view, 0.125)
    expected = cpu.decode(*arguments)  # has the parent start its threads

    def child() -> None:
        out, _ = cpu.decode(*arguments)
        raise SystemExit(0 if (out - expected[0]).abs().max().item() < 1e-4 else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_own_threads_serve_where_openmp_is_not_found() -> None:
    stored = random_stored("native", lengths=(3000,))
    arguments = (random_queries(stored, 3), stored.sealed, stored.open_, stored.view, 0.125)
    cpu.load().hfkv_use_openmp(None)
    try:
        assert_same("native", cpu.decode(*arguments), reference.decode(*arguments))
    finally:
        cpu.load().hfkv_use_openmp(cpu._gomp_parallel())


# ---- writing and sealing ----


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_write(dtype: torch.dtype) -> None:
    geometry = Geometry(3, 20, 36, 16, dtype)
    pages = empty_pages(codec_for("native"), geometry, 6)
    k, v = (torch.randn(2, 9, 3, dim).to(dtype).transpose(1, 2) for dim in (20, 36))
    segments = np.array([[0, 0, 9, 4, 7], [1, 3, 5, 2, 0], [1, 8, 1, 0, 15]], dtype=np.int32)
    for layout in (lambda x: x, lambda x: x.contiguous(), lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)):
        before = {name: x.clone() for name, x in pages.gather(np.arange(6)).items()}
        cpu.write(pages, layout(k), layout(v), segments)
        after = pages.gather(np.arange(6))
        for name, new in (("k", k), ("v", v)):
            for row, token, count, page, slot in segments:
                before[name][page, :, slot : slot + count] = new[row, :, token : token + count]
            assert torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8))
        k, v = -k, -v


SEAL_SHAPES = ((64, 64, 64), (8, 20, 9), (32, 96, 80), (128, 128, 36))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("codec", CODECS)
def test_seal_writes_what_the_codec_encodes(codec: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kinds = ("plain", "outliers", "narrow", "tiny", "huge", "constant", "zero", "signed zeros")
    for (block_size, k_dim, v_dim), kind in itertools.product(SEAL_SHAPES, kinds):
        if kind == "huge" and dtype == torch.float16:
            continue
        geometry = Geometry(2, k_dim, v_dim, block_size, dtype)
        sealed = empty_pages(codec_for(codec), geometry, 4)
        k, v = (extreme_elements(kind, 2, 2, 2 * block_size + 3, dim).to(dtype) for dim in (k_dim, v_dim))
        places = np.array([[1, 3], [0, block_size + 1]], dtype=np.int32)
        blocks = [torch.stack([x[row, :, t : t + block_size] for row, t in places]) for x in (k, v)]
        expected = sealed.codec.encode(*blocks, sealed.order)

        ids = np.array([2, 0], dtype=np.int32)
        cpu.seal(sealed, ids, k, v, places)
        _assert_fields(sealed.gather(ids), expected, kind)

        open_ = empty_pages(codec_for("native"), geometry, 5)
        sources, ids = np.array([4, 1], dtype=np.int32), np.array([1, 3], dtype=np.int32)
        open_.scatter(sources, dict(zip("kv", blocks, strict=True)))
        cpu.seal_pages(sealed, ids, open_, sources)
        _assert_fields(sealed.gather(ids), expected, kind)


def _assert_fields(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], kind: str) -> None:
    """Equal bits, but for the sign of a zero point or scale that is zero: which of two zeros torch calls the smaller one
    depends on their order."""
    for name, field in expected.items():
        a, b = actual[name].contiguous(), field.contiguous()
        same = (
            torch.equal(a, b)
            if name.endswith(("scale", "zero"))
            else torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        )
        assert same, (kind, name)


def test_status_is_a_sentence() -> None:
    assert "_cpu" in cpu.status() and cpu.status().endswith(".")


# `reference` with the values that the codec gives back, and with the exact ones.
@pytest.mark.parametrize("outliers", (1.0, 20.0))
@pytest.mark.parametrize("codec", INTEGERS)
def test_integer_products_err_by_less_than_a_fifth_of_what_the_codec_does(codec: str, outliers: float) -> None:
    stored = random_stored(codec, lengths=(1500,), block_size=64, outliers=outliers)
    exact = random_stored("native", lengths=(1500,), block_size=64, outliers=outliers)
    q = random_queries(stored, 3)
    with_codec, _ = reference.decode(q, stored.sealed, stored.open_, stored.view, 0.125)
    without, _ = reference.decode(q, exact.sealed, exact.open_, exact.view, 0.125)
    ours, _ = cpu.decode(q, stored.sealed, stored.open_, stored.view, 0.125)
    assert torch.equal(exact.k[0], stored.k[0])
    assert 0 < (ours - with_codec).norm() < (with_codec - without).norm() / 5
