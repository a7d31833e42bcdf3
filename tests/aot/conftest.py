"""These tests compile the CUDA kernels as they are compiled for a device, without having one: `python -m pytest tests/aot`, a
process of its own, because Triton decides when it is imported whether it interprets or compiles."""

from __future__ import annotations

import os
import sys

if "triton" in sys.modules:
    raise RuntimeError("Triton was imported before its options were set: run tests/aot in its own process.")
os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_DEFAULT_FP_FUSION"] = (
    "1"  # multiply-adds in one instruction: what devices run today, said explicitly
)
