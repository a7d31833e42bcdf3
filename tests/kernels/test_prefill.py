"""Attention of new tokens over themselves: the fused path equals the reference, the reference a plain mask."""

from __future__ import annotations

import pytest
import torch

from hf_kvcache.kernels import prefill as prefill_module
from hf_kvcache.kernels import reference
from hf_kvcache.kernels.merge import merge
from hf_kvcache.kernels.prefill import causal, prefill

CASES = {
    "causal": {},
    "window": {"window": 40},
    "window of one": {"window": 1, "sinks": 2},
    "window longer than the text": {"window": 900},
    "window with sinks": {"window": 33, "sinks": 5},
    "sinks turned": {"window": 33, "sinks": 5, "turned": True},
    "softcap": {"softcap": 5.0},
    "softcap in a window": {"window": 21, "softcap": 3.0},
}


def tensors(m: int, n: int, heads: int = 6, kv_heads: int = 2, k_dim: int = 32, v_dim: int = 32):
    return torch.randn(heads, m, k_dim), torch.randn(kv_heads, n, k_dim), torch.randn(kv_heads, n, v_dim)


def brute_force(q, k, v, scale, window=None, sinks=0, turned=None, softcap=None):
    """One softmax over a dense mask, in float64."""
    group, n, m = q.shape[0] // k.shape[0], k.shape[1], q.shape[1]
    k, v = (x.repeat_interleave(group, 0).double() for x in (k, v))
    query, key = torch.arange(n - m, n)[:, None], torch.arange(n)
    recent = (key <= query) & (key > query - (window or n + 1))
    sink = (key < sinks) & (key <= query) & ~recent
    scores = q.double() @ k.transpose(1, 2) * scale
    if turned is not None:
        scores = torch.where(sink, turned.double() @ k.transpose(1, 2) * scale, scores)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~(recent | sink), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).T


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (300, 300), (600, 600), (7, 300)])
@pytest.mark.parametrize("kernel", [prefill, reference.prefill], ids=["fused", "reference"])
def test_new_tokens_attend_to_themselves(case, m, n, kernel):
    q, k, v = tensors(m, n)
    options = dict(CASES[case])
    if options.get("turned"):
        options["turned"] = torch.randn_like(q)
    out, lse = kernel(q, k, v, 0.2, **options)
    expected, expected_lse = brute_force(q, k, v, 0.2, **options)
    assert torch.allclose(out.double(), expected, atol=2e-5)
    assert torch.allclose(lse.double(), expected_lse, atol=2e-5)


def test_values_of_another_width_than_keys():
    q, k, v = tensors(50, 50, v_dim=24)
    assert torch.allclose(prefill(q, k, v, 0.2)[0].double(), brute_force(q, k, v, 0.2)[0], atol=2e-5)


@pytest.mark.parametrize("n", [1, 33])
def test_the_plain_path_is_causal(n):
    q, k, v = tensors(n, n)
    assert torch.allclose(causal(q[None], k[None], v[None], 0.2)[0].double(), brute_force(q, k, v, 0.2)[0], atol=2e-5)


def test_merging_parts_is_attention_over_their_union():
    q, k, v = tensors(20, 90)
    everything = torch.ones(20, 90, dtype=torch.bool)
    whole = reference.attend(q, k, v, 0.2, everything)
    cuts = [slice(0, 30), slice(30, 31), slice(31, 90)]
    parts = [reference.attend(q, k[:, c], v[:, c], 0.2, everything[:, c]) for c in cuts]
    empty = (torch.zeros_like(whole[0]), torch.full_like(whole[1], -torch.inf))
    for ours, theirs in zip(merge(*parts, empty), whole, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    nothing = merge(empty, empty)
    assert torch.equal(nothing[0], empty[0]) and torch.equal(nothing[1], empty[1])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (300, 300), (1, 300), (7, 300)])
def test_the_path_of_cuda(case, m, n, monkeypatch):
    """Without a device: what the fused operation of CUDA is asked for, and what becomes of its answer."""
    asked = []

    def flash(q, k, v, dropout, causal, debug, *, scale):
        assert dropout == 0.0 and not debug
        assert not causal or q.shape[2] == k.shape[2], "releases differ in how they align other shapes"
        asked.append(causal)
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        visible = visible.tril() if causal else visible
        out, lse = zip(*(reference.attend(*row, scale, visible) for row in zip(q, k, v, strict=True)), strict=True)
        out, lse = torch.stack(out).transpose(1, 2), torch.stack(lse).transpose(1, 2)
        return out, lse, None, None, m, n, None, None, None

    monkeypatch.setattr(
        prefill_module,
        "_flash_on_cpu",
        lambda q, k, v, *rest, attn_mask, scale: flash(q, k, v, *rest, False, scale=scale)[:2],
    )
    monkeypatch.setattr(prefill_module, "_is_fused", lambda q, masked: not masked)
    q, k, v = tensors(m, n)
    options = dict(CASES[case])
    if options.get("turned"):
        options["turned"] = torch.randn_like(q)
    out, lse = prefill(q, k, v, 0.2, **options)
    expected, expected_lse = brute_force(q, k, v, 0.2, **options)
    assert torch.allclose(out.double(), expected, atol=2e-5)
    assert torch.allclose(lse.double(), expected_lse, atol=2e-5)
    assert bool(asked) == (m != 7 and "softcap" not in case)


def test_cuda_is_asked_for_nothing_on_the_cpu(monkeypatch):
    monkeypatch.setattr(prefill_module, "_flash_on_cpu", None)
    assert not prefill_module._is_fused(torch.zeros(1, 1, 64, dtype=torch.bfloat16), masked=False)
