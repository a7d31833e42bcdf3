"""The measurements: what they print, and that they refuse to time a cache that computes something else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eval import latency, quality
from hf_kvcache import KVCache, Window, cache_kwarg, named

from .forcing import ours, text

ROOT = Path(__file__).parents[1]


def plain_states(model, ids):
    return latency.states(model, ids)


def test_a_line_through_steps_gives_slope_intercept_and_break_even():
    steps = [("dynamic", 100, 2.0), ("dynamic", 200, 3.0), ("x", 100, 2.2), ("x", 200, 2.4)]
    timings = [latency.Timing(name, n, 1, itl, 0.0, n * 8, 0.0) for name, n, itl in steps]
    plain, other = latency.fit(timings)
    assert plain.slope == pytest.approx(0.01) and plain.intercept == pytest.approx(1.0) and plain.break_even is None
    assert other.slope_ratio == pytest.approx(0.2) and other.intercept_ratio == pytest.approx(2.0)
    assert other.break_even == pytest.approx(125.0)
    assert other.bandwidth == pytest.approx(8 / 0.002)


def test_wrong_logits_are_refused(monkeypatch):
    model = ours()
    exact = plain_states(model, text(1, 40))
    forgetful = lambda config: KVCache(config, retention=Window(4, 0))  # noqa: E731
    monkeypatch.setitem(named.KINDS, "paged", lambda config, argument: forgetful(config))
    with pytest.raises(latency.RefusedError, match="paged at 40 tokens"):
        latency.measure(model, exact, ["dynamic", "paged"], 40, 1, 2)


def test_every_kind_of_cache_is_measured_on_the_same_shapes():
    model = ours()
    exact = plain_states(model, text(1, 16))
    names = ["dynamic", "static", "paged", "offloaded:8", "int8/residual=0", "window:8+2"]
    timings = latency.measure(model, exact, names, 192, 2, 3)
    assert [t.cache for t in timings] == names and all(t.itl > 0 and t.bytes > 0 for t in timings)
    held = {t.cache: t.bytes for t in timings}
    assert held["window:8+2"] < held["int8/residual=0"] < held["paged"]


def test_the_measure_of_quality_sees_damage_and_sees_none_where_there_is_none():
    model = ours()
    ref = quality.reference(model, text(3, 90), steps=10)
    exact = quality.divergence(model, ref, named.cache_factory("paged/block_size=4"))
    assert exact.kl_max < 1e-6 and exact.top1 == 1.0 and exact.steps == 30 and exact.context == 79
    losses = [
        quality.divergence(model, ref, named.cache_factory(f"{n}/residual=0")).kl_mean for n in ("int8", "int4", "int2")
    ]
    assert 0 < losses[0] < losses[1] < losses[2]


def test_a_stale_block_shows(monkeypatch):
    """A planted fault: one block of one layer holds what another one held."""
    model = ours()
    ref = quality.reference(model, text(1, 90), steps=10)

    def with_stale_block(config):
        cache = named.cache_factory("paged/block_size=16")(config)
        update = cache.update

        def damaged(k, v, layer, *args, **kwargs):
            if layer == 1 and k.shape[2] > 1:
                k = k.clone()
                k[:, :, 16:32] = k[:, :, 48:64]
            return update(k, v, layer, *args, **kwargs)

        cache.update = damaged
        return cache

    assert quality.divergence(model, ref, with_stale_block).kl_mean > 1e-4


def test_names_of_caches():
    config = ours().config
    assert "int4" in repr(named.cache_factory("int4/residual=8")(config))
    assert named.cache_factory("window:32+2")(config).choices["retention"] == Window(32, 2)
    with pytest.raises(ValueError, match="kinds are"):
        named.cache_factory("int5")
    for name in named.BUILT_IN:
        assert isinstance(named.is_available(name), bool)


def test_windows_of_text_are_as_long_as_asked_for():
    class Characters:
        def __call__(self, text, return_tensors):
            return type("Encoding", (), {"input_ids": torch.tensor([[ord(c) for c in text]])})

    ids = quality.windows(Characters(), ["a" * 500, "b" * 500], count=4, length=20)
    assert ids.shape == (4, 20) and ids[0, 0] != ids[1, 0]
    with pytest.raises(ValueError, match="fewer than"):
        quality.windows(Characters(), ["short"], count=1, length=20)


@pytest.mark.demo
@pytest.mark.slow
def test_the_latency_command_prints_tables_and_ends_with_json(tmp_path):
    command = [sys.executable, "-m", "eval", "latency", "--contexts", "64,128", "--batch", "1,2", "--rounds", "3"]
    done = subprocess.run(
        [*command, "--caches", "paged,int4", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    run = json.loads(done.stdout.splitlines()[-1])
    assert {t["context"] for t in run["timings"]} == {64, 128} and {x["batch"] for x in run["lines"]} == {1, 2}
    assert {"dynamic", "static", "paged", "int4"} <= {t["cache"] for t in run["timings"]}
    assert (tmp_path / "latency.png").exists() and json.loads((tmp_path / "latency.json").read_text()) == run


def test_a_step_of_the_plain_cache_is_what_ours_is_compared_with():
    model, ids = ours(), text(2, 30)
    cache = named.cache_factory("paged")(model.config)
    latency.fill(cache, plain_states(model, ids[:1]), 30, 2)
    assert cache.get_seq_length() == 30 and cache.storage.batch == 2
    with torch.no_grad():
        assert model(ids[:, :1], **cache_kwarg(cache)).logits.isfinite().all()
