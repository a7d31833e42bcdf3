"""A model on the CUDA kernels, from the cache down to the interpreted kernels: pages, tables and plans fit together."""

from __future__ import annotations

import pytest

from hf_kvcache import KVCache, Window, pages
from hf_kvcache.codecs.packing import PLANAR
from hf_kvcache.kernels import cuda, dispatch

from ..forcing import forced, ours, padding, text


@pytest.fixture
def on_cuda(monkeypatch):
    """Pages on the CPU in the order of CUDA, served by its kernels."""
    native = lambda held, x: None if dispatch._plain_torch.get() else cuda  # noqa: E731
    monkeypatch.setattr(pages, "order_for", lambda device: PLANAR)
    monkeypatch.setattr(dispatch, "_native", native)
    monkeypatch.setattr(cuda, "_multiprocessors", lambda device: 1)


@pytest.mark.parametrize(
    "choices",
    [
        dict(codec="native", block_size=4),
        dict(codec="int8", block_size=8, retention=Window(12, sinks=2), residual=0),
    ],
    ids=str,
)
def test_a_model_on_the_kernels_is_the_model_on_plain_torch(choices: dict, on_cuda) -> None:
    model, ids, passes = ours(num_hidden_layers=1), text(2, 22), [15, 1, 5, 1]
    mask = padding(2, 22, 3, 0)
    cache = KVCache(model.config, **choices)
    logits = forced(model, cache, ids, passes, mask)
    with dispatch.plain_torch():
        expected = forced(model, KVCache(model.config, **choices), ids, passes, mask)
    tokens = mask.bool()
    assert (logits - expected)[tokens].norm() < 1e-3 * expected[tokens].norm()
    cache.check_integrity()
