"""A codec for every layer, chosen by measurement: how much each layer minds each codec, the mixture that is cheapest within a
tolerance, and what that one loses in truth.

Each layer is coded alone, all others left native, and scored through the cache against the plain one (`scoring.py`). The sums
of such losses give the front of mixtures (`mixtures.py`). They are nearly right: what was chosen is measured as a whole on the
same windows, and the sums are corrected by what they were off, until the choice stays. (A residual costs more bytes the shorter
the texts, and spares every layer some loss, so it is chosen along with the codecs.) Then it is verified on windows that had
no part in the choice, in true decode steps, beside a cache with one codec for all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from . import scoring
from .cache import KVCache
from .errors import ConfigurationError
from .mixtures import Mixture, fewest_bytes, front, least_loss
from .plan_file import CachePlan
from .scoring import NOISE, Compared, Divergence, Reference
from .spec import specs_from_config

ROUNDS = 6  # corrections of the sums; two or three are usual
TRIES = 5  # choices that are verified at most
NATIVE = "native"


class Tuner:
    """Measures mixtures of codecs through caches of one model.

    Args:
        model: on our attention (`enable`).
        windows: contexts that end where a block is sealed (`scoring.settled`), and what follows them, to choose by.
        codecs: names of those to choose from; native is always one of them.
        block_size, residual: of every cache.
        tokens: of the request whose bytes are counted.
    """

    def __init__(
        self, model, windows: Reference, codecs: Sequence[str], *, block_size: int, residual: int, tokens: int
    ):
        self.model, self.windows, self.tokens = model, windows, tokens
        self.block_size, self.residual = block_size, residual
        self.specs = specs_from_config(model.config)
        self.layers = [index for index, spec in enumerate(self.specs) if spec.stores]
        self.codecs = list(dict.fromkeys([NATIVE, *codecs]))
        native = self.uniform(NATIVE)
        self.floor = self._measured(native)  # rounding, which differs between passes and steps
        self._losses = {native: 0.0}

    def plan(self, codecs: Sequence[str]) -> CachePlan:
        """Of a codec for each layer that stores something."""
        names: list[str | None] = [None] * len(self.specs)
        for layer, name in zip(self.layers, codecs, strict=True):
            names[layer] = name
        return CachePlan(self.block_size, self.residual, tuple(names))

    def cache(self, codecs: Sequence[str]) -> KVCache:
        return KVCache.from_plan(self.model.config, self.plan(codecs).as_dict())

    def uniform(self, codec: str) -> tuple[str, ...]:
        """The same codec for all layers."""
        return (codec,) * len(self.layers)

    def alone(self, place: int, codec: str) -> tuple[str, ...]:
        """A codec for the `place`-th layer, all others native."""
        return tuple(codec if other == place else NATIVE for other in range(len(self.layers)))

    def loss(self, codecs: Sequence[str]) -> float:
        """The mean divergence on the windows, in nats, beyond what native layers show. Measured once."""
        codecs = tuple(codecs)
        if codecs not in self._losses:
            loss = self._measured(codecs) - self.floor
            self._losses[codecs] = math.inf if math.isnan(loss) else max(0.0, loss)
        return self._losses[codecs]

    def _measured(self, codecs: Sequence[str]) -> float:
        cache = scoring.write(self.model, self.windows, self.cache(codecs), copies=1)
        return scoring.in_one_pass(self.model, self.windows, cache).mean().item()

    @torch.inference_mode()
    def nbytes(self, codec: str) -> list[int]:
        """What a request takes in each layer, all with this codec: pages, open ones included, right after its prefill."""
        cache = scoring.write(self.model, self.windows, self.cache(self.uniform(codec)), copies=1)
        cache.reset()  # the pool knows the shapes of the pages now
        demands = {id(store): demand for store, demand in cache.storage.demands(np.array([self.tokens]))}
        found = []
        for layer in filter(None, cache.storage.layers):
            store, demand = layer.group.store, demands[id(layer.group.store)]
            opened, sealed = (pages[layer.index].layout.nbytes for pages in (store.open.pages, store.sealed.pages))
            found.append(demand.open * opened + demand.sealed * sealed)
        return found

    def options(self, advance: Callable[[], object] = lambda: None) -> list[dict[str, tuple[int, float]]]:
        """For each layer `{codec: (bytes, loss)}`, measured; `advance` is called after every measurement."""
        nbytes = {codec: self.nbytes(codec) for codec in self.codecs}
        found = []
        for place in range(len(self.layers)):
            found.append({})
            for codec in self.codecs:
                found[-1][codec] = nbytes[codec][place], self.loss(self.alone(place, codec))
                advance()
        return found

    def likened(self, options: list[dict[str, tuple[int, float]]], to: Tuner) -> list[dict[str, tuple[int, float]]]:
        """The same for this residual, from the `options` of another one: a codec's losses are multiplied by what they are in all
        layers together."""
        nbytes = {codec: self.nbytes(codec) for codec in self.codecs}
        factors = {codec: self._factor(codec, to) for codec in self.codecs}
        return [
            {codec: (nbytes[codec][place], loss * factors[codec]) for codec, (_, loss) in layer.items()}
            for place, layer in enumerate(options)
        ]

    def _factor(self, codec: str, other: Tuner) -> float:
        mine, theirs = (tuner.loss(tuner.uniform(codec)) for tuner in (self, other))
        return mine / theirs if theirs else 1.0

    def within(self, mixtures: Sequence[Mixture], tolerance: float) -> Mixture:
        """The mixture with the fewest bytes of those that were found to lose no more than `tolerance`, measured as a whole."""
        best, scale, tried = mixtures[-1], 1.0, set()
        for _ in range(ROUNDS):
            mixture = fewest_bytes(mixtures, tolerance / scale) or mixtures[-1]
            if mixture in tried or not mixture.loss:
                break
            tried.add(mixture)
            loss = self.loss(mixture.codecs)
            if loss <= tolerance and mixture.nbytes < best.nbytes:
                best = mixture
            scale = max(loss / mixture.loss, 1e-3)
        return best

    def verify(self, windows: Reference, codecs: Sequence[str]) -> Compared:
        """True decode steps on other windows."""
        return scoring.compare(self.model, windows, scoring.write(self.model, windows, self.cache(codecs)))


@dataclass(frozen=True)
class Tuned:
    """What was chosen and what it is worth.

    Attributes:
        plan: the cache.
        mixture: the codec of each layer that stores something; `nbytes` are those of one request.
        options: for each of these layers `{codec: (bytes, loss)}`, as measured with the first residual.
        front: all mixtures worth having with the chosen residual; their losses are sums over layers.
        loss: what the mixture loses as a whole on the windows that it was chosen by.
        verified: what it loses on the other windows; `tolerance` is what it may lose there.
        beside, beside_nbytes, beside_verified: the codec that would do for all layers, with the first residual, likewise.
        difference, stderr: how much more the mixture loses than that, in nats, and the standard error over windows.
    """

    plan: CachePlan
    mixture: Mixture
    options: list[dict[str, tuple[int, float]]]
    front: list[Mixture]
    loss: float
    verified: Divergence
    tolerance: float
    beside: str
    beside_nbytes: int
    beside_verified: Divergence
    difference: float
    stderr: float

    @property
    def holds(self) -> bool:
        return self.verified.kl_mean <= self.tolerance

    @property
    def scale(self) -> float:
        """By what the sums of the front are off, at the chosen mixture."""
        return self.loss / self.mixture.loss if self.mixture.loss else 1.0


def tune(
    tuners: Sequence[Tuner],
    others: Reference,
    tolerance: float | str,
    budget: int | None = None,
    advance: Callable[[], object] = lambda: None,
) -> Tuned:
    """Choose and verify.

    Args:
        tuners: one for each residual to choose from. Layers are measured with the first one.
        others: windows to verify on.
        tolerance: nats that a token may lose on average; or a codec: no more than that loses.
        budget: bytes of a request: then the smallest loss within it is chosen, else the fewest bytes within the tolerance.
        advance: called after every measurement of a layer.

    Raises:
        ConfigurationError: nothing is as small as the budget.
    """
    first = tuners[0]
    options = first.options(advance)
    fronts = {tuner: front(options if tuner is first else tuner.likened(options, first)) for tuner in tuners}
    least = min(mixtures[0].nbytes for mixtures in fronts.values())
    if budget is not None and least > budget:
        raise ConfigurationError(
            f"a request takes {least:,} bytes at least and the budget leaves it {budget:,}: ask for a shorter context or "
            "fewer requests, or allow narrower codecs, larger blocks or a smaller residual."
        )
    limit = first.loss(first.uniform(tolerance)) if isinstance(tolerance, str) else tolerance
    sizes = {codec: sum(option[codec][0] for option in options) for codec in first.codecs}
    good = [codec for codec in first.codecs if first.loss(first.uniform(codec)) <= limit]
    beside = tolerance if isinstance(tolerance, str) else min(good, key=sizes.get)
    uniform = first.verify(others, first.uniform(beside))
    allowed = max(NOISE, uniform.kl.mean().item() if isinstance(tolerance, str) else tolerance)
    if budget is None:
        tuner, mixture, found = _holding(fronts, others, limit, allowed)
    else:
        tuner, mixture = _fitting(fronts, budget)
        found = tuner.verify(others, mixture.codecs)
    more = (found.kl - uniform.kl).mean(1)
    return Tuned(
        plan=tuner.plan(mixture.codecs),
        mixture=mixture,
        options=options,
        front=fronts[tuner],
        loss=tuner.loss(mixture.codecs),
        verified=scoring.summary([found]),
        tolerance=allowed,
        beside=beside,
        beside_nbytes=sizes[beside],
        beside_verified=scoring.summary([uniform]),
        difference=more.mean().item(),
        stderr=(more.std() / len(more) ** 0.5).item() if len(more) > 1 else math.nan,
    )


def _holding(
    fronts: Mapping[Tuner, list[Mixture]], others: Reference, limit: float, allowed: float
) -> tuple[Tuner, Mixture, Compared]:
    """The fewest bytes that hold what is allowed on the other windows too. Where the first choice does not, the limit to
    choose by is lowered by as much, and then taken between what held and what did not."""
    best, holds, fails = None, None, None
    for _ in range(TRIES):
        tuner, mixture = _chosen(fronts, limit)
        if best is not None and mixture == best[1]:
            break
        found = tuner.verify(others, mixture.codecs)
        excess = found.kl.mean().item() / allowed
        if excess <= 1:
            best, holds = (tuner, mixture, found), limit
        else:
            fails = limit
        if fails is None:
            break
        limit = limit / excess if holds is None else (holds * fails) ** 0.5
    return best or (tuner, mixture, found)


def _chosen(fronts: Mapping[Tuner, list[Mixture]], limit: float) -> tuple[Tuner, Mixture]:
    """The fewest bytes within a tolerance."""
    found = [(tuner, tuner.within(mixtures, limit)) for tuner, mixtures in fronts.items()]
    return min(found, key=lambda pair: (pair[1].nbytes, pair[0].loss(pair[1].codecs)))


def _fitting(fronts: Mapping[Tuner, list[Mixture]], budget: int) -> tuple[Tuner, Mixture]:
    """The smallest loss within a budget that some mixture fits."""
    found = [(tuner, least_loss(mixtures, budget)) for tuner, mixtures in fronts.items()]
    return min(((t, m) for t, m in found if m is not None), key=lambda pair: pair[0].loss(pair[1].codecs))
