"""The one GPU script: proves the CUDA kernels on the card at hand, then times them, and the caches that are built on them.

python scripts/gpu_check.py [--out eval/results] [--minutes 8] [--rehearse]

1. Every codec's kernels against attention in float64 over the decoded pages; sealed pages against the codec's own encoding.
2. The hand-written unpacking of codes against the plain one, bit by bit.
3. Tokens of `generate()` through exact caches, host offload and compiled steps included, against the built-in cache's.
4. Decode attention alone, in CUDA graphs: which share of a copy's bandwidth it reaches, and torch's own attention beside it.
5. Decode steps of models with random weights, shaped like Llama-3.1-8B and Qwen3-4B with fewer layers: our caches and the
   built-in ones in turns (`eval/timing.py`), time to the first token, peak memory.

Nothing is timed once a check has failed. What is known is written after each part to one JSON file with date and card; the
tables come last. Parts that no longer fit into `--minutes` are left out, and named. `--rehearse` runs all of it on the CPU in
tiny shapes, which shows that the script works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import math
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen3Config

sys.path.insert(0, str(Path(__file__).parents[1]))
import hf_kvcache
from eval import timing
from hf_kvcache import BlockPool, PagedCache, cache_kwarg, named
from hf_kvcache.codecs import CODECS, Geometry, codec_for
from hf_kvcache.codecs.packing import order_for
from hf_kvcache.kernels import cpu, cuda, dispatch, reference
from tests.kernels.pages import Stored, empty_pages, random_queries, random_stored

# Few shapes, because each is compiled for: every value of every column is in one of them.
SHAPES = [
    dict(k_dim=128, block_size=64, group=4, lengths=(700, 64, 1), dtype=torch.bfloat16),
    dict(k_dim=64, block_size=16, group=3, lengths=(300, 77), q_len=5, window=50, sinks=4, dtype=torch.float16),
    dict(k_dim=80, v_dim=96, block_size=32, group=8, lengths=(200, 0), q_len=16, partial=True, softcap=30.0),
    dict(k_dim=256, block_size=128, group=1, lengths=(500,), sinks=20, window=17, rotary_dim=64, dtype=torch.bfloat16),
]
# Relative. "float" is float32 storage, multiplied in three tensor float parts; bfloat16 rounds probabilities to 8 bits.
LARGEST_RMSE = {"float": 1e-4, "half": 2e-3, "bfloat16": 5e-3}
MARKS = {"native": 0.8, "int8": 0.8, "int4": 0.6}  # share of a copy's bandwidth at 32k tokens, batch 8
SLOPES = {"paged": 0.6, "int8": 0.4, "int4": 0.3}  # of the decode step against DynamicCache's


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    models: dict[str, transformers.PretrainedConfig]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    most_tokens: int  # in one batch: all caches of a size live at once
    rounds: int
    prompt: int
    copied_bytes: int


WHOLE = Plan(
    models={
        "llama-3.1-8b": LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=4,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=128256,
            max_position_embeddings=131072 + 64,
        ),
        "qwen3-4b": Qwen3Config(
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=4,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=131072 + 64,
        ),
    },
    contexts=(2048, 8192, 32768, 131072),
    batches=(1, 8, 32),
    most_tokens=1 << 19,
    rounds=10,
    prompt=8192,
    copied_bytes=1 << 31,
)
SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
TINY = Plan(
    models={"llama-tiny": LlamaConfig(**SMALL, vocab_size=200), "qwen3-tiny": Qwen3Config(**SMALL, vocab_size=200)},
    contexts=(64, 192),
    batches=(1, 2),
    most_tokens=400,
    rounds=3,
    prompt=48,
    copied_bytes=1 << 20,
)


class WrongError(RuntimeError):
    """A check failed: nothing is timed."""


@dataclass
class Report:
    """Everything that is known, written to `path` again and again."""

    path: Path
    about: dict
    checks: list[dict] = field(default_factory=list)
    attention: list[dict] = field(default_factory=list)
    steps: list[dict] = field(default_factory=list)
    lines: list[dict] = field(default_factory=list)
    first_tokens: list[dict] = field(default_factory=list)
    marks: list[dict] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {name: value for name, value in vars(self).items() if name != "path"}
        self.path.write_text(json.dumps(content, indent=1) + "\n")


# ---- right or wrong -----------------------------------------------------------------------------------------------------


def attention_in_float64(stored: Stored, q: torch.Tensor, scale: float, softcap: float | None):
    """`out` `[batch, q_len, heads, v_dim]` and `lse` `[batch, q_len, heads]` over what the pages decode to."""
    view, (batch, heads, q_len, _) = stored.view, q.shape
    turned = q if view.rope is None else view.rope.apply(q)
    out = torch.zeros((batch, q_len, heads, stored.sealed.geometry.v_dim), dtype=torch.float64, device=q.device)
    lse = torch.full((batch, q_len, heads), -torch.inf, dtype=torch.float64, device=q.device)
    for b in range(batch):
        if view.entry_begin[b] == view.entry_end[b]:
            continue
        k, v, index = reference.stored(stored.sealed, stored.open_, view, b)
        k, v = (x.double().repeat_interleave(heads // x.shape[0], 0) for x in (k, v))
        begin, end = (torch.from_numpy(x[b]).to(q.device)[:, None] for x in (view.begin, view.end))
        recent = (index >= begin) & (index < end)
        sink = (index < view.sinks) & (index < end) & ~recent
        scores = torch.where(sink, turned[b].double() @ k.mT, q[b].double() @ k.mT) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~(recent | sink), -torch.inf)
        out[b] = (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(0, 1)
        lse[b] = scores.logsumexp(-1).T
    return out, lse


def check_decode(codec: str, shape: dict, device: torch.device) -> Iterator[dict]:
    """In as many splits as the device likes, and in one, whose loop goes over all tiles."""
    shape = dict(shape)
    name = f"decode {codec} " + " ".join(f"{key}={value}" for key, value in shape.items()).replace("torch.", "")
    group, softcap = shape.pop("group"), shape.pop("softcap", None)
    stored = random_stored(codec, device=str(device), **shape)
    q, scale = random_queries(stored, group).to(device), shape["k_dim"] ** -0.5
    kernels = cuda if device.type == "cuda" else cpu
    assert kernels.supports(stored.sealed.geometry, stored.sealed.codec, q.shape[2])
    expected, expected_lse = attention_in_float64(stored, q, scale, softcap)
    kind = "half" if codec != "native" else {torch.float32: "float", torch.bfloat16: "bfloat16"}.get(q.dtype, "half")
    limit, seen = LARGEST_RMSE[kind], ~expected_lse.isneginf()
    for splits in ("splits", "one split") if device.type == "cuda" else ("splits",):
        with one_multiprocessor() if splits == "one split" else contextlib.nullcontext():
            out, lse = kernels.decode(q, stored.sealed, stored.open_, stored.view, scale, softcap)
        error = ((out.double() - expected).norm() / expected.norm()).item()
        error = max(
            error, (lse.double() - expected_lse)[seen].abs().max().item() / 5
        )  # log-sum-exps are a few units in size
        right = error <= limit and torch.equal(lse.isneginf(), ~seen)
        yield {"check": f"{name}, {splits}", "error": error, "limit": limit, "passed": right}


@contextlib.contextmanager
def one_multiprocessor() -> Iterator[None]:
    """The decode kernel as a small device would run it."""
    known, cuda._multiprocessors = cuda._multiprocessors, lambda device: 1
    try:
        yield
    finally:
        cuda._multiprocessors = known


def check_seal(codec: str, device: torch.device) -> dict:
    """Blocks as the kernel seals them, and as the codec encodes them on the CPU, which divides exactly: the same numbers."""
    chosen, order = codec_for(codec), order_for(device)
    pages = empty_pages(chosen, Geometry(2, 128, 128, 64, torch.bfloat16), 6, device=str(device), order=order)
    k, v = (3 * torch.randn(2, 2, 192, 128).to(torch.bfloat16) for _ in range(2))
    places = np.array([(row, 64 * block) for row in range(2) for block in range(3)], np.int32)
    ids = np.arange(6, dtype=np.int32)
    dispatch.seal(pages, ids, k.to(device), v.to(device), places)
    blocks = (torch.stack([x[row, :, start : start + 64] for row, start in places]) for x in (k, v))
    encoded, sealed = chosen.encode(*blocks, order), pages.gather(ids)
    different = sum(int((sealed[name].cpu().float() != encoded[name].float()).sum()) for name in encoded)
    return {"check": f"seal {codec}: numbers that differ", "error": different, "limit": 0, "passed": different == 0}


def check_unpacking(codec: str, device: torch.device) -> dict:
    """The same kernel with the hand-written instructions and without."""
    stored = random_stored(
        codec, k_dim=128, block_size=64, lengths=(900, 130), dtype=torch.bfloat16, device=str(device)
    )
    q = random_queries(stored, 4).to(device)
    run = lambda: cuda.decode(q, stored.sealed, stored.open_, stored.view, 128**-0.5)  # noqa: E731
    by_hand = run()
    for pages in {id(p): p for p in (stored.sealed, stored.open_)}.values():
        constants, launch = pages.__dict__["_cuda_constants"]
        pages.__dict__["_cuda_constants"] = ({**constants, "ASM": False}, launch)
    same = all(torch.equal(a, b) for a, b in zip(by_hand, run(), strict=True))
    return {"check": f"unpacking {codec}: bit-equal", "error": 0.0 if same else 1.0, "limit": 0.0, "passed": same}


def check_generate(device: torch.device, tokens: int) -> Iterator[dict]:
    """`generate()` through exact caches gives the built-in cache's tokens, in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, vocab_size=200)).to(device).eval()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.dim() > 1):
            parameter.normal_(0, 0.2)
    hf_kvcache.enable(model)
    ids = torch.randint(3, 200, (2, tokens), device=device)
    options = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    expected = model.generate(ids, **options, **cache_kwarg(DynamicCache(config=model.config)))
    pool = BlockPool(model.config, capacity_tokens=4 * tokens)
    caches = {
        name: named.cache_factory(name)(model.config)
        for name in ("paged", f"offloaded:{tokens // 4}", f"disk:{tokens // 4}")
    }
    caches["paged, reserved"] = reserved = PagedCache(model.config, pool=pool)
    for name, cache in caches.items():
        same = torch.equal(model.generate(ids, **options, **cache_kwarg(cache)), expected)
        yield {"check": f"generate {name}: same tokens", "error": float(not same), "limit": 0.0, "passed": same}
    if device.type == "cuda":
        compiled = reserved.is_compileable and hasattr(model, "_compiled_call")
        yield {
            "check": "generate() compiled a step by itself",
            "error": float(not compiled),
            "limit": 0.0,
            "passed": compiled,
        }


def check_everything(report: Report, device: torch.device, tokens: int) -> None:
    """Raises `WrongError` once all checks have been made and some failed."""
    start = time.monotonic()
    for number, codec in enumerate(CODECS):  # every codec on two shapes: each is compiled for, which takes seconds
        for shape in (SHAPES[number % len(SHAPES)], SHAPES[(number + 1) % len(SHAPES)]):
            report.checks += check_decode(codec, shape, device)
    report.checks += [check_seal(codec, device) for codec in CODECS if codec != "native"]
    if device.type == "cuda":
        report.checks += [check_unpacking(codec, device) for codec in CODECS if codec != "native"]
    report.checks += check_generate(device, tokens)
    report.about["seconds_of_checks"] = math.ceil(time.monotonic() - start)
    report.write()
    wrong = [
        f"{c['check']}: {c['error']:.2e}, at most {c['limit']:.0e} is right" for c in report.checks if not c["passed"]
    ]
    if wrong:
        raise WrongError("\n".join(["nothing was timed, because these checks failed:", *wrong]))


# ---- how fast -----------------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 10, samples: int = 5) -> float:
    """Median seconds of `work` on the device alone: captured in a CUDA graph, so that what launches it does not count."""
    if device.type != "cuda":
        return statistics.median(_wall(work) for _ in range(samples))
    work(), work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    times = []
    for _ in range(samples):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / repeats)
    return statistics.median(times)


def _wall(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copy_bandwidth(nbytes: int, device: torch.device) -> float:
    """Bytes read and written per second by a copy of `nbytes`."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / seconds(lambda: target.copy_(source), device)


@torch.inference_mode()
def time_attention(config, context: int, batch: int, copied: float, device: torch.device) -> Iterator[dict]:
    """One layer's decode attention, per cache and for torch's own attention over whole tensors."""
    one = copy.deepcopy(config)
    one.num_hidden_layers, one.layer_types = 1, ["full_attention"]
    kv_heads, dim = one.num_key_value_heads, config.get_text_config().head_dim
    k, v = (torch.randn((batch, kv_heads, context, dim), device=device, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn((batch, config.num_attention_heads, 1, dim), device=device, dtype=torch.bfloat16)
    plain = seconds(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), device)
    known = {"context": context, "batch": batch}
    yield known | {"cache": "sdpa", "us": plain * 1e6, "share": (k.nbytes + v.nbytes) / plain / copied, "ratio": 1.0}
    for name in ("paged", "fp8", "int8", "int4", "int2"):
        cache = named.cache_factory(name)(one)
        cache.update(k, v, 0)
        key, _ = cache.update(k[:, :, -1:], v[:, :, -1:], 0)
        took = seconds(lambda key=key: key.fresh.layer.attend(key.fresh, q, scale=dim**-0.5), device)
        share = cache.memory().stored / took / copied
        yield known | {"cache": name, "us": took * 1e6, "share": share, "ratio": took / plain}


def sizes(plan: Plan) -> list[tuple[int, int]]:
    """`(context, batch)` pairs that fit, the marks' first."""
    pairs = [(c, b) for b in plan.batches for c in plan.contexts if c * b <= plan.most_tokens]
    return sorted(pairs, key=lambda pair: (pair not in ((32768, 8), (32768, 1)), pair[0] * pair[1]))


def time_models(report: Report, plan: Plan, device: torch.device, left: Callable[[], float]) -> None:
    names = [name for name in named.BUILT_IN if named.is_available(name)]
    names += ["paged", "fp8", "int8", "int4", "window:1024+4"]
    if plan is TINY:
        names = [*named.BUILT_IN[:2], "paged", "int4", "window:32+4"]
    for label, config in plan.models.items():
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        hf_kvcache.enable(model)
        shape = (1, config.num_key_value_heads, 1024, config.get_text_config().head_dim)
        exact = [
            tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in "kv")
        ] * config.num_hidden_layers
        ids = torch.randint(3, config.vocab_size, (1, plan.prompt))
        if enough(report, left, 45, f"{label}: first pass"):
            with fits(report, f"{label}: first pass"):
                first = timing.prefill(model, ids.to(device), names, 2)
                report.first_tokens += [{"model": label, **asdict(p)} for p in first]
        timings = []
        for batch in plan.batches:
            for context in (c for c in plan.contexts if c * batch <= plan.most_tokens):
                what = f"{label}: steps at {context} x {batch}"
                if enough(report, left, 40, what):
                    with fits(report, what):
                        timings += timing.measure(model, exact, names, context, batch, plan.rounds)
                    report.steps = [s for s in report.steps if s["model"] != label]
                    report.steps += [{"model": label, **asdict(t)} for t in timings]
                    report.write()
        fitted = [t for t in timings if len({u.context for u in timings if u.batch == t.batch}) > 1]
        report.lines += [{"model": label, **asdict(line)} for line in timing.fit(fitted)]
        report.write()


def enough(report: Report, left: Callable[[], float], needed: float, what: str) -> bool:
    """Whether there is time for one more part; notes what is left out."""
    if left() < needed:
        report.left_out.append(what)
    return left() >= needed


@contextlib.contextmanager
def fits(report: Report, what: str) -> Iterator[None]:
    """What does not fit into the device's memory is left out, and named."""
    try:
        yield
    except torch.OutOfMemoryError:
        report.left_out.append(f"{what} (out of memory)")
    torch.cuda.empty_cache()


# ---- the script ---------------------------------------------------------------------------------------------------------


def marks(report: Report) -> list[dict]:
    """What was aimed at, and what was reached."""
    found = []
    names = {"native": "paged"}
    for codec, mark in MARKS.items():
        for a in report.attention:
            if (a["cache"], a["context"], a["batch"]) == (names.get(codec, codec), 32768, 8):
                found.append(
                    {
                        "mark": f"{codec}: share of copy bandwidth, 32k, batch 8",
                        "aim": mark,
                        "got": a["share"],
                        "least": True,
                    }
                )
    for cache, mark in SLOPES.items():
        for line in report.lines:
            if (line["cache"], line["batch"]) == (cache, 1):
                what = f"{line['model']}, {cache}: slope of the step against DynamicCache's"
                found.append({"mark": what, "aim": mark, "got": line["slope_ratio"], "least": False})
    return [m | {"met": m["got"] >= m["aim"] if m["least"] else m["got"] <= m["aim"]} for m in found]


def table(title: str, rows: list[dict], columns: dict[str, str]) -> None:
    """Print `rows`, a format for each column."""
    if not rows:
        return
    cells = [list(columns), *[[format(row[name], spec) for name, spec in columns.items()] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def show(report: Report) -> None:
    passed = sum(c["passed"] for c in report.checks)
    print(f"\n{report.about['card']}, {report.about['date']}: {passed} of {len(report.checks)} checks passed")
    table(
        "decode attention, one layer",
        report.attention,
        {"cache": "", "context": "d", "batch": "d", "us": ".1f", "share": ".2f", "ratio": ".2f"},
    )
    dynamic = {(s["model"], s["context"], s["batch"]): s["itl"] for s in report.steps if s["cache"] == "dynamic"}
    rows = [
        s | {"ms": s["itl"] * 1e3, "ratio": s["itl"] / dynamic[s["model"], s["context"], s["batch"]]}
        for s in report.steps
    ]
    columns = {"model": "", "cache": "", "context": "d", "batch": "d", "ms": ".2f", "ratio": ".3f", "spread": ".0%"}
    table("decode step", rows, columns)
    table(
        "slopes", report.lines, {"model": "", "cache": "", "batch": "d", "slope_ratio": ".3f", "intercept_ratio": ".3f"}
    )
    firsts = [p | {"peak MB": p["peak"] / 1e6} for p in report.first_tokens]
    table("first pass", firsts, {"model": "", "cache": "", "tokens": "d", "ttft": ".3f", "peak MB": ".0f"})
    table("marks", report.marks, {"mark": "", "aim": ".2f", "got": ".2f", "met": ""})
    for what in report.left_out:
        print(f"left out: {what}")
    print(f"written: {report.path}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("eval/results"), help="folder of the result file")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which nothing more is begun")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in tiny shapes")
    args = parser.parse_args(argv)
    if not args.rehearse and not cuda.available():
        sys.exit(f"{cuda.status()} (--rehearse tries the script itself on a CPU.)")

    start, device = time.monotonic(), torch.device("cpu" if args.rehearse else "cuda")
    plan = TINY if args.rehearse else WHOLE
    left = lambda: 60 * args.minutes - (time.monotonic() - start)  # noqa: E731
    card = "a CPU, as a rehearsal" if args.rehearse else torch.cuda.get_device_name()
    date = datetime.date.today().isoformat()
    about = {"date": date, "card": card, "python": platform.python_version(), "torch": torch.__version__}
    about |= {"transformers": transformers.__version__, "hf_kvcache": hf_kvcache.__version__, "kernels": cuda.status()}
    slug = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    report = Report(args.out / f"gpu-check-{slug}-{date}.json", about)

    check_everything(report, device, 64 if args.rehearse else 1024)
    copied = copy_bandwidth(plan.copied_bytes, device)
    report.about["copy_bandwidth"] = copied
    config = next(iter(plan.models.values()))
    for context, batch in sizes(plan):
        what = f"attention at {context} x {batch}"
        if enough(report, left, 20, what):
            with fits(report, what):
                report.attention += time_attention(config, context, batch, copied, device)
            report.write()
    time_models(report, plan, device, left)
    report.marks = marks(report)
    report.about["seconds"] = math.ceil(time.monotonic() - start)
    report.write()
    show(report)


if __name__ == "__main__":
    main()
