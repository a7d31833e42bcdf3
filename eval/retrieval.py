"""Retrieval: numbers hidden in a long text and asked for at its end, by context length and by how deep they lie.

The tasks are those of RULER (Hsieh et al. 2024), made here from a seed, without a network: one needle, or several of the same
form of which one is asked for, in real prose or in a few sentences over and over. As in kvpress's evaluation the context is
written through the cache under test before the question is known, and the question and the greedy answer are computed on
top of it, so that what has been compressed is what is read.

A context's keys and values are computed once, exactly, as in a prefill in one pass, and written to every cache. A window is
thereby given keys and values that have seen the whole text: what it fails to answer, it fails for want of the needle alone.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers.cache_utils import Cache

from hf_kvcache import KVCache, cache_kwarg, named
from hf_kvcache.contexts import exact, write

from . import models
from .records import Record
from .session import Session

DIGITS = 6
NEW_TOKENS = DIGITS + 2  # a space, the digits, and one to spare
INTRODUCTION = "This text gives the numbers of some cities, which are to be remembered.\n\n"
NEEDLE = " Keep this in mind: the number of {city} is {code}."
QUESTION = "\n\nWe were told to keep the numbers of some cities in mind. As the text says, the number of {city} is"
NOISE = "The road is long and the day is warm. A bird sits on the wall. We walk on and say little. "
PROSE = 4  # texts; what else has been fetched changes no question
CITIES = [
    "Athens", "Berlin", "Boston", "Cairo", "Chicago", "Denver", "Dublin", "Geneva", "Houston", "Istanbul", "Lima", "Lisbon",
    "London", "Madrid", "Milan", "Moscow", "Munich", "Oslo", "Paris", "Prague", "Rome", "Sydney", "Toronto", "Vienna",
]  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        context, question: token ids; the context has the length asked for.
        code: the digits of the right answer.
        depth: where the needle was to be, 0 at the start of the context and 1 at its end.
        place: the needle's tokens within the context, from and up to.
    """

    context: list[int]
    question: list[int]
    code: str
    depth: float
    place: tuple[int, int]


def sample(
    tokenizer, haystack: Sequence[str], *, seed: int, length: int, depth: float, i: int, keys: int = 1
) -> Sample:
    """The `i`-th question at a length and depth: a function of its arguments alone.

    The needle asked for is where a sentence ends next to `depth`, the other `keys - 1` anywhere.
    """
    rng = random.Random(f"{seed}/{length}/{depth}/{i}/{keys}")
    cities = rng.sample(CITIES, keys)
    codes = [str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for _ in cities]
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
    introduction = encode(INTRODUCTION)
    needles = [encode(NEEDLE.format(city=a, code=b)) for a, b in zip(cities, codes, strict=True)]
    hay = _hay(tokenizer, haystack, rng, length - len(introduction) - sum(map(len, needles)))
    ends = _sentence_ends(tokenizer, hay)
    depths = [depth, *(rng.random() for _ in needles[1:])]
    cuts = [min(ends, key=lambda end, d=d: abs(end - d * len(hay))) for d in depths]
    context, place, previous = introduction, (0, 0), 0
    for cut, j in sorted(zip(cuts, range(keys), strict=True)):
        context = context + hay[previous:cut]
        place = (len(context), len(context) + len(needles[j])) if j == 0 else place
        context, previous = context + needles[j], cut
    question = encode(QUESTION.format(city=cities[0]))
    return Sample(context + hay[previous:], question, codes[0], depth, place)


def _hay(tokenizer, haystack: Sequence[str], rng: random.Random, tokens: int) -> list[int]:
    """`tokens` tokens from somewhere in one of the texts."""
    if tokens < 1:
        raise ValueError(f"a length of {tokens} tokens is left for text beside the needles: ask for longer contexts.")
    text, room = rng.choice(haystack), 12 * tokens  # characters: no prose has so many to a token
    start = rng.randrange(max(1, len(text) - room))
    ids = tokenizer(text[start : start + room], add_special_tokens=False).input_ids[:tokens]
    if len(ids) < tokens:
        raise ValueError(f"a text of {len(text)} characters has fewer than {tokens} tokens: take longer texts.")
    return ids


def _sentence_ends(tokenizer, ids: list[int]) -> list[int]:
    """Places between tokens where a sentence ends; the start and the end are two of them."""
    ends = [i for i, token in enumerate(ids, 1) if tokenizer.decode([token]).rstrip().endswith((".", "!", "?"))]
    return [0, *ends, len(ids)]


def haystack_texts(kind: str) -> list[str]:
    """What needles are hidden in: `prose` (the first of `models.texts`, which are the same everywhere) or `noise`."""
    return list(models.texts().values())[:PROSE] if kind == "prose" else [NOISE * 20_000]


@torch.inference_mode()
def answer(model, tokenizer, cache: Cache, question: Sequence[int]) -> str:
    """The greedy answer on top of what `cache` holds; ends as soon as it has the digits of a code."""
    ids, new = torch.tensor([question], device=model.device), []
    while len(new) < NEW_TOKENS:
        ids = model(ids, **cache_kwarg(cache), logits_to_keep=1).logits[:, -1:].argmax(-1)
        new.append(ids.item())
        text = tokenizer.decode(new)
        if sum(c.isdigit() for c in text) >= DIGITS or new[-1] == tokenizer.eos_token_id:
            break
    return text


def ask(model, tokenizer, question: Sample, factories: Iterable[Callable], tick: Callable[[], None] = lambda: None):
    """`[(answer, compressed share)]` of one sample through a new cache of every factory."""
    context, results = torch.tensor([question.context]), []
    held = exact(model, context)
    for make_cache in factories:
        cache = write(model, context, held, make_cache(model.config))
        share = cache.stats()["compressed"] if isinstance(cache, KVCache) else None
        results.append((answer(model, tokenizer, cache, question.question), share))
        tick()
    return results


@functools.cache
def metric():
    """Our `evaluate.Metric`, from the checkout; imported here because that takes seconds."""
    import evaluate

    return evaluate.load(str(Path(__file__).parent / "metrics" / "answer_accuracy"), keep_in_memory=True)


def score(samples: Sequence[Sample], results: Sequence[tuple[str, float | None]]) -> dict:
    """The metrics of a record: accuracy with a Wilson interval, in all and by depth."""
    codes, answers = [s.code for s in samples], [text for text, _ in results]
    by_depth = []
    for depth in sorted({s.depth for s in samples}):
        at = [i for i, s in enumerate(samples) if s.depth == depth]
        there = metric().compute(predictions=[answers[i] for i in at], references=[codes[i] for i in at])
        by_depth.append({"depth": depth, **{k: there[k] for k in ("right", "n", "low", "high")}})
    total = metric().compute(predictions=answers, references=codes)
    shares = [share for _, share in results if share is not None]
    return {
        **{k: total[k] for k in ("accuracy", "low", "high", "n")},
        "by_depth": by_depth,
        "compressed": sum(shares) / len(shares) if shares else None,
    }


def run(
    session: Session,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int,
    keys: Sequence[int],
    haystack: str = "prose",
    seed: int = 0,
    longest_multi_key: int = 1024,
) -> list[Record]:
    """A record for each length, number of keys and cache, the plain cache first: what it does not find says nothing.

    Several keys are tried only up to `longest_multi_key` tokens.
    """
    points = [(k, n) for k, n in itertools.product(keys, lengths) if k == 1 or n <= longest_multi_key]
    names, texts, records = list(dict.fromkeys(["dynamic", *session.caches])), haystack_texts(haystack), []
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()[:12]
    shared = {"depths": list(depths), "samples": samples, "haystack": haystack, "texts": digest, "seed": seed}
    draw = functools.partial(sample, session.tokenizer, texts, seed=seed)
    with session.progress() as progress:
        for count, length in points:
            places = itertools.product(depths, range(samples))
            drawn = [draw(length=length, depth=depth, i=i, keys=count) for depth, i in places]
            protocol = {"task": "needle" if count == 1 else "multi-key", "keys": count, "length": length, **shared}
            records += _point(session, progress, names, protocol, drawn)
    return records


def _point(session: Session, progress, names: Sequence[str], protocol: dict, drawn: Sequence[Sample]) -> list[Record]:
    """Records of all caches at one point of the protocol.

    The first cache without a record asks for all of them, so that a context is computed once and lives no longer than it
    is needed.
    """
    missing = [name for name in names if session.known("retrieval", name, protocol) is None]
    results = functools.cache(lambda: _ask_all(session, progress, missing, protocol, drawn))
    work = lambda name: score(drawn, [row[missing.index(name)] for row in results()])  # noqa: E731
    return [session.measure("retrieval", name, protocol, functools.partial(work, name)) for name in names]


def _ask_all(session: Session, progress, names: Sequence[str], protocol: dict, drawn: Sequence[Sample]) -> list:
    mine, factories = session.share(drawn), [named.cache_factory(name) for name in names]
    bar = progress.add_task(f"{protocol['task']}, {protocol['length']} tokens", total=len(mine) * len(names))
    tick = lambda: progress.advance(bar)  # noqa: E731
    return session.gather([ask(session.model, session.tokenizer, one, factories, tick) for one in mine])


def configure(parser: argparse.ArgumentParser) -> None:
    """The suite's own arguments."""
    parser.add_argument("--lengths", default="512,1024,2048", help="tokens of context, comma-separated")
    parser.add_argument("--depths", default="0,0.25,0.5,0.75,1", help="where the needle is, 0 to 1, comma-separated")
    parser.add_argument("--samples", type=int, default=1, help="questions for each length and depth")
    parser.add_argument("--keys", default="1,4", help="needles in a context, one of them asked for, comma-separated")
    parser.add_argument("--longest-multi-key", type=int, default=1024, help="longest context with several needles")
    parser.add_argument("--haystack", default="prose", choices=["prose", "noise"], help="what needles are hidden in")
    parser.add_argument("--seed", type=int, default=0, help="of the questions")


def main(session: Session, args: argparse.Namespace) -> list[Record]:
    """Run the suite and print it; quick asks for one needle, at the shortest length, once for each depth."""
    lengths, keys = ([int(x) for x in text.split(",")] for text in (args.lengths, args.keys))
    depths, samples = [float(x) for x in args.depths.split(",")], args.samples
    if session.quick:
        lengths, keys, samples = [min(lengths)], [min(keys)], 1
    records = run(
        session,
        lengths=lengths,
        depths=depths,
        samples=samples,
        keys=keys,
        haystack=args.haystack,
        seed=args.seed,
        longest_multi_key=args.longest_multi_key,
    )
    if session.processes.is_main_process:
        show(records)
    return records


def show(records: Sequence[Record]) -> None:
    """A table for each number of needles: what every cache finds at every length, with its interval, and by depth."""
    for keys in dict.fromkeys(r.protocol["keys"] for r in records):
        chosen = [r for r in records if r.protocol["keys"] == keys]
        asked = chosen[0].protocol
        table = Table(
            title=f"{'one needle' if keys == 1 else f'one of {keys} needles'} in {asked['haystack']}: right answers",
            caption="read: share of the context read as compressed. depths: " + " ".join(map(str, asked["depths"])),
        )
        headings = ("cache", "tokens", "right", "95 %", "read", f"of {asked['samples']} by depth")
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "cache" else "right", overflow="fold")
        for record in chosen:
            table.add_row(record.cache, str(record.protocol["length"]), *_cells(record.metrics))
        Console().print(table)


def _cells(m: dict) -> list[str]:
    return [
        f"{m['accuracy']:.0%}",
        f"{m['low']:.2f}-{m['high']:.2f}",
        "-" if m["compressed"] is None else f"{m['compressed']:.0%}",
        " ".join(str(x["right"]) for x in m["by_depth"]),
    ]
