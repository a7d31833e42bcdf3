"""The host tier's copies, played on a CPU by a stream that notes in which order things are asked of it, and carries copies out as
early, or as late, as a device may."""

from __future__ import annotations

import pytest
import torch

from hf_kvcache import HostTier, KVCache
from hf_kvcache.kernels import dispatch
from hf_kvcache.tiers.base import Copies
from tests.forcing import forced, ours, text

LAYERS, PROMPT, STEPS = 3, 70, 5  # in the fifth step no block becomes cold
CHOICES = {"native": {"block_size": 4}, "int8": {"block_size": 8, "codec": "int8", "residual": 0}}


class Stream(Copies):
    """Copies in the order in which they are begun: at once, or not before somebody waits."""

    def __init__(self, log: list, late: bool):
        self.log, self.late, self.begun, self.queue = log, late, 0, []

    def begin(self, pages, ids, buffer):
        self.begun += 1
        self.log.append(("copy", self.begun))
        self.queue.append((self.begun, lambda: Copies.begin(self, pages, ids, buffer)))
        if not self.late:
            self._carry_out(self.begun)
        return self.begun

    def wait(self, copied):
        self.log.append(("wait", copied))
        self._carry_out(copied)

    def _carry_out(self, number: int) -> None:
        while self.queue and self.queue[0][0] <= number:
            self.queue.pop(0)[1]()


def logits(tier: HostTier, choices: dict, log: list | None = None, late: bool = False) -> torch.Tensor:
    """Of `STEPS` decode steps after a prompt; `log` is told what was asked for in the last one."""
    model = ours(num_hidden_layers=LAYERS)
    cache = KVCache(model.config, tier=tier, **choices)
    if log is not None:
        (group,) = cache.storage.groups
        group.tier._copies = Stream(log, late)
    ids = text(2, PROMPT + STEPS)
    forced(model, cache, ids[:, :PROMPT])
    parts = []
    for step in range(PROMPT, PROMPT + STEPS):
        if log is not None:
            log.clear()
        parts.append(forced(model, cache, ids[:, step : step + 1]))
    assert cache.memory().by_tier["host"] > 0
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_a_layer_waits_for_its_own_copy_and_the_next_ones_is_under_way_before_it_attends(choices, late, monkeypatch):
    expected = logits(HostTier(8), choices)
    log, decode = [], dispatch.decode
    monkeypatch.setattr(dispatch, "decode", lambda *args: log.append("attend") or decode(*args))
    assert torch.equal(logits(HostTier(8, direct=False), choices, log, late), expected)
    first = log[0][1]
    attends = ["attend"] * 2  # over what came back, and over what stayed
    wanted = [("copy", first)]
    for copy in range(first, first + LAYERS):
        following = [("copy", copy + 1)] if copy + 1 < first + LAYERS else []
        wanted += [("wait", copy), *following, *attends]
    assert log == wanted


def test_with_one_buffer_nothing_is_copied_ahead(monkeypatch):
    """It is read until the layer has attended."""
    log, decode = [], dispatch.decode
    expected = logits(HostTier(8), CHOICES["native"])
    monkeypatch.setattr(dispatch, "decode", lambda *args: log.append("attend") or decode(*args))
    got = logits(HostTier(8, direct=False, ring=1), CHOICES["native"], log, late=True)
    assert torch.equal(got, expected)
    assert [entry if entry == "attend" else entry[0] for entry in log] == ["copy", "wait", "attend", "attend"] * LAYERS
