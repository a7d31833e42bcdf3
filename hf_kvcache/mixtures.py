"""A codec of its own for every layer: all mixtures that are worth having, between the fewest bytes and the smallest loss.

Bytes add up over layers, and so, nearly, does the divergence that each layer's codec causes alone: errors of different layers are
small and as good as independent, so their squares add. Which codec each layer gets is then a multiple-choice knapsack,
which the front below solves exactly for every budget and every tolerance at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mixture:
    """A codec's name for each layer, what they take in bytes, and the sum of what each of them loses alone."""

    codecs: tuple[str, ...]
    nbytes: int
    loss: float


def front(layers: Sequence[Mapping[str, tuple[int, float]]]) -> list[Mixture]:
    """Every mixture that no other one beats, fewest bytes and greatest loss first.

    Layer by layer, all that has been chosen so far is extended by each of the layer's codecs, and what takes no fewer bytes than
    something that loses no more is dropped. (Dynamic programming over bytes: exact, and quick, as pages come in few sizes.)

    Args:
        layers: for each layer `{codec: (bytes, loss)}`.
    """
    nbytes, loss = np.zeros(1, np.int64), np.zeros(1)
    steps = []  # for each layer: which earlier state each state extends, and by which codec
    for options in layers:
        more, worse = (np.array(values) for values in zip(*options.values(), strict=True))
        nbytes, loss = ((a[:, None] + b).ravel() for a, b in ((nbytes, more), (loss, worse)))
        order = np.lexsort((loss, nbytes))
        least = np.minimum.accumulate(loss[order])
        kept = order[np.diff(least, prepend=np.inf) < 0]
        steps.append((kept // len(options), kept % len(options)))
        nbytes, loss = nbytes[kept], loss[kept]
    return [
        Mixture(_codecs(layers, steps, state), int(nbytes[state]), float(loss[state])) for state in range(len(nbytes))
    ]


def _codecs(layers: Sequence[Mapping[str, tuple[int, float]]], steps: list, state: int) -> tuple[str, ...]:
    """What led to a state of the last layer, read backwards."""
    names = []
    for options, (before, chosen) in zip(reversed(layers), reversed(steps), strict=True):
        names.append(list(options)[chosen[state]])
        state = before[state]
    return tuple(reversed(names))


def fewest_bytes(mixtures: Sequence[Mixture], tolerance: float) -> Mixture | None:
    """The first of a front that loses no more than `tolerance`; None where all lose more."""
    return next((mixture for mixture in mixtures if mixture.loss <= tolerance), None)


def least_loss(mixtures: Sequence[Mixture], budget: int) -> Mixture | None:
    """The last of a front that takes no more than `budget` bytes; None where all take more."""
    return next((mixture for mixture in reversed(mixtures) if mixture.nbytes <= budget), None)
