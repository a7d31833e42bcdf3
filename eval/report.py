"""`python -m eval report`: runs merged into one page that opens anywhere, with the cache to choose (`choice.py`).

The page holds its figures as SVG and needs no network; the same figures lie beside it as PNGs, and `report.json` has
the records, the choices and the warnings. Every caption says what was asked, of which model, where and when.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_kvcache.scoring import NOISE

from .choice import Candidate, Choice, Limits, Model, by_model, compare, scientific
from .quality import RECHUNKED
from .records import Record, load
from .sections import Gallery, milliseconds, origins, sections, yes

SCHEMA = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("results", type=Path, nargs="+", help="results.jsonl of any number of runs")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where report.html, report.json and the PNGs go")
    budget = "largest share of a plain cache's bytes; above 1, bytes per token"
    parser.add_argument("--budget", type=float, default=0.3, help=budget)
    parser.add_argument("--tolerance", type=float, default=0.01, help="largest mean KL to the plain cache, in nats")


def main(args: argparse.Namespace, console: Console) -> None:
    """Write the page, its figures and `report.json` into `args.out`, and print the recommendation."""
    missing = [str(path) for path in args.results if not path.is_file()]
    if missing:
        raise SystemExit(f"no such file: {', '.join(missing)}; give the results.jsonl that the suites of `eval` write.")
    records = load(args.results)
    if not records:
        raise SystemExit(f"no records in {', '.join(map(str, args.results))}.")
    limits = Limits(args.budget, args.tolerance)
    models = by_model(compare(records), limits)
    args.out.mkdir(parents=True, exist_ok=True)
    page = args.out / "report.html"
    page.write_text(render(models, limits, args.out), encoding="utf-8")
    (args.out / "report.json").write_text(as_json(models, limits, records), encoding="utf-8")
    for model in models:
        show(model, console)
    console.print(f"page: {page}", markup=False, soft_wrap=True)


def as_json(models: Sequence[Model], limits: Limits, records: Sequence[Record]) -> str:
    """The report for programs; what is not a finite number is null."""
    report = {
        "schema": SCHEMA,
        "limits": asdict(limits),
        "models": [
            {
                "model": model.name,
                "dtype": model.dtype,
                "choices": [_choice_as_dict(choice) for choice in model.choices],
                "warnings": model.warnings,
            }
            for model in models
        ],
        "records": [asdict(record) for record in records],
    }
    return json.dumps(json.loads(json.dumps(report), parse_constant=lambda _: None), indent=1)


def _choice_as_dict(choice: Choice) -> dict:
    steps = choice.pace and {"context": choice.pace.context, "protocol": choice.pace.part.protocol}
    return {
        "protocol": choice.part.protocol,
        "runs": choice.part.runs,
        "steps": steps,
        "noise_floor": choice.floor,
        "recommended": choice.best and choice.best.cache,
        "verdict": choice.verdict,
        "candidates": [asdict(candidate) for candidate in choice.candidates],
    }


def show(model: Model, console: Console) -> None:
    """The choice on the terminal, in 80 columns."""
    console.print(Text(model.title, style="bold"))
    for warning in model.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    if not model.choices:
        console.print("no records of quality: nothing to recommend.")
    for choice in model.choices:
        table = Table(box=box.SIMPLE_HEAD, width=min(80, console.width))
        table.add_column("cache", overflow="fold")
        for heading in ("bytes", "KL", "top-1", "step ms", "within", "Pareto"):
            table.add_column(heading, justify="right", no_wrap=True)
        for candidate in choice.candidates:
            style = "bold green" if candidate.recommended else None
            table.add_row(Text(candidate.cache), *_cells(candidate), style=style)
        console.print(table)
        console.print(Text(choice.verdict))


def _cells(x: Candidate) -> list[str]:
    within = {(True, True): "both", (True, False): "budget", (False, True): "KL", (False, False): "-"}
    top1 = "-" if x.top1 is None else f"{x.top1:.1%}"
    numbers = [f"{x.ratio:.0%}", scientific(x.kl), top1, milliseconds(x.itl)]
    return [*numbers, within[x.affordable, x.faithful], yes(x.optimal)]


def render(models: Sequence[Model], limits: Limits, folder: Path) -> str:
    """The page; its figures are also written to `folder`."""
    loader = FileSystemLoader(Path(__file__).parent)
    settings = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    page = Environment(loader=loader, autoescape=True, **settings).get_template("report.html.jinja")
    return page.render(
        models=models,
        sections=[sections(model, Gallery(folder, model, i)) for i, model in enumerate(models, 1)],
        limits=limits,
        origins=origins(models),
        control=RECHUNKED,
        noise=scientific(NOISE),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
