"""What a model is to a planner: its config, wherever it comes from, how long its texts may be, and how many parameters it has.
No weights are read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..errors import ConfigurationError
from ..spec import STATE_ONLY, specs_from_config

# Sizes by the names that configs have for them, where a model's own class is not known.
ALIASES = {
    "num_hidden_layers": ("num_hidden_layers", "num_layers", "n_layers", "n_layer"),
    "hidden_size": ("hidden_size", "d_model", "n_embd", "dim"),
    "num_attention_heads": ("num_attention_heads", "num_heads", "n_heads", "n_head"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "d_kv"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "d_ff", "ffn_dim", "n_inner"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
}
UNLIMITED = 1 << 40  # positions of a model that says nothing of them
NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True)
class Model:
    """A model without its weights.

    Attributes:
        name: for tables.
        config, text: its config, and that of its text decoder.
        dtype: of weights, keys and values.
        limit: tokens of the longest text that its positions allow, rope scaling included; None where the config sets none.
        estimate: what is only estimated, and from what; None where nothing is.
    """

    name: str
    config: PreTrainedConfig
    text: PreTrainedConfig
    dtype: torch.dtype
    limit: int | None
    estimate: str | None = None

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(getattr(self.config, "is_encoder_decoder", False))


def load(source, dtype: torch.dtype | None = None) -> Model:
    """The model of a config, of a `config.json`, of a folder that has one, or of a hub id.

    Args:
        source: a `PreTrainedConfig`, a dict of its fields, a path, or an id, which needs a network or the hub's local cache.
        dtype: of weights, keys and values; None for the config's (float32 where it names none).

    Raises:
        ConfigurationError: when there is no config to be had, or it does not even say how large the model is.
    """
    name, config = source if isinstance(source, str) else getattr(source, "model_type", "model"), source
    if isinstance(source, (str, Path)):
        name, config = _read(str(source))
    estimate = None
    if isinstance(config, dict):
        config, estimate = _from_fields(config)
    if estimate is None and not _says_its_shapes(config):
        config, estimate = _llama_like(config.to_dict(), f"{config.model_type!r} does not say what its layers store")
    text = config.get_text_config(decoder=True)
    own = getattr(text, "dtype", None) or getattr(config, "dtype", None)
    return Model(name, config, text, dtype or own or torch.float32, _limit(text), estimate)


def _read(source: str) -> tuple[str, dict | PreTrainedConfig]:
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            fields = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigurationError(f"{path} is not JSON ({error}): give the path to a model's config.json.") from None
        if not isinstance(fields, dict):
            raise ConfigurationError(f"{path} holds no JSON object: give the path to a model's config.json.")
        return path.parent.name if path.name == "config.json" else path.stem, fields
    try:
        fields, _ = PreTrainedConfig.get_config_dict(source)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"{source!r} is no file or folder here, and the hub does not give it ({reason}): give a model id that can be "
            "reached, or the path to its config.json."
        ) from None
    return source.rsplit("/", 1)[-1], fields


def _from_fields(fields: dict) -> tuple[PreTrainedConfig, str | None]:
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return _llama_like(fields, f"transformers {transformers.__version__} knows no model type {kind!r}")
    try:
        return CONFIG_MAPPING[kind].from_dict(fields), None
    except Exception as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ConfigurationError(
            f"this is not a config of a {kind!r} model: {reason} Correct its config.json."
        ) from None


def _llama_like(fields: dict, reason: str) -> tuple[PreTrainedConfig, str]:
    """A Llama of a model's sizes, in place of a model that is not known."""
    fields = {**fields, **(fields.get("text_config") or {})}
    found = {
        name: next((fields[alias] for alias in aliases if isinstance(fields.get(alias), int)), None)
        for name, aliases in ALIASES.items()
    }
    missing = [name for name in NEEDED if not found[name] or found[name] < 1]
    if missing:
        raise ConfigurationError(
            f"{reason}, and its config has no {', '.join(missing)}: update transformers, or add them to config.json for an "
            "estimate."
        )
    found["intermediate_size"] = found["intermediate_size"] or 4 * found["hidden_size"]
    found["head_dim"] = found["head_dim"] or found["hidden_size"] // found["num_attention_heads"]
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    found["max_position_embeddings"] = found["max_position_embeddings"] or UNLIMITED
    config = LlamaConfig(**{name: value for name, value in found.items() if value}, dtype=dtype)
    return config, f"{reason}: everything here is estimated for a Llama of its sizes, with full attention in all layers"


def _says_its_shapes(config: PreTrainedConfig) -> bool:
    try:
        specs = specs_from_config(config)
    except (AttributeError, TypeError, StopIteration, ValueError):
        return False
    return all(spec.kv_heads is not None or not spec.stores for spec in specs) and bool(specs)


def _limit(text: PreTrainedConfig) -> int | None:
    """Positions that a model has: `max_position_embeddings`, or what its rope scaling makes of the original ones."""
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or not 1 <= limit < UNLIMITED:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    for scaling in [rope, *(x for x in rope.values() if isinstance(x, dict))]:
        original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
        if original and factor and limit <= original:  # not counted in
            limit = int(original * factor)
    return limit


@dataclass(frozen=True)
class Parameters:
    """Parameters of a model by what a quantisation does with them.

    Attributes:
        linear: in the matrices of linear layers; `rows` of these matrices in all.
        experts: in matrices that experts share one tensor for.
        rest: embeddings, the output projection, norms, biases, convolutions, and buffers that a checkpoint holds.
        exact: whether they were counted in the model's own modules, and not estimated from its sizes.
        note: what was left out of the count, if anything.
    """

    linear: int
    rows: int
    experts: int
    rest: int
    exact: bool = True
    note: str | None = None

    @property
    def total(self) -> int:
        return self.linear + self.experts + self.rest


def parameters(model: Model) -> Parameters:
    """Count the parameters of the model's modules, built without memory; one that is tied counts once."""
    note = None
    for config in (model.config, model.text):
        try:
            return _count(_build(config), note)
        except Exception as error:  # a vision tower's package that is not installed, a class that cannot be built
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            note = f"parameters of the text model only: the whole cannot be built here ({reason})"
    return _formula(model)


def _build(config: PreTrainedConfig) -> torch.nn.Module:
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    config = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "quantization_config"})
    with torch.device("meta"):
        return auto.from_config(config)


def _count(model: torch.nn.Module, note: str | None) -> Parameters:
    head = model.get_output_embeddings()
    matrices = {
        id(module.weight): module.weight.shape
        for module in model.modules()
        if isinstance(module, (torch.nn.Linear, transformers.pytorch_utils.Conv1D)) and module is not head
    }
    linear = rows = experts = rest = 0
    for name, parameter in model.named_parameters():  # each once, tied or not
        if id(parameter) in matrices:
            linear, rows = linear + parameter.numel(), rows + parameter.shape[0]
        elif parameter.dim() == 3 and "expert" in name:
            experts += parameter.numel()
        else:
            rest += parameter.numel()
    buffers, saved = dict(model.named_buffers()), model.state_dict().keys()
    rest += sum(buffer.numel() for name, buffer in buffers.items() if name in saved)
    return Parameters(linear, rows, experts, rest, note=note)


def _formula(model: Model) -> Parameters:
    """The matrices of a gated transformer of these sizes."""
    text = model.text
    specs, hidden = specs_from_config(model.config), text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, (list, tuple)) else inner
    heads = text.num_attention_heads
    linear = 0
    for spec in specs:
        q = heads * (spec.k_dim or hidden // heads)
        kv = 0 if spec.kind in STATE_ONLY or not spec.kv_heads else spec.kv_heads * (spec.k_dim + spec.v_dim)
        linear += hidden * (2 * q + kv + 3 * inner)
    rest = hidden * text.vocab_size * (1 if getattr(text, "tie_word_embeddings", False) else 2)
    note = "parameters estimated as those of a gated transformer of these sizes: its class cannot be built here"
    return Parameters(linear, math.ceil(linear / hidden), 0, rest, exact=False, note=note)
