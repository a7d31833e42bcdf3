"""What every test shares: one thread, no network, a seeded generator."""

from __future__ import annotations

import gc
import os

# Before transformers is imported, which is left to the tests: the process that hands them out needs seconds less.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--everywhere",
        action="store_true",
        help="conformance of every cache on every attention implementation, not of some (a few minutes more)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    gc.freeze()  # what has been imported is no garbage: tests that collect some need not look at it


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The global generator starts from the same seed in every test."""
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A generator of the test's own."""
    return torch.Generator().manual_seed(0)
