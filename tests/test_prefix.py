"""The prefix index by itself: what is found, what is never found, and what is given up first."""

from __future__ import annotations

import hashlib
import itertools
import random
import struct
from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_kvcache import prefix
from hf_kvcache.prefix import PRIORITY, Group, Media, Node, PrefixIndex, Root, digest

BLOCK = 4
FULL, SLIDING = Group("full"), Group("sliding", window=7)


class Clock:
    """A clock that stands still unless told otherwise."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Index(PrefixIndex):
    """An index with owners of its pages: whoever holds a chain has a reference to each page."""

    def __init__(self, groups: tuple[Group, ...] = (FULL,)):
        super().__init__(Clock())
        self.groups, self.owners, self.numbers = groups, {}, itertools.count()
        self.entered: dict[Node, list[int | None]] = {}

    def tree(self, **fields) -> Root:
        return self.root(digest(**fields), BLOCK, self.groups)

    def enter(self, tokens, root: Root | None = None, media=(), without: dict[int, set] | None = None) -> list[Node]:
        """Compute `tokens` anew and publish their full blocks; group `g` has no pages for the blocks of `without[g]`.
        Returns the chain, which is in use where it was entered just now."""
        root = root or self.tree()
        node, chain = root, []
        for block, (part, there) in enumerate(root.cut(np.array(tokens), media)):
            lacks = [block in (without or {}).get(g, ()) for g in range(len(self.groups))]
            pages = [None if lack else next(self.numbers) for lack in lacks]
            node, named = self.insert(root, node, part, there, pages)
            chain.append(node)
            self.entered[node] = [slot and slot.page for slot in node.slots]
            for page in named:
                self.owners[page] = 1
        return chain

    def hold(self, chain: list[Node]) -> None:
        for slot in (slot for node in chain for slot in node.slots if slot is not None):
            key = slot.group.store, slot.page
            self.owners[key] += 1
            if self.owners[key] == 1:
                self.wake(slot.group.store, [slot.page])

    def let_go(self, chain: list[Node]) -> None:
        """Give a chain back, the tail first."""
        for slot in (slot for node in reversed(chain) for slot in node.slots if slot is not None):
            key = slot.group.store, slot.page
            self.owners[key] -= 1
            if self.owners[key] == 0:
                self.rest(slot.group.store, [slot.page])

    def keep(self, tokens, **options) -> list[Node]:
        """Publish and give back at once."""
        chain = self.enter(tokens, **options)
        self.let_go(
            [node for node in chain if all(s is None or self.owners[s.group.store, s.page] for s in node.slots)]
        )
        return chain

    def length(self, tokens, root: Root | None = None, limit: int = 10**9, **options) -> int:
        return self.match(root or self.tree(), np.array(tokens), **options).longest(limit)

    def pages(self, chain: list[Node], place: int = 0) -> list[int | None]:
        """The pages that blocks were entered with."""
        return [self.entered[node][place] for node in chain]

    def evict(self, stores, reason: str) -> list[tuple[Hashable, int]]:
        return [(slot.group.store, slot.page) for slot in super().evict(stores, reason)]

    def order(self, store: Hashable = "full") -> list[int]:
        """What is given up, one after the other, until nothing is left."""
        pages = []
        while gone := self.evict([store], "test"):
            pages += [page for owner, page in gone if owner == store]
        return pages

    def check(self) -> None:
        self.check_integrity(lambda store, page: self.owners[store, page] > 0)


# ---- identity --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20))
@settings(max_examples=100, deadline=None)
def test_two_texts_share_exactly_their_common_full_blocks(a, b):
    index = Index()
    first, second = index.enter(a), index.enter(b)
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    for block, (x, y) in enumerate(zip(first, second, strict=False)):
        assert (x is y) == (x.key == y.key) == ((block + 1) * BLOCK <= common)
    assert index.length(b, partial=False) == len(b) // BLOCK * BLOCK


def test_a_changed_token_changes_every_later_key():
    index, text = Index(), list(range(20))
    first, second = index.enter(text), index.enter([*text[:5], 99, *text[6:]])
    assert [x.key == y.key for x, y in zip(first, second, strict=True)] == [True, False, False, False, False]


def test_keys_are_the_same_in_every_process():
    """A key is made of bytes alone: of the namespace's digest and the ids in a fixed byte order."""
    (node,) = Index().enter([1, 2, 3, 4])
    assert node.key == hashlib.sha256(hashlib.sha256(b"").digest() + struct.pack("<4q", 1, 2, 3, 4)).digest()


LOOK_ALIKES = [
    {"salt": "a", "adapter": None},
    {"salt": None, "adapter": "a"},
    {"salt": b"a", "adapter": None},
    {"salt": "a", "adapter": "a"},
    {"salt": "", "adapter": None},
    {"salt": None, "adapter": None},
    {"salt": "None", "adapter": None},
    {"salt": 1, "adapter": None},
    {"salt": "1", "adapter": None},
    {"salt": True, "adapter": None},
    {"salt": "aadaptera", "adapter": None},
    {"salt": ("a",), "adapter": None},
    {"salt": ("a", "b"), "adapter": None},
    {"salt": (("a", "b"),), "adapter": None},
    {"salt": (("a",), "b"), "adapter": None},
    {"salt": "a"},
    {"adapter": "a"},
    {"saltadapter": "a"},
]


def test_namespaces_that_look_alike_are_not_the_same():
    assert len({digest(**fields) for fields in LOOK_ALIKES}) == len(LOOK_ALIKES)


def test_nothing_is_found_in_another_namespace():
    index, text = Index(), list(range(12))
    roots = [index.tree(**fields) for fields in LOOK_ALIKES]
    index.enter(text, root=roots[0])
    assert [index.length(text, root=index.tree(**fields)) for fields in LOOK_ALIKES] == [12] + [0] * (len(roots) - 1)


def test_equal_hashes_of_other_tokens_are_no_hit(monkeypatch):
    monkeypatch.setattr(prefix, "block_key", lambda parent, tokens, media: bytes(32))
    index = Index()
    index.enter([1, 2, 3, 4])
    assert index.length([1, 2, 3, 4]) == 4
    assert index.length([5, 6, 7, 8]) == 0


CAT, DOG = Media("cat", 2, 4), Media("dog", 2, 4)


@pytest.mark.parametrize(
    ("media", "found"),
    [
        ([CAT], 12),
        ([DOG], 2),
        ([], 2),
        ([Media("cat", 3, 4)], 2),  # the same picture elsewhere
        ([CAT, Media("dog", 9, 1)], 9),
        ([Media(b"cat", 2, 4)], 2),
        ([Media("cat", 2, 2)], 2),  # the same picture, processed to another size
    ],
)
def test_media_are_part_of_every_block_that_they_reach_into(media, found):
    index = Index()
    index.enter([0] * 12, media=[CAT])
    assert index.length([0] * 12, media=media) == found


# ---- finding ---------------------------------------------------------------------------------------------------------


def test_a_block_is_found_in_part_where_it_begins_alike():
    index = Index()
    index.enter([1, 2, 3, 4, 5, 6, 7, 8])
    index.enter([1, 2, 3, 4, 5, 6, 0, 0])
    assert index.length([1, 2, 3, 4, 5, 6, 7, 9]) == 7
    assert index.length([1, 2, 3, 4, 5, 6, 7, 9], partial=False) == 4
    assert index.length([1, 2, 3, 4, 5]) == 5
    assert index.length([1, 2, 3, 4, 5, 6, 7, 8], limit=7) == 7
    assert index.length([2, 2, 3, 4]) == 0


def test_looking_up_grows_linearly_and_sees_only_its_own_chain():
    for tokens in (1000, 50_000):
        index = Index()
        index.enter(np.arange(tokens))
        for salt in range(3):
            index.enter(np.arange(2000), root=index.tree(salt=salt))
        before = index.hashed, index.compared
        assert index.length(np.arange(tokens)) == tokens
        assert (index.hashed - before[0], index.compared - before[1]) == (tokens // BLOCK, 0)


def test_what_others_have_changes_nothing_about_a_look_up():
    alone, together, text = Index(), Index(), np.arange(400)
    together.enter(text, root=together.tree(salt="other"))
    for index in (alone, together):
        index.enter(text[:100], root=index.tree(salt="mine"))
        before = index.hashed, index.compared
        assert index.length(text, root=index.tree(salt="mine")) == 100
        index.work = index.hashed - before[0], index.compared - before[1]
    assert alone.work == together.work


def test_a_partial_match_looks_at_a_bounded_number_of_children():
    index = Index()
    for token in range(500):
        index.enter([7, token, 0, 0])
    before = index.compared
    assert index.length([7, 499, 0, 1]) == 3
    assert index.compared - before <= prefix.LAST_CHILDREN


@pytest.mark.parametrize("sinks", [0, 5])
def test_a_window_needs_only_its_last_positions_and_the_sinks(sinks):
    """After 40 tokens a window of 7 sees positions 34 to 39 (and the one that is computed): blocks 8 and 9."""
    needed = {8, 9} | set(range(-(-sinks // BLOCK)))
    for lacks in range(10):
        index = Index((FULL, Group("sliding", 7, sinks)))
        index.enter(range(40), without={1: {lacks}})
        assert (index.length(range(41)) == 40) == (lacks not in needed)


def test_the_longest_hit_is_common_to_all_groups():
    index = Index((FULL, SLIDING))
    index.enter(range(40), without={1: {7}})
    assert index.length(range(41)) == 40
    assert index.length(range(36)) == 28  # 36 would need block 7, as would 32
    assert index.length([*range(38), 99]) == 38  # begins within block 7's reach: positions 32 to 37
    assert index.length([*range(37), 99]) == 28


def test_a_window_begins_within_a_block():
    index = Index((Group("sliding", 6),))
    index.enter(range(40), without={0: set(range(8))})
    assert index.length(range(40)) == 40
    assert index.length(range(40), limit=37) == 37  # positions 32 to 36
    assert index.length(range(40), limit=36) == 0


def test_duplicates_stay_out_and_missing_pages_are_filled_in():
    index = Index((FULL, SLIDING))
    (first,) = index.enter(range(4), without={1: {0}})
    before = index.pages([first])
    (second,) = index.enter(range(4))
    assert second is first and index.pages([second]) == before and second.slots[1] is not None
    assert len(index.slots) == 2
    index.check()


# ---- giving up -------------------------------------------------------------------------------------------------------


def test_the_tail_of_a_chain_goes_before_its_head_and_the_older_chain_first():
    index = Index()
    a, b = index.keep([1] * 12), index.keep([2] * 8)
    index.hold(a[:1])  # a system prompt that somebody uses once more
    index.let_go(a[:1])
    assert index.order() == [*index.pages(a[:0:-1]), *index.pages(b[::-1]), *index.pages(a[:1])]


def test_pages_at_rest_stay_findable_and_pages_in_use_stay():
    index = Index()
    a, b = index.keep([1] * 12), index.enter([2] * 8)
    assert index.length([1] * 13) == 12
    index.hold(a)
    assert index.evict(["full"], "test") == []
    index.let_go(a)
    assert index.order() == index.pages(a[::-1])
    assert index.length([1] * 13) == 0 and index.length([2] * 9) == 8
    index.let_go(b)
    index.check()


def test_what_is_in_use_behind_an_evicted_block_is_no_longer_found():
    """Its sequence computed the head for itself: the block in the index was another one's."""
    index = Index()
    head = index.keep([1] * 4)
    chain = index.enter([1] * 8)
    assert chain[0] is head[0]
    gone = index.evict(["full"], "test")
    assert sorted(page for _, page in gone) == sorted([head_page := 0, head_page + 2])
    assert index.length([1] * 8) == 0 and not chain[1].alive
    assert index.evicted["test"] == 1
    index.check()


def test_lower_priorities_go_first_and_end_after_their_time():
    index = Index()
    low, plain, high = (index.enter([n] * 4) for n in range(3))
    index.prioritise(low[0], 0)
    index.prioritise(high[0], 90, seconds=60)
    for chain in (high, plain, low):
        index.let_go(chain)
        index.clock.now += 1
    assert index.order() == index.pages(low + plain + high)
    assert [index.evict([store], "test") for store in ("full", "sliding", "unknown")] == [[], [], []]


def test_a_priority_counts_from_when_the_block_came_to_rest():
    index = Index()
    high, plain = index.enter([1] * 4), index.enter([2] * 4)
    index.prioritise(high[0], 90, seconds=60)
    index.clock.now = 1000.0
    index.let_go(high)
    index.clock.now = 1059.0
    index.let_go(plain)
    index.hold(high)
    index.let_go(high)
    index.clock.now = 1118.0
    assert index.evict(["full"], "test") == [("full", index.pages(plain)[0])]
    index.clock.now = 1119.0
    again = index.keep([2] * 4)
    assert index.order() == index.pages(high + again), "reverted to 35, and the least recently used of those"
    assert PRIORITY == 35


def test_no_block_outlives_its_head_whatever_the_priorities():
    index = Index()
    chain, other = index.enter([1] * 12), index.enter([2] * 4)
    index.prioritise(chain[0], 0)
    index.prioritise(chain[2], 100)
    index.let_go(other)
    index.let_go(chain)
    assert index.order() == [*index.pages(other), *index.pages(chain[::-1])]


def test_pinned_blocks_stay_until_the_last_pin_is_gone():
    index = Index()
    chain = index.keep([1] * 12)
    index.pin(chain[:2])
    index.pin(chain[:1])
    assert index.evictable("full") == 1
    assert index.order() == index.pages(chain[2:])
    index.unpin(chain[:2])
    assert index.order() == index.pages(chain[1:2])
    index.unpin(chain[:1])
    assert index.order() == index.pages(chain[:1])
    index.check()


def test_pages_of_a_window_go_one_by_one():
    index = Index((FULL, SLIDING))
    chain = index.enter([1] * 40)
    for node in chain[:8]:  # the window has moved on
        index.owners["sliding", node.slots[1].page] -= 1
        index.rest("sliding", [node.slots[1].page])
    released = index.pages(chain[:8], 1)
    assert index.order("sliding") == released
    index.check()
    assert index.length([1] * 41) == 40
    index.let_go([node for node in chain if node.slots[1] is not None])
    assert index.evictable("sliding") == 2
    index.check()


def test_a_tree_of_windows_alone_ends_with_its_last_page():
    index = Index((SLIDING,))
    chain = index.keep([1] * 40, without={0: set(range(8))})
    assert index.length([1] * 41) == 40
    index.order("sliding")
    assert not index.roots and not index.slots and not any(node.alive for node in chain)
    index.check()


def test_dropping_leaves_nothing():
    index = Index()
    index.pin(index.keep([1] * 12))
    index.keep([2] * 12, root=index.tree(salt="b"))
    assert len(index.drop("dropped")) == 6
    assert not index.roots and not index.slots and index.evictable("full") == 0
    index.check()


# ---- random lives ----------------------------------------------------------------------------------------------------


class Lives(RuleBasedStateMachine):
    """Chains come, are used again, rest and go; the index is recounted after every step, and what it gives up is what a
    plain search says."""

    @initialize()
    def start(self):
        self.index, self.held = Index((FULL, SLIDING)), []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=4, max_size=24), late=st.integers(0, 5))
    def enter(self, tokens, late):
        before = set(self.index.slots)
        chain = self.index.enter(tokens, without={1: set(range(late))})
        new = [
            (node, slot)
            for node in chain
            for slot in node.slots
            if slot and (slot.group.store, slot.page) not in before
        ]
        self.held.append([slot for _, slot in new])

    @rule(tokens=st.lists(st.integers(0, 1), min_size=4, max_size=24))
    def use(self, tokens):
        match = self.index.match(self.index.tree(), np.array(tokens))
        slots = [slot for node in match.nodes for slot in node.slots if slot is not None]
        for slot in slots:
            self.index.owners[slot.group.store, slot.page] += 1
            if slot.order is not None:
                self.index.wake(slot.group.store, [slot.page])
        self.held.append(slots)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data):
        for slot in reversed(self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))):
            key = slot.group.store, slot.page
            self.index.owners[key] -= 1
            if self.index.owners[key] == 0 and self.index.slots.get(key) is slot:
                self.index.rest(slot.group.store, [slot.page])

    @rule(data=st.data(), level=st.integers(0, 100), seconds=st.sampled_from([None, 1.0, 5.0]))
    def prioritise(self, data, level, seconds):
        nodes = list(dict.fromkeys(slot.node for slot in self.index.slots.values()))
        if nodes:
            self.index.prioritise(data.draw(st.sampled_from(nodes)), level, seconds)

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds):
        self.index.clock.now += seconds

    @rule(store=st.sampled_from(["full", "sliding"]))
    def evict(self, store):
        index, now = self.index, self.index.clock.now
        resting = [s for s in index.slots.values() if s.group.store == store and s.order is not None]

        def free_behind(slot) -> bool:
            nodes = list(slot.node.children.values())
            for node in nodes:
                nodes.extend(node.children.values())
            return all(node.slots[0].order is None for node in nodes)

        def worth(slot) -> tuple[int, int]:
            over = slot.node.seconds is not None and now >= slot.rested + slot.node.seconds
            return PRIORITY if over else slot.node.level, slot.order

        ready = [s for s in resting if store == "sliding" or free_behind(s)]
        least = (store, min(ready, key=worth).page) if ready else None
        assert index.evictable(store) == len(resting)
        gone = index.evict([store], "test")
        assert (least in gone) if ready else not gone
        assert store == "full" or len(gone) <= 1

    @invariant()
    def adds_up(self):
        if hasattr(self, "index"):
            self.index.check()


Lives.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
TestLives = Lives.TestCase


def test_a_hundred_thousand_operations_leak_nothing():
    """Eight owners take up chains, extend them and let them go, in a store of 60 pages that is always full."""
    generator, index = random.Random(0), Index()
    index.hashed, used = 0, [[] for _ in range(8)]
    for done in range(100_000):
        owner = generator.randrange(8)
        if used[owner] and generator.random() < 0.4:
            index.let_go(used[owner])
            used[owner] = []
            continue
        if len(used[owner]) == 7:
            continue
        parent = used[owner][-1] if used[owner] else index.tree()
        part = bytes([generator.randrange(3)]) * 8 * BLOCK
        known = index._child(parent, part, ())
        if known is not None:
            index.hold([known])
            used[owner].append(known)
        else:
            while len(index.slots) >= 60:
                assert index.evict(["full"], "capacity")
            node, named = index.insert(index.tree(), parent, part, (), [next(index.numbers)])
            index.owners.update(dict.fromkeys(named, 1))
            used[owner].append(node)
        if done % 2000 == 0:
            index.check()
    for chain in used:
        index.let_go(chain)
    assert index.evictable("full") == len(index.slots) > 50 and index.evicted["capacity"] > 10_000
    index.order()
    index.check()
    assert not index.roots and not index.slots and sum(map(len, index._queues.values())) < 200
