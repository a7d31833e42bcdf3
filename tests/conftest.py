"""What every test shares: one thread, no network, a seeded generator."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--everywhere",
        action="store_true",
        help="conformance of every cache on every attention implementation, not of some (a few minutes more)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The global generator starts from the same seed in every test."""
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A generator of the test's own."""
    return torch.Generator().manual_seed(0)
