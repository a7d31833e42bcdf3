"""Choosing a codec for every layer: the solver, what it is fed with, and what comes out."""

from __future__ import annotations

import errno
import itertools
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hf_kvcache
from hf_kvcache import (
    ConfigurationError,
    DiskTier,
    HostTier,
    KVCache,
    QuantizedCache,
    Window,
    cli,
    named,
    saving,
    scoring,
)
from hf_kvcache.commands.tune import finite
from hf_kvcache.contexts import write
from hf_kvcache.mixtures import fewest_bytes, front, least_loss
from hf_kvcache.plan_file import CachePlan
from hf_kvcache.tuning import Tuner, tune

from .forcing import ours, text
from .test_eval import PROSE, saved_model

README = (Path(__file__).parents[1] / "README.md").read_text()

# ---- the solver --------------------------------------------------------------------------------------------------------


def instance(seed: int) -> list[dict[str, tuple[int, float]]]:
    """Five layers with one to four codecs each, several of them of equal size."""
    random = np.random.default_rng(seed)
    return [
        {f"c{i}": (int(random.integers(1, 6)) * 64, float(random.random())) for i in range(random.integers(1, 5))}
        for _ in range(5)
    ]


def every_mixture(layers) -> list[tuple[int, float]]:
    return [tuple(map(sum, zip(*values, strict=True))) for values in itertools.product(*(x.values() for x in layers))]


@pytest.mark.parametrize("seed", range(20))
def test_the_front_is_what_trying_everything_finds(seed):
    layers, mixtures = instance(seed), front(instance(seed))
    for mixture in mixtures:
        chosen = [options[codec] for options, codec in zip(layers, mixture.codecs, strict=True)]
        assert mixture.nbytes == sum(b for b, _ in chosen) and mixture.loss == pytest.approx(sum(x for _, x in chosen))
    everything = every_mixture(layers)
    for tolerance in np.linspace(0, 5, 23):
        fits = [nbytes for nbytes, loss in everything if loss <= tolerance]
        best = fewest_bytes(mixtures, tolerance)
        assert best.nbytes == min(fits) if fits else best is None
    for budget in range(0, 26 * 64, 64):
        fits = [loss for nbytes, loss in everything if nbytes <= budget]
        best = least_loss(mixtures, budget)
        assert best.loss == pytest.approx(min(fits)) if fits else best is None
    assert [m.nbytes for m in mixtures] == sorted({m.nbytes for m in mixtures})


def test_a_sum_that_is_off_is_corrected_by_measuring():
    mixtures = front([{"wide": (4, 0.0), "middle": (2, 1.0), "narrow": (1, 3.0)}] * 6)
    sums = {mixture.codecs: mixture.loss for mixture in mixtures}
    for truth in (lambda s: 2.2 * s, lambda s: 0.4 * s, lambda s: s**1.2):
        tuner = SimpleNamespace(loss=lambda codecs, truth=truth: truth(sums[codecs]))
        best = Tuner.within(tuner, mixtures, 6.0)
        assert best.nbytes == min(m.nbytes for m in mixtures if truth(m.loss) <= 6.0)


def test_where_nothing_holds_native_is_left():
    mixtures = front([{"native": (4, 0.0), "narrow": (1, 1.0)}] * 3)
    assert Tuner.within(SimpleNamespace(loss=lambda codecs: 9.0), mixtures, 2.0) == mixtures[-1]
    assert mixtures[-1].codecs == ("native",) * 3


# ---- plans -------------------------------------------------------------------------------------------------------------

PLAN = CachePlan(16, 8, ("int4", "k8v4", "int4"))


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        CachePlan(16, 0, ("native", "int8", "fp8")),
        CachePlan(32, 8, ("int2",) * 3, {"name": "window", "window": 64, "sinks": 2}),
        CachePlan(16, 8, ("int4", "int4", "int2"), tier={"name": "host", "resident_tokens": 32}),
    ],
)
def test_file_and_printed_call_build_one_cache(plan, tmp_path):
    config = ours().config
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.as_dict(model={"name": "x"}, measured={"kl": 0.1})))
    assert CachePlan.read(path) == plan
    names = {"model": SimpleNamespace(config=config), "KVCache": KVCache, "Window": Window, "HostTier": HostTier}
    read, called = KVCache.from_plan(config, path), eval(plan.call(), names)
    assert repr(read) == repr(called) == repr(named.cache_factory(f"plan:{path}")(config))
    for cache in (read, called):
        assert (cache.block_size, cache.residual) == (plan.block_size, plan.residual)
        held = [str(layer.storage.group.store.sealed.codec) for layer in cache.layers]
        assert held == list(plan.codecs)
        assert cache.choices["retention"] == (Window(64, 2) if plan.retention else hf_kvcache.Everything())
        assert cache.choices["tier"].resident_tokens == (32 if plan.tier else None)


def test_what_a_plan_leaves_out_can_be_said():
    model = ours()
    pool = hf_kvcache.BlockPool(model.config, capacity_tokens=4096)
    cache = QuantizedCache.from_plan(model.config, PLAN.as_dict(), pool=pool, residual=4)
    assert cache.pool is pool and type(cache) is QuantizedCache and cache.residual == 4 and cache.block_size == 16


def test_layers_without_keys_and_values_have_no_codec():
    model = ours("gemma3n_text")  # two layers, and two that share theirs
    plan = CachePlan(16, 0, ("int8", "int4", None, None))
    assert "int8" in repr(KVCache.from_plan(model.config, plan.as_dict()))
    with pytest.raises(ConfigurationError, match="layer 2 the codec 'int4'"):
        KVCache.from_plan(model.config, CachePlan(16, 0, ("int8", "int4", "int4", None)).as_dict())
    with pytest.raises(ConfigurationError, match="layer 1 the codec None"):
        KVCache.from_plan(model.config, CachePlan(16, 0, ("int8", None, None, None)).as_dict())


GOOD = PLAN.as_dict()


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ("no JSON", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "no plan"),
        ("{}", "no plan"),
        (GOOD | {"version": 2}, "version 2"),
        (GOOD | {"choices": {"block_size": 16}}, "must be block_size, residual, codecs"),
        (GOOD | {"choices": GOOD["choices"] | {"sinks": 4}}, "may have retention and tier"),
        (GOOD | {"choices": GOOD["choices"] | {"codecs": ["int4"] * 4}}, "4 layers and this one has 3"),
        (GOOD | {"choices": GOOD["choices"] | {"codecs": ["int5"] * 3}}, "'int5' is unknown"),
        (GOOD | {"choices": GOOD["choices"] | {"codecs": [4] * 3}}, "list of names"),
        (GOOD | {"choices": GOOD["choices"] | {"codecs": "int"}}, "list of names"),
        (GOOD | {"choices": GOOD["choices"] | {"block_size": "16"}}, "block_size='16'"),
        (GOOD | {"choices": GOOD["choices"] | {"residual": -1}}, "residual=-1"),
        (GOOD | {"choices": GOOD["choices"] | {"tier": {"name": "tape"}}}, "one of device, host"),
        (GOOD | {"choices": GOOD["choices"] | {"tier": {"name": "host", "reels": 2}}}, "does not take {'reels': 2}"),
        (GOOD | {"choices": GOOD["choices"] | {"tier": {"name": ["host"]}}}, "one of device, host"),
        (GOOD | {"choices": GOOD["choices"] | {"tier": {}}}, "one of device, host"),
        (GOOD | {"choices": GOOD["choices"] | {"retention": {"name": "windows"}}}, "one of everything, window"),
        (GOOD | {"choices": GOOD["choices"] | {"retention": "window"}}, "one of everything, window"),
    ],
)
def test_what_is_no_plan_is_refused_in_a_sentence(held, says, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(held if isinstance(held, str) else json.dumps(held))
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        KVCache.from_plan(ours().config, path)


def test_a_plan_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none\.json cannot be read: No such file"):
        named.cache_factory(f"plan:{tmp_path}/none.json")
    assert not named.is_exact("plan:a/b.json")


def test_no_file_says_which_folder_is_written_to(tmp_path):
    """A tier makes its folder: merely to read a file of somebody else's would."""
    config, folder = ours().config, tmp_path / "made"
    options = {"resident_tokens": 8, "path": str(folder)}
    plan = replace(PLAN, tier={"name": "disk"} | options)
    with pytest.raises(ConfigurationError, match=r"tier cannot be: 'disk' has \{'path': .*give it tier=DiskTier"):
        KVCache.from_plan(config, plan.as_dict())
    saved = {"retention": None, "codec": None, "tier": 0, "layers": [], "tiers": [["disk", options]]}
    with pytest.raises(ValueError, match="no file may say which folder"):
        saving.choices_from(saved)
    assert not folder.exists()
    cache = KVCache.from_plan(config, replace(PLAN, tier={"name": "disk"}).as_dict(), tier=DiskTier(8, folder))
    assert cache.choices["tier"].place.folder == folder and folder.exists()


# ---- measuring ---------------------------------------------------------------------------------------------------------


def tuner(model, codecs=("int8", "int4", "int2"), tokens=300, seed=0, **shape) -> Tuner:
    shape = {"block_size": 16, "residual": 16} | shape
    return Tuner(model, reference(model, seed), codecs, tokens=tokens, **shape)


def reference(model, seed=0) -> scoring.Reference:
    return scoring.reference(model, text(2, 96 + 9, seed), steps=8)


@pytest.mark.parametrize("residual", [0, 10, 16])
def test_one_pass_finds_what_true_steps_find(residual):
    model, context = ours(), scoring.settled(100, 16, residual)
    ref = scoring.reference(model, text(2, context + 16), steps=15)
    make = lambda: QuantizedCache(model.config, bits=2, block_size=16, residual=residual)  # noqa: E731
    steps = scoring.compare(model, ref, scoring.write(model, ref, make()))
    at_once = scoring.in_one_pass(model, ref, scoring.write(model, ref, make(), copies=1))
    assert steps.kl.mean() > 1e-3
    torch.testing.assert_close(at_once, steps.kl, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma3n_text", "qwen3_next"])
@pytest.mark.parametrize("codec", ["native", "k8v4"])
def test_bytes_of_a_request_are_what_its_cache_holds(name, codec):
    model = ours(name)
    for tokens in (33, 300):
        measures = tuner(model, [codec], tokens=tokens)
        codecs = measures.uniform(codec)
        cache = write(model, text(1, tokens), None, measures.cache(codecs))
        report = cache.memory()
        assert sum(measures.nbytes(codec)) == report.stored - report.by_tier["state"]


def with_outliers(layer: int, by: float = 100.0) -> torch.nn.Module:
    """A model that computes the same, in whose `layer` one channel of each head's values is `by` times as large."""
    model = ours()
    attention, dim = model.model.layers[layer].self_attn, model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        attention.v_proj.weight[::dim] *= by
        attention.o_proj.weight[:, ::dim] /= by
    return model


def test_a_layer_whose_values_have_outliers_gets_the_wider_codec():
    planted, plain = with_outliers(2), ours()
    ids = text(1, 20)
    with torch.no_grad():
        torch.testing.assert_close(planted(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-3)
    chosen = {}
    for model in (plain, planted):
        measures = tuner(model, ("int8", "int4"))
        options = measures.options()
        found = tune([measures], measures.windows, tolerance=1.2 * sum(options[layer]["int4"][1] for layer in (0, 1)))
        chosen[model] = found.mixture.codecs
        assert found.plan.codecs == found.mixture.codecs
    assert chosen[plain] == ("int4",) * 3
    assert chosen[planted] == ("int4", "int4", "int8")


def test_a_budget_gets_the_smallest_loss_that_fits():
    model = ours()
    measures = tuner(model, tokens=2000)
    mixtures = front(measures.options())
    budget = (mixtures[0].nbytes + mixtures[-1].nbytes) // 2
    found = tune([measures], reference(model, 1), tolerance=10.0, budget=budget)
    assert found.mixture == least_loss(mixtures, budget) and found.holds
    assert found.mixture.nbytes <= budget < min(m.nbytes for m in mixtures if m.loss < found.mixture.loss)
    with pytest.raises(ConfigurationError, match=f"takes {mixtures[0].nbytes:,} bytes at least"):
        tune([measures], reference(model, 1), tolerance=10.0, budget=mixtures[0].nbytes - 1)
    assert not tune([measures], reference(model, 1), tolerance=1e-9, budget=budget).holds


def test_where_texts_are_short_a_residual_is_too_dear():
    """Exact positions are a large part of a short request, and nothing of a long one: it gets them, and narrower codecs."""
    model, chosen = ours(), {}
    for tokens in (96, 100_000):
        both = [tuner(model, tokens=tokens, residual=residual) for residual in (32, 0)]
        found = tune(both, both[0].windows, tolerance="int4")
        assert found.holds and found.mixture.nbytes <= found.beside_nbytes
        chosen[tokens] = found.plan.residual
        if found.plan.residual == 0:
            assert found.plan == both[1].plan(found.mixture.codecs) and found.loss == both[1].loss(found.mixture.codecs)
    assert chosen == {96: 0, 100_000: 32}


def test_a_choice_that_does_not_hold_elsewhere_is_made_again_with_less():
    """On the other windows everything loses three times as much."""
    model = ours()
    measures = tuner(model, ("int8", "int4", "int2"))
    true_steps = measures.verify

    def worse(windows, codecs):
        found = true_steps(measures.windows, codecs)
        found.kl = 3 * found.kl
        return found

    measures.verify = worse
    limit = measures.loss(measures.uniform("int4"))
    found = tune([measures], measures.windows, tolerance=limit)
    assert found.holds and found.loss * 3 <= limit * 1.01


# ---- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict[str, str]:
    """A model, a text, and a place for the plan."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "text.txt").write_text(PROSE["a"] + PROSE["b"])
    return {
        "PATH_OR_ID": saved_model(folder / "model"),
        "FILE": str(folder / "text.txt"),
        "tuned.json": str(folder / "tuned.json"),
    }


QUICK = ["--length", "96", "--block-size", "16", "--residual", "16,0", "--steps", "8", "--windows", "2"]


def run(tiny: dict[str, str], *options: str) -> int:
    """The command of the README with quick options and `options`."""
    (command,) = re.findall(r"`hf-kvcache (tune [^`]*--out tuned\.json)`", README)
    return cli.main([*(tiny.get(word, word) for word in shlex.split(command)), *QUICK, *options])


def test_the_command_prints_a_call_and_a_plan(tiny, capsys):
    assert run(tiny, "--tolerance", "int4", "--context", "2k", "--requests", "3") == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines()[:-1])
    plan = json.loads(out.splitlines()[-1])
    assert plan == json.loads(Path(tiny["tuned.json"]).read_text())
    config = ours().config
    call = out[out.index("KVCache(") : out.rindex('{"format"')]
    called = eval(call, {"KVCache": KVCache, "model": SimpleNamespace(config=config)})
    assert repr(called) == repr(KVCache.from_plan(config, tiny["tuned.json"]))
    assert plan["measured"]["kl_verified"] <= plan["measured"]["kl_tolerance"] == plan["measured"]["beside_kl_verified"]
    assert plan["measured"]["request_tokens"] == 2048 and plan["model"]["layers"] == 3


def test_a_budget_that_the_tolerance_does_not_fit_is_told_what_would(tiny, capsys):
    smallest = ["--codecs", "int2", "--context", "4k", "--requests", "4", "--json"]
    assert run(tiny, *smallest, "--budget", "2MiB", "--tolerance", "kl=1e-7") == 1
    captured = capsys.readouterr()
    plan = json.loads(captured.out)
    assert plan["measured"]["request_bytes"] * 4 <= 2 << 20
    assert re.search(r"needs about [\d.]+ MiB, the budget is 2.00 MiB", captured.err)


def strict(text: str) -> dict:
    """JSON as everybody reads it: Python alone takes NaN and Infinity for numbers."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def test_a_plan_that_cannot_be_written_is_printed_all_the_same(tiny, monkeypatch, capsys):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert run(tiny, "--codecs", "int4", "--windows", "1", "--json") == 2
    captured = capsys.readouterr()
    assert "tuned.json (No space left on device): keep what is printed above" in captured.err
    plan = strict(captured.out)
    assert CachePlan.read(plan).codecs and plan["measured"]["kl_difference_stderr"] is None  # one window tells none


def test_losses_without_bound_are_null_in_a_plan():
    losses = [{"native": 0.0, "int2": math.inf}, {"native": 0.0, "int2": 0.5}]
    held = finite({"kl_alone": losses, "kl_stderr": math.nan, "windows": 1, "beside": "int4"})
    assert held == {
        "kl_alone": [{"native": 0.0, "int2": None}, {"native": 0.0, "int2": 0.5}],
        "kl_stderr": None,
        "windows": 1,
        "beside": "int4",
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tolerance", "kl=abc"], "'kl=abc' is none: write kl=0.01"),
        (["--tolerance", "kl=-1"], "'kl=-1' is none"),
        (["--tolerance", "kl=0"], "'kl=0' is none"),
        (["--tolerance", "0.01"], "'0.01' is none"),
        (["--codecs", "int4,int5"], "'int5' is unknown"),
        (["--texts", "none.txt"], "No such file"),
        (["--length", "2000"], "longer than the model's 512"),
        (["--length", "20"], "ask for --length 32"),
        (["--windows", "200"], "fewer than 105 tokens"),
        (["--steps", "16"], "less than --block-size 16"),
        (["--residual", "-1"], "'-1' is none: write whole numbers"),
        (["--residual", "16,8"], "multiples of --block-size 16"),
        (["--windows", "0"], "--windows 0 must be at least 1"),
        (["--requests", "-2"], "--requests -2 must be at least 1"),
        (["--budget", "4 apples"], "'4 apples' is not a size"),
        (["--budget", "1KiB"], "bytes at least and the budget leaves it 1,024"),
        (["--context", "long"], "'long' is not a number of tokens"),
        (["--block-size", "20", "--residual", "0"], "multiple of 8"),
        (["--model", "/nowhere"], "'/nowhere' cannot be loaded"),
        (
            ["--out", "none/x.json", "--model", "/nowhere"],
            "--out none/x.json cannot be written: give a file in a folder",
        ),
        (["--out", ".", "--model", "/nowhere"], "--out . cannot be written: give a file"),
    ],
)
def test_bad_input_is_a_sentence(options, says, tiny, capsys):
    assert run(tiny, *options) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert says in err[-1] and err[-1].startswith("hf-kvcache tune: ")


def test_without_texts_it_says_where_to_get_some(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["tune", "--model", tiny["PATH_OR_ID"], *QUICK]) == 2
    assert "give --texts FILE" in capsys.readouterr().err
