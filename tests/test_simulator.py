"""Requests that join and leave: against a real pool that is driven by the same trace, and by arithmetic."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hf_kvcache import BlockPool, ConfigurationError, KVCache, PagedCache, QuantizedCache, Window, memory
from hf_kvcache.memory.footprint import PagedFootprint, bind
from hf_kvcache.memory.workload import Request, step_of

from .architectures import build

F32, CPU = torch.float32, torch.device("cpu")
MAKE = {
    "paged": lambda config, pool=None: PagedCache(config, block_size=8, pool=pool),
    "int4": lambda config, pool=None: QuantizedCache(config, bits=4, block_size=16, residual=16, pool=pool),
    "window": lambda config, pool=None: KVCache(config, block_size=8, retention=Window(24, 2), pool=pool),
}


def drive(make, config, workload: memory.Workload, users: int | None, capacity: int | None = None) -> list:
    """A pool's metrics after every step of serving a workload, first come, first served."""
    pool = BlockPool(config, capacity_bytes=capacity)
    waiting, running, metrics, now = list(workload.requests), [], [], 0
    sizes = np.maximum.accumulate(PagedFootprint(make(config), F32, CPU).held(range(512)).device)
    most = lambda r: int(sizes[r.prompt + r.answer - 1])  # noqa: E731
    while waiting or running:
        while waiting and step_of(waiting[0], workload) <= now and (users is None or len(running) < users):
            if capacity is not None and sum(most(r) for r, _, _ in running) + most(waiting[0]) > capacity:
                break
            request = waiting.pop(0)
            cache = bind(make(config, pool), F32, CPU)
            cache.storage.rehearse(np.array([request.prompt]))
            running.append([request, cache, request.answer])
        for _, cache, _ in running:
            cache.memory()  # windows let go of what no later query sees
        if running:
            metrics.append(pool.metrics())
        for entry in running:
            entry[2] -= 1
        for _, cache, left in running:
            if not left:
                cache.reset()
        running = [entry for entry in running if entry[2]]
        for _, cache, _ in running:
            cache.storage.rehearse(np.array([1]))
        now += 1
    return metrics


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("rate", [None, 1.5])
def test_peaks_are_those_of_a_pool_driven_with_the_same_trace(name, rate):
    config = build("gemma3_text" if name == "window" else "llama").config
    users = 5 if rate is None else None
    workload = memory.lognormal(60, 0.8, answer_mean=15, count=30, limit=400, rate=rate)
    simulated = memory.simulate(PagedFootprint(MAKE[name](config), F32, CPU), workload, users=users)
    driven = drive(MAKE[name], config, workload, users)
    for got, field in (
        (simulated.held, "resident_tokens"),
        (simulated.slots, "resident_slots"),
        (simulated.device, "bytes_used"),
    ):
        series = [getattr(metrics, field) for metrics in driven]
        assert got[2] == pytest.approx(max(series), rel=0.02)
        assert got[2] == max(series) and got[0] == np.percentile(series, 50, method="higher"), field
    assert simulated.finished == 30 and simulated.refused == 0
    tokens, slots = (sum(getattr(m, field) for m in driven) for field in ("resident_tokens", "resident_slots"))
    assert simulated.waste == pytest.approx(1 - tokens / slots)


def test_a_pool_with_a_limit_is_never_overrun():
    config = build("llama").config
    footprint = PagedFootprint(PagedCache(config, block_size=8), F32, CPU)
    workload = memory.lognormal(60, 0.8, answer_mean=15, count=30, limit=400)
    capacity = int(footprint.held([200]).device[0])
    simulated = memory.simulate(footprint, workload, capacity=capacity)
    fitting = [r for r in workload.requests if footprint.held([r.prompt + r.answer - 1]).device[0] <= capacity]
    assert simulated.finished == len(fitting) and simulated.refused == 30 - len(fitting) > 0
    driven = drive(
        MAKE["paged"], config, memory.Workload("", tuple(fitting)), None, capacity
    )  # raises where it is overrun
    assert simulated.device[2] == max(metrics.bytes_used for metrics in driven) <= capacity
    assert simulated.occupancy[2] == simulated.device[2] / capacity


def test_by_hand():
    config = build("llama").config
    footprint = PagedFootprint(PagedCache(config, block_size=4), F32, CPU)
    # One request of 3 + 3 tokens, one of 6 + 1 that arrives in step 1: tokens 3; 4 + 6; 5 in blocks of 4: 1; 1 + 2; 2.
    workload = memory.Workload("by hand", (Request(3, 3, 0.0), Request(6, 1, 1.0)), step_seconds=1.0)
    simulated = memory.simulate(footprint, workload)
    assert (simulated.steps, simulated.tokens, simulated.held, simulated.slots) == (
        3,
        (5, 10, 10),
        (5, 10, 10),
        (8, 12, 12),
    )
    assert simulated.waste == pytest.approx(1 - 18 / 24) and simulated.running == (1, 2, 2)
    queued = memory.simulate(footprint, workload, users=1)
    assert queued.steps == 4 and queued.wait == (2, 2, 2) and queued.waiting[2] == 1


def test_waste_is_half_a_block_a_request():
    config = build("llama", max_position_embeddings=4096).config
    footprint = PagedFootprint(PagedCache(config, block_size=16), F32, CPU)
    workload = memory.lognormal(512, 0.5, answer_mean=64, count=300, limit=4096)
    simulated = memory.simulate(footprint, workload, users=20)
    assert simulated.waste == pytest.approx(7.5 / (540 + 7.5), rel=0.2) and simulated.waste < 0.04
    assert simulated.tokens[2] < 20 * 4096 / 3, "twenty requests are never all at their longest"


def test_states_count_for_every_request():
    config = build("llama").config
    footprint = PagedFootprint(PagedCache(config, block_size=4), F32, CPU)
    workload = memory.Workload("two", (Request(3, 1), Request(3, 1)))
    plain, stateful = (memory.simulate(footprint, workload, state_bytes=n) for n in (0, 1000))
    assert stateful.device[2] == plain.device[2] + 2000


def test_log_normal_lengths_have_the_mean_that_was_asked_for():
    workload = memory.lognormal(1000, 0.8, answer_mean=200, answer_sigma=0.5, count=6_000)
    prompts, answers = np.array([(r.prompt, r.answer) for r in workload.requests]).T
    assert prompts.mean() == pytest.approx(1000, rel=0.05) and np.log(prompts).std() == pytest.approx(0.8, rel=0.05)
    assert answers.mean() == pytest.approx(200, rel=0.05)
    assert workload == memory.lognormal(1000, 0.8, answer_mean=200, answer_sigma=0.5, count=6_000), (
        "one seed, one workload"
    )
    arrivals = [r.arrival for r in memory.lognormal(10, 0.1, count=5000, rate=4.0).requests]
    assert arrivals[-1] == pytest.approx(5000 / 4, rel=0.05) and arrivals == sorted(arrivals)


def test_a_trace_is_read(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"prompt_tokens": 5, "output_tokens": 2, "arrival": 3.5},
        {"prompt_tokens": 7, "output_tokens": 1, "arrival": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert memory.read_trace(path).requests == (Request(7, 1, 1), Request(5, 2, 3.5))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests"),
        ("{", "line 1 is not JSON"),
        ("[1, 2]", "line 1 holds no object"),
        (
            '{"prompt_tokens": 5, "output_tokens": 1}\n{"prompt_tokens": "x", "output_tokens": 1}',
            "line 2: field prompt_tokens is 'x'",
        ),
        ('{"prompt_tokens": 5}', "line 1: field output_tokens is None"),
        ('{"prompt_tokens": 5, "output_tokens": 0}', "field output_tokens is 0"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "arrival": -1}', "field arrival is -1"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "arrival": NaN}', "field arrival is nan"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "arrival": Infinity}', "field arrival is inf"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "arrival": 1764520000000}', "and at most 1,000,000,000"),
        (
            '{"prompt_tokens": 5, "output_tokens": 1, "arrival": 1}\n{"prompt_tokens": 5, "output_tokens": 1}',
            "line 2: field arrival is in some lines only",
        ),
    ],
)
def test_a_malformed_trace_is_named_by_line_and_field(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        memory.read_trace(path)


def test_a_request_beyond_the_models_limit_is_refused():
    workload = memory.Workload("a trace", (Request(500, 100),))
    with pytest.raises(ConfigurationError, match="a trace: a request of 500 \\+ 100 tokens is beyond the model's 512"):
        memory.plan(build("llama").config, context=64, caches=["paged"], workload=workload)


@pytest.mark.parametrize(
    "settings",
    [
        {"mean": 0},
        {"mean": float("inf")},
        {"sigma": -1},
        {"sigma": float("nan")},
        {"answer_sigma": 1e6},
        {"rate": 0},
        {"count": 0},
        {"answer_mean": -5},
    ],
    ids=str,
)
def test_a_workload_that_cannot_be_is_refused(settings):
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        memory.lognormal(**{"mean": 10, "sigma": 0.5} | settings)
