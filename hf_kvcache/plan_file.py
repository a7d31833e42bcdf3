"""The choices of a cache as JSON and as a call in Python: what `hf-kvcache tune` writes and `KVCache.from_plan` reads."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .choices import made
from .codecs import codec_for
from .errors import ConfigurationError
from .retention import RETENTIONS
from .spec import LayerSpec
from .tiers import TIERS

FORMAT, VERSION = "hf_kvcache plan", 1
LEVERS = {"retention": RETENTIONS, "tier": TIERS}


@dataclass(frozen=True)
class CachePlan:
    """A cache for a model with as many layers as there are `codecs`.

    Attributes:
        block_size, residual: as `KVCache` takes them.
        codecs: the name of each layer's codec; None where a layer keeps no keys and values of its own.
        retention, tier: `{"name": ..., option: value, ...}` as in the tables of these levers; None for the default. No folders:
            a plan may be somebody else's, and a tier makes its folder.
    """

    block_size: int
    residual: int
    codecs: tuple[str | None, ...]
    retention: Mapping | None = None
    tier: Mapping | None = None

    @classmethod
    def read(cls, source: str | Path | Mapping) -> CachePlan:
        """A plan from the path of a JSON file, or from what such a file holds.

        Raises:
            ConfigurationError: when there is no such file, it is no plan or one of another version, or it names what does
                not exist.
        """
        held = source if isinstance(source, Mapping) else _load(Path(source))
        if not isinstance(held, Mapping) or held.get("format") != FORMAT:
            raise ConfigurationError(
                f'this is no plan for a cache: it lacks "format": "{FORMAT}". `hf-kvcache tune --out` writes plans.'
            )
        if held.get("version") != VERSION:
            raise ConfigurationError(
                f"the plan has version {held.get('version')!r} and this release reads {VERSION}: make it anew with "
                "`hf-kvcache tune`, or use the release that wrote it."
            )
        choices = held.get("choices")
        known = list(cls.__dataclass_fields__)
        if not isinstance(choices, Mapping) or not {*known[:3]} <= choices.keys() <= {*known}:
            given = list(choices) if isinstance(choices, Mapping) else choices
            raise ConfigurationError(f"the plan's choices are {given!r}; they must be {', '.join(known[:3])}, and may have "
                                     f"{' and '.join(known[3:])}.")  # fmt: skip
        plan = cls(**choices)
        plan._check()
        return replace(plan, codecs=tuple(plan.codecs))

    def _check(self) -> None:
        if not isinstance(self.codecs, list | tuple) or not all(isinstance(name, str | None) for name in self.codecs):
            raise ConfigurationError(
                f"the plan's codecs are {self.codecs!r}; they must be a list of names (null: none)."
            )
        for name in filter(None, self.codecs):
            codec_for(name)
        for lever in LEVERS:
            self._built(lever)

    def _built(self, lever: str) -> object | None:
        """The rule or tier that the plan describes."""
        described = getattr(self, lever)
        if described is None:
            return None
        if not isinstance(described, Mapping):
            raise ConfigurationError(
                f'the plan\'s {lever} is {described!r}; write {{"name": ...}}, one of {", ".join(LEVERS[lever])}.'
            )
        try:
            return made(LEVERS[lever], described.get("name"), _options(described))
        except ConfigurationError:
            raise
        except ValueError as error:
            raise ConfigurationError(f"the plan's {lever} cannot be: {error}.") from error

    def choices(self, specs: Sequence[LayerSpec]) -> dict:
        """The keywords of `KVCache` for a model with these layers.

        Raises:
            ConfigurationError: for a model with other layers.
        """
        if len(self.codecs) != len(specs):
            raise ConfigurationError(
                f"the plan is for a model of {len(self.codecs)} layers and this one has {len(specs)}: make one for it "
                "with `hf-kvcache tune`."
            )
        for index, (name, spec) in enumerate(zip(self.codecs, specs, strict=True)):
            if (name is not None) != spec.stores:
                keeps = "keeps keys and values" if spec.stores else "keeps no keys and values of its own"
                raise ConfigurationError(
                    f"the plan gives layer {index} the codec {name!r} and the model's {keeps}: it is for another model."
                )
        usual, others = self._grouped()
        layers = {index: {"codec": name} for name, indices in others.items() for index in indices}
        built = {lever: self._built(lever) for lever in LEVERS}
        return {
            "block_size": self.block_size,
            "residual": self.residual,
            "codec": usual,
            "layers": layers,
            **{lever: value for lever, value in built.items() if value is not None},
        }

    def _grouped(self) -> tuple[str, dict[str, list[int]]]:
        """The codec that most layers have, and the layers of each other one."""
        counts = Counter(filter(None, self.codecs))
        usual = counts.most_common(1)[0][0] if counts else "native"
        others = [name for name in counts if name != usual]
        return usual, {name: [i for i, own in enumerate(self.codecs) if own == name] for name in others}

    def call(self, config: str = "model.config") -> str:
        """The same cache in Python, over lines of at most 80 columns."""
        usual, others = self._grouped()
        lines = [config, f"block_size={self.block_size}", f"residual={self.residual}", f'codec="{usual}"']
        for lever, table in LEVERS.items():
            described = getattr(self, lever)
            if described is not None:
                options = ", ".join(f"{key}={value!r}" for key, value in _options(described).items())
                lines.append(f"{lever}={table[described['name']].__name__}({options})")
        if others:
            parts = [f'**dict.fromkeys({indices}, {{"codec": "{name}"}})' for name, indices in others.items()]
            lines.append("layers={\n" + "\n".join(_indented(f"{part},", 8) for part in parts) + "\n    }")
        return "KVCache(\n" + "".join(f"    {line},\n" for line in lines) + ")"

    def as_dict(self, **about) -> dict:
        """What the file holds; `about` is for readers, such as `model` and `measured`."""
        return {"format": FORMAT, "version": VERSION, "choices": asdict(self) | {"codecs": list(self.codecs)}, **about}


def _options(described: Mapping) -> dict:
    return {key: value for key, value in described.items() if key != "name"}


def _indented(text: str, columns: int) -> str:
    """Python within brackets, broken to fit a terminal."""
    first, more = " " * columns, " " * (columns + 4)
    return textwrap.fill(text, 80, initial_indent=first, subsequent_indent=more, break_long_words=False)


def _load(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigurationError(f"the plan {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"the plan {path} is not JSON: {error}.") from error
