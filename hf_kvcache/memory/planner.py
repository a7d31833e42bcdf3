"""Before you run: does it fit, how many requests, how long a context, with which cache. Needs no GPU and no weights."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from .. import named
from ..cache import KVCache
from ..errors import ConfigurationError
from ..spec import specs_from_config
from . import budget, models
from .answer import Budget, CachePlan, Plan
from .footprint import Footprint, PagedFootprint, PlainFootprint
from .layers import LayerKind, layer_kinds
from .models import Model
from .simulator import simulate
from .states import state_of
from .units import show_bytes
from .workload import Workload

CACHES = ("dynamic", *named.DEFAULT)
CONTEXT = 8192  # planned for where no context is given and the model allows it
FAR = 1 << 26  # tokens: no search goes further
Caches = Sequence[str] | Mapping[str, Callable[[object], KVCache]]


def plan(
    model,
    *,
    device_memory: int | None = None,
    context: int | None = None,
    requests: int = 1,
    workload: Workload | None = None,
    **settings,
) -> Plan:
    """Plan the memory of `model` for `requests` requests of `context` tokens each, prompt and answer.

    Args:
        model: a config, a dict of its fields, a `config.json` or a folder with one, or a hub id.
        device_memory: bytes of one device; None answers what is needed, and not what fits.
        context: tokens; None for 8,192, or the model's limit where that is less.
        workload: requests to simulate (`workload.py`).
        settings: of the `Planner`.

    Raises:
        ConfigurationError: for numbers that make no sense, a context beyond the model's limit, an unknown cache.
    """
    return Planner(model, **settings).plan(device_memory, context, requests, workload)


class Planner:
    """A model and how it is to be run, ready to be asked for any context and number of requests.

    Args:
        model: as for `plan`.
        caches: names (`named.py`), or functions from a config to an empty cache by name.
        dtype: of weights, keys and values; None for the config's.
        weights: how weights are stored: `auto`, `bf16`, `fp16`, `fp32`, `8bit`, `4bit` (`budget.weight_bytes`).
        shards: tensor-parallel devices; each has an equal part of the weights and its KV heads (`footprint.shard`).
        memory_fraction: of the device that may be planned with.
        runtime: bytes beside all tensors; the default is an assumption for CUDA.
        pass_tokens: tokens of the longest pass (chunked prefill); None for one whole prompt.
        encoder_tokens: of an encoder's text; None for as many as the context has.
        device: whose packed order the pages have.

    Raises:
        ConfigurationError: as `plan`.
    """

    def __init__(
        self,
        model,
        *,
        caches: Caches = CACHES,
        dtype: torch.dtype | None = None,
        weights: str = "auto",
        shards: int = 1,
        memory_fraction: float = 0.9,
        runtime: int = budget.RUNTIME,
        pass_tokens: int | None = None,
        encoder_tokens: int | None = None,
        device: torch.device | str = "cuda",
    ):
        _check_positive(shards=shards, pass_tokens=pass_tokens, encoder_tokens=encoder_tokens)
        if runtime < 0:
            raise ConfigurationError(f"runtime={runtime} must be at least 0 bytes.")
        if not 0 < memory_fraction <= 1:
            raise ConfigurationError(
                f"memory_fraction={memory_fraction} must be more than 0 and at most 1 (0.9 is usual)."
            )
        self.model = models.load(model, dtype)
        self.footprints = footprints(self.model, caches, torch.device(device), shards)
        self.parameters = models.parameters(self.model)
        self.weights = -(-budget.weight_bytes(self.model, self.parameters, weights) // shards)
        self.shards, self.memory_fraction, self.runtime = shards, memory_fraction, runtime
        self.pass_tokens, self.encoder_tokens = pass_tokens, encoder_tokens
        without, with_one = (
            sum(kind.state_bytes for kind in layer_kinds(self.model, 1, source, shards)) for source in (0, 1)
        )
        self.state_bytes, self.source_bytes = (
            without,
            with_one - without,
        )  # of a request; of each token of an encoder's text

    def plan(
        self, device_memory: int | None, context: int | None = None, requests: int = 1, workload: Workload | None = None
    ) -> Plan:
        """See `plan`."""
        context = min(self.model.limit or CONTEXT, CONTEXT) if context is None else context
        _check_positive(device_memory=device_memory, context=context, requests=requests)
        self._check_context(context)
        if workload is not None:
            workload.check(self.model.limit)
        usable = None if device_memory is None else int(device_memory * self.memory_fraction)
        kinds = self.kinds(context)
        return Plan(
            model=self.model.name,
            dtype=str(self.model.dtype).removeprefix("torch."),
            limit=self.model.limit,
            parameters=self.parameters.total,
            context=context,
            requests=requests,
            shards=self.shards,
            layers=kinds,
            budget=self._budget(device_memory, usable, context, requests),
            caches=tuple(self._cache(name, usable, context, requests, workload) for name in self.footprints),
            notes=tuple(self._notes(kinds, context, requests)),
        )

    def kinds(self, context: int) -> tuple[LayerKind, ...]:
        """The model's layers by type, at a context."""
        return layer_kinds(self.model, context, self._source(context), self.shards)

    def _source(self, context: int) -> int:
        """Tokens of an encoder's text."""
        return (self.encoder_tokens or context) if self.model.is_encoder_decoder else 0

    def request_bytes(self, cache: str, context: int) -> int:
        """Device bytes that a request has needed by the time it has `context` tokens."""
        return self.footprints[cache].peak(context) + self._states(context)

    def beside(self, context: int, requests: int) -> int:
        """Device bytes of everything but caches."""
        return self.weights + self.runtime + self._activations(context, requests) + budget.logits(self.model, requests)

    def needed(self, cache: str, context: int, requests: int) -> int:
        """Device bytes of everything, all requests at this context at once."""
        return self.beside(context, requests) + requests * self.request_bytes(cache, context)

    def _states(self, context: int) -> int:
        return self.state_bytes + self._source(context) * self.source_bytes

    def _activations(self, context: int, requests: int) -> int:
        return budget.activations(self.model, self._pass(context), context, requests, self.shards)

    def _pass(self, context: int) -> int:
        """Tokens of the longest pass. An encoder takes its text whole."""
        return max(min(context, self.pass_tokens or context), self._source(context))

    def _budget(self, device: int | None, usable: int | None, context: int, requests: int) -> Budget:
        return Budget(
            device=device,
            margin=0 if device is None else device - usable,
            weights=self.weights,
            runtime=self.runtime,
            activations=self._activations(context, requests),
            logits=budget.logits(self.model, requests),
            pass_tokens=self._pass(context),
            pools=None if usable is None else max(0, usable - self.beside(context, requests)),
        )

    def _cache(
        self, name: str, usable: int | None, context: int, requests: int, workload: Workload | None
    ) -> CachePlan:
        footprint, one = self.footprints[name], self.request_bytes(name, context)
        fits = lambda context, requests: self.needed(name, context, requests) <= usable  # noqa: E731
        longest = most = simulation = None
        if usable is not None:
            room = max(0, usable - self.beside(context, 0)) // max(1, one)  # no more than caches alone would leave it
            most = _largest(room, lambda n: fits(context, n))
            longest = _largest(self.model.limit or FAR, lambda n: fits(n, requests))
        if workload is not None:
            pools = None if usable is None else max(0, usable - self.beside(context, requests))
            simulation = simulate(
                footprint, workload, capacity=pools, users=requests, state_bytes=self._states(context)
            )
        paged = isinstance(footprint, PagedFootprint)
        held = footprint.held([context])
        parts = footprint.anatomy(context) if paged else dict.fromkeys(("scales", "tail", "rounding"), 0)
        return CachePlan(
            name=name,
            block_size=footprint.block_size if paged else 0,
            token_bytes=_growth(footprint, context),
            request_bytes=one,
            host_bytes=int(held.host[0]),
            disk_bytes=int(held.disk[0]),
            scale_bytes=parts["scales"],
            tail_bytes=parts["tail"],
            rounding_bytes=parts["rounding"],
            bound_bytes=requests * one,
            fits=None if usable is None else fits(context, requests),
            requests=most,
            context=longest,
            capped=longest is not None and longest == self.model.limit,
            simulation=simulation,
        )

    def _check_context(self, context: int) -> None:
        if self.model.limit is not None and context > self.model.limit:
            raise ConfigurationError(
                f"a context of {context:,} tokens is beyond the {self.model.limit:,} positions of {self.model.name}: plan for "
                "fewer, or give its config a rope scaling that reaches further."
            )

    def _notes(self, kinds: tuple[LayerKind, ...], context: int, requests: int):
        """What a reader of the numbers has to know."""
        model, count = self.model, self.parameters
        if model.estimate:
            yield f"ESTIMATE: {model.estimate}."
        if count.note:
            yield f"{'' if count.exact else 'ESTIMATE: '}{count.note}."
        unknown = {spec.kind for spec in specs_from_config(model.config) if state_of(model.text, spec.kind) is None}
        if unknown:
            yield f"ESTIMATE: the state of {', '.join(sorted(unknown))} layers is not known here and counted as nothing."
        for kind in kinds:
            if kind.kind == "latent_attention":
                expanded = budget.expanded_bytes(model, self.shards)
                yield (
                    f"Stored is the latent, {kind.token_bytes // kind.layers:,} B per token and layer; transformers' attention "
                    f"expands it to {expanded:,} B in every pass, a layer at a time: counted with the activations."
                )
        if self.shards > 1:
            yield f"Bytes are those of one of {self.shards} devices; KV heads that do not divide by them are held more than once."
        if slower := ", ".join(self._slower(context, requests)):
            yield f"Not limited here, with {requests} x {context:,} tokens: {slower}."
        passed = f"{self._pass(context):,} tokens" if self.pass_tokens else "one prompt"
        yield (
            f"Assumed: passes of {passed} at a time (prompts that are prefilled together need the activations of each), fused "
            f"attention, {self.runtime / (1 << 30):.2f} GiB for the runtime."
        )

    def _slower(self, context: int, requests: int):
        """What all requests keep off the device, where they do."""
        for name, footprint in self.footprints.items():
            held = footprint.held([context]).together(np.zeros((requests, 1), np.int64))
            for size, where in ((int(held.host[0]), "host memory"), (int(held.disk[0]), "disk")):
                if size:
                    yield f"{show_bytes(size)} of {where} ({name})"


def footprints(model: Model, caches: Caches, device: torch.device, shards: int = 1) -> dict[str, Footprint]:
    """The footprint of every cache, by name.

    Raises:
        ConfigurationError: for a name that is none, and for a built-in cache other than `dynamic`.
    """
    made: dict[str, Footprint] = {}
    for name in caches:
        if name == "dynamic":
            made[name] = PlainFootprint(model.config, model.dtype, shards)
            continue
        cache = build(caches[name] if isinstance(caches, Mapping) else name, model.config)
        made[name] = PagedFootprint(cache, model.dtype, device, shards)
    return made


def build(cache: str | Callable[[object], KVCache], config) -> KVCache:
    """An empty cache of ours by name or from a function.

    Raises:
        ConfigurationError: for a name that is none, and for what is no cache of ours.
    """
    try:
        built = (named.cache_factory(cache) if isinstance(cache, str) else cache)(config)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"there is no cache {cache!r}: {error}") from None
    if not isinstance(built, KVCache):
        raise ConfigurationError(f"{cache!r} is a built-in cache that is not planned for; use dynamic or one of ours.")
    return built


def _growth(footprint: Footprint, context: int) -> float:
    """Bytes per token over the last half of a context, from block end to block end."""
    step = footprint.block_size
    end, start = -(-context // step) * step, context // 2 // step * step
    before, after = footprint.held([start, end]).needed.tolist()
    return max(0.0, (after - before) / (end - start))


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, where what fits is no larger than what does not."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda n: not fits(n))


def _check_positive(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value <= 0:
            raise ConfigurationError(f"{name}={value} leaves nothing to plan: give a positive number.")
