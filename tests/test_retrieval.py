"""Needles in haystacks: the questions are the same every time and lie where they should, the metric counts and bounds, and a
cache that has lost the needle shows."""

from __future__ import annotations

import argparse
import io
import socket

import pytest
import torch
from rich.console import Console

from eval import models, retrieval
from eval.session import Session
from hf_kvcache import named

from .forcing import demo_model, ours, text

PROSE = ["It was a warm day. Nobody was in the street! Where had they gone? " * 60, "Call me what you like. " * 200]


class Characters:
    """One token for each character, whatever it is; a model of `forced` knows the ids."""

    eos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        return argparse.Namespace(input_ids=[ord(c) % 95 + 2 for c in text])

    def decode(self, ids) -> str:
        return "".join(chr((i - 2 - 32) % 95 + 32) for i in ids)


def session(model, path, caches=(), quick: bool = False) -> Session:
    return Session(model, Characters(), list(caches), path / "results.jsonl", Console(file=io.StringIO()), quick)


def sample(**changes) -> retrieval.Sample:
    return retrieval.sample(
        Characters(), PROSE, **{"seed": 0, "length": 600, "depth": 0.5, "i": 0, "keys": 1, **changes}
    )


def test_a_question_is_a_function_of_its_place_in_the_protocol():
    assert sample() == sample()
    others = [sample(seed=1), sample(i=1), sample(depth=0.25), sample(length=601), sample(keys=2)]
    assert len({one.code for one in [sample(), *others]}) == 6


@pytest.mark.parametrize("keys", [1, 4])
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_a_context_is_as_long_as_asked_for_with_the_needle_at_its_depth(depth, keys):
    one = sample(depth=depth, keys=keys)
    read = Characters().decode
    needle, context = read(one.context[slice(*one.place)]), read(one.context)
    assert len(one.context) == 600 and one.code in needle and needle in context
    assert len(one.code) == retrieval.DIGITS and context.count(one.code) == 1
    assert context.count("Keep this in mind") == keys
    city = needle.split("number of ")[1].split(" is")[0]
    assert read(one.question).endswith(f"number of {city} is")
    assert depth in (0, 1) or context[one.place[0] - 1] in ".!?"
    if keys == 1:
        hay = 600 - len(retrieval.INTRODUCTION) - len(needle)
        assert abs(one.place[0] - len(retrieval.INTRODUCTION) - depth * hay) < 25  # the longest sentence has 24


def test_noise_serves_any_length_and_short_prose_is_refused():
    noise = retrieval.haystack_texts("noise")
    one = retrieval.sample(Characters(), noise, seed=0, length=5000, depth=0.5, i=0)
    assert len(one.context) == 5000
    with pytest.raises(ValueError, match="fewer than"):
        retrieval.sample(Characters(), ["Too short."], seed=0, length=500, depth=0, i=0)
    with pytest.raises(ValueError, match="ask for longer contexts"):
        sample(length=50)


def test_the_metric_counts_and_bounds_without_a_network(monkeypatch):
    retrieval.metric.cache_clear()
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("a connection was opened"))
    compute = retrieval.metric().compute
    answers = [" 12 34 56.", "12345", "the 123456", ""]
    got = compute(predictions=answers, references=["123456"] * 4)
    assert (got["right"], got["n"], got["accuracy"]) == (2, 4, 0.5)
    assert got["low"] == pytest.approx(0.1500, abs=1e-4) and got["high"] == pytest.approx(0.8500, abs=1e-4)
    all_right = compute(predictions=["7"] * 16, references=["7"] * 16)
    assert all_right["low"] == pytest.approx(0.8064, abs=1e-4) and all_right["high"] == 1.0
    assert compute(predictions=["8"] * 16, references=["7"] * 16)["high"] == pytest.approx(1 - 0.8064, abs=1e-4)
    wider = compute(predictions=answers, references=["123456"] * 4, confidence=0.99)
    assert wider["low"] < got["low"] and wider["high"] > got["high"]


def test_scores_by_depth_add_up():
    samples = [sample(depth=d, i=i) for d in (0.0, 1.0) for i in range(2)]
    results = [(samples[0].code, 0.5), ("no", 0.5), (samples[2].code, 0.25), (samples[3].code, 0.75)]
    metrics = retrieval.score(samples, results)
    assert metrics["accuracy"] == 0.75 and metrics["n"] == 4 and metrics["compressed"] == 0.5
    assert [(x["depth"], x["right"], x["n"]) for x in metrics["by_depth"]] == [(0.0, 1, 2), (1.0, 2, 2)]
    assert 0 < metrics["low"] < 0.75 < metrics["high"] < 1
    assert retrieval.score(samples, [("", None)] * 4)["compressed"] is None


def question(model, number: int) -> retrieval.Sample:
    """A random context whose right answer is what the model itself says with everything in its cache."""
    context, asked = text(1, 120, seed=number)[0].tolist(), text(1, 5, seed=100 + number)[0].tolist()
    draft = retrieval.Sample(context, asked, "", 0.5, (0, 0))
    (((said, share),),) = retrieval.ask(model, Characters(), [draft], [named.cache_factory("dynamic")])
    assert share is None
    return retrieval.Sample(context, asked, said, 0.5, (0, 0))


def test_answers_are_those_of_a_plain_greedy_generation():
    model = ours()
    one = question(model, 0)
    ids = torch.tensor([one.context + one.question])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=retrieval.NEW_TOKENS, do_sample=False)
    assert Characters().decode(out[0, ids.shape[1] :].tolist()).startswith(one.code)


def test_caches_that_keep_the_context_answer_alike_and_those_that_lose_it_do_not():
    model = ours()
    samples = [question(model, i) for i in range(6)]
    names = ["paged", "int8/residual=0/block_size=8", "window:8+2", "offloaded:16"]
    rows = retrieval.ask(model, Characters(), samples, map(named.cache_factory, names))
    paged, _, window, offloaded = (retrieval.score(samples, column) for column in zip(*rows, strict=True))
    assert paged["accuracy"] == offloaded["accuracy"] == 1.0 and window["accuracy"] < 0.5
    assert [row[1][1] for row in rows] == [1.0] * 6 and window["compressed"] > 0.9
    assert paged["compressed"] == offloaded["compressed"] == 0.0


def test_samples_of_one_size_are_asked_at_once_and_answered_each_for_itself(monkeypatch):
    model, names = ours(), ["dynamic", "int4/residual=0/block_size=8"]
    longer = question(model, 9)
    longer = retrieval.Sample(longer.context * 2, longer.question, longer.code, 0.5, (0, 0))
    samples = [question(model, 0), longer, question(model, 1), question(model, 2)]
    apart = [retrieval.ask(model, Characters(), [one], map(named.cache_factory, names))[0] for one in samples]
    monkeypatch.setattr(retrieval, "BATCH_TOKENS", 240)
    batches = []
    exact = retrieval.exact
    monkeypatch.setattr(retrieval, "exact", lambda model, ids: batches.append(tuple(ids.shape)) or exact(model, ids))
    assert retrieval.ask(model, Characters(), samples, map(named.cache_factory, names)) == apart
    assert batches == [(2, 120), (1, 120), (1, 240)]


def test_a_context_written_to_the_wrong_layer_shows(monkeypatch):
    """A planted fault: one layer is given the keys and values of another."""
    model = ours()
    samples = [question(model, i) for i in range(4)]
    write = retrieval.write
    wrong = lambda exact: [exact[0], exact[2], exact[1]]  # noqa: E731
    monkeypatch.setattr(retrieval, "write", lambda model, ids, exact, cache: write(model, ids, wrong(exact), cache))
    results = [row[0] for row in retrieval.ask(model, Characters(), samples, [named.cache_factory("paged")])]
    assert retrieval.score(samples, results)["accuracy"] < 0.5


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_models_of_which_a_plain_cache_keeps_a_part_only_write_every_context_themselves(name):
    model = ours(name)
    one = question(model, 0)
    assert retrieval.exact(model, torch.tensor([one.context])) is None
    (((said, share),),) = retrieval.ask(model, Characters(), [one], [named.cache_factory("paged")])
    assert said == one.code and share == 0.0


def test_an_answer_ends_with_the_digits_of_a_code_or_the_end_of_the_text():
    def answer(*script: str, eos: int | None = None) -> str:
        tokenizer, tokens = Characters(), iter(script)
        tokenizer.eos_token_id = eos

        def model(ids, **kwargs):
            logits = torch.zeros(1, 1, 200)
            logits[..., tokenizer(next(tokens)).input_ids[0]] = 1
            return argparse.Namespace(logits=logits)

        model.device = "cpu"
        return retrieval.answer(model, tokenizer, named.cache_factory("dynamic")(ours().config), [[5]])[0]

    assert answer(*" 1234567") == " 123456"
    assert answer(*"1 2 3 4 5 6") == "1 2 3 4 "
    assert answer(*"a!bcd", eos=Characters()("!").input_ids[0]) == "a!"


def test_a_record_for_each_cache_length_and_number_of_keys(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "texts", lambda: dict(enumerate(PROSE)))
    here = session(ours(), tmp_path, ["paged", "paged", "window:64+2"])
    asked = {"lengths": [300, 500], "depths": [0, 1], "samples": 1, "keys": [1, 2], "longest_multi_key": 400}
    records = retrieval.run(here, **asked)
    points = [(r.cache, r.protocol["keys"], r.protocol["length"]) for r in records]
    names = ["dynamic", "paged", "window:64+2"]
    assert points == [(name, keys, n) for keys, n in ((1, 300), (1, 500), (2, 300)) for name in names]
    assert all(r.metrics["n"] == 2 and r.protocol["haystack"] == "prose" for r in records)
    monkeypatch.setattr(retrieval, "exact", lambda *args: pytest.fail("measured again"))
    assert retrieval.run(here, **asked) == records


def test_processes_share_the_samples_and_every_answer_finds_its_question(tmp_path, monkeypatch):
    """Two processes, played one after the other: each asks every second question; together they score as one does."""
    asked = {"lengths": [300], "depths": [0, 0.5, 1], "samples": 1, "keys": [1], "haystack": "noise"}
    monkeypatch.setattr(
        retrieval,
        "ask",
        lambda model, tokenizer, mine, factories, tick: [[(one.code, 0.5)] * len(list(factories)) for one in mine],
    )
    parts = []
    for index in (0, 1):
        here = session(ours(), tmp_path)
        monkeypatch.setattr(here, "share", lambda items, index=index: list(items[index::2]))
        monkeypatch.setattr(here, "gather", lambda mine: parts.append(mine) or [[("", None)]] * 3)
        retrieval.run(here, **asked)
    assert [len(part) for part in parts] == [2, 1]
    together = session(ours(), tmp_path)
    monkeypatch.setattr(together, "gather", lambda mine: [parts[0][0], parts[1][0], parts[0][1]])
    assert retrieval.run(together, **asked)[0].metrics["accuracy"] == 1.0


def test_the_suite_prints_a_table_that_fits_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(models, "texts", lambda: dict(enumerate(PROSE)))
    parser = argparse.ArgumentParser()
    retrieval.configure(parser)
    args = parser.parse_args(["--lengths", "300,900", "--depths", "0,1", "--samples", "5"])
    records = retrieval.main(session(ours(), tmp_path, ["window:64+2"], quick=True), args)
    assert {(r.protocol["length"], r.protocol["keys"], r.metrics["n"]) for r in records} == {(300, 1, 2)}
    printed = capsys.readouterr().out
    assert "window:64+2" in printed and max(map(len, printed.splitlines())) <= 80


@pytest.mark.demo
@pytest.mark.slow
def test_the_demo_model_finds_a_needle_within_the_window_and_none_outside(tmp_path):
    model, tokenizer = demo_model()
    prose = retrieval.haystack_texts("prose")
    names = ["dynamic", "paged", "int8", "window:200+4"]
    for depth, inside in ((0.25, False), (0.9, True)):
        one = retrieval.sample(tokenizer, prose, seed=0, length=512, depth=depth, i=0)
        assert (
            len(one.context) == 512 and (one.place[0] > 512 + len(one.question) + retrieval.NEW_TOKENS - 200) == inside
        )
        (results,) = retrieval.ask(model, tokenizer, [one], map(named.cache_factory, names))
        found = [one.code in said.replace(" ", "") for said, _ in results]
        assert found == [True, True, True, inside], results
        assert results[1][1] == 0.0 and results[2][1] > 0.8 and results[3][1] > 0.5
