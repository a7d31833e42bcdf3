"""lm-eval through the cache: the numbers of its own `hf` where the cache is exact, and decode steps everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

pytest.importorskip("lm_eval")
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import fetch_demo_model
import hf_kvcache
from hf_kvcache import lm_eval as command
from hf_kvcache import named
from hf_kvcache.lm_eval import KVCacheLM, Usage, cache_name

from .architectures import VOCABULARY, build

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "eval" / "tasks"
LOSSY = {"cache": "int2", "residual": 0, "block_size": 8}


@pytest.fixture(scope="module")
def tokenizer():
    """Words w2 .. w96, one token each."""
    words = {"<pad>": 0, "<s>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="<s>", clean_up_tokenization_spaces=False
    )


@pytest.fixture
def hf(tokenizer):
    return HFLM(pretrained=build("llama"), tokenizer=tokenizer, batch_size=4)


@pytest.fixture
def make(tokenizer):
    """A `KVCacheLM` on a tiny model."""

    def made(architecture: str = "llama", batch_size: int = 4, **options) -> KVCacheLM:
        return KVCacheLM(pretrained=build(architecture), tokenizer=tokenizer, batch_size=batch_size, **options)

    return made


def words(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{i}" for i in torch.randint(2, VOCABULARY, (count,), generator=generator).tolist())


def request(kind: str, *arguments) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("task", 0, 1))


def choices(contexts=(40, 7, 23, 1), lengths=(1, 1, 5, 2)) -> list[Instance]:
    """Contexts of several lengths with continuations of several lengths each, in no order of length."""
    return [
        request("loglikelihood", words(n, seed=n), " " + words(m, seed=100 * n + 10 * m + i))
        for i, m in enumerate(lengths)
        for n in contexts
    ]


def log_likelihoods(lm: HFLM, requests: list[Instance]) -> torch.Tensor:
    answers = lm.loglikelihood(requests, disable_tqdm=True)
    return torch.tensor([value for value, _ in answers])


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-4)


class Watched:
    """What goes through a model: `(cached columns, new columns, rows)` of every forward pass."""

    def __init__(self, model):
        self.passes: list[tuple[int, int, int]] = []
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, model, args, options):
        (cache,) = (options[key] for key in hf_kvcache.cache_kwarg(None))
        rows, new = options["input_ids"].shape
        self.passes.append((cache.get_seq_length(), new, rows))


# ---- log-likelihoods


@pytest.mark.parametrize("cache", ["dynamic", "static:64", "paged", "paged/block_size=4", "offloaded:8"])
def test_an_exact_cache_gives_the_numbers_of_hf(hf, make, cache):
    requests = choices()
    lm = make(cache=cache)
    assert close(log_likelihoods(hf, requests), log_likelihoods(lm, requests))
    assert [g for _, g in hf.loglikelihood(requests)] == [g for _, g in lm.loglikelihood(requests)]


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_neox", "bloom", "falcon_h1", "gpt_oss"])
def test_other_architectures(tokenizer, make, architecture):
    requests = choices(contexts=(18, 3, 1), lengths=(1, 3))
    hf = HFLM(pretrained=build(architecture), tokenizer=tokenizer, batch_size=1)
    assert close(log_likelihoods(hf, requests), log_likelihoods(make(architecture, cache="paged"), requests))


def test_the_greedy_continuation_is_said_to_be_one(make):
    lm = make(cache="paged")
    context = words(12, seed=3)
    (greedy,) = lm.generate_until([request("generate_until", context, {"max_gen_toks": 4, "until": ["<s>"]})])
    answers = lm.loglikelihood([request("loglikelihood", context, f" {text}") for text in (greedy, words(4, seed=5))])
    assert [is_greedy for _, is_greedy in answers] == [True, False]


@pytest.mark.parametrize("cache", ["paged", "int4", "int2", "window"])
def test_a_batch_of_ragged_rows_gives_the_numbers_of_one_row_at_a_time(make, cache):
    options = {"int4": {"residual": 8, "block_size": 8}, "int2": {"residual": 0, "block_size": 8}}
    options |= {"window": {"window": 8, "sinks": 2, "block_size": 4}}
    requests = choices()
    one, many = (make(batch_size=n, cache=cache, **options.get(cache, {})) for n in (1, 5))
    assert close(log_likelihoods(one, requests), log_likelihoods(many, requests))


def test_a_model_that_keeps_its_own_attention_gets_no_padding(make):
    lm = make("bloom", **LOSSY)
    watched = Watched(lm.model)
    log_likelihoods(lm, choices(contexts=(40, 23)))
    assert lm.batch_size == 1 and {rows for _, _, rows in watched.passes} == {1}


@pytest.mark.parametrize("chunk", [2, 3, 8])
def test_chunks_change_nothing_for_an_exact_cache(hf, make, chunk):
    requests = choices()
    lm = make(cache="paged", score_chunk=chunk)
    assert close(log_likelihoods(hf, requests), log_likelihoods(lm, requests))


def test_chunks_hide_loss(make):
    requests = choices(contexts=(9,), lengths=(24,))
    exact, steps, chunks = (
        log_likelihoods(make(**options), requests)
        for options in ({"cache": "paged"}, LOSSY, LOSSY | {"score_chunk": 24})
    )
    assert (chunks - exact).abs() < (steps - exact).abs()


def test_a_lossy_cache_changes_the_numbers(hf, make):
    requests = choices()
    exact, lossy = log_likelihoods(hf, requests), log_likelihoods(make(**LOSSY), requests)
    long = torch.tensor([len(r.args[0].split()) > 8 for r in requests])
    assert ((exact - lossy).abs()[long] > 1e-3).all()


@pytest.mark.skipif(not named.is_available("hf-fp8"), reason="this transformers has no fp8 cache")
def test_a_lossy_built_in_cache_changes_them_too(hf, make):
    requests = choices(contexts=(40, 23), lengths=(1, 4))
    exact, lossy = log_likelihoods(hf, requests), log_likelihoods(make(cache="hf-fp8"), requests)
    assert ((exact - lossy).abs() > 1e-4).all() and torch.allclose(exact, lossy, atol=1)


def test_contexts_are_cut_as_hf_cuts_them(tokenizer, make, caplog):
    requests = choices()
    hf = HFLM(pretrained=build("llama"), tokenizer=tokenizer, batch_size=4, max_length=16)
    lm = make(cache="paged", max_length=16)
    assert close(log_likelihoods(hf, requests), log_likelihoods(lm, requests))
    assert "8 of 16 contexts were cut" in caplog.text
    with pytest.raises(ValueError, match="17 tokens exceeds the model's 16"):
        lm.loglikelihood([request("loglikelihood", "w2", " " + words(17, seed=0))])


@pytest.mark.parametrize("max_length", [512, 16])
@pytest.mark.parametrize("cache", ["dynamic", "paged"])
def test_rolling(tokenizer, make, cache, max_length):
    requests = [request("loglikelihood_rolling", words(n, seed=n)) for n in (30, 5, 41)]
    hf = HFLM(pretrained=build("llama"), tokenizer=tokenizer, batch_size=2, max_length=max_length)
    lm = make(batch_size=2, cache=cache, max_length=max_length)
    assert close(*(torch.tensor(x.loglikelihood_rolling(requests, disable_tqdm=True)) for x in (hf, lm)))


# ---- what goes through the model


def test_a_shared_context_is_prefilled_once_and_never_in_one_pass_with_a_continuation(make):
    lm = make(batch_size=8, cache="paged")
    watched = Watched(lm.model)
    log_likelihoods(lm, choices(contexts=(40, 23), lengths=(3, 3, 5, 2)))
    prefill, *steps = watched.passes
    assert prefill == (0, 39, 2)
    assert steps == [(39, 1, 8), (40, 1, 8), (41, 1, 6), (42, 1, 2), (43, 1, 2)]


def test_one_token_continuations_of_a_context_share_a_single_step(make):
    lm = make(cache="paged")
    watched = Watched(lm.model)
    log_likelihoods(lm, choices(contexts=(40,), lengths=(1, 1, 1, 1)))
    assert watched.passes == [(0, 39, 1), (39, 1, 1)]


def test_more_choices_than_rows_are_scored_on_forks_of_one_prefill(make):
    lm = make(batch_size=2, cache="paged")
    watched = Watched(lm.model)
    log_likelihoods(lm, choices(contexts=(40,), lengths=(2, 2, 2)))
    assert watched.passes == [(0, 39, 1), (39, 1, 2), (40, 1, 2), (39, 1, 1), (40, 1, 1)]


def test_built_in_caches_never_see_padding(make):
    lm = make(batch_size=8, cache="dynamic")
    watched = Watched(lm.model)
    log_likelihoods(lm, choices(contexts=(40, 23), lengths=(2, 2)))
    lm.generate_until([request("generate_until", words(n, seed=n), {"max_gen_toks": 2}) for n in (9, 5)])
    assert {rows for _, _, rows in watched.passes} == {1}
    assert [new for held, new, _ in watched.passes if not held] == [39, 22, 9, 5]


# ---- generation


@pytest.mark.parametrize("cache", ["dynamic", "paged", "paged/block_size=4"])
def test_generation_is_that_of_hf_with_left_padding(hf, make, cache):
    requests = [
        request("generate_until", words(n, seed=n), {"max_gen_toks": 6, "until": ["w5"]}) for n in (40, 7, 23, 1)
    ]
    assert make(cache=cache).generate_until(requests, disable_tqdm=True) == hf.generate_until(requests)


def test_a_lossy_cache_generates_something_else(hf, make):
    requests = [request("generate_until", words(40, seed=n), {"max_gen_toks": 8}) for n in range(4)]
    assert make(**LOSSY).generate_until(requests) != hf.generate_until(requests)


# ---- records


def test_results_say_what_was_measured(make):
    lm = make(**LOSSY)
    log_likelihoods(lm, choices(contexts=(40,), lengths=(1, 2)))
    lm.generate_until([request("generate_until", words(40, seed=1), {"max_gen_toks": 2})])
    info = lm.get_model_info()
    assert info["cache"] == "int2/block_size=8/residual=0" and info["score_chunk"] == 1
    assert "int2" in info["cache_choices"]
    scored, generated = info["kv"]["scored"], info["kv"]["generated"]
    assert (scored["contexts"], scored["mean_context_tokens"], generated["contexts"]) == (1, 40, 1)
    assert scored["share_compressed"] == pytest.approx((2 * 40 + 40) / (2 * 40 + 41))  # whole blocks of 8, step by step
    assert generated["share_compressed"] == pytest.approx(40 / 41)
    json.dumps(info, default=str)


def test_what_a_window_passed_is_counted(make):
    lm = make(cache="window", window=8, sinks=2, block_size=4)
    log_likelihoods(lm, choices(contexts=(40,), lengths=(1,)))
    assert lm.get_model_info()["kv"]["scored"]["share_compressed"] == pytest.approx(30 / 40)


@pytest.mark.parametrize(
    "options, warns",
    [
        ({"cache": "int4"}, True),
        ({"cache": "window"}, True),
        (LOSSY, False),
        ({"cache": "paged"}, False),
        ({"cache": "dynamic"}, False),
    ],
)
def test_a_lossy_cache_that_lost_nothing_is_warned_about(make, caplog, options, warns):
    lm = make(**options)
    lm.get_model_info()
    assert "too short" not in caplog.text  # nothing ran
    log_likelihoods(lm, choices(contexts=(20,)))
    lm.get_model_info()
    assert ("too short" in caplog.text) == warns


def test_usage_adds_up():
    assert Usage(1, 2, 3, 4.0) + Usage(1, 1, 1, 1.0) == Usage(2, 3, 4, 5.0)
    assert set(Usage(contexts=0).as_dict().values()) == {0, None}


def test_names_and_options():
    assert cache_name("int4", residual=64) == "int4/residual=64"
    assert cache_name("window", window=32, block_size=8) == "window:32+4/block_size=8"
    assert cache_name("window:32+2") == "window:32+2"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cache": "int5"}, "kinds are"),
        ({"cache": "int4", "window": 8}, "cannot be made.*window"),
        ({"cache": "paged", "score_chunk": 0}, "score_chunk=0"),
    ],
)
def test_what_cannot_be_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


# ---- lm-eval around it


@pytest.fixture
def simple(tmp_path, monkeypatch):
    """A run of `simple_evaluate` on a small task in a folder of its own."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # asks other programs, for seconds
    rows = [{"question": words(20 + i, seed=i), "right": i % 2} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tiny.yaml").write_text(
        f"""
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}
output_type: multiple_choice
test_split: test
doc_to_text: question
doc_to_choice: ["w5 w6", "w7"]
doc_to_target: right
"""
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def run(lm, **options):
        return lm_eval.simple_evaluate(model=lm, tasks=["tiny"], task_manager=manager, bootstrap_iters=0, **options)

    return run


def test_simple_evaluate(hf, make, simple):
    theirs, ours, lossy = (simple(lm) for lm in (hf, make(cache="dynamic"), make(**LOSSY)))
    values = lambda run: torch.tensor([[r[0][0] for r in s["resps"]] for s in run["samples"]["tiny"]])  # noqa: E731
    assert ours["results"] == theirs["results"]
    assert close(values(ours), values(theirs)) and not close(values(lossy), values(theirs))
    assert lossy["config"]["cache"] == "int2/block_size=8/residual=0"
    assert lossy["config"]["kv"]["scored"]["contexts"] == 5


def test_the_names_under_which_lm_eval_knows_it():
    assert get_model("hf-kvcache") is KVCacheLM
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["lm_eval.models"]["hf-kvcache"] == f"{KVCacheLM.__module__}:{KVCacheLM.__name__}"
    assert project["scripts"]["hf-kvcache-lm-eval"] == f"{command.main.__module__}:{command.main.__name__}"


def test_a_model_from_a_path_with_arguments_in_one_string(tokenizer, simple, tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = f"pretrained={tmp_path / 'model'},cache=int2/block_size=8,residual=0"
    run = simple("hf-kvcache", model_args=arguments, device="cpu", batch_size=3)
    assert run["config"]["cache"] == "int2/block_size=8/residual=0" and run["config"]["rows_per_batch"] == 3
    assert run["config"]["kv"]["scored"]["share_compressed"] > 0.5


def test_stored_answers_belong_to_one_variant(make, simple, tmp_path):
    store = str(tmp_path / "answers")
    first = simple(make(cache="paged"), use_cache=store)
    lm = make(cache="paged")
    again = simple(lm, use_cache=store)
    assert again["results"] == first["results"] and lm.scored.contexts == 0
    with pytest.raises(ValueError, match=r"int2.*--use_cache path of its own"):
        simple(make(**LOSSY), use_cache=store)


def test_stored_answers_of_another_model_are_refused(hf, make, simple, tmp_path):
    store = str(tmp_path / "answers")
    simple(hf, use_cache=store)
    with pytest.raises(ValueError, match="answers of another model"):
        simple(make(cache="paged"), use_cache=store)


# ---- the command line


TASK_NAMES = ("kv_facts", "kv_needle", "kv_past_tense", "kv_prose")


def test_the_tasks_are_there_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tasks = TaskManager(include_path=str(TASKS), include_defaults=False, metadata={"needle_words": 60}).load(["kv"])
    assert sorted(tasks["tasks"]) == sorted(TASK_NAMES)
    for task in tasks["tasks"].values():
        task.build_all_requests(limit=2, rank=0, world_size=1)
        assert len(task.eval_docs) >= 4 and len({i.args[0] for i in task.instances}) == 2
    (needle,) = (task for name, task in tasks["tasks"].items() if name == "kv_needle")
    document = needle.eval_docs[0]
    assert f"The secret number of {document['city']} is {document['number']}." in document["text"]
    assert needle.process_results(document, [f" {document['number']} or so"]) == {"contains": 1.0}
    assert needle.process_results(document, [" 12"]) == {"contains": 0.0}


FACTS = str(TASKS / "kv_facts.yaml")


@pytest.mark.parametrize(
    "tasks, indexed",
    [
        ([FACTS], False),
        ([f"{FACTS},{TASKS / 'kv_prose.yaml'}"], False),
        ([str(TASKS)], False),
        ([FACTS, "mmlu"], True),
        ([FACTS, "group.yaml"], True),
        (["missing.yaml"], True),
        ([], True),
    ],
)
def test_tasks_given_as_paths_need_no_index(monkeypatch, tmp_path, tasks, indexed):
    (tmp_path / "group.yaml").write_text("group: mine\ntask: [mmlu]\n")
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(command, "cli_evaluate", lambda: seen.append(lm_eval.tasks.TaskManager))
    monkeypatch.setattr(sys, "argv", ["hf-kvcache-lm-eval", *(["--tasks", *tasks] if tasks else []), "--limit", "2"])
    command.main()
    assert (seen == [TaskManager]) == indexed and lm_eval.tasks.TaskManager is TaskManager


def written(out: Path) -> tuple[dict, dict]:
    """Results of a command line, and every answer by question and choice."""
    (results,), (samples,) = out.rglob("results*.json"), out.rglob("samples*.jsonl")
    rows = map(json.loads, samples.read_text().splitlines())
    return json.loads(results.read_text()), {row["doc_id"]: [float(r[0][0]) for r in row["resps"]] for row in rows}


@pytest.mark.demo
@pytest.mark.slow
def test_the_command_line_gives_the_same_with_one_process_and_with_two(tmp_path, monkeypatch):
    """Two facts through int4."""
    model = f"pretrained={fetch_demo_model.fetch()},cache=int4,residual=64"
    run = ["--model", "hf-kvcache", "--model_args", model, "--device", "cpu", "--tasks", FACTS, "--limit", "2"]
    run += ["--batch_size", "1", "--log_samples", "--output_path"]
    monkeypatch.setattr(sys, "argv", ["hf-kvcache-lm-eval", *run, str(tmp_path / "one")])
    command.main()
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    subprocess.run(
        [*launch, "--main_process_port", "0", "-m", "hf_kvcache.lm_eval", *run, str(tmp_path / "two")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        check=True,
    )
    (one, answers), (split, split_answers) = (written(tmp_path / n) for n in ("one", "two"))
    assert one["results"] == split["results"] and one["config"]["kv"] == split["config"]["kv"]
    assert one["config"]["kv"]["scored"]["contexts"] == 2 and one["config"]["kv"]["scored"]["share_compressed"] > 0.5
    assert answers == split_answers and sorted(answers) == [0, 1]
