"""These tests run the CUDA kernels on CPU tensors, in Triton's interpreter: `python -m pytest tests/triton`, a process of its
own, because Triton decides when it is imported whether it interprets or compiles."""

from __future__ import annotations

import os
import sys

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"
if "triton" in sys.modules:
    raise RuntimeError("Triton was imported before it could be told to interpret: run tests/triton in its own process.")


@pytest.fixture(autouse=True)
def poisoned_workspaces():
    """What is allocated and not written reads as NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
