"""Every rule of a diagnosis: a symptom that it answers, and one like it that it does not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_kvcache import BlockPool, ConfigurationError, PagedCache, diagnose, memory
from hf_kvcache.memory import Observation
from hf_kvcache.memory.diagnosis import RULES
from hf_kvcache.memory.footprint import bind
from hf_kvcache.memory.observation import FIELDS, from_metrics, observe, read_observation

from .architectures import build

KNOWN = Path(__file__).parent / "known_configs"
FULL = {"occupancy": 0.97, "failures": 3}
MODEL = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
         "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 65536,
         "dtype": "bfloat16"}  # fmt: skip

# rule: (an observation it answers, cache), lever, [(an observation it does not answer, cache)]
CASES = {
    "fragmentation": (
        (Observation(request_tokens=90, waste=0.4), "paged/block_size=64"),
        "blocks",
        [
            (Observation(request_tokens=90, waste=0.04), "paged/block_size=64"),
            (Observation(request_tokens=90), "paged/block_size=64"),
            (Observation(request_tokens=90, waste=0.4), "paged/block_size=8"),  # there are no smaller ones
            (Observation(request_tokens=9000, waste=0.4), "paged/block_size=64"),  # at this length it gains nothing
        ],
    ),
    "repeated_prefixes": (
        (Observation(request_tokens=2000, repeated_rate=0.8, hit_rate=0.1, requests=10), "paged"),
        "reuse",
        [
            (Observation(request_tokens=2000, repeated_rate=0.8, hit_rate=0.78), "paged"),
            (Observation(request_tokens=2000, hit_rate=0.0), "paged"),  # nobody knows whether prompts repeat
        ],
    ),
    "retained_tokens": (
        (Observation(request_tokens=20_000, **FULL), "paged"),
        "window",
        [
            (Observation(request_tokens=20_000, occupancy=0.3, failures=0), "paged"),
            (Observation(request_tokens=900, **FULL), "paged"),
            (Observation(request_tokens=20_000, **FULL), "window:4096+4"),
        ],
    ),
    "bytes_per_element": (
        (Observation(request_tokens=900, **FULL), "paged"),
        "codec",
        [
            (Observation(request_tokens=900, occupancy=0.3, failures=0), "paged"),
            (Observation(request_tokens=900, **FULL), "int4"),
            (Observation(request_tokens=20_000, **FULL), "disk:1024"),
            (Observation(request_tokens=900, **FULL), "paged/int8=0-1"),  # some layers have a codec
        ],
    ),
    "cold_blocks": (
        (Observation(request_tokens=20_000, idle=0.5, **FULL), "paged"),
        "tier",
        [
            (Observation(request_tokens=1500, **FULL), "paged"),
            (Observation(request_tokens=20_000, occupancy=0.3, failures=0), "paged"),
            (Observation(request_tokens=20_000, **FULL), "offloaded:1024"),
        ],
    ),
}


def test_every_rule_has_a_case():
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_answers_its_symptom_and_no_other(rule):
    (seen, cache), lever, others = CASES[rule]
    found = {finding.rule: finding for finding in diagnose(seen, MODEL, cache=cache).findings}
    assert found[rule].lever == lever and found[rule].gain > 1.05
    assert found[rule].gain == pytest.approx(found[rule].bytes_before / found[rule].bytes_after)
    for seen, cache in others:
        assert rule not in {finding.rule for finding in diagnose(seen, MODEL, cache=cache).findings}, (seen, cache)


@pytest.mark.parametrize("model", [MODEL, str(KNOWN / "falcon-h1-7b.json")], ids=["llama", "hybrid"])
@pytest.mark.parametrize("cache", ["paged", "dynamic"])
def test_the_largest_gain_comes_first_and_is_the_planners(model, cache):
    found = diagnose(Observation(request_tokens=20_000, **FULL), model, cache=cache)
    gains = [finding.gain for finding in found.findings]
    assert found.binds and gains == sorted(gains, reverse=True) and len(gains) == 3
    caches = ["paged", *(finding.cache for finding in found.findings)]
    planned = {c.name: c.request_bytes for c in memory.plan(model, context=20_000, caches=caches).caches}
    for finding in found.findings:
        assert finding.bytes_before == pytest.approx(planned["paged"], rel=0.02)
        assert finding.gain == pytest.approx(planned["paged"] / planned[finding.cache], rel=0.02), finding


def test_what_nothing_changes_makes_gains_smaller():
    """Falcon-H1 keeps a state of 133 MiB: of 2,000 tokens 4 bits would gain three times, and gain half of that."""
    (codec,) = diagnose(Observation(request_tokens=2_000, **FULL), str(KNOWN / "falcon-h1-7b.json")).findings
    state = 44 * (4 * 3_584 * 2 + 24 * 128 * 256 * 4)
    assert codec.bytes_before == state + 2_015 * 45_056  # one length of 16 ends with its block
    without = (codec.bytes_before - state) / (codec.bytes_after - state)
    assert codec.gain < 1.6 < 2.5 < without


def test_a_plans_blocks_are_not_changed_by_name(tmp_path):
    path = tmp_path / "tuned.json"
    choices = {"block_size": 64, "residual": 0, "codecs": ["native"] * 4}
    path.write_text(json.dumps({"format": "hf_kvcache plan", "version": 1, "choices": choices}))
    seen = Observation(request_tokens=90, waste=0.4)
    assert not diagnose(seen, MODEL, cache=f"plan:{path}").findings
    assert diagnose(seen, MODEL, cache="paged/block_size=64").findings, "the same cache, by a name that can say it"


def test_prompts_that_all_repeat_still_compute_a_token():
    seen = Observation(request_tokens=2000, repeated_rate=1.0, hit_rate=0.0, requests=4)
    assert "2000.0 times fewer tokens" in diagnose(seen, MODEL).findings[0].price


def test_what_smaller_blocks_gain_is_arithmetic():
    found = diagnose(Observation(request_tokens=90, waste=0.4), MODEL, cache="paged/block_size=64").findings[0]
    token = 2 * 4 * 4 * 64 * 2
    # From 90 to 153 tokens: blocks of 64 hold 128 up to that length, 192 beyond; blocks of 8 hold half a block more than needed.
    assert found.bytes_before == pytest.approx(token * np.mean([-(-n // 64) * 64 for n in range(90, 154)]), rel=1e-6)
    assert found.cache == "paged/block_size=8"
    assert found.bytes_after == token * np.mean([-(-n // 8) * 8 for n in range(90, 98)])


def test_reuse_says_what_becomes_of_the_time_to_the_first_token():
    seen = Observation(request_tokens=2000, repeated_rate=0.75, hit_rate=0.0, requests=4, ttft=2.0)
    found = diagnose(seen, MODEL).findings[0]
    token = 2 * 4 * 4 * 64 * 2  # bytes; of 2000 tokens 1500 are shared by 4 requests, blocks of 16
    assert "from 2.00 s to about 0.50 s" in found.price
    assert found.bytes_after == pytest.approx(token * (500 + 1500 / 4 + 7.5), rel=0.01)


def test_it_says_when_kv_memory_is_not_what_binds():
    idle = diagnose(Observation(request_tokens=900, occupancy=0.2, failures=0), MODEL)
    assert idle.binds is False and not idle.findings and "not what binds" in idle.elsewhere[0]
    unknown = diagnose(Observation(request_tokens=900), MODEL)
    assert unknown.binds is None and not unknown.elsewhere
    before = diagnose(Observation(request_tokens=900, occupancy=0.2, failures=1), MODEL)
    assert before.binds is False and not before.findings, "the one failure was before the pool was as empty as it is"
    assert diagnose(Observation(request_tokens=900, failures=1), MODEL).binds
    assert diagnose(Observation(request_tokens=900, occupancy=0.2, failures=1, counted=9), MODEL).binds, (
        "seen to happen"
    )
    between = diagnose(Observation(request_tokens=900, occupancy=0.7, failures=0), MODEL)
    assert between.binds is False and not between.elsewhere


def test_it_says_when_weights_are():
    seen = Observation(request_tokens=900, **FULL)
    count = memory.models.parameters(memory.models.load(MODEL)).total
    crowded = diagnose(seen, MODEL, device_memory=3 * count)
    assert any("Weights take" in sentence for sentence in crowded.elsewhere)
    assert not diagnose(seen, MODEL, device_memory=100 * count).elsewhere
    assert not diagnose(seen, MODEL, device_memory=3 * count, weights="4bit").elsewhere, "they are small already"


@pytest.mark.parametrize(("fixed", "slope", "says"), [(0.050, 1e-7, True), (0.002, 1e-5, False)])
def test_it_says_when_decode_time_is_not_reading_the_cache(fixed, slope, says):
    generator = np.random.default_rng(0)
    tokens = generator.integers(1000, 9000, 50)
    samples = [
        {"resident_tokens": int(n), "requests": 4, "itl": fixed + slope * n + generator.normal(0, 1e-4)} for n in tokens
    ]
    seen = observe(samples)
    assert seen.itl_fixed == pytest.approx(fixed / (fixed + slope * tokens.mean()), abs=0.05)
    assert any("Decode time" in s for s in diagnose(seen, MODEL).elsewhere) == says


def test_samples_that_do_not_vary_tell_nothing_of_decode_time():
    assert observe([{"resident_tokens": 5000 + n, "itl": 0.05} for n in range(20)]).itl_fixed is None


def test_a_pools_own_metrics_are_understood(tmp_path):
    config = build("llama").config
    pool = BlockPool(config, capacity_tokens=64)
    cache = bind(PagedCache(config, pool=pool), torch.float32, torch.device("cpu"))
    cache.storage.rehearse(np.array([40]))
    seen = from_metrics(pool.metrics())
    assert (seen.resident_tokens, seen.occupancy, seen.failures, seen.hit_rate) == (40, 48 / 64, 0, 0)
    assert seen.waste == pytest.approx(1 - 40 / 48)
    path = tmp_path / "metrics.prom"
    path.write_text(pool.metrics().prometheus())
    assert read_observation(path) == seen
    found = diagnose(pool.metrics(), config, request_tokens=40)
    assert [finding.lever for finding in found.findings] == ["blocks"]


def test_a_trace_is_summed_up():
    seen = observe([{"resident_tokens": 100, "requests": 2, "occupancy": 0.5, "allocation_failures": 4},
                    {"resident_tokens": 300, "requests": 2, "occupancy": 0.9, "allocation_failures": 7}])  # fmt: skip
    assert (seen.resident_tokens, seen.requests, seen.request_tokens, seen.failures) == (200, 2, 100, 3)
    assert seen.occupancy == pytest.approx(0.88)


@pytest.mark.parametrize(
    ("counts", "failures", "binds"),
    [([7, 0, 0], 0, False), ([7, 7, 0, 2, 2], 2, True), ([3, 3, 3], 0, False), ([3, 5], 2, True)],
)
def test_a_counter_that_began_again_counts_from_there(counts, failures, binds):
    seen = observe([{"request_tokens": 900, "occupancy": 0.6, "allocation_failures": count} for count in counts])
    assert seen.failures == failures and diagnose(seen, MODEL).binds is binds


def test_what_prometheus_adds_to_metrics_is_read_over(tmp_path):
    path = tmp_path / "metrics.prom"
    path.write_text(
        '# TYPE hf_kvcache_resident_tokens gauge\nhf_kvcache_resident_tokens{job="chat",instance="a:1"} 40 1764520000000\n'
        'hf_kvcache_evictions_total{reason="room"} 3\nhf_kvcache_occupancy_ratio  0.75\n'
    )
    seen = read_observation(path)
    assert (seen.resident_tokens, seen.occupancy) == (40, 0.75)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no samples"),
        ("{", "line 1 is not JSON"),
        ('{"speed": 1}', "line 1 says nothing of a pool: write some of resident_tokens"),
        (
            '{"waste": 0.1}\n{"waste": 1.5}',
            "line 2: field waste is 1.5 and must be a number of at least 0 and at most 1",
        ),
        ('{"itl": "fast"}', "line 1: field itl is 'fast'"),
        ("hf_kvcache_unknown 3", "none of hf_kvcache_resident_tokens"),
        ("hf_kvcache_resident_tokens many", "is 'many', which is no number"),
        ("hf_kvcache_occupancy_ratio NaN", "hf_kvcache_occupancy_ratio is nan and must be a number of at least 0"),
        ("hf_kvcache_occupancy_ratio 7", "hf_kvcache_occupancy_ratio is 7.0 and must be .* at most 1"),
        ('{"request_tokens": Infinity}', "line 1: field request_tokens is inf"),
        ('{"request_tokens": NaN}', "line 1: field request_tokens is nan"),
    ],
)
def test_metrics_that_cannot_be_read_are_named(tmp_path, text, message):
    path = tmp_path / "metrics"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_observation(path)


@pytest.mark.parametrize("tokens", [None, 0, float("inf")])
def test_the_length_of_requests_has_to_be_known(tokens):
    with pytest.raises(ConfigurationError, match="give request_tokens"):
        diagnose(Observation(occupancy=0.9), MODEL, request_tokens=tokens)


def test_every_field_of_a_sample_can_be_given(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(dict.fromkeys(FIELDS, 1)))
    assert read_observation(path).ttft == 1.0
