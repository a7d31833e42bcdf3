"""Sessions: what a prompt finds, what is computed, and that nobody can tell the difference but by the time."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor

import hf_kvcache
from hf_kvcache import (
    BlockPool,
    CacheInputError,
    CacheStateError,
    CapacityError,
    ConfigurationError,
    HostTier,
    PagedCache,
    Session,
    UnsupportedError,
    Window,
    cache_kwarg,
)
from hf_kvcache.inputs import setting, speculates

from .architectures import LINEAR, build
from .forcing import error, forced, ours, padding, text

MODELS = ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "gemma4_text"]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return ours()


@pytest.fixture
def pool(model) -> BlockPool:
    return BlockPool(model.config, block_size=4, poison=True)


class Passes:
    """Counts the columns that a model computes."""

    def __init__(self, model):
        self.columns = 0
        self.hook = model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module, given, out) -> None:
        self.columns += given[0].shape[1]

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, *error) -> None:
        self.hook.remove()


OPTIONS = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


def alone(model, ids, mask=None, make=PagedCache, **options):
    """The same without a pool."""
    cache, mask = make(model.config), torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **OPTIONS | options, **cache_kwarg(cache))


def same(a, b, tolerance: float = 1e-4) -> bool:
    close = all(torch.allclose(x, y, atol=tolerance) for x, y in zip(a.logits, b.logits, strict=True))
    return torch.equal(a.sequences, b.sequences) and close


def hits(session) -> int:
    return session.metrics().hits


# ---- reuse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_second_request_computes_only_what_is_new_and_says_the_same(name):
    model = ours(name)
    pool = BlockPool(model.config, block_size=4, poison=True)
    shared = text(1, 41)
    for seed in (1, 2):
        ids, session = torch.cat([shared, text(1, 6, seed)], 1), pool.session()
        with Passes(model) as passes:
            found = session.generate(model, ids, **OPTIONS)
        assert same(found, alone(model, ids))
        assert passes.columns == 47 - hits(session) + 5
        pool.check_integrity()
    # Where there is a window, its positions before the divergence have been kept.
    assert hits(session) == 41
    assert pool.metrics().reuse.hits == hits(session)


def test_a_prompt_that_is_known_computes_one_token(model, pool):
    ids = text(1, 40)
    first = pool.session().generate(model, ids, **OPTIONS)
    for session in (pool.session(), pool.session(partial_reuse=False)):
        with Passes(model) as passes:
            assert same(session.generate(model, ids, **OPTIONS), first)
        assert hits(session) == (39 if session.partial_reuse else 36)
        assert passes.columns == 40 - hits(session) + 5


@pytest.mark.parametrize("name", MODELS)
def test_every_turn_of_a_chat_finds_prompt_and_answer(name):
    model = ours(name)
    pool = BlockPool(model.config, block_size=4)
    ids = text(1, 15)
    for turn in range(3):
        session = pool.session()
        found = session.generate(model, ids, **OPTIONS)
        assert same(found, alone(model, ids))
        held = ids.shape[1] - (15 if not turn else 5)  # all but this turn's words were held, but the newest token
        assert (held - 1) // 4 * 4 <= hits(session) <= max(0, held) and (turn == 0) == (hits(session) == 0)
        ids = torch.cat([found.sequences, text(1, 5, turn + 1)], 1)
    pool.check_integrity()


def test_a_session_that_lives_on_needs_nobody_to_remember_for_it(model, pool):
    session, ids = pool.session(), text(1, 15)
    for turn in range(3):
        found = session.generate(model, ids, **OPTIONS)
        assert same(found, alone(model, ids))
        ids = torch.cat([found.sequences, text(1, 5, turn + 1)], 1)
    assert hits(session) == (15 + 5) + (26 + 5), "all but the newest token, which generate() never computes"
    changed = ids.clone()
    changed[0, 9] += 1
    assert same(session.generate(model, changed, **OPTIONS), alone(model, changed))
    pool.check_integrity()


def test_a_prompt_prepared_by_hand_is_found_and_shared(model, pool):
    ids = text(1, 30)
    session = pool.session()
    assert session.prepare(ids, model=model) == 0
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS, **cache_kwarg(session))
    session.reset()
    other = pool.session()
    assert other.prepare(ids) == 28, "7 full blocks; nobody knows what the eighth ends with"
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS, **cache_kwarg(other))
    assert same(found, wanted)


def test_before_the_pool_has_seen_a_model_nothing_is_shared(model, pool):
    for session in (pool.session(), pool.session()):
        assert session.prepare(text(1, 20)) == 0
        forced(model, session, text(1, 20))
    assert session.prepare(text(1, 22)) == 20, "its own tokens are its own"
    assert not pool.metrics().blocks_cached


@pytest.mark.parametrize("missing", [(0, 0, 0), (0, 7, 3)], ids=["equal", "ragged"])
@pytest.mark.parametrize("codec", [None, "int8"])
def test_rows_of_a_batch_share_what_all_of_them_find(model, codec, missing):
    pool = BlockPool(model.config, block_size=8)
    ids, mask = text(1, 40).repeat(3, 1), padding(3, 44, *missing)
    ids = torch.cat([torch.zeros(3, 4, dtype=torch.long), ids], 1)
    for row, n in enumerate(missing):
        ids[row] = torch.cat([torch.zeros(n, dtype=torch.long), text(1, 44 - n)[0]])
    first, second = pool.session(codec=codec), pool.session(codec=codec)
    wanted = first.generate(model, ids, attention_mask=mask, **OPTIONS)
    found = second.generate(model, ids, attention_mask=mask, **OPTIONS)
    pool.check_integrity()
    if codec is None:
        assert same(wanted, alone(model, ids, mask)) and same(found, wanted)
    else:
        assert error(found.logits[0], wanted.logits[0]) < 0.02
    assert hits(first) == 0 and hits(second) >= 3 * 32 - 10
    longer = torch.cat([found.sequences, text(3, 3, 5)], 1)
    mask = torch.cat([mask, torch.ones(3, 9, dtype=torch.long)], 1)
    third = second.generate(model, longer, attention_mask=mask, **OPTIONS)
    assert codec or same(third, alone(model, longer, mask))
    pool.check_integrity()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_rows_that_store_their_padding_share_nothing(implementation):
    """Only our masks tell a cache what is padding; elsewhere token i of a row is not at position i."""
    model, ids, mask = build("llama"), text(2, 30), padding(2, 30, 0, 5)
    model.set_attn_implementation(implementation)
    pool = BlockPool(model.config, block_size=4)
    for _ in range(2):
        session = pool.session()
        assert same(session.generate(model, ids, attention_mask=mask, **OPTIONS), alone(model, ids, mask))
        assert hits(session) == 0
        assert same(session.generate(model, ids, attention_mask=mask, **OPTIONS), alone(model, ids, mask))
    unpadded = pool.session()
    unpadded.generate(model, ids, **OPTIONS)
    assert hits(unpadded) == 0 and pool.metrics().blocks_cached == 16
    again = pool.session()
    assert same(again.generate(model, ids, **OPTIONS), alone(model, ids)) and hits(again) == 58


@pytest.mark.parametrize("name", LINEAR)
def test_models_with_a_recurrent_state_share_nothing_and_are_right(name):
    model = ours(name)
    pool, ids = BlockPool(model.config, block_size=4), text(1, 20)
    for _ in range(2):
        session = pool.session()
        assert same(session.generate(model, ids, **OPTIONS), alone(model, ids)) and hits(session) == 0
    assert not pool.metrics().blocks_cached


def test_a_rotary_embedding_that_depends_on_the_length_shares_nothing():
    config = build("llama").config
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = hf_kvcache.enable(AutoModelForCausalLM.from_config(config).eval())
    pool = BlockPool(model.config, block_size=4)
    for _ in range(2):
        session = pool.session()
        session.generate(model, text(1, 20), **OPTIONS)
        assert hits(session) == 0


# ---- identity --------------------------------------------------------------------------------------------------------


def test_nobody_finds_what_another_namespace_holds(model):
    pool, ids = BlockPool(model.config, block_size=8), text(1, 30)
    pool.session(salt="a").generate(model, ids, **OPTIONS)
    others = [
        {},
        {"adapter": "a"},
        {"salt": "b"},
        {"salt": b"a"},
        {"salt": "a", "adapter": "a"},
        {"salt": "a", "codec": 8},
    ]
    others += [{"salt": "a", "block_size": 16}, {"salt": "a", "retention": Window(64)}]
    for choices in others:
        session = pool.session(**choices)
        session.generate(model, ids, **OPTIONS)
        assert hits(session) == 0, choices
    again = pool.session(salt="a")
    again.generate(model, ids, **OPTIONS)
    assert hits(again) == 29


def test_a_tenant_sees_nothing_of_another(model):
    """Neither what it finds, nor what looking costs, nor its own numbers differ."""
    seen = []
    for neighbour in (False, True):
        pool, ids = BlockPool(model.config, block_size=4), text(1, 30)
        if neighbour:
            pool.session(salt="other").generate(model, ids, **OPTIONS)
        index, session = pool.prefixes, pool.session(salt="mine")
        before = index.hashed, index.compared
        for _ in range(2):
            with Passes(model) as passes:
                session.generate(model, ids, **OPTIONS)
        work = index.hashed - before[0], index.compared - before[1]
        seen.append((session.metrics(), work, passes.columns))
    assert seen[0] == seen[1]


def test_equal_placeholders_of_other_pictures_are_no_hit(model, pool):
    ids = text(1, 30)
    ids[0, 10:18] = 5
    for picture, found in (("cat", 0), ("dog", 10), ("cat", 29)):
        session = pool.session(media=[(picture, 10, 8)])
        session.generate(model, ids, **OPTIONS)
        assert hits(session) == found, picture
    session.media.append(("cat", 26, 2))
    session.generate(model, torch.cat([ids, text(1, 10, 1)], 1), **OPTIONS)
    assert hits(session) == 29 + 26, "nor is what the session itself holds without the picture"
    pool.check_integrity()


def test_whatever_else_the_model_is_given_counts_where_no_media_are_declared(model, pool):
    ids = text(1, 30)
    places = {"position_ids": torch.arange(30)[None]}
    for inputs, found in (({}, 0), (places, 0), (places, 29), ({}, 29)):
        session = pool.session()
        session.generate(model, ids, **inputs, **OPTIONS)
        assert hits(session) == found
    session.generate(model, torch.cat([ids, text(1, 4, 1)], 1), position_ids=torch.arange(34)[None], **OPTIONS)
    before = pool.metrics().blocks_cached
    session.prepare(text(1, 30), model=model)
    assert hits(session) == 29 + 29 and pool.metrics().blocks_cached == before, "by hand there is nothing else again"


def test_tensors_without_declared_media_share_nothing(model, pool, monkeypatch):
    """Whether as a tensor, an array, a list of numbers, or within a dict."""
    take_anything(model, monkeypatch)
    ids, image = text(1, 30), torch.ones(1, 3)
    for value in (image, image.numpy(), image.tolist(), {"image": [image]}, object()):
        for _ in range(2):
            session = pool.session()
            session.generate(model, ids, pixels=value, **OPTIONS)
            session.generate(model, ids, pixels=value, **OPTIONS)
            assert hits(session) == 0
    assert not pool.metrics().blocks_cached
    session.generate(model, ids, **OPTIONS)
    assert hits(session) == 0, "nor is what it held of use to another call"


def test_settings_of_the_model_count_and_those_of_generate_do_not(model, pool, monkeypatch):
    take_anything(model, monkeypatch)
    ids = text(1, 30)
    names = (
        {"adapter_names": ["a"]},
        {"adapter_names": ["b"]},
        {"strength": 0.5},
        {"strength": 1},
        {"strength": "1"},
        {},
    )
    for inputs in names:
        for found in (0, 29):
            session = pool.session()
            session.generate(model, ids, **inputs, **OPTIONS)
            assert hits(session) == found, inputs
    session = pool.session()
    session.generate(model, ids, temperature=0.5, stopping_criteria=[], **OPTIONS)
    assert hits(session) == 29


def take_anything(model, monkeypatch) -> None:
    """Have generate() accept inputs that the model does not know, and keep them from it."""
    monkeypatch.setattr(model, "_validate_model_kwargs", lambda model_kwargs: None, raising=False)
    prepare = model.prepare_inputs_for_generation
    own = ("pixels", "adapter_names", "strength")
    without = lambda *args, **given: {k: v for k, v in prepare(*args, **given).items() if k not in own}  # noqa: E731
    monkeypatch.setattr(model, "prepare_inputs_for_generation", without, raising=False)


def test_where_the_media_are_handed_over_a_hit_ends_before_them(model, pool, monkeypatch):
    take_anything(model, monkeypatch)
    ids, media = text(1, 30), [("cat", np.int64(10), np.int64(8))]
    for found in (0, 10):
        session = pool.session(media=media)
        session.generate(model, ids, pixels=torch.ones(1, 3), **OPTIONS)
        assert hits(session) == found
    session.generate(model, ids, pixels=torch.ones(1, 3), **OPTIONS)
    assert hits(session) == 20
    session.generate(model, ids, **OPTIONS)
    assert hits(session) == 49


def test_a_model_that_remembers_the_last_prompts_positions_starts_from_scratch(pool):
    model, ids = ours(), text(1, 20)
    model.model.rope_deltas = None
    session = pool.session()
    for _ in range(2):
        assert same(session.generate(model, ids, **OPTIONS), alone(model, ids)) and hits(session) == 0
    assert not pool.metrics().blocks_cached


def test_what_was_computed_under_a_mask_of_its_own_is_not_shared(model, pool, monkeypatch):
    """As a prefix that sees itself both ways: what is held of a token depends on those after it."""
    both_ways = lambda batch, head, query, key: (key <= query) | (key < 20)  # noqa: E731
    ids, session = text(1, 20), pool.session()
    session.prepare(ids, model=model)
    with monkeypatch.context() as patch:
        patch.setattr("transformers.masking_utils.causal_mask_function", both_ways)
        forced(model, session, ids)
    assert session.storage.foreign_mask
    session.publish()
    assert not pool.metrics().blocks_cached
    assert same(session.generate(model, ids, **OPTIONS), alone(model, ids)) and hits(session) == 0


def test_a_session_that_shares_nothing_still_compares_what_counts(pool):
    """Its own keys and values are those of other weights, or of another adapter, as well."""
    model = ours("qwen3_next")
    pool, ids = BlockPool(model.config, block_size=4), text(1, 20)
    session = pool.session(adapter="a")
    session.prepare(ids, model=model)
    before = session._namespace
    session.adapter = "b"
    session.prepare(ids, model=model)
    assert before != session._namespace is not None and session._root is None


def test_padding_by_hand_without_positions_is_refused(model, pool):
    ids, mask = text(2, 20), padding(2, 20, 0, 5)
    session = pool.session()
    session.prepare(ids, mask, model=model)
    with pytest.raises(CacheStateError, match="padding needs position_ids"), torch.no_grad():
        model(ids, attention_mask=mask, **cache_kwarg(session))
    session.publish()
    assert not pool.metrics().blocks_cached
    forced(model, session, ids, mask=mask)
    session.publish()
    assert pool.metrics().blocks_cached == 5 + 3


class Stop(LogitsProcessor):
    """Fails once there are 34 tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if input_ids.shape[1] < 34 else 1 / 0


def test_what_follows_a_failed_answer_by_hand_is_not_taken_for_it(model):
    """Packed blocks are entered some tokens after they were shown: here the fourth one, which is then another."""
    pool, ids = BlockPool(model.config, block_size=8), text(1, 32)
    session = pool.session(codec="int8", residual=8)
    with pytest.raises(ZeroDivisionError):
        session.generate(model, ids, logits_processor=[Stop()], **OPTIONS)
    session.crop(-18)
    assert session.get_seq_length() == 16
    forced(model, session, text(1, 24, 1))
    session.publish()
    assert pool.session(codec="int8", residual=8).prepare(torch.cat([ids, text(1, 4, 2)], 1), model=model) == 24


def test_what_follows_a_failed_prompt_by_hand_is_not_taken_for_it(model, pool):
    ids, session = text(1, 30), pool.session()
    session.generate(model, ids[:, :20], **OPTIONS | {"max_new_tokens": 1})
    before = pool.metrics().blocks_cached
    hook = model.model.layers[-1].register_forward_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.generate(model, ids, **OPTIONS)
    hook.remove()
    assert session.get_seq_length() == 20
    forced(model, session, text(1, 10, 1))
    session.publish()
    assert pool.metrics().blocks_cached == before
    again = pool.session()
    assert same(again.generate(model, ids, **OPTIONS), alone(model, ids)) and hits(again) == 20


def test_settings_are_read_where_generate_reads_them(model, pool):
    ids = text(1, 21).repeat(2, 1)
    pool.session().generate(model, ids, **OPTIONS)
    beams = GenerationConfig(num_beams=3)
    model.generation_config.prompt_lookup_num_tokens = 4
    try:
        assert speculates(model, {"generation_config": GenerationConfig()})
        assert not speculates(model, {"prompt_lookup_num_tokens": 0})
    finally:
        model.generation_config.prompt_lookup_num_tokens = None
    assert speculates(model, {"use_mtp": True})
    options = {k: v for k, v in OPTIONS.items() if k != "max_new_tokens"}
    model.generation_config.num_beams = 3
    try:
        config = GenerationConfig(max_new_tokens=6, pad_token_id=0)
        session = pool.session()
        found = session.generate(model, ids, generation_config=config, **options)
        assert same(found, alone(model, ids, num_beams=3)) and hits(session) == 40
    finally:
        model.generation_config.num_beams = None
    assert setting(model, {"generation_config": beams}, "num_beams") == 3
    pool.check_integrity()


def test_a_step_copies_no_ids_where_no_block_has_become_full(model, pool, monkeypatch):
    looked = []
    learn = Session._learn
    monkeypatch.setattr(Session, "_learn", lambda self: looked.append(self.storage.columns) or learn(self))
    for name, wanted in ((None, [30, 32, 36, 40, 41]), ("pixels", [41])):
        take_anything(model, monkeypatch)
        inputs = {name: torch.ones(1)} if name else {}
        looked.clear()
        pool.session().generate(model, text(1, 30), **inputs, **OPTIONS | {"max_new_tokens": 12})
        assert [columns for columns in looked if columns] == wanted


def test_other_weights_are_refused_until_the_prefixes_are_dropped():
    model, other = ours(), ours()
    pool, ids = BlockPool(model.config, block_size=4), text(1, 20)
    session = pool.session()
    session.generate(model, ids, **OPTIONS)
    pool.session().generate(other, ids, **OPTIONS)  # the same weights in another object
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3] += 0.1
    with pytest.raises(CacheInputError, match=r"other weights.*drop_prefixes"):
        pool.session().generate(other, ids, **OPTIONS)
    session.reset()
    pool.drop_prefixes()
    fresh = pool.session()
    fresh.generate(other, ids, **OPTIONS)
    assert hits(fresh) == 0
    pool.check_integrity()


class Lora(torch.nn.Module):
    """A linear layer with low-rank adapters, as peft's layers look from outside."""

    def __init__(self, base: torch.nn.Linear, **scales: float):
        super().__init__()
        self.base_layer, self.active_adapters, self.merged_adapters, self.disable_adapters = base, [], [], False
        self.scaling = dict.fromkeys(scales, 1.0)
        rank = {name: torch.nn.Linear(base.in_features, 2, bias=False) for name in scales}
        self.lora_A = torch.nn.ModuleDict(rank)
        self.lora_B = torch.nn.ModuleDict({n: torch.nn.Linear(2, base.out_features, bias=False) for n in scales})
        for name, scale in scales.items():
            torch.nn.init.constant_(self.lora_A[name].weight, scale)
            torch.nn.init.constant_(self.lora_B[name].weight, scale)

    def forward(self, x):
        active = [] if self.disable_adapters else self.active_adapters
        return self.base_layer(x) + sum(self.scaling[name] * self.lora_B[name](self.lora_A[name](x)) for name in active)


def test_every_weight_counts():
    model, other = ours(), ours()
    pool, ids = BlockPool(model.config, block_size=4), text(1, 20)
    pool.session().generate(model, ids, **OPTIONS)
    with torch.no_grad():
        other.get_input_embeddings().weight[42, 7] += 1
    with pytest.raises(CacheInputError, match="other weights"):
        pool.session().generate(other, ids, **OPTIONS)
    with torch.no_grad():
        model.get_input_embeddings().weight[[41, 42]] = model.get_input_embeddings().weight[[42, 41]]
    with pytest.raises(CacheInputError, match="other weights"):
        pool.session().generate(model, ids, **OPTIONS)
    with pytest.raises(UnsupportedError, match="meta device"):
        BlockPool(model.config).session().prepare(ids, model=ours().to("meta"))


def test_loaded_adapters_count_with_their_weights():
    model = ours()
    layer = model.model.layers[0].self_attn.k_proj = Lora(model.model.layers[0].self_attn.k_proj, a=0.3, b=0.5)
    pool, ids = BlockPool(model.config, block_size=4), text(1, 20)

    def found(active: list[str], off: bool = False) -> int:
        layer.active_adapters, layer.disable_adapters = active, off
        session = pool.session()
        assert same(session.generate(model, ids, **OPTIONS), alone(model, ids))
        return hits(session)

    assert [found(["a"]), found(["b"]), found([]), found(["a"]), found(["b"], off=True)] == [0, 0, 0, 19, 19]
    with torch.no_grad():
        layer.lora_A["a"].weight += 0.1
    assert [found(["a"]), found(["b"])] == [0, 19], "the adapter's weights have changed, nobody else's"
    layer.scaling["a"] = 2.0
    assert [found(["a"]), found(["b"])] == [0, 19]


def test_what_follows_a_crop_is_entered_behind_what_is_left(model, pool):
    one, other, more = text(1, 32), text(1, 20, 1), text(1, 9, 2)
    session = pool.session()
    session.prepare(one, model=model)
    forced(model, session, one)
    session.publish()
    session.crop(-20)
    forced(model, session, torch.cat([other, more], 1), [20, 9])
    session.show(torch.cat([one[:, :12], other, more], 1))
    pool.check_integrity()
    for ids, found in ((torch.cat([one, more], 1), 32), (torch.cat([one[:, :12], other, more], 1), 40)):
        fresh = pool.session()
        assert same(fresh.generate(model, ids, **OPTIONS), alone(model, ids))
        assert hits(fresh) == found


# ---- codecs and groups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", [0, 8])
@pytest.mark.parametrize("codec", ["int8", "int4", "fp8", "k8v4"])
def test_packed_blocks_are_shared_as_they_are(model, codec, residual):
    pool = BlockPool(model.config, block_size=8, poison=True)
    ids = text(1, 60)
    first = pool.session(codec=codec, residual=residual)
    wanted = first.generate(model, ids, **OPTIONS)
    store = first.storage.groups[0].store.sealed
    pages = first.storage.groups[0].table.ids[0, : hits_in_blocks(60, residual)].copy()
    before = {name: field.clone() for name, field in store.layer(0).gather(pages).items()}
    second = pool.session(codec=codec, residual=residual)
    found = second.generate(model, ids, **OPTIONS)
    assert hits(second) == len(pages) * 8
    assert (second.storage.groups[0].table.ids[0, : len(pages)] == pages).all()
    assert all(torch.equal(field, before[name]) for name, field in store.layer(0).gather(pages).items())
    assert error(found.logits[0], wanted.logits[0]) < 0.35
    assert second.stats()["tokens_sealed"] <= 8, "nothing was encoded twice"
    pool.check_integrity()


def hits_in_blocks(tokens: int, residual: int) -> int:
    """Full blocks that are sealed of a prompt and 5 tokens of the answer, as far as the prompt goes but for a token."""
    return min((tokens + 5 - residual) // 8, (tokens - 1) // 8)


@pytest.mark.parametrize(
    "choices",
    [
        {"retention": Window(8, 2, rebase=False)},
        {"retention": Window(8, 2)},
        {"retention": Window(11)},
        {"codec": "int8", "residual": 4, "retention": Window(16, 2, rebase=False)},
        {"layers": {0: {"codec": "int8"}}},
    ],
    ids=str,
)
def test_caches_with_a_window_or_with_mixed_layers_continue_a_chat(model, choices):
    size = 8 if "codec" in str(choices) else 4
    pool = BlockPool(model.config, block_size=size, poison=True)
    kept, ids = pool.session(**choices), text(1, 31)
    for turn in range(3):
        fresh, bare = pool.session(**choices), PagedCache(model.config, block_size=size, **choices)
        found = fresh.generate(model, ids, **OPTIONS)
        wanted = alone(model, ids, make=lambda config, bare=bare: bare)
        limit = 1e-4 if "codec" not in str(choices) else 0.1
        assert error(found.logits[0], wanted.logits[0]) < limit
        assert turn == 0 or hits(fresh) >= ids.shape[1] - 5 - 1 - size - choices.get("residual", 0)
        kept.generate(model, ids, **OPTIONS)
        pool.check_integrity()
        ids = torch.cat([found.sequences, text(1, 5, turn + 1)], 1)
    assert hits(kept) > 0


def test_a_hybrid_pool_counts_the_longest_hit_common_to_all_groups():
    model = ours("gemma2")  # a window of 6
    pool, ids = BlockPool(model.config, block_size=4), text(1, 40)
    pool.session().generate(model, ids, **OPTIONS)
    branch = torch.cat([ids[:, :20], text(1, 20, 1)], 1)
    session = pool.session()
    assert same(session.generate(model, branch, **OPTIONS), alone(model, branch))
    assert hits(session) == 0, "the window's blocks before position 20 were never stored: one pass went over them"
    again = pool.session()
    assert same(again.generate(model, torch.cat([branch, text(1, 3, 2)], 1), **OPTIONS), alone(
        model, torch.cat([branch, text(1, 3, 2)], 1)))  # fmt: skip
    assert hits(again) == 40


# ---- forks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_beams_begin_with_what_is_known_and_leave_what_they_wrote(model, pool, options, rows):
    ids = text(rows, 21)
    pool.session().generate(model, ids, **OPTIONS)
    session = pool.session()
    found = session.generate(model, ids, **OPTIONS | options)
    assert same(found, alone(model, ids, **options)) and hits(session) == rows * 20
    pool.check_integrity()
    for tokens in session.token_ids:
        other = pool.session()
        other.prepare(torch.tensor(np.append(tokens, 1))[None], model=model)
        assert hits(other) >= len(tokens) // 4 * 4


def test_samples_and_speculation(model, pool):
    ids = text(1, 16).repeat(1, 2)
    for options in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": ours(num_hidden_layers=1)}):
        session = pool.session()
        found = session.generate(model, ids, **OPTIONS | options | {"max_new_tokens": 20})
        assert torch.equal(found.sequences, alone(model, ids, max_new_tokens=20).sequences)
        pool.check_integrity()
        held = session.token_ids[0].tolist()
        assert held == found.sequences[0, : len(held)].tolist() and len(held) >= 50
    several = pool.session().generate(model, ids, max_new_tokens=5, do_sample=True, num_return_sequences=3)
    assert several.shape == (3, 37)
    pool.check_integrity()


def test_forks_are_sessions_of_their_own(model, pool):
    session = pool.session()
    first = session.generate(model, text(1, 20), **OPTIONS)
    branches = []
    for seed in (1, 2, 3):
        branch, ids = session.fork(), torch.cat([first.sequences, text(1, 6, seed)], 1)
        assert same(branch.generate(model, ids, **OPTIONS), alone(model, ids))
        assert branch.metrics().hits in (25, 26)  # once a branch has computed the newest token, the others find it
        branches.append(branch)
        pool.check_integrity()
    assert session.metrics().queries == 1 and pool.metrics().blocks_shared >= 6
    session = pool.session(media=[("cat", 3, 2)], priorities=[(0, 8, 50)])
    branch = session.fork()
    branch.media.append(("dog", 7, 2))
    branch.priorities.clear()
    assert len(session.media) == len(session.priorities) == 1


# ---- keeping ---------------------------------------------------------------------------------------------------------


def test_a_pinned_system_prompt_stays_under_pressure(model):
    pool = BlockPool(model.config, capacity_tokens=160, block_size=4)
    system = text(1, 40)
    with pool.session() as session:
        session.generate(model, system, **OPTIONS)
        pin = session.pin(40)
    assert pin.tokens == [40] and pool.metrics().blocks_pinned == 10

    def press() -> None:
        for seed in range(5):
            pool.session().generate(model, text(1, 90, 10 + seed), **OPTIONS)

    press()
    assert pool.metrics().evictions["capacity"] > 50
    session = pool.session()
    session.generate(model, torch.cat([system, text(1, 3, 1)], 1), **OPTIONS)
    assert hits(session) == 40
    pin.release()
    pin.release()
    del session
    press()
    session = pool.session()
    session.generate(model, system, **OPTIONS)
    assert hits(session) == 0
    pool.check_integrity()


def test_priorities_of_token_ranges_decide_what_stays(model):
    now = [0.0]
    for level, seconds, waited, found in ((90, None, 0, 32), (90, 60, 30, 32), (90, 60, 61, 0), (0, None, 0, 0)):
        pool = BlockPool(model.config, capacity_tokens=160, block_size=4, clock=lambda: now[0])
        ids = text(1, 41)
        pool.session(priorities=[(0, 30, level, seconds)]).generate(model, ids, **OPTIONS)
        now[0] += waited
        for seed in range(3):
            pool.session().generate(model, text(1, 80, 10 + seed), **OPTIONS)
        session = pool.session()
        session.generate(model, torch.cat([ids[:, :32], text(1, 5, 1)], 1), **OPTIONS)
        assert hits(session) == found, (level, seconds, waited)
        pool.check_integrity()


# ---- a full pool -----------------------------------------------------------------------------------------------------


def test_a_full_pool_makes_room_and_never_touches_a_live_sequence(model):
    pool = BlockPool(model.config, capacity_tokens=120, block_size=4, poison=True)
    live, ids = pool.session(), text(1, 30)
    live.prepare(ids, model=model)
    logits = forced(model, live, ids)
    for seed in range(8):
        session = pool.session()
        wanted = alone(model, text(1, 50, seed + 10))
        assert same(session.generate(model, text(1, 50, seed + 10), **OPTIONS), wanted)
        pool.check_integrity()
    assert pool.metrics().evictions["capacity"] > 50
    with pytest.raises(CapacityError, match=r"more blocks of 4.*longest context that fits is \d+ tokens"):
        pool.session().generate(model, text(1, 100), **OPTIONS)
    more = forced(model, live, text(1, 8, 1), [1] * 8)
    bare = PagedCache(model.config, block_size=4)
    assert torch.equal(logits, forced(model, bare, ids))
    assert torch.equal(more, forced(model, bare, text(1, 8, 1), [1] * 8))
    assert pool.metrics().allocation_failures == 1


@pytest.mark.parametrize(
    ("salts", "own", "room"), [("ab", 10, 600), ("aa", 30, 164)], ids=["two_tenants", "one_tenant_and_little_room"]
)
def test_two_threads_at_once(model, salts, own, room):
    """In little room, what one thread has just used is given up for the other, and two copies of a block may meet."""
    pool = BlockPool(model.config, capacity_tokens=room, block_size=4, poison=True)
    prompts = [torch.cat([text(1, 40), text(1, own, seed)], 1) for seed in range(4)]
    wanted = [alone(model, ids) for ids in prompts]
    failures = []

    def work(salt: str) -> None:
        try:
            for turn in range(6):
                ids, reference = prompts[turn % 4], wanted[turn % 4]
                with pool.session(salt=salt) as session:
                    if not same(session.generate(model, ids, **OPTIONS), reference):
                        failures.append((salt, turn))
                    if room == 600 and hits(session) < (40 if turn else 0):
                        failures.append((salt, turn, hits(session)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(salt,)) for salt in salts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        pool.metrics()  # who looks is a third one
    for thread in threads:
        thread.join()
    assert not failures
    pool.check_integrity()
    assert pool.metrics().reuse.queries == 12
    assert room == 600 or pool.metrics().evictions["capacity"] > 0


def test_thirty_two_requests_cost_one_prefix_and_their_own_tokens(model):
    pool, shared = BlockPool(model.config), text(1, 256)
    page = 3 * 2 * 2 * 16 * 8 * 4
    sessions = []
    for seed in range(32):
        sessions.append(pool.session())
        sessions[-1].generate(model, torch.cat([shared, text(1, 8, seed + 1)], 1), max_new_tokens=2, do_sample=False)
    assert pool.metrics().bytes_used == page * (16 + 32)
    assert pool.metrics().blocks_shared == 16


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_a_session_cannot_do_is_said(model, pool):
    ids = text(1, 10)
    for options, says in (
        ({"inputs_embeds": torch.zeros(1, 10, 32)}, "inputs_embeds"),
        ({"input_ids": ids, **cache_kwarg(PagedCache(model.config))}, "is the cache itself"),
    ):
        with pytest.raises(CacheInputError, match=says):
            pool.session().generate(model, **options)
    with pytest.raises(ConfigurationError, match="tier"):
        pool.session(tier=HostTier(4))
    with pytest.raises(ConfigurationError, match="config"):
        BlockPool().session()
    for priority in ((0, 4, 101), (0, 4, -1), (4, 4, 5), (-1, 4, 5), (0, None, 5, 0)):
        with pytest.raises(ConfigurationError, match="Priority"):
            pool.session(priorities=[priority])
    for options in (
        {"salt": 7},
        {"adapter": b"a"},
        {"media": [("a", 0.5, 2)]},
        {"media": [(7, 0, 2)]},
        {"media": [("a", 0, 0)]},
    ):
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            pool.session(**options)
    with pytest.raises(CacheInputError, match="no full block"):
        pool.session().pin()
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        model.config.is_encoder_decoder = True
        try:
            pool.session().generate(model, ids)
        finally:
            model.config.is_encoder_decoder = False
