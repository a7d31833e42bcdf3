"""The measurements: what they print, and that they refuse to time a cache that computes something else."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers
import torch
from rich.console import Console
from transformers import DynamicCache, PreTrainedTokenizerFast

from eval import latency, models, quality, timing
from eval.__main__ import main
from eval.records import Record, load
from eval.session import Session
from hf_kvcache import KVCache, Window, cache_kwarg, named, scoring
from hf_kvcache.kernels import cpu, dispatch

from .architectures import VOCABULARY, build
from .forcing import demo_model, generate, ours, text

ROOT = Path(__file__).parents[1]


def plain_states(model, ids):
    return timing.states(model, ids)


def test_a_line_through_steps_gives_slope_intercept_and_break_even():
    steps = [("dynamic", 100, 2.0), ("dynamic", 200, 3.0), ("x", 100, 2.2), ("x", 200, 2.4)]
    timings = [timing.Timing(name, n, 1, itl, 0.0, n * 8, 0.0) for name, n, itl in steps]
    plain, other = timing.fit(timings)
    assert plain.slope == pytest.approx(0.01) and plain.intercept == pytest.approx(1.0) and plain.break_even is None
    assert other.slope_ratio == pytest.approx(0.2) and other.intercept_ratio == pytest.approx(2.0)
    assert other.break_even == pytest.approx(125.0)
    assert other.bandwidth == pytest.approx(8 / 0.002)


def test_a_machine_that_slows_down_between_contexts_does_not_tilt_the_line():
    steps = [("dynamic", 100, 2.0, 1.0), ("dynamic", 200, 6.0, 2.0), ("x", 100, 2.2, 1.0), ("x", 200, 4.8, 2.0)]
    plain, other = timing.fit([timing.Timing(n, c, 1, itl, 0.0, c * 8, 0.0, anchor) for n, c, itl, anchor in steps])
    assert plain.slope_ratio == 1.0 and other.slope_ratio == pytest.approx(0.2)


def test_wrong_logits_are_refused(monkeypatch):
    model = ours()
    exact = plain_states(model, text(1, 40))
    forgetful = lambda config: KVCache(config, retention=Window(4, 0))  # noqa: E731
    monkeypatch.setitem(named.KINDS, "paged", forgetful)
    with pytest.raises(timing.RefusedError, match="paged at 40 tokens"):
        timing.measure(model, exact, ["dynamic", "paged"], 40, 1, 2)


@pytest.mark.skipif(cpu.load() is None, reason=cpu.status())
@pytest.mark.parametrize("name", ["paged", "int2/residual=0", "window:24+2"])
def test_a_kernel_that_reads_pages_wrongly_is_refused_behind_any_loss_of_the_codec(name, monkeypatch):
    model, decode = ours(), cpu.decode
    exact = plain_states(model, text(1, 40))
    timing.measure(model, exact, ["dynamic", name], 128, 1, 2)
    monkeypatch.setattr(cpu, "decode", lambda *arguments: (decode(*arguments)[0] * 1.1, decode(*arguments)[1]))
    with pytest.raises(timing.RefusedError, match="plain torch reads in the same pages"):
        timing.measure(model, exact, ["dynamic", name], 128, 1, 2)


def test_every_kind_of_cache_is_measured_on_the_same_shapes():
    model = ours()
    exact = plain_states(model, text(1, 16))
    names = ["dynamic", "static", "paged", "offloaded:8", "int8/residual=0", "window:8+2"]
    timings = timing.measure(model, exact, names, 192, 2, 3)
    assert [t.cache for t in timings] == names and all(t.itl > 0 and t.bytes > 0 for t in timings)
    held = {t.cache: t.bytes for t in timings}
    assert held["window:8+2"] < held["int8/residual=0"] < held["paged"]


def test_the_measure_of_quality_sees_damage_and_sees_none_where_there_is_none():
    model = ours()
    ref = scoring.reference(model, text(3, 90), steps=10)
    exact = scoring.divergence(model, ref, named.cache_factory("paged/block_size=4"))
    assert exact.kl_max < 1e-6 and exact.top1 == 1.0 and exact.steps == 30 and exact.context == 79
    losses = [
        scoring.divergence(model, ref, named.cache_factory(f"{n}/residual=0")).kl_mean for n in ("int8", "int4", "int2")
    ]
    assert 0 < losses[0] < losses[1] < losses[2]


# ---- planted faults: each moves the divergence beyond its standard error -----------------------------------------------


def divergence(name: str, wrap=lambda cache: cache, model_name: str = "llama") -> scoring.Divergence:
    """Of 12 steps after 147 tokens, in three windows of a tiny model."""
    model, ref = faultless(model_name)
    return scoring.divergence(model, ref, lambda config: wrap(named.cache_factory(name)(config)))


@functools.cache
def faultless(name: str):
    model = ours(name)
    return model, scoring.reference(model, text(3, 160), steps=12)


def assert_moved(fault: scoring.Divergence, right: scoring.Divergence) -> None:
    assert fault.kl_mean - right.kl_mean > 2 * (fault.kl_stderr**2 + right.kl_stderr**2) ** 0.5


def test_a_stale_block_shows():
    """One block of one layer holds what another one held."""

    def stale(cache):
        update = cache.update

        def damaged(k, v, layer, *args, **kwargs):
            if layer == 1 and k.shape[2] > 1:
                k = k.clone()
                k[:, :, 16:32] = k[:, :, 48:64]
            return update(k, v, layer, *args, **kwargs)

        cache.update = damaged
        return cache

    assert_moved(divergence("paged", stale), divergence("paged"))


def test_scales_that_are_off_by_5_percent_show(monkeypatch):
    right, seal = divergence("int8/residual=0"), dispatch.seal

    def sloppy(sealed, ids, k, v, places):
        seal(sealed, ids, k, v, places)
        fields = sealed.gather(ids)
        sealed.scatter(ids, fields | {"v_scale": fields["v_scale"] * 1.05})

    monkeypatch.setattr(dispatch, "seal", sloppy)
    assert_moved(divergence("int8/residual=0"), right)


def test_a_residual_that_is_ignored_shows():
    assert_moved(divergence("int2/residual=0/block_size=16"), divergence("int2/residual=128/block_size=16"))


def test_a_window_that_is_off_by_one_shows():
    right, short = divergence("window:160+0"), divergence("window:158+0")
    assert right.kl_max < 1e-6 and right.identical == 1.0
    assert short.by_position[-1]["kl"] > 100 * right.kl_max and short.by_position[0]["kl"] < 1e-6


def test_what_the_plain_cache_generates_is_where_greedy_tokens_part():
    exact, bad = divergence("paged"), divergence("int2/residual=0/block_size=16")
    assert exact.first_difference is None and exact.identical == 1.0
    model, ref = faultless("llama")
    cache = scoring.write(model, ref, named.cache_factory("int2/residual=0/block_size=16")(model.config))
    _, choices = scoring.predictions(model, ref, cache)
    free = generate(model, ref.ids[:, : ref.context + 1], DynamicCache(config=model.config), 12)
    assert ref.greedy.tolist() == free
    firsts = sorted((choices != ref.greedy).int().argmax(-1).tolist())
    assert bad.first_difference == firsts[1]


def test_a_model_with_a_window_of_its_own_prefills_every_cache_itself():
    _, ref = faultless("mistral")
    assert ref.states is None
    exact = divergence("paged", model_name="mistral")
    assert exact.kl_max < 1e-6 and exact.top1 == 1.0


# ---- the suite ---------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of characters."""

    def __call__(self, text, return_tensors):
        ids = [2 + ord(c) % (VOCABULARY - 2) for c in text]
        return type("Encoding", (), {"input_ids": torch.tensor([ids])})


def session(path: Path, caches: list[str], **options) -> Session:
    return Session(ours(), Letters(), caches, path, Console(quiet=True), **options)


PROSE = {"a": "It was a bright cold day in April. " * 80, "b": "Call me what you like, said the whale. " * 80}


def test_quality_records_can_be_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "texts", lambda: PROSE)
    path = tmp_path / "results.jsonl"
    records = quality.run(session(path, ["paged", "int4/residual=0"]), [(150, 2), (250, 2)], steps=8)
    assert [r.cache for r in records[:4]] == [quality.RECHUNKED, quality.KNOWN_BAD, "paged", "int4/residual=0"]
    assert records[2].metrics["compressed"] == 0 and records[3].metrics["compressed"] > 0.5
    quality.check_controls(records, "float32")
    quality.show(records, Console(quiet=True))
    before = path.read_text()
    monkeypatch.setattr(quality, "reference", None)  # nothing is computed again
    again = quality.run(session(path, ["paged", "int4/residual=0"], resume=True), [(150, 2), (250, 2)], steps=8)
    assert [r.metrics for r in again] == [r.metrics for r in records] and path.read_text() == before


def test_controls_fail_when_the_measure_is_broken():
    def record(name, kl):
        return Record("quality", name, {}, {"model": "m", "dtype": "float32"}, {"kl_mean": kl})

    quality.check_controls([record(quality.RECHUNKED, 1e-6), record(quality.KNOWN_BAD, 0.1)], "float32")
    with pytest.raises(quality.ControlError, match="chunking"):
        quality.check_controls([record(quality.RECHUNKED, 1e-3)], "float32")
    with pytest.raises(quality.ControlError, match="bad cache"):
        quality.check_controls([record(quality.KNOWN_BAD, 1e-7)], "float32")


def test_records_of_another_schema_are_refused(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"schema": 99}) + "\n")
    with pytest.raises(ValueError, match="schema 99"):
        load([path])


def test_latency_records(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "texts", lambda: PROSE)
    monkeypatch.setattr(timing, "BANDWIDTH_BYTES", 1 << 20)
    plan = {"contexts": [64, 128], "rounds": 3, "prefill": 96, "prefill_rounds": 2, "batch": 2}
    one = session(tmp_path / "results.jsonl", ["paged", "int4"])
    records = latency.run(one, plan)
    assert {"dynamic", "static", "paged", "int4"} <= {r.cache for r in records}
    for record in records:
        m = record.metrics
        assert [t["context"] for t in m["timings"]] == [64, 128] and m["ttft"] > 0 and m["peak_bytes"] >= 0
        assert m["slope_ratio"] == pytest.approx(m["slope"] / records[0].metrics["slope"])
    monkeypatch.setattr(timing, "measure", None)
    assert [r.metrics for r in latency.run(one, plan)] == [r.metrics for r in records]
    latency.show(records, Console(quiet=True))


def test_peak_memory_sees_what_is_held_for_a_moment():
    with timing.PeakMemory(torch.device("cpu")) as memory:
        held = torch.ones(64 << 20, dtype=torch.uint8)
        time.sleep(0.05)
        del held
    assert memory.peak > 48 << 20


def test_names_of_caches():
    config = ours().config
    assert "int4" in repr(named.cache_factory("int4/residual=8")(config))
    assert named.cache_factory("window:32+2")(config).choices["retention"] == Window(32, 2)
    mixed = repr(named.cache_factory("k4v2/residual=8/native=0-1+2")(config))
    assert "3 layers" in mixed and "k4v2" not in mixed
    assert "1 layers: everything, int8" in repr(named.cache_factory("int2/int8=1")(config))
    with pytest.raises(ValueError, match="kinds are"):
        named.cache_factory("int5")
    for name in named.BUILT_IN:
        assert isinstance(named.is_available(name), bool)


def test_numbers_in_names():
    config = ours().config
    for name, window in (("window", Window(1024, 4)), ("window:32", Window(32, 0)), ("window:32+2", Window(32, 2))):
        assert named.cache_factory(name)(config).choices["retention"] == window
    for name, resident in (("offloaded", 1024), ("offloaded:8", 8), ("disk", 1024), ("disk:8", 8)):
        assert named.cache_factory(name)(config).choices["tier"].resident_tokens == resident
    assert named.cache_factory("static:48")(config).layers[0].max_cache_len == 48
    with pytest.raises(ValueError, match="write static:4096"):
        named.cache_factory("static")(config)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("int4/residual", "'residual' in 'int4/residual' is no option: write option=value"),
        ("int4/residual=x", "'x' in 'int4/residual=x' must be a whole number; write residual=64"),
        ("int4/", "'' in 'int4/' is no option"),
        ("int4:32", "int4 takes no number after a colon; write int4/block_size=32"),
        ("paged:64", "paged takes no number after a colon; write paged/block_size=64"),
        ("dynamic:64", "dynamic takes no number after a colon."),
        ("window:abc", "'abc' in 'window:abc' must be a whole number; write window:WINDOW+SINKS"),
        ("window:8+", "'' in 'window:8+' must be a whole number"),
        ("window:8+2+1", "has 3 numbers; write window:WINDOW+SINKS"),
        ("offloaded:8+2", "has 2 numbers; write offloaded:TOKENS"),
        ("static:long", "'long' in 'static:long' must be a whole number; write static:LENGTH"),
        ("int2/int8=0-x", "'x' in 'int2/int8=0-x' must be a whole number; write int8=0-3+29"),
    ],
)
def test_a_name_that_is_none_says_how_it_is_written(name, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        named.cache_factory(name)


def test_windows_of_text_are_as_long_as_asked_for():
    class Characters:
        def __call__(self, text, return_tensors):
            return type("Encoding", (), {"input_ids": torch.tensor([[ord(c) for c in text]])})

    ids = scoring.windows(Characters(), ["a" * 500, "b" * 500], count=4, length=20)
    assert ids.shape == (4, 20) and ids[0, 0] != ids[1, 0]
    with pytest.raises(ValueError, match="fewer than"):
        scoring.windows(Characters(), ["short"], count=1, length=20)


def saved_model(path: Path) -> str:
    """A tiny model on disk, with a tokenizer of characters."""
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(i): i for i in range(VOCABULARY)}, unk_token=" "))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(path)
    build("llama").save_pretrained(path)
    return str(path)


def test_the_latency_command_prints_tables_and_writes_records(tmp_path, capsys):
    command = ["latency", "--model", saved_model(tmp_path / "model"), "--contexts", "64,128", "--batch", "1,2"]
    main([*command, "--rounds", "3", "--caches", "paged,int4", "--prefill", "64", "--out", str(tmp_path)])
    records = load([tmp_path / "results.jsonl"])
    assert {r.protocol["batch"] for r in records} == {1, 2} and all(r.metrics["slope"] for r in records)
    assert {"dynamic", "static", "paged", "int4"} <= {r.cache for r in records}
    printed = capsys.readouterr().out
    assert "decode step" in printed and "first pass over 64 tokens" in printed
    assert (tmp_path / "latency.png").exists()


@pytest.mark.demo
@pytest.mark.slow
def test_all_suites_quickly_on_the_demo_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(models, "load", lambda name, dtype: demo_model())
    main(["all", "--quick", "--caches", "int4", "--out", str(tmp_path)])
    metrics = {(r.suite, r.cache): r.metrics for r in load([tmp_path / "results.jsonl"])}
    assert metrics["quality", "int4"]["kl_mean"] < metrics["quality", quality.KNOWN_BAD]["kl_mean"] / 10
    assert metrics["retrieval", "int4"]["accuracy"] == metrics["retrieval", "dynamic"]["accuracy"] == 1.0
    assert metrics["streaming", "window:256+4"]["ratio"] < 1.05 and metrics["streaming", "window:256+0"]["ratio"] > 1.5
    assert all(metrics["latency", name]["slope_ratio"] for name in ("dynamic", "static", "int4"))
    assert "At 991 tokens of context: int4 holds" in capsys.readouterr().out
    assert (tmp_path / "latency.png").exists() and (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_two_processes_measure_what_one_does(tmp_path):
    """`accelerate launch` deals the windows out, on CPUs too: the same numbers but for float noise."""
    own = ["quality", "--model", saved_model(tmp_path / "model"), "--lengths", "300", "--windows", "4", "--steps", "8"]
    own += ["--caches", "int4/residual=0", "--out"]
    main([*own, str(tmp_path / "one")])
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "-m", "eval"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*launch, *own, str(tmp_path / "two")], cwd=ROOT, check=True, capture_output=True, env=environment)
    for one, two in zip(*(load([tmp_path / n / "results.jsonl"]) for n in ("one", "two")), strict=True):
        assert one.cache == two.cache and two.metrics["steps"] == 32
        assert (one.run["processes"], two.run["processes"]) == (1, 2)
        for key in ("kl_mean", "nll_change", "ppl", "bytes"):
            assert two.metrics[key] == pytest.approx(one.metrics[key], rel=1e-3, abs=1e-7), (one.cache, key)


def test_a_step_of_the_plain_cache_is_what_ours_is_compared_with():
    model, ids = ours(), text(2, 30)
    cache = named.cache_factory("paged")(model.config)
    timing.fill(cache, plain_states(model, ids[:1]), 30, 2)
    assert cache.get_seq_length() == 30 and cache.storage.batch == 2
    with torch.no_grad():
        assert model(ids[:, :1], **cache_kwarg(cache)).logits.isfinite().all()
