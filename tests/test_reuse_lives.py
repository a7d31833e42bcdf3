"""Random lives of sessions in one full, poisoned pool. Keys are a function of the namespace and of all tokens up to their own, as
a model's are, so that a block which is found wrongly, evicted in use or written to while shared shows at once."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_kvcache import BlockPool, CacheStateError, CapacityError, Session, Window
from hf_kvcache.prefix import Node

from .test_blocks import CONFIG, DIM, HEADS, LAYERS, held

BLOCK, CAPACITY = 8, 30  # blocks, in each group of layers


@functools.cache
def key(namespace: str | None, tokens: tuple[int, ...]) -> torch.Tensor:
    """What layer 0 stores for the last of `tokens`: `[heads, dim]`."""
    seed = hashlib.sha256(repr((namespace, tokens)).encode()).digest()[:4]
    return torch.from_numpy(np.random.default_rng(list(seed)).standard_normal((HEADS, DIM), np.float32))


@functools.cache
def block(namespace: str | None, tokens: bytes) -> torch.Tensor:
    """What layer 0 stores for the last block of `tokens`: `[heads, block, dim]`."""
    ids = tuple(np.frombuffer(tokens, "<i8").tolist())
    return torch.stack([key(namespace, ids[: n + 1]) for n in range(len(ids) - BLOCK, len(ids))], 1)


class Weights(torch.nn.Linear):
    """All that a session wants to know of a model."""

    config = CONFIG

    def __init__(self):
        super().__init__(1, 1)


class Life:
    """A session, and for each row the tokens that it must hold."""

    def __init__(self, session: Session, rows: list[list[int]]):
        self.session, self.rows = session, rows

    def append(self, columns: list[list[int]]) -> None:
        """One pass of new tokens `[row][column]`, then what generate() would show."""
        rows = [row + new for row, new in zip(self.rows, columns, strict=True)]
        first = len(self.rows[0])
        keys = torch.stack(
            [
                torch.stack([key(self.session.salt, tuple(row[: i + 1])) for i in range(first, len(row))], 1)
                for row in rows
            ]
        )
        for layer in range(LAYERS):
            self.session.update(keys + layer, -keys - layer, layer)
        self.rows = rows
        self.session.show(torch.tensor(rows))


class Lives(RuleBasedStateMachine):
    choices: dict = {}  # noqa: RUF012 - set by each concrete machine
    tolerance = 0.0

    @initialize()
    def start(self):
        self.pool = BlockPool(CONFIG, capacity_tokens=CAPACITY * BLOCK, block_size=BLOCK, poison=True)
        self.model, self.lives, self.pins = Weights(), [], []
        self.salts: dict[bytes, str | None] = {}  # by the key of the tree

    def begin(self, session: Session, rows: list[list[int]]) -> None:
        columns = session.prepare(torch.tensor(rows), model=self.model)
        self.salts[session._root.key] = session.salt
        life = Life(session, [row[:columns] for row in rows])
        try:
            life.append([row[columns:] for row in rows])
        except CapacityError:
            session.reset()
            return
        self.lives.append(life)

    @precondition(lambda self: len(self.lives) < 5)
    @rule(
        salt=st.sampled_from([None, "a"]),
        shared=st.sampled_from([0, 8, 19]),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        batch=st.integers(1, 2),
    )
    def create(self, salt, shared, own, batch):
        rows = [[0] * shared + own[:-1] + [own[-1] ^ row] for row in range(batch)]
        self.begin(self.pool.session(salt=salt, **self.choices), rows)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=12), one_by_one=st.booleans())
    def extend(self, data, new, one_by_one):
        life = data.draw(st.sampled_from(self.lives))
        try:
            for part in [[token] for token in new] if one_by_one else [new]:
                life.append([part] * len(life.rows))
        except CapacityError:
            self.end(life)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), cut=st.integers(0, 20), new=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def next_turn(self, data, cut, new):
        """Another prompt for the same session, with most of its history."""
        life = data.draw(st.sampled_from(self.lives))
        rows = [row[: max(0, len(row) - cut)] + new for row in life.rows]
        self.lives.remove(life)
        self.begin(life.session, rows)

    @precondition(lambda self: 0 < len(self.lives) < 5)
    @rule(data=st.data(), cut=st.integers(0, 20), new=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def branch(self, data, cut, new):
        """A new session with most of another one's history."""
        life = data.draw(st.sampled_from(self.lives))
        rows = [row[: max(0, len(row) - cut)] + new for row in life.rows]
        self.begin(self.pool.session(salt=life.session.salt, **self.choices), rows)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), cut=st.integers(1, 20))
    def crop(self, data, cut):
        life = data.draw(st.sampled_from(self.lives))
        cut = min(cut, len(life.rows[0]) - 1)
        try:
            life.session.crop(-cut)
        except CacheStateError:
            return
        life.rows = [row[: len(row) - cut] for row in life.rows]

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), order=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def reorder(self, data, order):
        life = data.draw(st.sampled_from(self.lives))
        order = [row % len(life.rows) for row in order]
        life.session.reorder_cache(torch.tensor(order))
        life.rows = [life.rows[row] for row in order]

    @precondition(lambda self: 0 < len(self.lives) < 5)
    @rule(data=st.data())
    def fork(self, data):
        life = data.draw(st.sampled_from(self.lives))
        self.lives.append(Life(life.session.fork(), life.rows))

    @precondition(lambda self: self.lives and len(self.pins) < 2)
    @rule(data=st.data())
    def pin(self, data):
        life = data.draw(st.sampled_from(self.lives))
        if life.session.stats()["tokens_sealed"] and any(tail.depth for tail in life.session._tails):
            self.pins.append(life.session.pin(16))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        self.pins.pop().release()

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def leave(self, data):
        self.end(data.draw(st.sampled_from(self.lives)))

    def end(self, life: Life) -> None:
        life.session.reset()
        self.lives.remove(life)

    @invariant()
    def adds_up(self):
        if hasattr(self, "pool"):
            self.pool.check_integrity()

    @invariant()
    def every_block_in_the_index_holds_what_its_chain_gives(self):
        slots = list(self.pool.prefixes.slots.values()) if hasattr(self, "pool") else []
        if slots:
            wanted = torch.stack([self.contents(slot.node) for slot in slots]) + 1
            found, _ = slots[0].group.store.layer(1).decode(np.array([slot.page for slot in slots]))
            assert (found - wanted).abs().max() <= self.tolerance

    def contents(self, node: Node) -> torch.Tensor:
        """What layer 0 stores for a block, from the tokens of its chain."""
        tokens = b""
        while node.depth:
            node, tokens = node.parent, node.tokens + tokens
        return block(self.salts[node.key], tokens)

    @invariant()
    def every_session_holds_what_its_tokens_give(self):
        for life in getattr(self, "lives", []):
            rule, n = life.session.choices["retention"], len(life.rows[0])
            for r, row in enumerate(life.rows):
                positions, keys = held(life.session, r, 1)
                wanted = torch.stack([key(life.session.salt, tuple(row[: p + 1])) + 1 for p in positions], 1)
                assert (keys - wanted).abs().max() <= self.tolerance
                seen = range(n) if rule.window is None else {*range(min(rule.sinks, n)), *range(n + 1 - rule.window, n)}
                assert {p for p in seen if p >= 0} <= set(positions.tolist())

    def teardown(self):
        if hasattr(self, "pool"):
            for pin in self.pins:
                pin.release()
            for life in list(self.lives):
                self.end(life)
            self.pool.drop_prefixes()
            self.pool.check_integrity()
            assert self.pool.nbytes() == 0 and not self.pool.prefixes.roots


MACHINES = {
    "native": {},
    "whole_blocks": {"partial_reuse": False},
    "window": {"retention": Window(12, 3)},
    "int8": {"codec": "int8", "residual": 5},
    "int8_window": {"codec": "int8", "retention": Window(20, 2)},
}
for name, choices in MACHINES.items():
    tolerance = 0.03 if "codec" in choices else 0.0  # half a step of 255 over a spread of at most 12
    machine = type(f"Lives_{name}", (Lives,), {"choices": choices, "tolerance": tolerance})
    machine.TestCase.settings = settings(
        max_examples=5,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
    globals()[f"Test_{name}"] = machine.TestCase


@pytest.mark.parametrize("choices", MACHINES.values(), ids=MACHINES)
def test_the_machines_see_reuse_and_pressure(choices):
    """What the lives above are made of does happen: blocks are found, and given up."""
    machine = type("Machine", (Lives,), {"choices": choices})()
    machine.start()
    for turn in range(24):
        machine.create(salt=None, shared=19, own=[turn >> bit & 1 for bit in range(8)] * 3, batch=1)
        machine.tolerance = 0.03 if "codec" in choices else 0.0
        machine.every_session_holds_what_its_tokens_give()
        machine.adds_up()
        machine.end(machine.lives[0])
    found = machine.pool.metrics()
    assert found.evictions["capacity"] > 0 and (found.reuse.hits > 0 or "retention" in choices)
    machine.teardown()
