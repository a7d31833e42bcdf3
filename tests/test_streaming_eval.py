"""The measure of StreamingLLM's effect: which tokens are scored, from how much, and that it sees what a window lacks."""

from __future__ import annotations

import argparse
import io
import math

import pytest
import torch
from rich.console import Console

from eval import models, streaming
from eval.session import Session
from hf_kvcache import PagedCache, SlidingWindowCache

from .forcing import demo_model, ours, text, uncached


def session(model, path, tokenizer=None, quick: bool = False) -> Session:
    return Session(model, tokenizer, [], path / "results.jsonl", Console(file=io.StringIO()), quick)


def expected(model, ids: torch.Tensor, **sees) -> torch.Tensor:
    log_probs = uncached(model, ids[None], **sees)[0, :-1].log_softmax(-1)
    return -log_probs.gather(-1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_streamed_text_is_scored_through_what_the_cache_shows(chunk):
    model, (ids,) = ours(), text(1, 60)
    everything = streaming.streamed(model, ids, PagedCache(model.config), chunk)
    assert torch.allclose(everything, expected(model, ids), atol=1e-4)
    windowed = streaming.streamed(model, ids, SlidingWindowCache(model.config, window=16, sinks=0), chunk)
    assert torch.allclose(windowed, expected(model, ids, sees=(16, 0)), atol=1e-4)


@pytest.mark.parametrize(("n", "window", "stride"), [(100, 16, 8), (101, 16, 7), (18, 16, 4), (50, 9, 9)])
def test_fresh_windows_score_every_token_once_from_about_a_window(n, window, stride):
    ids = torch.arange(n)
    passes = streaming.fresh_windows(ids, window, stride)
    assert torch.cat([part[-scored:] for part, scored in passes]).tolist() == list(range(window + 1, n))
    for part, scored in passes:
        past = [len(part) - scored + i for i in range(scored)]  # tokens that each scored one is predicted from
        assert part.tolist() == list(range(part[0], part[0] + len(part)))
        assert max(past) <= window + stride / 2 + 1
        assert min(past) >= window - stride / 2


def test_a_fresh_window_is_the_model_without_a_cache():
    model, (ids,) = ours(), text(1, 30)
    assert torch.allclose(streaming.recomputed(model, ids, 10), expected(model, ids)[-10:], atol=1e-4)


def test_perplexity_by_position_covers_all_positions_once(monkeypatch):
    monkeypatch.setattr(streaming, "BIN", 10)
    nll = torch.log(torch.arange(1.0, 26.0))[None]  # perplexity of each token is its number
    bins = streaming.by_position(nll, 17)
    assert [(x["from"], x["to"]) for x in bins] == [(17, 20), (20, 30), (30, 40), (40, 42)]
    assert bins[0]["ppl"] == pytest.approx(6 ** (1 / 3)) and bins[-1]["ppl"] == pytest.approx((24 * 25) ** 0.5)
    assert streaming.ppl(nll) == pytest.approx(math.factorial(25) ** (1 / 25), rel=1e-5)


def test_records_tell_a_window_with_sinks_from_one_without(tmp_path):
    """On a model with random weights sinks help nothing; what is tested is that each window has a record of its own."""
    here, (ids, other) = session(ours(), tmp_path), text(2, 80)
    options = {"window": 16, "sinks": [4, 0, 4], "chunk": 32, "stride": 8}
    records = streaming.run(here, {"a": ids, "b": other}, **options)
    assert [r.cache for r in records] == ["window:16+4", "window:16+0"]
    assert records[0].protocol["texts"] == ["a", "b"] and records[0].protocol["tokens"] == 80
    with_sinks, without = (r.metrics for r in records)
    assert with_sinks["ppl_recomputed"] == without["ppl_recomputed"] and with_sinks["ppl"] != without["ppl"]
    assert with_sinks["ratio"] == with_sinks["ppl"] / with_sinks["ppl_recomputed"]
    nll = torch.stack([expected(here.model, x, sees=(16, 0)) for x in (ids, other)])[:, 16:]
    assert without["ppl"] == pytest.approx(streaming.ppl(nll), rel=1e-4)
    assert [(x["from"], x["to"]) for x in without["by_position"]] == [(17, 80)]


def test_what_is_measured_already_is_not_measured_again(tmp_path, monkeypatch):
    here, texts = session(ours(), tmp_path), {"a": text(1, 40)[0]}
    options = {"window": 16, "sinks": [2], "chunk": 32, "stride": 8}
    records = streaming.run(here, texts, **options)
    monkeypatch.setattr(streaming, "streamed", None)
    monkeypatch.setattr(streaming, "recomputed", None)
    assert streaming.run(here, texts, **options) == records


class Characters:
    """One token for each character."""

    def __call__(self, text, return_tensors):
        return argparse.Namespace(input_ids=torch.tensor([[2 + ord(c) % 90 for c in text]]))


def test_texts_are_read_from_their_beginning_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "texts", lambda: {"one": "abcd" * 10, "two": "xyz" * 20})
    rows = streaming.read(Characters(), ["two"], 50)
    assert list(rows) == ["two"] and rows["two"].shape == (50,)
    assert list(streaming.read(Characters(), [], 20)) == ["one"]
    with pytest.raises(ValueError, match="one has 40 tokens, 50 were"):
        streaming.read(Characters(), ["one"], 50)
    with pytest.raises(ValueError, match="called three; there are one, two"):
        streaming.read(Characters(), ["three"], 5)
    with pytest.raises(ValueError, match="never leave a window of 64"):
        streaming.run(session(ours(), tmp_path), rows, window=64, sinks=[0], chunk=8, stride=8)
    with pytest.raises(ValueError, match="stride=20 must be between 1 and the window of 16"):
        streaming.run(session(ours(), tmp_path), rows, window=16, sinks=[0], chunk=8, stride=20)


def test_the_suite_prints_a_table_that_fits_a_terminal(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(models, "texts", lambda: {"one": "Once upon a time " * 20})
    parser = argparse.ArgumentParser()
    streaming.configure(parser)
    args = parser.parse_args(["--window", "16", "--tokens", "200", "--chunk", "16", "--stride", "8"])
    records = streaming.main(session(ours(), tmp_path, Characters(), quick=True), args)
    assert records[0].protocol["tokens"] == 48
    printed = capsys.readouterr().out
    assert "window:16+0" in printed and max(map(len, printed.splitlines())) <= 80


@pytest.mark.demo
@pytest.mark.slow
def test_four_sinks_keep_the_demo_model_near_a_recomputed_window_and_none_do_not(tmp_path):
    """StreamingLLM's effect on a window of 256; `python -m eval streaming` measures it on 1,024 over 9,216 tokens."""
    model, tokenizer = demo_model()
    texts = streaming.read(tokenizer, ["lcet10"], 768)
    records = streaming.run(session(model, tmp_path, tokenizer), texts, window=256, sinks=[4, 0], chunk=512, stride=128)
    with_sinks, without = (r.metrics["ratio"] for r in records)
    assert with_sinks < 1.05 and without > 2
