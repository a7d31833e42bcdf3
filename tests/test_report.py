"""The report: what it recommends and warns of, what may stand in one table, and that the page needs no network."""

from __future__ import annotations

import argparse
import io
import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from eval import plots, report
from eval.choice import Limits, by_model, compare, pareto
from eval.records import Record

RUN = {
    "model": "org/tiny",
    "dtype": "float32",
    "attention": "hf_kvcache",
    "device": "Some CPU",
    "threads": 2,
    "commit": "abc1234",
    "hf_kvcache": "0.1.0",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "date": "2026-01-02 03:04 UTC",
}
PLAIN = 1000  # bytes per token of the plain cache
NASTY = 'int4/<script>alert("x")</script>'


def quality(cache: str, ratio: float, kl: float, *, context: int = 100, run: dict | None = None, **metrics) -> Record:
    protocol = {"context": context, "steps": 8, "windows": 2, "score_chunk": 1, "prefill_chunk": None, "texts": "0f"}
    if cache == "dynamic/rechunked":
        protocol["prefill_chunk"] = 64
    held = {"bytes": int(ratio * PLAIN * 2 * context), "plain_bytes": PLAIN * 2 * context}
    buckets = [{"from": i, "to": i + 4, "kl": kl * (1 + i), "top1": 0.9} for i in (0, 4)]
    scored = {"ppl": 20.5, "ppl_plain": 20.0, "nll_change": 0.0247, "nll_stderr": 0.01, "top1": 0.9, "identical": 0.5}
    losses = {"kl_mean": kl, "kl_stderr": kl / 100, "kl_p99": 5 * kl, "kl_max": 9 * kl, "first_difference": None}
    found = {**held, **scored, **losses, "by_position": buckets, "compressed": 0.9} | metrics
    return Record("quality", cache, protocol, RUN | (run or {}), found)


def latency(cache: str, itl: float) -> Record:
    timings = [{"context": n, "itl": itl * n / 100, "spread": 0.05, "bytes": n} for n in (100, 1000)]
    line = {"slope": itl / 100, "intercept": 0.0, "slope_ratio": 1.0, "intercept_ratio": 1.0, "break_even": None}
    reads = {"bandwidth": float("inf"), "read_bandwidth": 1e10, "peak_bytes": 1e6, "ttft": 0.1}
    return Record("latency", cache, {"contexts": [100, 1000], "batch": 1}, RUN, {"timings": timings, **line, **reads})


def retrieval(cache: str) -> Record:
    depths = [{"depth": d, "right": r, "n": 4, "low": 0.1, "high": 0.9} for d, r in ((0.0, 4), (0.5, 1), (1.0, 3))]
    protocol = {"keys": 1, "length": 512, "haystack": "prose", "depths": [0.0, 0.5, 1.0], "samples": 4, "seed": 0}
    found = {"accuracy": 8 / 12, "low": 0.39, "high": 0.86, "n": 12, "by_depth": depths, "compressed": 0.9}
    return Record("retrieval", cache, protocol, RUN, found)


def streaming(cache: str, ppl: float) -> Record:
    parts = [{"from": i, "to": i + 100, "ppl": ppl} for i in (0, 100)]
    found = {"ppl": ppl, "ppl_recomputed": 20.0, "ratio": ppl / 20, "by_position": parts}
    return Record("streaming", cache, {"window": 64, "tokens": 200}, RUN, found)


CONTROL = quality("dynamic/rechunked", 1.0, -2e-8, compressed=None)
EVERYTHING = [
    CONTROL,
    quality("paged", 1.01, 4e-8, compressed=0.0),
    quality("int8", 0.52, 2e-5),
    quality("int4", 0.28, 4e-3),
    quality(NASTY, 0.284, 5e-3),
    quality("int2", 0.15, 0.1),
    quality("window:1024+4", 1.0, 0.0, compressed=0.0),
    *(latency(cache, itl) for cache, itl in (("dynamic", 0.02), ("int4", 0.018), (NASTY, 0.012))),
    *(retrieval(cache) for cache in ("int4", NASTY)),
    *(streaming(cache, ppl) for cache, ppl in (("window:64+4", 20.1), ("window:64+0", 900.0))),
]


def choices(records: list[Record], budget: float = 0.3, tolerance: float = 0.01):
    (model,) = by_model(compare(records), Limits(budget, tolerance))
    return model


def written(folder: Path, records: list[Record], *options: str) -> tuple[str, dict, str]:
    """The page, the JSON and what was printed for `records`."""
    folder.mkdir(exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(asdict(record)) + "\n" for record in records))
    parser, text = argparse.ArgumentParser(), io.StringIO()
    report.configure(parser)
    args = parser.parse_args([str(folder / "results.jsonl"), "--out", str(folder), *options])
    report.main(args, Console(file=text, width=80))
    page, data = (folder / "report.html").read_text(encoding="utf-8"), (folder / "report.json").read_text()
    return page, json.loads(data, parse_constant=pytest.fail), text.getvalue()


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return folder, *written(folder, EVERYTHING)


@pytest.fixture
def undrawn(monkeypatch):
    """Pages without pictures, which take most of the time."""
    for name in ("tradeoff", "curves", "heat_map"):
        monkeypatch.setattr(plots, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(plots, "save", lambda *args: "")


class Tags(HTMLParser):
    """Tags with their attributes, and ids."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def named(self, *names: str) -> list[dict]:
        return [attrs for tag, attrs in self.tags if tag in names]


def test_the_page_asks_nothing_of_a_network(full):
    _, page, _, _ = full
    tags = Tags(page)
    links = [attrs[key] for _, attrs in tags.tags for key in ("src", "href", "xlink:href", "action") if key in attrs]
    ids = [attrs["id"] for _, attrs in tags.tags if "id" in attrs]
    assert links and all(link.startswith("#") for link in links)
    assert {link[1:] for link in links} <= set(ids) and len(ids) == len(set(ids))
    assert not tags.named("script", "link", "img", "iframe") and "@import" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_the_page_can_be_read_without_seeing_it(full):
    _, page, _, _ = full
    tags = Tags(page)
    assert len(tags.named("h1")) == 1 and tags.named("main") and tags.named("html") == [{"lang": "en"}]
    assert len(tags.named("caption")) == len(tags.named("table")) > 5
    assert all(svg["role"] == "img" and re.search("int4|window", svg["aria-label"]) for svg in tags.named("svg"))


def test_names_are_escaped(full):
    _, page, data, _ = full
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert NASTY in {x["cache"] for x in data["models"][0]["choices"][0]["candidates"]}


def test_every_suite_has_a_section_and_every_number_an_origin(full):
    _, page, _, _ = full
    for heading in ("Choice", "Quality", "Retrieval", "Streaming", "Latency"):
        assert f"<h3>{heading}</h3>" in page
    captions = re.findall(r"<caption>(.*?)</caption>", page, re.DOTALL)
    for caption in captions[:-1]:  # the last table is the list of origins itself
        assert all(word in caption for word in ("org/tiny", "float32", "Some CPU", "abc1234", "Protocol: "))


def test_pictures_lie_beside_the_page(full):
    folder, page, _, _ = full
    pictures = sorted(path.name for path in folder.glob("*.png"))
    for stem in ("bytes-100", "time-100", "position-100", "needles-1-512", "streaming", "latency-1"):
        assert f"1-org-tiny-float32-{stem}.png" in pictures
    assert len(pictures) == page.count("<figure>")
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_the_json_holds_records_choices_and_limits(full):
    _, _, data, _ = full
    (choice,) = data["models"][0]["choices"]
    assert data["schema"] == 1 and data["limits"] == {"budget": 0.3, "tolerance": 0.01}
    assert len(data["records"]) == len(EVERYTHING) and choice["recommended"] == NASTY
    assert choice["runs"] == [RUN] and choice["steps"]["context"] == 100


def test_the_terminal_shows_the_choice_in_80_columns(full):
    _, _, _, printed = full
    assert "28%" in printed and "both" in printed and "page: " in printed
    assert all(len(line) <= 80 for line in printed.splitlines() if not line.startswith("page: "))


def test_a_page_of_one_suite_says_that_nothing_is_recommended(tmp_path, undrawn):
    page, data, printed = written(tmp_path, [retrieval("int4")])
    assert "<h3>Retrieval</h3>" in page and "<h3>Quality</h3>" not in page and data["models"][0]["choices"] == []
    assert "nothing to recommend" in printed and "nothing is recommended" in page


def test_metrics_may_be_missing_or_infinite(tmp_path):
    broken = quality("int4", 0.3, float("nan"), by_position=[], kl_stderr=None, nll_change=float("inf"))
    page, data, _ = written(tmp_path, [quality("int8", 0.5, 1e-4), broken], "--tolerance", "1e-9")
    assert "not finite" in page and data["models"][0]["choices"][0]["recommended"] is None


def test_the_front_holds_what_nothing_beats():
    points = {"a": (1.0, 0.0), "b": (0.5, 0.1), "c": (0.5, 0.2), "d": (0.2, 0.3), "e": (0.6, 0.15), "f": (0.2, 0.3)}
    assert pareto(points) == ["a", "b", "d", "f"]


def test_labels_are_moved_apart_and_no_further():
    assert plots._apart([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert plots._apart([0.1, 0.5, 0.5, 0.52], 0.1) == pytest.approx([0.1, 0.40667, 0.50667, 0.60667], abs=1e-4)


def test_below_the_noise_floor_no_cache_is_better():
    (choice,) = choices([CONTROL, quality("paged", 1.0, 4e-8), quality("offloaded:8", 1.1, 1e-9)]).choices
    assert [x.cache for x in choice.candidates if x.optimal] == ["paged"]


def test_the_smallest_cache_within_both_limits_is_recommended():
    records = [CONTROL, quality("int8", 0.29, 2e-5), quality("int4", 0.2, 4e-3), quality("int2", 0.1, 0.1)]
    (choice,) = choices(records).choices
    assert choice.best.cache == "int4" and not choice.warnings
    assert choice.verdict.startswith("At 100 tokens of context: int4 holds 20% of the bytes at KL 4.0e-3")
    assert choices(records, tolerance=1e-3).choices[0].best.cache == "int8"
    assert choices(records, tolerance=0.5).choices[0].best.cache == "int2"


def test_of_equal_bytes_the_faster_is_recommended():
    records = [quality("int4", 0.281, 4e-3), quality("k4v4", 0.284, 3e-3), latency("int4", 0.02), latency("k4v4", 0.01)]
    assert choices(records).choices[0].best.cache == "k4v4"
    assert choices(records[:2]).choices[0].best.cache == "int4"


def test_a_budget_above_one_is_bytes_per_token():
    records = [quality("int8", 0.5, 2e-5), quality("int4", 0.28, 4e-3)]
    assert choices(records, budget=300).choices[0].best.cache == "int4"
    assert choices(records, budget=200).choices[0].best is None
    assert choices(records, budget=500, tolerance=1e-3).choices[0].best.cache == "int8"


def test_where_nothing_fits_the_verdict_says_what_comes_closest():
    records = [quality("int8", 0.5, 2e-5), quality("int4", 0.28, 4e-3)]
    verdict = choices(records, tolerance=1e-3).choices[0].verdict
    assert "no cache fits at most 30% of a plain cache's bytes at a KL of at most 0.001" in verdict
    assert "smallest within the tolerance is int8 with 50%" in verdict and "within the budget is int4" in verdict
    assert choices(records, budget=0.1, tolerance=1e-9).choices[0].verdict.endswith("None is within either limit.")


def test_an_idle_cache_is_warned_of_and_not_recommended():
    model = choices([CONTROL, quality("int4", 0.2, 0.0, compressed=0.0), quality("paged", 0.3, 0.0, compressed=0.0)])
    assert [text for text in model.warnings if "int4 had compressed nothing" in text]
    assert not [text for text in model.warnings if "paged" in text] and model.choices[0].best.cache == "paged"


def test_a_bad_or_missing_control_is_warned_of():
    records = [quality("int4", 0.2, 4e-3)]
    assert "No control" in choices(records).warnings[0]
    assert choices([*records, CONTROL]).warnings == []
    assert "above 1.0e-5" in choices([*records, quality("dynamic/rechunked", 1.0, 1e-3)]).warnings[0]
    assert "KL not finite" in choices([*records, quality("dynamic/rechunked", 1.0, float("nan"))]).warnings[0]


def test_a_close_call_is_warned_of():
    assert "two standard errors" in choices([CONTROL, quality("int4", 0.2, 0.009, kl_stderr=1e-3)]).warnings[0]


def test_mixed_commits_and_devices_are_warned_of():
    records = [
        CONTROL,
        quality("int4", 0.2, 4e-3, run={"commit": "def+", "device": "A GPU"}),
        quality("int8", 0.5, 0.0),
    ]
    found = choices(records).warnings
    assert "device differs between caches: Some CPU, A GPU." in found[0].replace(" / ", ", ")
    assert "commit differs" in found[1] and "abc1234" in found[1] and "def+" in found[1]


def test_models_dtypes_and_protocols_are_never_mixed(tmp_path, undrawn):
    other = {"model": "/data/models/other"}
    records = [
        quality("int4", 0.2, 4e-3),
        quality("int4", 0.2, 4e-3, context=200),
        quality("int8", 0.5, 1e-5, run=other),
    ]
    records.append(quality("int8", 0.5, 1e-5, run={"dtype": "bfloat16"}))
    models = by_model(compare(records), Limits(0.3, 0.01))
    assert [model.title for model in models] == ["org/tiny, float32", "other, float32", "org/tiny, bfloat16"]
    assert [len(model.choices) for model in models] == [2, 1, 1]
    page, _, _ = written(tmp_path, records)
    for table in re.findall(r"<table>.*?</table>", page, re.DOTALL):
        assert ("org/tiny" in table) != (">other" in table)


def test_the_control_stands_beside_what_it_controls():
    parts = compare([CONTROL, quality("int4", 0.2, 4e-3), quality("int4", 0.2, 4e-3, context=200)])
    assert [[record.cache for record in part.records] for part in parts] == [["dynamic/rechunked", "int4"], ["int4"]]


def test_a_missing_file_and_an_empty_one_are_named(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for path, words in (
        (tmp_path / "none.jsonl", "no such file: .*none.jsonl"),
        (empty, "no records in .*empty.jsonl"),
    ):
        args = argparse.Namespace(results=[path], out=tmp_path, budget=0.3, tolerance=0.01)
        with pytest.raises(SystemExit, match=words):
            report.main(args, Console())
