"""What machine code says without a GPU: nothing spills, and no row of the launch table needs more registers, or moves fewer bytes
per instruction, than was recorded (`launches.json`). Codes cost instructions, so that a slow change shows here."""

from __future__ import annotations

import json

import pytest
import torch

from hf_kvcache.kernels.triton_decode import LAUNCHES

from .kernels import ARCHITECTURES, H200, RECORD, combine_report, decode_report, row_report, seal_reports

RECORDED = json.loads(RECORD.read_text())
# What is moved meanwhile, in units of what an H200's memory can: less than 1 is bound by instructions.
BOUND_BY_MEMORY = {"int8": 1.5, "int4": 1.1, "native": 1.5, "fp8": 1.5}
SHARED_MEMORY = (
    99 << 10
)  # bytes that a program may have on sm_86, sm_89 and sm_120, the least of all that are supported
# Compilers of other versions allocate a little differently.
MORE_REGISTERS, FEWER_BYTES = 8, 0.97


def rows():
    for arch in ARCHITECTURES:
        for representation, size in LAUNCHES:
            slow = arch >= 100 and size != 128
            name = f"sm_{arch} {representation} {size}"
            yield pytest.param(arch, representation, size, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("arch", "representation", "size"), rows())
def test_a_row_of_the_launch_table(arch: int, representation: str, size: int) -> None:
    report, moved = row_report(representation, size, arch)
    recorded = RECORDED[f"sm_{arch} {representation} {size}"]
    assert report.spilled == 0
    assert report.registers <= recorded["registers"] + MORE_REGISTERS
    assert moved >= FEWER_BYTES * recorded["bytes_per_instruction"]
    assert report.shared <= SHARED_MEMORY
    if arch == 90 and size == 128 and representation in BOUND_BY_MEMORY:
        assert moved / H200 >= BOUND_BY_MEMORY[representation]


MANY_QUERIES = {"ONE_QUERY": False, "ROPE": "halves", "SOFTCAP": True}
VARIANTS = [
    ("k8v4", 64, MANY_QUERIES, {}),
    ("k4v2", 128, {}, {}),
    ("int4", 64, MANY_QUERIES, {"block_size": 128}),
    ("int4", 96, MANY_QUERIES, {}),
    ("int2", 128, MANY_QUERIES, {"block_size": 32}),
    ("fp8", 256, MANY_QUERIES, {"v_dim": 128}),
    ("native", 128, {"ROPE": "interleaved"}, {"dtype": torch.float16, "block_size": 64}),
    ("native", 256, MANY_QUERIES, {}),
]


@pytest.mark.parametrize(
    ("codec", "k_dim", "more", "shape"), VARIANTS, ids=[f"{c}-{k}-{len(m)}-{s}" for c, k, m, s in VARIANTS]
)
def test_variants_do_not_spill(codec: str, k_dim: int, more: dict, shape: dict) -> None:
    assert decode_report(codec, k_dim, arch=90, more=more, **shape)[0].spilled == 0


@pytest.mark.parametrize("codec", ["k4v2", "fp8"])
def test_writing_and_sealing_do_not_spill(codec: str) -> None:
    assert all(report.spilled == 0 for report in seal_reports(codec, 90).values())


def test_combining_does_not_spill() -> None:
    assert combine_report(80).spilled == 0
