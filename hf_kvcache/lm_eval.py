"""EleutherAI's lm-eval, measuring through the cache.

lm-eval's own model `hf` scores a continuation in one forward pass with its context. Such a pass reads the exact keys and
values that it has just computed, so no cache makes a difference. `KVCacheLM` prefills each context into a cache and then
feeds the continuation in decode steps, which read what the cache made of the context.

    hf-kvcache-lm-eval --model hf-kvcache --model_args pretrained=PATH,cache=int4,residual=64 --tasks TASK

is lm-eval's command line with this model known to it (also `python -m hf_kvcache.lm_eval`). Releases of lm-eval that read
entry points know it without that. Several processes split the work, with or without GPUs:

    accelerate launch --multi_gpu --num_processes 2 -m hf_kvcache.lm_eval --model hf-kvcache ...

(`accelerate launch --cpu` starts one process, whatever it is told, unless it has MPI.)
"""

from __future__ import annotations

import argparse
import copy
import functools
import inspect
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lm_eval.tasks
import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers.cache_utils import Cache

from .attention import IMPLEMENTATION, enable
from .cache import KVCache, cache_kwarg
from .named import cache_factory

NAME = "hf-kvcache"
OPTIONS = ("block_size", "residual", "window", "sinks")
logger = logging.getLogger("hf_kvcache")


def cache_name(cache: str, **options: int) -> str:
    """One name, as `named.py` reads them, from a name and options beside it: `int4` and `residual=64` make
    `int4/residual=64`; `window` and `sinks` belong to a cache called plain `window`."""
    if cache == "window":
        cache = f"window:{options.pop('window', 1024)}+{options.pop('sinks', 4)}"
    return "/".join([cache, *(f"{option}={value}" for option, value in options.items())])


@dataclass
class Usage:
    """What caches held while something was computed from them: whether a measurement measured anything.

    Attributes:
        contexts, context_tokens: contexts written through a cache, and their tokens. (A rolling log-likelihood has
            contexts of one token: the text itself is what it writes.)
        held: tokens of all rows that a step could look back on, summed over the steps looked at.
        compressed: how many of those no longer read as they were written; see `KVCache.stats`.
    """

    contexts: int = 0
    context_tokens: int = 0
    held: int = 0
    compressed: float = 0.0

    def look_at(self, cache: Cache) -> None:
        """Add what `cache` holds now. (Built-in caches do not tell.)"""
        if isinstance(cache, KVCache):
            stats = cache.stats()
            held = sum(stats["tokens"])
            self.held += held
            self.compressed += held * stats["compressed"]

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))

    def as_dict(self) -> dict:
        """For the results; None where nothing is known."""
        return {
            "contexts": self.contexts,
            "mean_context_tokens": self.context_tokens / self.contexts if self.contexts else None,
            "share_compressed": self.compressed / self.held if self.held else None,
        }


@dataclass
class Row:
    """One sequence of decode steps, and the requests that it answers: those that differ in their last token only.

    Attributes:
        context: which row of the prefilled batch it goes on from.
        fed: tokens that go through the model, the context's last one first.
        asked: index and continuation of every request.
    """

    context: int
    fed: tuple[int, ...]
    asked: list[tuple[int, list[int]]]


class KVCacheLM(HFLM):
    """lm-eval's `hf` with everything going through a cache.

    Rows of different lengths run as one batch with left padding, which our caches do not store. The built-in ones store
    it like tokens, and so does a model that keeps its own attention: there every batch has one row.

    Args:
        pretrained: path, hub id or model, as for `hf`.
        cache: a name as `named.py` reads them.
        score_chunk: tokens of a continuation per forward pass. The neighbours in a chunk see each other exactly: 1 is
            what generation does, more is faster, hides loss, and depends a little on what is batched with what.
        **options: `block_size`, `residual`, `window`, `sinks` of the cache; the rest is `hf`'s.

    Raises:
        ValueError: for a cache that does not exist or has no such option, a model that is no decoder, or a score_chunk
            below 1.
    """

    def __init__(self, pretrained, *, cache: str, score_chunk: int = 1, **options):
        if score_chunk < 1:
            raise ValueError(f"score_chunk={score_chunk} must be at least 1 token.")
        self.score_chunk = score_chunk
        self.cache_name = cache_name(cache, **{key: options.pop(key) for key in OPTIONS if key in options})
        self._make_cache = cache_factory(self.cache_name)
        _let_accelerate_use_cpus()
        super().__init__(pretrained, **options)
        if self.backend != "causal":
            raise ValueError(f"{NAME} is for decoder-only models, this one is {self.backend}.")
        if hasattr(self, "accelerator"):  # `hf` splits the work only where it finds several GPUs
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        self.scored, self.generated = Usage(), Usage()
        self._of_all_processes: list[tuple[Usage, Usage]] = []
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        self._inspect_cache()

    def _inspect_cache(self) -> None:
        """Make one cache: to fail early, and to know whether it is lossy and whether its batches may have padding."""
        try:
            cache = self._new_cache()
        except TypeError as error:
            raise ValueError(f"the cache {self.cache_name!r} cannot be made: {error}") from error
        self.cache_choices, self.is_lossy, self.pads = repr(cache), False, False
        if isinstance(cache, KVCache):
            enable(self.model)
            self.pads = self.model.config.get_text_config(decoder=True)._attn_implementation == IMPLEMENTATION
            self.is_lossy = any(
                not group.store.lossless or (group.retention.window is not None and not group.retention.native)
                for group in cache.storage.groups
            )

    @property
    def batch_size(self) -> int | str:
        return super().batch_size if self.pads else 1

    def _new_cache(self) -> Cache:
        return self._make_cache(self.model.config)

    # ---- log-likelihoods --------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of every request `(key, context, continuation)`, and whether it is the greedy one."""
        contexts = self._by_context(requests)
        answers: list = [None] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc=f"Scoring: {self.cache_name}")
        width = override_bs or self.batch_size
        if width == "auto":
            width = self._detect_batch_size(sorted(requests, key=lambda r: -len(r[1] + r[2])))
        for batch in _parts(sorted(contexts, key=len, reverse=True), width):
            cache, mask = self._prefill(batch)
            rows = [Row(i, fed, asked) for i, c in enumerate(batch) for fed, asked in contexts[c].items()]
            for part in _parts(sorted(rows, key=lambda row: -len(row.fed)), width):
                for index, answer in self._score(cache, mask, part):
                    answers[index] = answer
                    if (key := requests[index][0]) is not None:  # the parts of a rolling log-likelihood have none
                        self.cache_hook.add_partial("loglikelihood", key, answer)
                    bar.update()
        bar.close()
        return answers

    def _by_context(self, requests: Sequence) -> dict[tuple, dict[tuple, list[tuple[int, list[int]]]]]:
        """Requests by context, then by what is fed after it; cut on the left as `hf` does."""
        contexts: dict = {}
        for index, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(f"a continuation of {len(continuation)} tokens exceeds the model's {self.max_length}.")
            context = tuple(context[-(self.max_length + 1 - len(continuation)) :])
            fed = (context[-1], *continuation[:-1])
            contexts.setdefault(context, {}).setdefault(fed, []).append((index, continuation))
        cut = sum(len(context) + len(continuation) > self.max_length + 1 for _, context, continuation in requests)
        if cut:
            logger.warning(
                "%d of %d contexts were cut on the left: the model takes %d", cut, len(requests), self.max_length
            )
        return contexts

    def _prefill(self, contexts: Sequence[tuple[int, ...]]) -> tuple[Cache, torch.Tensor]:
        """A cache with all but the last token of every context, and its padding mask `[contexts, columns]`."""
        cache = self._new_cache()
        ids, mask = self._padded([context[:-1] for context in contexts], left=True)
        if ids.shape[1]:
            self._forward(ids, mask, cache, **({"logits_to_keep": 1} if self._keeps_logits else {}))
        self.scored += Usage(len(contexts), sum(map(len, contexts)))
        return cache, mask

    def _score(self, cache: Cache, mask: torch.Tensor, rows: list[Row]) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Index and answer of every request of `rows` (longest first), from steps on a copy of the prefilled cache."""
        branch = copy.deepcopy(cache)  # ours: a fork that shares every block
        sources = [row.context for row in rows]
        if sources != list(range(len(mask))):
            branch.batch_select_indices(torch.tensor(sources))
        asked = [(r, *request) for r, row in enumerate(rows) for request in row.asked]
        owner = torch.tensor([r for r, _, _ in asked], device=self.device)
        target, real = self._padded([continuation for _, _, continuation in asked])
        chosen, greedy = torch.zeros(target.shape, device=self.device), ~real.bool()
        for start, log_probs in self._steps(branch, mask[sources], [row.fed for row in rows]):
            alive = int((owner < len(log_probs)).sum())  # rows end from the last one on, and so do their requests
            columns = torch.arange(start, start + log_probs.shape[1], device=self.device)
            who, what = owner[:alive, None], target[:alive, columns]
            chosen[:alive, columns] = log_probs[who, columns - start, what].float()
            greedy[:alive, columns] |= log_probs.argmax(-1)[who, columns - start] == what
        sums, all_greedy = (chosen * real).sum(1).tolist(), greedy.all(1).tolist()
        for (_, index, _), answer in zip(asked, zip(sums, all_greedy, strict=True), strict=True):
            yield index, answer

    def _steps(self, cache: Cache, mask: torch.Tensor, fed: list[tuple]) -> Iterator[tuple[int, torch.Tensor]]:
        """Feed every row, `score_chunk` tokens at a time; rows that have ended leave the batch.

        Yields:
            the place of the chunk's first token, and log-probabilities `[rows left, chunk, vocabulary]`.
        """
        for start in range(0, len(fed[0]), self.score_chunk):
            chunk = [row[start : start + self.score_chunk] for row in fed if len(row) > start]
            if len(chunk) < len(mask):
                cache.batch_select_indices(torch.arange(len(chunk)))
            ids, new = self._padded(chunk)
            mask = torch.cat([mask[: len(chunk)], new], dim=1)
            logits = self._forward(ids, mask, cache)
            self.scored.look_at(cache)
            yield start, logits.log_softmax(-1, dtype=self.softmax_dtype or torch.float32)

    @torch.no_grad()
    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, cache: Cache, **options) -> torch.Tensor:
        """Logits of the newest columns `ids`; `mask` covers what is cached as well."""
        if not mask.all():
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            options |= {"attention_mask": mask, "position_ids": positions}
        precision = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=precision, enabled=precision is not None):
            return self.model(input_ids=ids, use_cache=True, **cache_kwarg(cache), **options).logits

    def _padded(self, rows: Sequence[Sequence[int]], left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids `[rows, longest]` with zeros where a row has ended (or not begun), and 1 where it has a token."""
        longest = max(map(len, rows))
        ids, mask = torch.zeros((2, len(rows), longest), dtype=torch.long)
        for r, row in enumerate(rows):
            place = slice(longest - len(row), longest) if left else slice(len(row))
            ids[r, place], mask[r, place] = torch.tensor(row, dtype=torch.long), 1
        return ids.to(self.device), mask.to(self.device)

    # ---- generation -------------------------------------------------------------------------------------------------

    def _model_generate(self, context, max_length: int, stop: list[str], **options) -> torch.Tensor:
        cache = self._new_cache()
        out = super()._model_generate(context, max_length, stop, **cache_kwarg(cache), **options)
        self.generated += Usage(len(context), int(options["attention_mask"].sum()))
        self.generated.look_at(cache)
        return out

    # ---- records ----------------------------------------------------------------------------------------------------

    @property
    def variant(self) -> str:
        """Everything that answers depend on, the requests apart."""
        model = {key: getattr(self, key) for key in ("revision", "peft", "delta", "max_length")}
        model |= {"model": self.model.name_or_path, "dtype": str(self.model.dtype)}
        return json.dumps(model | {"cache": self.cache_name, "score_chunk": self.score_chunk}, sort_keys=True)

    def set_cache_hook(self, cache_hook) -> None:
        """Use lm-eval's store of answers (`--use_cache`), whose keys are the requests alone, for one variant only.

        Raises:
            ValueError: when it holds answers of anything else.
        """
        store = cache_hook.dbdict
        owner = store.get(NAME, "another model" if len(store) else self.variant)
        if owner != self.variant:
            raise ValueError(
                f"{store.filename} has answers of {owner}, and this is {self.variant}: they would be taken for this one's. "
                "Give every variant a --use_cache path of its own."
            )
        store[NAME] = self.variant
        super().set_cache_hook(cache_hook)

    def barrier(self) -> None:
        """Wait for the other processes; the first one learns what their caches held. (lm-eval repeats a request where one
        process has fewer; it is counted twice.)"""
        super().barrier()
        self._of_all_processes = self.gather_object((self.scored, self.generated)) or []

    def get_model_info(self) -> dict:
        """What lm-eval writes into the results: the model, the cache, and whether it had anything to do.

        Warns where a lossy cache never lost anything: contexts were too short, and the results say nothing about it.
        """
        parts = zip(*(self._of_all_processes or [(self.scored, self.generated)]), strict=True)
        usage = {kind: sum(part, Usage()) for kind, part in zip(("scored", "generated"), parts, strict=True)}
        for kind, used in usage.items():
            if used.contexts and self.is_lossy and not used.compressed:
                logger.warning(
                    "%s compressed nothing of what was %s through it: its %d contexts, of %.0f tokens on average, are too "
                    "short for it, and the results say nothing about it.",
                    *(self.cache_name, kind, used.contexts, used.context_tokens / used.contexts),
                )
        return super().get_model_info() | {
            "cache": self.cache_name,
            "cache_choices": self.cache_choices,
            "score_chunk": self.score_chunk,
            "rows_per_batch": self.batch_size,
            "kv": {kind: used.as_dict() for kind, used in usage.items()},
        }


def _let_accelerate_use_cpus() -> None:
    """Without GPUs, Accelerate takes each of several processes for the only one unless it is told that CPUs are meant. And
    on its "cpu:0" the weights are copied, which changes last bits: on "cpu" results are those of a single process."""
    if "LOCAL_RANK" in os.environ and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")


def _parts(items: Sequence, size: int) -> Iterator[Sequence]:
    """`items` in runs of `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))


def _stands_alone(name: str) -> bool:
    """Whether `name` is the path of tasks that refer to no others by name."""
    path = Path(name)
    files = list(path.glob("*.yaml")) if os.sep in name and path.is_dir() else [path]
    return all(f.suffix == ".yaml" and f.is_file() and "\ngroup:" not in "\n" + f.read_text("utf-8") for f in files)


def main() -> None:
    """lm-eval's command line. Where all tasks are given as paths it starts without lm-eval's index of its own tasks, which
    takes longer to read (tens of seconds) than a small task to run."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tasks", "-t", nargs="*", default=[])
    tasks = [name for given in parser.parse_known_args()[0].tasks for name in given.split(",")]
    manager = lm_eval.tasks.TaskManager
    if tasks and all(map(_stands_alone, tasks)):
        lm_eval.tasks.TaskManager = functools.partial(manager, include_defaults=False)
    try:
        cli_evaluate()
    finally:
        lm_eval.tasks.TaskManager = manager


if __name__ == "__main__":
    from hf_kvcache.lm_eval import main  # the class must be registered from the module that the entry point names

    main()
else:
    register_model(NAME)(KVCacheLM)
