"""The README tells the truth: its code runs, its commands are run by CI or here."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from eval import models

from .forcing import demo_model

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


@pytest.mark.demo
def test_the_python_examples_run_one_after_the_other(capsys, tmp_path, monkeypatch):
    import fetch_demo_model

    scope = {"path": str(fetch_demo_model.fetch(progress=False).resolve())}
    monkeypatch.chdir(tmp_path)  # what they leave behind
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), scope)
    assert "QuantizedCache" in capsys.readouterr().out


@pytest.mark.parametrize("command", [line for block in blocks("console") for line in block.splitlines()])
def test_the_commands_of_the_planner_run(command, capsys, monkeypatch, tmp_path):
    from hf_kvcache.cli import main

    name, *arguments = command.replace("plan.png", str(tmp_path / "plan.png")).split()
    monkeypatch.chdir(ROOT)
    assert name == "hf-kvcache" and main(arguments) == 0
    out = capsys.readouterr().out
    assert "request" in out and ("--plot" not in command or (tmp_path / "plan.png").exists())


def test_every_shell_command_is_run_by_ci():
    ci = (ROOT / ".ci" / "run").read_text()
    commands = [
        line.split("#")[0].split()[0] for block in blocks("bash") for line in block.splitlines() if line.strip()
    ]
    assert commands == ["scripts/demo", "scripts/test"]
    assert all(command in ci for command in commands)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a recipe that the README names, on the one demo model of all tests: the JSON of its last line."""
    monkeypatch.setattr(models, "load", lambda name=None: demo_model())

    def run(recipe: str, *options: object) -> dict:
        assert f"`python recipes/{recipe}" in README
        monkeypatch.setattr(sys, "argv", [recipe, *map(str, options)])
        runpy.run_path(str(ROOT / "recipes" / recipe), run_name="__main__")
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.demo
@pytest.mark.slow
def test_the_recipe_compares_caches_and_ends_with_json(run, tmp_path):
    sizes = ["--prompt-tokens", 200, "--new-tokens", 4, "--context", 320, "--steps", 8, "--out", tmp_path]
    result = run("compare_caches.py", "--caches", "paged,int4,window:128+4", *sizes)
    rows = {row["cache"]: row for row in result["caches"]}
    assert list(rows) == ["dynamic", "paged", "int4", "window:128+4"]
    assert rows["paged"]["same_tokens"] and rows["paged"]["loss"]["kl_mean"] < 1e-6
    assert 1e-4 < rows["int4"]["loss"]["kl_mean"] < 0.1
    assert rows["window:128+4"]["loss"]["kl_mean"] > 1e-4, "the scored context is longer than the window"
    assert Path(result["plot"]).stat().st_size > 10_000


@pytest.mark.demo
@pytest.mark.slow
def test_the_recipes_show_what_reuse_and_offload_save(run):
    turns = run("chat_session.py", "--turns", 3, "--user-tokens", 20, "--new-tokens", 13)["turns"]
    assert [turn["history"] for turn in turns] == [0, 33, 66] and all(turn["same_token"] for turn in turns)
    assert [turn["found"] for turn in turns] == [0, 32, 64]

    shared = run("shared_prefix.py", "--requests", 4, "--prefix-tokens", 96, "--own-tokens", 16, "--new-tokens", 2)
    assert shared["same_tokens"] and shared["pinned_tokens"] == 96 and shared["blocks_shared"] == 6
    assert shared["bytes"] * 2 < shared["bytes_apart"] and shared["bytes_over_needed"] < 1.4
    assert shared["hit_rate"] >= 3 * 96 / (4 * 112)

    offload = run("offload.py", "--tokens", 1024, "--resident", 128)
    assert all(offload[codec]["read"] == offload[codec]["on_disk"] > 0 for codec in ("native", "int4"))
    assert offload["int4"]["read"] * 7 < offload["native"]["read"] and offload["native"]["share"] > 0

    tree = run("tree_search.py", "--prompt-tokens", 48, "--depth", 2, "--samples", 2, "--new-tokens", 4)
    assert (
        tree["computed"] * 2 < tree["computed_without"]
        and tree["slots"] < tree["tokens"]
        and tree["blocks_shared"] >= 3
    )


@pytest.mark.demo
@pytest.mark.slow
def test_the_recipe_of_saving_resumes_in_another_process():
    assert "`python recipes/resume_long_document.py`" in README
    command = [sys.executable, "recipes/resume_long_document.py", "--context", "512"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["same_token"] and result["file_over_stored"] <= 1.02


def test_the_recipes_are_short_and_use_public_names_only():
    for recipe in (ROOT / "recipes").glob("*.py"):
        text = recipe.read_text()
        assert len(text.splitlines()) <= 80, f"{recipe.name} is longer than a screenful"
        assert not re.search(r"hf_kvcache\.\w+\.|\._\w", text), f"{recipe.name} reaches behind the public names"


def test_doctor_says_which_kernels_are_in_use(capsys):
    from hf_kvcache.cli import main

    main(["doctor"])
    out = capsys.readouterr().out
    assert "CPU kernels" in out and "CUDA kernels" in out and "int4" in out


def test_every_change_to_the_public_names_is_documented():
    import hf_kvcache

    changelog = (ROOT / "CHANGELOG.md").read_text()
    for name in (
        "PagedCache",
        "SlidingWindowCache",
        "QuantizedCache",
        "OffloadedCache",
        "BlockPool",
        "Session",
        "Ladder",
    ):
        assert name in hf_kvcache.__all__ and name in changelog and name in README
