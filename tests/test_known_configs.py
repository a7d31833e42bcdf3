"""Well-known models, from their published configs (`tests/known_configs/`, trimmed to what decides about memory), against numbers
worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_kvcache import memory
from hf_kvcache.memory import budget, models

FOLDER = Path(__file__).parent / "known_configs"
K, GIB = 1024, 1 << 30


def plan(name: str, context: int, **settings) -> memory.Plan:
    return memory.plan(str(FOLDER / f"{name}.json"), context=context, caches=["dynamic", "paged"], **settings)


def kind(answer: memory.Plan, name: str) -> memory.LayerKind:
    return next(kind for kind in answer.layers if kind.kind == name)


def test_every_known_config_has_a_number_here():
    text = Path(__file__).read_text()
    for path in FOLDER.glob("*.json"):
        assert text.count(f'"{path.stem}"') >= 2, f"{path.stem} needs parameters and bytes per token"


# Published sizes, to the last digit where a checkpoint's index gives it, else (a multiple of ten million) within half of that.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),  # the embedding is tied: once
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-4b", 4_022_468_096),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-3-4b", 4_300_079_472),  # with its vision tower
        # 6.87 B of text as published, less the key and value projections of 15 layers that use another's, and are not built.
        ("gemma-3n-e4b", 6_870_000_000 - 15 * 2 * 2048 * 2 * 256),
        ("gpt-oss-20b", 20_914_757_184),
        ("deepseek-v3", 671_026_419_200),  # 671 B without the layer that predicts a second token
        ("qwen3-next-80b-a3b", 79_674_391_296),
        ("falcon-h1-7b", 7_590_000_000),
        ("t5-base", 222_903_552),
    ],
)
def test_parameters(name, parameters):
    known = models.load(str(FOLDER / f"{name}.json"))
    count = models.parameters(known)
    assert known.estimate is None and count.exact and count.note is None
    rounded = name in ("gemma-3n-e4b", "falcon-h1-7b")
    assert count.total == pytest.approx(parameters, abs=5_000_000 if rounded else 0)


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("llama-3.1-8b", 131_072),  # K and V: 2 x 32 layers x 8 heads x 128 x 2 bytes, 128 KiB as published
        ("llama-3.1-70b", 327_680),  # 2 x 80 x 8 x 128 x 2: 320 KiB as published
        ("llama-3.2-1b", 32_768),  # 2 x 16 x 8 x 64 x 2
        ("qwen2.5-7b", 57_344),  # 2 x 28 x 4 x 128 x 2: 56 KiB
        ("qwen3-4b", 147_456),  # 2 x 36 x 8 x 128 x 2: 144 KiB
        ("mistral-7b-v0.3", 131_072),  # 2 x 32 x 8 x 128 x 2
        ("deepseek-v3", 70_272),  # 61 layers x (512 latent + 64 rotary) x 2 bytes = 61 x 1,152
        ("t5-base", 73_728),  # 2 x 12 x 12 x 64 x 4 (float32)
    ],
)
def test_bytes_of_a_token_where_all_layers_see_everything(name, token_bytes):
    answer = plan(name, 512)
    assert sum(kind.token_bytes for kind in answer.layers) == token_bytes
    plain, paged = answer.caches
    assert plain.token_bytes == paged.token_bytes == token_bytes
    states = sum(kind.state_bytes for kind in answer.layers)
    assert paged.request_bytes == 512 * token_bytes + states  # 512 tokens fill their blocks


# (layers that see everything, bytes of a token in them, layers with a window, it, bytes of a token in these)
@pytest.mark.parametrize(
    ("name", "full", "full_bytes", "sliding", "window", "sliding_bytes"),
    [
        ("mistral-7b-v0.1", 0, 0, 32, 4096, 131_072),  # 2 x 32 x 8 x 128 x 2
        ("gemma-2-9b", 21, 172_032, 21, 4096, 172_032),  # 2 x 21 x 8 x 256 x 2
        (
            "gemma-3-4b",
            5,
            20_480,
            29,
            1024,
            118_784,
        ),  # every sixth layer of 34 is full: 2 x 5 x 4 x 256 x 2, 2 x 29 x ...
        ("gemma-3n-e4b", 4, 8_192, 16, 512, 32_768),  # of 35 layers 20 store, every fifth is full: 2 x 4 x 2 x 256 x 2
        ("gpt-oss-20b", 12, 24_576, 12, 128, 24_576),  # 2 x 12 x 8 x 64 x 2
    ],
)
def test_windows_bound_what_their_layers_keep(name, full, full_bytes, sliding, window, sliding_bytes):
    context = 8 * K
    answer = plan(name, context)
    seen = kind(answer, "sliding_attention")
    assert (seen.layers, seen.window, seen.token_bytes) == (sliding, window, sliding_bytes)
    assert seen.request_bytes == sliding_bytes * (window - 1), "what transformers' own sliding layers keep"
    if full:
        whole = kind(answer, "full_attention")
        assert (whole.layers, whole.token_bytes) == (full, full_bytes)
    plain, paged = answer.caches
    held = context * full_bytes + sliding_bytes * (window - 1)
    assert sum(kind.request_bytes for kind in answer.layers) == held
    assert paged.token_bytes == pytest.approx(full_bytes, rel=0.01)  # at this length only full layers grow
    assert held <= paged.request_bytes <= held + 2 * 16 * sliding_bytes  # at most two blocks of 16 more
    assert plain.request_bytes > held  # a step copies one layer


def test_shared_layers_keep_nothing_of_their_own():
    answer = plan("gemma-3n-e4b", 4 * K)
    shared = [kind for kind in answer.layers if kind.kind == "shared"]
    assert sum(kind.layers for kind in shared) == 15 and not any(kind.request_bytes for kind in shared)
    assert sum(kind.layers for kind in answer.layers) == 35


def test_latents_are_stored_and_expanded_to_be_attended():
    answer = plan("deepseek-v3", 4 * K, dtype=None)
    latent = kind(answer, "latent_attention")
    assert (latent.layers, latent.kv_heads, latent.k_dim, latent.v_dim) == (61, 1, 512, 64)
    assert latent.token_bytes == 61 * 1_152  # (512 + 64) x 2 bytes, as published
    # Expanded for 128 heads: keys of 128 + 64 channels, values of 128: 128 x 320 x 2 bytes in every layer's pass.
    assert budget.expanded_bytes(models.load(str(FOLDER / "deepseek-v3.json"))) == 81_920
    assert any("1,152 B" in note and "81,920 B" in note for note in answer.notes)
    with_two = plan("deepseek-v3", 4 * K, requests=2)
    assert with_two.budget.activations - answer.budget.activations == 4 * K * 81_920


def test_linear_layers_keep_a_state_of_one_size():
    short, long = (plan("qwen3-next-80b-a3b", n) for n in (K, 64 * K))
    for answer in (short, long):
        linear, full = kind(answer, "linear_attention"), kind(answer, "full_attention")
        assert (linear.layers, full.layers) == (36, 12)
        # 36 layers x (convolution: 4 inputs of 2 x 16 x 128 + 32 x 128 channels, 2 bytes; 32 heads of 128 x 128 in float32)
        assert linear.state_bytes == linear.request_bytes == 36 * (4 * 8_192 * 2 + 32 * 128 * 128 * 4)
        assert full.token_bytes == 24_576  # 2 x 12 x 2 x 256 x 2: every fourth layer
    grown = long.caches[1].request_bytes - short.caches[1].request_bytes
    assert grown == 63 * K * 24_576


def test_a_mamba_state_beside_attention():
    answer = plan("falcon-h1-7b", K)
    hybrid = kind(answer, "hybrid")
    assert hybrid.layers == 44 and hybrid.token_bytes == 45_056  # 2 x 44 x 2 x 128 x 2
    # 44 layers x (convolution: 4 inputs of 3,072 + 2 x 256 channels, 2 bytes; 24 heads of 128 x 256 in float32)
    assert hybrid.state_bytes == 44 * (4 * 3_584 * 2 + 24 * 128 * 256 * 4)


@pytest.mark.parametrize("chunk", [None, 32])
def test_an_encoders_text_is_kept_once(chunk):
    answer = plan("t5-base", 64, encoder_tokens=500, pass_tokens=chunk)
    cross = kind(answer, "cross_attention")
    assert cross.request_bytes == cross.state_bytes == 500 * 73_728  # 2 x 12 layers x 12 heads x 64 x 4 bytes
    # The encoder takes its text whole: its feed-forward half has 500 x (2 x 768 + 3 x 3,072) numbers of 4 bytes.
    assert answer.budget.pass_tokens == 500
    assert answer.budget.activations == 500 * (2 * 768 + 3 * 3_072) * 4


@pytest.mark.parametrize(
    ("name", "weights", "size"),
    [
        ("llama-3.1-8b", "bf16", 8_030_261_248 * 2),
        # All but embedding, output (128,256 x 4,096 each) and norms (65 x 4,096) is linear: 6,979,321,856.
        # 4 bits and a float32 per 64: 3,489,660,928 + 436,207,616, and 2,101,878,784 of the rest in bfloat16.
        ("llama-3.1-8b", "4bit", 6_027_747_328),
        # A byte, and a float32 for each of the 43,008 rows of a layer (4,096 + 2 x 1,024 + 4,096 + 2 x 14,336 + 4,096).
        ("llama-3.1-8b", "8bit", 6_979_321_856 + 4 * 32 * 43_008 + (2 * 128_256 * 4_096 + 65 * 4_096) * 2),
        # gpt-oss' experts (24 x 32 x (2,880 x 5,760 + 2,880 x 2,880) = 19,110,297,600) at 4.25 bits, the rest in bfloat16:
        # 13.76 GB, the size of the published checkpoint.
        ("gpt-oss-20b", "auto", 19_110_297_600 * 17 // 32 + (20_914_757_184 - 19_110_297_600) * 2),
    ],
)
def test_bytes_of_weights(name, weights, size):
    known = models.load(str(FOLDER / f"{name}.json"))
    assert budget.weight_bytes(known, models.parameters(known), weights) == size


def test_blocks_in_host_memory_need_buffers_on_the_device():
    answer = memory.plan(str(FOLDER / "llama-3.1-8b.json"), context=8 * K, caches=["offloaded:1024"])
    (cache,) = answer.caches
    # 1,024 of 8,192 tokens stay; of 448 blocks of 16 x 4,096 bytes in a layer two copies, with an eighth and one of room.
    assert cache.request_bytes == 1_024 * 131_072 + 16 * 131_072 + 2 * (448 + 56 + 1) * 16 * 4_096
    assert cache.host_bytes == (8_192 - 1_024) * 131_072 and cache.disk_bytes == 0


def test_how_long_texts_may_be():
    limits = {path.stem: models.load(str(path)).limit for path in FOLDER.glob("*.json")}
    assert limits["llama-3.1-8b"] == limits["gpt-oss-20b"] == limits["gemma-3-4b"] == 128 * K
    assert limits["deepseek-v3"] == 160 * K and limits["gemma-2-9b"] == 8 * K
    assert limits["t5-base"] is None, "relative positions have no end"


def test_rope_scaling_that_the_config_does_not_count_in_is():
    fields = {"model_type": "qwen2", "max_position_embeddings": 32_768, "num_hidden_layers": 2}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert models.load(fields).limit == 32_768
    assert models.load(fields | {"rope_scaling": scaling}).limit == 131_072


def test_an_answer_that_everybody_wants():
    """Llama-3.1-8B on 24 GiB: 14.96 GiB of weights; what is left of 90 % holds one request of 32k in bfloat16 (4 GiB), four
    in 4 bits (about 1.1 GiB each)."""
    answer = memory.plan(
        str(FOLDER / "llama-3.1-8b.json"),
        device_memory=24 * GIB,
        context=32 * K,
        caches=["paged", "int4"],
        pass_tokens=2 * K,
    )
    paged, int4 = answer.caches
    assert answer.budget.weights == 16_060_522_496 and paged.request_bytes == 4 * GIB
    assert paged.requests == 1 and int4.requests in (4, 5) and paged.context < int4.context
