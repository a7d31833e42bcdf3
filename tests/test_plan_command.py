"""`hf-kvcache plan` and `hf-kvcache diagnose`: what they print, and what they say of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_kvcache import ConfigurationError, memory
from hf_kvcache.cli import COMMANDS, main
from hf_kvcache.memory import models
from hf_kvcache.memory.footprint import PagedFootprint

KNOWN = Path(__file__).parent / "known_configs"
LLAMA = str(KNOWN / "llama-3.2-1b.json")


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3n-e4b", "deepseek-v3", "falcon-h1-7b", "t5-base"])
def test_tables_fit_80_columns(capsys, name):
    context = ["--context", "512"] if name == "t5-base" else []
    arguments = ["--device-memory", "80GiB", "--requests", "8", "--lengths", "300,0.5", "--answers", "20,0.5"]
    code, out, err = run(capsys, "plan", "--model", KNOWN / f"{name}.json", *arguments, *context)
    assert code == 0 and not err
    assert max(map(len, out.splitlines())) <= 80
    for word in ("Layers", "weights", "left for caches", "bound", "offloaded:1024", "Simulated", "Assumed", name):
        assert word in out
    assert "…" not in out, "nothing is cut off"


def test_what_is_off_the_device_is_said_by_its_place(capsys):
    caches = ["--cache", "paged,offloaded:1024,disk:1024", "--context", "8k", "--requests", "3"]
    code, out, _ = run(capsys, "plan", "--model", LLAMA, *caches)
    assert code == 0 and "disk" in out and max(map(len, out.splitlines())) <= 80
    # 3 x 7,168 tokens of 32,768 bytes
    said = (
        "Not limited here, with 3 x 8,192 tokens: 672 MiB of host memory (offloaded:1024), 672 MiB of disk (disk:1024)."
    )
    assert said in " ".join(out.split())
    code, out, _ = run(capsys, "plan", "--model", LLAMA, "--cache", "paged,int4", "--requests", "3")
    assert code == 0 and "Not limited here" not in out and "disk" not in out


def test_json_says_what_the_api_says(capsys):
    code, out, _ = run(
        capsys, "plan", "--model", LLAMA, "--device-memory", "8GB", "--context", "4k", "--cache", "paged,int4", "--json"
    )
    assert code == 0
    said = json.loads(out)
    answer = memory.plan(LLAMA, device_memory=8 * 10**9, context=4096, caches=["paged", "int4"])
    assert said["budget"]["pools"] == answer.budget.pools and said["checks"] == []
    assert [cache["context"] for cache in said["caches"]] == [cache.context for cache in answer.caches]
    assert said["layers"][0]["token_bytes"] == 32_768


def test_verify_agrees_here(capsys):
    code, out, _ = run(capsys, "plan", "--model", LLAMA, "--cache", "paged,int4,window:64+4", "--verify")
    assert code == 0 and out.count("to the byte") == 3
    assert max(map(len, out.splitlines())) <= 80


def test_verify_fails_where_bytes_differ(capsys, monkeypatch):
    honest = PagedFootprint.held
    monkeypatch.setattr(
        PagedFootprint, "held", lambda self, n: honest(self, n)._replace(device=honest(self, n).device + 1)
    )
    code, out, _ = run(capsys, "plan", "--model", LLAMA, "--cache", "paged", "--verify")
    assert code == 1 and "no: at 1, 15, 16" in out


def test_a_plot_is_drawn(capsys, tmp_path):
    path = tmp_path / "plan.png"
    code, _, _ = run(
        capsys, "plan", "--model", LLAMA, "--device-memory", "8GiB", "--cache", "paged,int4", "--plot", path
    )
    assert code == 0 and path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 20_000


def test_a_trace_is_simulated(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt_tokens": 600, "output_tokens": 20}\n' * 5)
    code, out, _ = run(
        capsys, "plan", "--model", LLAMA, "--cache", "paged", "--requests", "2", "--trace", path, "--json"
    )
    simulated = json.loads(out)["caches"][0]["simulation"]
    assert code == 0 and simulated["finished"] == 5 and simulated["running"][2] == 2 and simulated["steps"] == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device-memory", "-24GiB"], "'-24GiB' is a size that leaves no room"),
        (["--device-memory", "lots"], "'lots' is not a size; write 24GiB"),
        (["--context", "0"], "'0' is a number of tokens that leaves no room"),
        (["--context", "many"], "not a number of tokens; write 32768 or 32k"),
        (["--context", "1M"], "beyond the 131,072 positions of llama-3.2-1b: plan for fewer"),
        (["--requests", "0"], "requests=0 leaves nothing to plan"),
        (["--tp", "-1"], "shards=-1 leaves nothing to plan"),
        (["--cache", "zip"], "no cache is called 'zip'; kinds are"),
        (["--cache", "int4/size=big"], "there is no cache 'int4/size=big'"),
        (["--cache", "hf-fp8"], "not planned for; use dynamic or one of ours"),
        (["--weights", "3bit"], "weights '3bit' is unknown; use one of auto"),
        (["--dtype", "int7"], "dtype 'int7' is unknown"),
        (["--memory-fraction", "1.5"], "memory_fraction=1.5 must be more than 0 and at most 1"),
        (["--trace", "/nowhere.jsonl"], "the trace /nowhere.jsonl cannot be read"),
        (["--lengths", "4000"], "--lengths '4000' is not MEAN,SIGMA: write 4000,0.8"),
        (["--lengths", "-1,0.5"], "mean=-1.0 must be more than 0"),
        (["--lengths", "4000,nan"], "sigma=nan must be at least 0 and at most 10"),
        (["--rate", "2"], "--rate belongs to --lengths, which is not given"),
        (["--answers", "200,0.5"], "--answers belongs to --lengths, which is not given"),
        (["--device-memory", "9" * 400], "'99999999999999999999...' is a size beyond any that there is"),
        (["--context", "9" * 400], "'99999999999999999999...' is a number of tokens beyond any that there is"),
        (["--plot", "/nowhere/plan.png"], "the plot cannot be written to /nowhere/plan.png"),
    ],
)
def test_bad_input_gets_a_sentence(capsys, arguments, message):
    base = ["plan", "--model", LLAMA] + (["--cache", "paged"] if "--cache" not in arguments else [])
    code, _, err = run(capsys, *base, *(f"{a}={b}" for a, b in zip(arguments[::2], arguments[1::2], strict=True)))
    assert code == 2 and message in err and "Traceback" not in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is no file or folder here, and the hub does not give it"),
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"model_type": ["llama"]}', "knows no model type ['llama'], and its config has no num_hidden_layers"),
        (
            '{"model_type": "martian"}',
            "knows no model type 'martian', and its config has no num_hidden_layers, hidden_size",
        ),
        ('{"model_type": "llama", "num_hidden_layers": "three"}', "this is not a config of a 'llama' model"),
    ],
)
def test_a_model_that_is_none_gets_a_sentence(capsys, tmp_path, content, message):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    code, _, err = run(capsys, "plan", "--model", path if content is not None else "no/such-model")
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1


def test_an_unknown_model_is_estimated_and_says_so(capsys, tmp_path):
    sizes = {"model_type": "martian", "n_layer": 4, "n_embd": 256, "n_head": 8, "n_kv_heads": 2, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    code, out, _ = run(capsys, "plan", "--model", tmp_path, "--cache", "paged", "--context", "64")
    assert code == 0 and "ESTIMATE" in out and "no model type 'martian'" in out
    answer = memory.plan(sizes, context=64, caches=["paged"])
    assert answer.layers[0].token_bytes == 2 * 4 * 2 * 32 * 4 and answer.limit is None
    # 4 layers of (2 x 256 x 256 + 2 x 256 x 64 + 3 x 256 x 1024 + 2 norms of 256), a norm, and two of 1000 x 256
    assert answer.parameters == 4 * (2 * 256**2 + 2 * 256 * 64 + 3 * 256 * 1024 + 512) + 256 + 2 * 256_000


def test_a_model_without_attention_keeps_its_state_only():
    answer = memory.plan({"model_type": "mamba2", "num_hidden_layers": 2}, context=64, caches=["paged"])
    assert answer.caches[0].token_bytes == 0 and any("ESTIMATE" in note for note in answer.notes)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("24GB", 24 * 10**9),
        ("24G", 24 << 30),
        ("1.5 MiB", 3 << 19),
        ("512", 512),
        ("80gib", 80 << 30),
    ],
)
def test_sizes_are_read(text, size):
    assert memory.parse_bytes(text) == size


def test_tokens_are_read():
    assert [memory.parse_tokens(text) for text in ("32k", "32K", "1M", "32,768", "4096")] == [
        32768,
        32768,
        1 << 20,
        32768,
        4096,
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (131_072, "128 KiB"), (1_200_000, "1.14 MiB"), (5 << 33, "40.0 GiB")],
)
def test_sizes_are_shown(count, text):
    assert memory.show_bytes(count) == text


def test_diagnose_prints_what_to_do(capsys, tmp_path):
    path = tmp_path / "pool.jsonl"
    path.write_text(json.dumps({"resident_tokens": 80_000, "requests": 4, "occupancy": 0.98, "allocation_failures": 3}))
    code, out, _ = run(capsys, "diagnose", path, "--model", LLAMA, "--device-memory", "4GiB")
    assert code == 0 and "KV memory is short" in out and "codec" in out and "window" in out
    assert "Weights take" in out and max(map(len, out.splitlines())) <= 80
    code, out, _ = run(capsys, "diagnose", path, "--model", LLAMA, "--json")
    assert json.loads(out)["binds"] and json.loads(out)["findings"][0]["gain"] > 2


def test_diagnose_says_what_is_wrong_with_its_input(capsys, tmp_path):
    path = tmp_path / "pool.jsonl"
    path.write_text('{"occupancy": 3}')
    code, _, err = run(capsys, "diagnose", path, "--model", LLAMA)
    assert code == 2 and "line 1: field occupancy is 3" in err
    code, _, err = run(capsys, "diagnose", tmp_path / "none", "--model", LLAMA)
    assert code == 2 and "cannot be read" in err
    path.write_text('{"occupancy": 0.3}')
    for option, message in (
        ("--device-memory", "'lots' is not a size; write"),
        ("--request-tokens", "'lots' is not a number"),
    ):
        code, _, err = run(capsys, "diagnose", path, "--model", LLAMA, option, "lots")
        assert code == 2 and message in err and len(err.strip().splitlines()) == 1


def test_every_command_explains_itself(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            main([name, "--help"])
        assert stopped.value.code == 0 and COMMANDS[name].__doc__.split()[0] in capsys.readouterr().out
    assert main([]) == 0 and "plan" in capsys.readouterr().out


def test_a_config_without_sizes_is_an_error():
    with pytest.raises(ConfigurationError, match="has no num_hidden_layers, num_attention_heads"):
        models.load({"model_type": "unheard", "hidden_size": 12})
