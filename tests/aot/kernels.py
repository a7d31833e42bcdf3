"""The kernels as a model would have them compiled, and what was recorded of them.

`python -m tests.aot.kernels` compiles every row of the launch table anew and writes `launches.json`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from hf_kvcache.codecs import codec_for
from hf_kvcache.codecs.base import Geometry
from hf_kvcache.codecs.packing import PLANAR
from hf_kvcache.kernels import triton_decode, triton_seal

from .compiling import Report, compiled

RECORD = Path(__file__).with_name("launches.json")
ARCHITECTURES = (80, 90, 100, 120)
KV_HEADS = 8
# Bytes of memory per warp instruction that a device can move while it issues one every cycle: bandwidth / (multiprocessors *
# 4 schedulers * clock). A kernel below is bound by its instructions.
H200 = 4.3e12 / (132 * 4 * 1.98e9)

POINTERS = {
    **dict.fromkeys(("cos_ptr", "sin_ptr", "out_ptr", "lse_ptr", "parts_ptr", "part_lses_ptr"), "*fp32"),
    **dict.fromkeys(("base_ptr", "open_base_ptr"), "*u8"),
    **dict.fromkeys(("offsets_ptr", "open_offsets_ptr"), "*i64"),
    **dict.fromkeys(("table_ptr", "segments_ptr", "places_ptr", "ids_ptr", "sources_ptr"), "*i32"),
}
STRIDES = ("q_batch", "q_head", "q_token", "k_head", "k_token", "v_head", "v_token")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def types(kernel, constants: dict[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """Types of a kernel's arguments, for inputs of `dtype`."""
    inputs = {name: f"*{NAMES[dtype]}" for name in ("q_ptr", "k_ptr", "v_ptr")}
    known = POINTERS | inputs | dict.fromkeys(("scale", "softcap"), "fp32") | dict.fromkeys(STRIDES, "i32:16")
    return {name: known.get(name, "i32") for name in kernel.arg_names if name not in constants}


def pages(codec: str, k_dim: int, v_dim: int | None = None, block_size: int | None = None, dtype=torch.bfloat16):
    """Codec, geometry and layout of a layer's pages."""
    chosen = codec_for(codec)
    geometry = Geometry(KV_HEADS, k_dim, v_dim or k_dim, block_size or (16 if chosen.lossless else 64), dtype)
    return chosen, geometry, chosen.layout(geometry, PLANAR)


def decode_report(
    codec: str,
    k_dim: int,
    *,
    arch: int,
    dtype: torch.dtype = torch.bfloat16,
    more: dict[str, Any] | None = None,
    **shape,
) -> tuple[Report, float]:
    """The decode kernel for a layer, and the bytes of pages that it reads per warp instruction of its loop."""
    codec, geometry, layout = pages(codec, k_dim, dtype=dtype, **shape)
    constants = triton_decode.decode_constants(codec, geometry, layout)
    constants |= {"ONE_QUERY": True, "ROPE": "none", "SOFTCAP": False} | (more or {})
    launch = triton_decode.launch_for(codec, geometry)
    kernel = triton_decode.decode_kernel
    report = compiled(kernel, types(kernel, constants, dtype), constants, arch, launch.warps, launch.stages)
    nbytes = sum(field.nbytes for field in layout.fields.values()) * constants["PAGES"] / constants["CHUNKS"] / KV_HEADS
    return report, nbytes / (report.instructions * launch.warps)


def row_report(representation: str, size: int, arch: int) -> tuple[Report, float]:
    """A row of the launch table."""
    if representation == "float32":
        return decode_report("native", size, arch=arch, dtype=torch.float32)
    return decode_report(representation, size, arch=arch)


def seal_reports(codec: str, arch: int) -> dict[str, Report]:
    """The kernels that write, by name."""
    codec, geometry, layout = pages(codec, 128)
    native, _, open_layout = pages("native", 128, block_size=geometry.block_size)
    constants = {
        triton_seal.write_kernel: triton_seal.write_constants(native, geometry, open_layout),
        triton_seal.seal_kernel: triton_seal.seal_constants(codec, geometry, layout),
        triton_seal.seal_pages_kernel: triton_seal.seal_pages_constants(codec, geometry, layout, open_layout),
    }
    return {
        kernel.__name__: compiled(kernel, types(kernel, known, torch.bfloat16), known, arch, 4, 3)
        for kernel, known in constants.items()
    }


def combine_report(arch: int) -> Report:
    constants, kernel = {"V_DIM": 128, "V_PAD": 128}, triton_decode.combine_kernel
    return compiled(kernel, types(kernel, constants, torch.float32), constants, arch, 4, 3)


def main() -> None:
    rows = {}
    for arch in ARCHITECTURES:
        for representation, size in triton_decode.LAUNCHES:
            report, moved = row_report(representation, size, arch)
            row = {"registers": report.registers, "bytes_per_instruction": round(moved, 2)}
            rows[f"sm_{arch} {representation} {size}"] = row
            print(f"sm_{arch} {representation} {size}", row, report, flush=True)
    RECORD.write_text("{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items()) + "\n}\n")


if __name__ == "__main__":
    main()
