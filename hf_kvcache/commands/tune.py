"""Choose a codec for every layer of a model: measure how much each layer minds each codec, solve for the fewest bytes within a
tolerance (with --budget: for the smallest loss within it), and verify the choice on text that had no part in it."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from .. import scoring
from ..attention import enable
from ..codecs import CODECS, codec_for
from ..errors import ConfigurationError
from ..memory.units import parse_bytes, parse_tokens, show_bytes
from ..mixtures import fewest_bytes
from ..tuning import NATIVE, Tuned, Tuner, tune

HELP = "choose a codec for every layer by measurement"
DTYPES = ("float32", "bfloat16", "float16")
LEVELS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # tolerances that the front is shown at


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="path or hub id")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--texts", type=Path, nargs="+", help="plain text to measure on; the demo's if left out")
    parser.add_argument(
        "--tolerance", default="kl=0.01", help="kl=NATS a token may lose on average, or a codec: lose no more than that"
    )
    parser.add_argument("--budget", help="bytes for all requests, such as 4GiB: the smallest loss that fits")
    parser.add_argument("--context", help="tokens of a request, such as 32k, for the bytes; as measured if left out")
    parser.add_argument("--requests", type=int, default=1, help="requests that share the budget")
    parser.add_argument("--codecs", default=",".join(name for name in CODECS if name != NATIVE), help="to choose from")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument(
        "--residual",
        default="64,0",
        help="newest positions that stay exact, to choose from; layers are measured with the first",
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of a measured context")
    parser.add_argument("--steps", type=int, default=32, help="decode steps scored after it")
    parser.add_argument("--windows", type=int, default=6, help="windows of text to choose by, and as many to verify")
    parser.add_argument("--out", type=Path, help="file for the plan that KVCache.from_plan reads")
    parser.add_argument("--json", action="store_true", help="print the plan and nothing else")


def main(args: argparse.Namespace) -> int:
    """Measure, choose, verify, print. The exit code is 1 where what was chosen does not hold the tolerance."""
    request = Request.of(args)
    console = Console(quiet=args.json)
    model, tokenizer = load(args.model, getattr(torch, args.dtype))
    length = scoring.settled(args.length, args.block_size, request.residuals[0])
    check_length(model, length + args.steps + 1)
    texts = read_texts(args.texts)
    ids = scoring.windows(tokenizer, texts, 2 * args.windows, length + args.steps + 1).to(model.device)
    with progress() as bar:
        task = bar.add_task("the plain cache, to compare with", total=None)
        mine, others = (scoring.reference(model, part, args.steps) for part in ids.chunk(2))
        shape = {"block_size": args.block_size, "tokens": request.context or length}
        tuners = [Tuner(model, mine, request.codecs, residual=r, **shape) for r in request.residuals]
        tuner = tuners[0]
        bar.update(task, description="layers and codecs", total=len(tuner.layers) * len(tuner.codecs))
        found = tune(tuners, others, request.tolerance, request.budget, lambda: bar.advance(task))
    about = protocol(args, model, texts, mine, tuner)
    plan = found.plan.as_dict(model=about.pop("model"), measured=about | finite(measured(found)))
    show(found, tuner, request, console)
    console.print(found.plan.call(), highlight=False, markup=False, soft_wrap=True)
    print(json.dumps(plan))
    if args.out:
        write(plan, args.out)
    if not found.holds:
        print(f"hf-kvcache tune: {shortfall(found, request)}", file=sys.stderr)
    return 0 if found.holds else 1


@dataclass(frozen=True)
class Request:
    """What was asked for: `tolerance` in nats or as a codec's name, `budget` bytes for each of `count` requests of
    `context` tokens."""

    tolerance: float | str
    codecs: list[str]
    residuals: list[int]
    budget: int | None
    context: int | None
    count: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> Request:
        """The checked arguments.

        Raises:
            ConfigurationError: for numbers that make no sense, names that are none, and a file that cannot be written.
        """
        if args.out and (os.path.isdir(args.out) or not os.path.isdir(args.out.absolute().parent)):
            raise ConfigurationError(f"--out {args.out} cannot be written: give a file in a folder that exists.")
        for name, least in (("requests", 1), ("windows", 1), ("steps", 1), ("block_size", 8)):
            if getattr(args, name) < least:
                raise ConfigurationError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {least}.")
        if args.steps >= args.block_size:
            raise ConfigurationError(
                f"--steps {args.steps} must be less than --block-size {args.block_size}: no block is to be sealed while the "
                "steps are scored."
            )
        residuals = parse_residuals(args.residual, args.block_size)
        if args.length < args.block_size + max(residuals):
            raise ConfigurationError(
                f"a context of {args.length} tokens seals no block of {args.block_size} behind the {max(residuals)} newest "
                f"ones: ask for --length {args.block_size + max(residuals)} or more."
            )
        tolerance, codecs = parse_tolerance(args.tolerance), args.codecs.split(",")
        codecs += [tolerance] if isinstance(tolerance, str) else []
        for codec in codecs:
            codec_for(codec)
        budget = parse_bytes(args.budget) // args.requests if args.budget else None
        return cls(
            tolerance, codecs, residuals, budget, parse_tokens(args.context) if args.context else None, args.requests
        )


def parse_tolerance(text: str) -> float | str:
    """`kl=0.01` as 0.01, or a codec's name.

    Raises:
        ConfigurationError: for anything else.
    """
    if text in CODECS:
        return text
    name, _, value = text.partition("=")
    try:
        tolerance = float(value) if name == "kl" else math.nan
    except ValueError:
        tolerance = math.nan
    if not 0 < tolerance < math.inf:
        raise ConfigurationError(
            f"--tolerance {text!r} is none: write kl=0.01 (nats that a token may lose on average), or one of "
            f"{', '.join(CODECS)} to lose no more than that."
        )
    return tolerance


def parse_residuals(text: str, block_size: int) -> list[int]:
    """`64,0` as these numbers.

    Raises:
        ConfigurationError: for anything else, and for numbers with which blocks are not sealed at the same moments.
    """
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ConfigurationError(f"--residual {text!r} is none: write whole numbers of tokens, such as 64 or 64,0.")
    residuals = list(dict.fromkeys(map(int, parts)))
    if len({residual % block_size for residual in residuals}) > 1:
        raise ConfigurationError(
            f"--residual {text} are measured on the same windows, where a block has just been sealed with each: let them "
            f"differ by multiples of --block-size {block_size}."
        )
    return residuals


def load(name: str, dtype: torch.dtype):
    """`(model, tokenizer)` of a path or hub id, the model on our attention and on the GPU where there is one."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the model {name!r} cannot be loaded: {str(error).strip().splitlines()[0]}"
        ) from error
    return enable(model.to("cuda" if torch.cuda.is_available() else "cpu")), tokenizer


def check_length(model, tokens: int) -> None:
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and tokens > longest:
        raise ConfigurationError(
            f"windows of {tokens} tokens are longer than the model's {longest}: use a shorter --length."
        )


def read_texts(paths: Sequence[Path] | None) -> list[str]:
    """The texts of files; without any, what `scripts/fetch_eval_data.py` of a checkout has fetched.

    Raises:
        ConfigurationError: a file cannot be read, or there is none.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "hf_kvcache" / "texts"
    found = paths or sorted(folder.glob("*.txt"))
    if not found:
        raise ConfigurationError(
            "there is no text to measure on: give --texts FILE ..., plain text like what the model will read. (The demo's, "
            f"which scripts/fetch_eval_data.py of a checkout fetches, are not in {folder}.)"
        )
    try:
        return [path.read_text() for path in found]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"a text cannot be read: {error}") from error


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar on standard error."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield bar


def protocol(args: argparse.Namespace, model, texts: Sequence[str], windows: scoring.Reference, tuner: Tuner) -> dict:
    """What was measured, on what."""
    config = model.config.get_text_config(decoder=True)
    about = {"name": model.name_or_path, "type": config.model_type, "layers": len(tuner.specs), "dtype": args.dtype}
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()[:12]
    counts = {"windows": args.windows, "steps": args.steps, "context": windows.context, "texts": digest}
    return {"model": about, **counts, "request_tokens": tuner.tokens}


def measured(found: Tuned) -> dict:
    """The numbers of a plan, for readers."""
    return {
        "request_bytes": found.mixture.nbytes,
        "kl_sum": found.mixture.loss,
        "kl_chosen_by": found.loss,
        "kl_verified": found.verified.kl_mean,
        "kl_stderr": found.verified.kl_stderr,
        "kl_tolerance": found.tolerance,
        "top1": found.verified.top1,
        "beside": found.beside,
        "beside_bytes": found.beside_nbytes,
        "beside_kl_verified": found.beside_verified.kl_mean,
        "kl_difference": found.difference,
        "kl_difference_stderr": found.stderr,
        "kl_alone": [
            {codec: float(f"{loss:.3g}") for codec, (_, loss) in options.items()} for options in found.options
        ],
    }


def finite(value):
    """`value` with None for what JSON cannot say: NaN (a standard error over one window) and infinity (a loss without bound)."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(plan: Mapping, path: Path) -> None:
    """Write a plan that has been printed.

    Raises:
        ConfigurationError: that cannot be.
    """
    try:
        path.write_text(json.dumps(plan, indent=1) + "\n")
    except OSError as error:
        raise ConfigurationError(
            f"the plan cannot be written to {path} ({error.strerror}): keep what is printed above."
        ) from error


def show(found: Tuned, tuner: Tuner, request: Request, console: Console) -> None:
    """Tables of what was measured, what could be had, and what was chosen."""
    console.print(sensitivities(found, tuner))
    console.print(levels(found, request))
    console.print(verdict(found, request))
    if found.mixture.nbytes >= found.beside_nbytes and request.budget is None:
        console.print(f"No mixture of these codecs was found that is smaller than {found.beside} in all layers.\n")


def new_table(title: str, *headings: str, caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    return table


def sensitivities(found: Tuned, tuner: Tuner) -> Table:
    """What each codec loses in each layer, the chosen one marked."""
    codecs = tuner.codecs[1:]
    table = new_table("KL of one layer coded alone (* chosen)", "layer", *codecs)
    for layer, options, chosen in zip(tuner.layers, found.options, found.mixture.codecs, strict=True):
        cells = [scoring.readable(options[codec][1]) + ("*" if codec == chosen else " ") for codec in codecs]
        table.add_row(f"{layer}*" if chosen == NATIVE else str(layer), *cells)
    return table


def levels(found: Tuned, request: Request) -> Table:
    """Bytes that tolerances need, as far as the sums of layers tell, corrected by what they were off."""
    native = found.front[-1].nbytes
    table = new_table("What a tolerance needs (estimated)", "KL", "bytes of all requests", "of native")
    smallest = found.front[0]
    for level in LEVELS:
        mixture = fewest_bytes(found.front, level / found.scale)
        if mixture is not None:
            table.add_row(f"{level:g}", show_bytes(mixture.nbytes * request.count), f"{mixture.nbytes / native:.3f}")
        if mixture is smallest:
            break
    return table


def verdict(found: Tuned, request: Request) -> Table:
    """What was chosen beside one codec for all layers, on the windows that had no part in the choice."""
    steps, more = found.verified.steps, f"{found.difference:+.1e} ± {found.stderr:.1e}"
    table = new_table(
        f"{steps} decode steps after {found.verified.context} tokens of other text",
        *("cache", "bytes", "of native", "KL", "top-1"),
        caption=f"chosen - {found.beside}: KL {more} (paired, over windows)",
    )
    rows = [(f"{found.beside}, residual {request.residuals[0]}", found.beside_nbytes, found.beside_verified)]
    rows += [(f"chosen, residual {found.plan.residual}", found.mixture.nbytes, found.verified)]
    for name, nbytes, loss in rows:
        share = f"{nbytes / found.front[-1].nbytes:.3f}"
        kl = f"{scoring.readable(loss.kl_mean)} ± {loss.kl_stderr:.0e}"
        table.add_row(name, show_bytes(nbytes * request.count), share, kl, f"{loss.top1:.1%}")
    return table


def shortfall(found: Tuned, request: Request) -> str:
    """Why the choice does not do, and what would."""
    lost = f"the choice loses {found.verified.kl_mean:.2g} nats where {found.tolerance:.2g} are allowed"
    if request.budget is None:
        return f"{lost}, on the windows that it was not chosen by: measure on more --windows, or allow more."
    needed = fewest_bytes(found.front, found.tolerance / found.scale) or found.front[-1]
    return (
        f"{lost}: that tolerance needs about {show_bytes(needed.nbytes * request.count)}, the budget is "
        f"{show_bytes(request.budget * request.count)}. Allow --tolerance kl={found.verified.kl_mean:.2g}, or ask for a shorter "
        "context or fewer requests."
    )
