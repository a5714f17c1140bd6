"""Configuration: the schema. Values live in `conf/`; Hydra composes them, `Settings.of` turns the result into dataclasses."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from artifacts import Format, LayerFormat
from artifacts.errors import FormatError, SignpostError
from artifacts.format import from_json

WEIGHTS = ("none", "fisher", "fisher_scaled")
SOURCES = ("generated", "text", "wikitext2", "c4", "none")


class ConfigError(SignpostError, ValueError):
    """A setting has a value that cannot work. The message names it, what is allowed and the way out."""


@dataclass
class ModelConfig:
    """Which model. name: for people; path: folder or hub id; revision: of the hub; dtype: auto, float32, bfloat16, float16."""

    name: str = MISSING
    path: str = MISSING
    revision: str | None = None
    dtype: str = "auto"


@dataclass
class TextConfig:
    """Where tokens come from. path: a UTF-8 file or a folder of .txt files; naming one makes the source `text`."""

    source: str = MISSING
    path: str | None = None


@dataclass
class EvalConfig(TextConfig):
    """What to evaluate on.

    tokens        tokens of text at most (null: all of it)
    seqlen        tokens per window (null: `seqlen`); quality and bits are stated at this length
    cache_tokens  tokens that are also decoded one by one through the real cache, as a check (0: no check)
    """

    tokens: int | None = 8192
    seqlen: int | None = None
    cache_tokens: int = 96


@dataclass
class MethodConfig:
    """A recipe over the parts of the format algebra; see `artifacts.format.Format` for what `key` and `value` may hold.

    weights  of the signposts' k-means: none, fisher, fisher_scaled (KVQuant's objective, F_ii * s_i^2)
    bins     of the histogram over normalized numbers
    layers   settings that differ in single layers: {"0": {key: {dense: {bits: 8}}}}
    """

    name: str = MISSING
    key: Any = MISSING
    value: Any = MISSING
    weights: str = "fisher_scaled"
    bins: int = 16384
    layers: Any = field(default_factory=dict)


@dataclass
class Config:
    """Everything that `python -m calib` takes."""

    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    data: TextConfig = field(default_factory=TextConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    bits: int = 4
    outliers: float = 0.01
    sinks: int = 1
    samples: int = 16
    seqlen: int = 2048
    seed: int = 0
    device: str = "auto"
    out: str = MISSING


def register() -> None:
    """Gives Hydra the schema against which `conf/` is checked."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, node in (("model", ModelConfig), ("method", MethodConfig), ("data", TextConfig), ("eval", EvalConfig)):
        store.store(group=group, name="schema", node=node)


@dataclass(frozen=True)
class Settings:
    """The validated configuration; what the rest of calib sees."""

    config: Config
    resolved: dict[str, Any]  # plain data of the whole configuration, for provenance

    @classmethod
    def of(cls, composed: DictConfig) -> "Settings":
        """Converts what Hydra composed. Raises ConfigError or FormatError before any model is loaded."""
        config = OmegaConf.to_object(composed)
        if not isinstance(config, Config):
            raise ConfigError("the configuration does not follow the schema: does config.yaml start from `schema`?")
        resolved = OmegaConf.to_container(composed, resolve=True)
        assert isinstance(resolved, dict)
        settings = cls(config, {str(k): v for k, v in resolved.items()})
        settings._validate()
        return settings

    def _validate(self) -> None:
        c = self.config
        for name, least in (("samples", 1), ("seqlen", 2), ("sinks", 0), ("seed", 0)):
            if getattr(c, name) < least:
                raise ConfigError(f"{name}={getattr(c, name)} must be at least {least}")
        if c.method.weights not in WEIGHTS:
            raise ConfigError(f"method.weights={c.method.weights}: allowed are {', '.join(WEIGHTS)}")
        if c.method.bins < 256:
            raise ConfigError(f"method.bins={c.method.bins}: at least 256, or boundaries between signposts get coarse")
        for text, where in ((c.data, "data"), (c.eval, "eval")):
            if text.path is not None:
                text.source = "text"
            if text.source not in SOURCES or (text.source, where) == ("none", "data"):
                raise ConfigError(f"{where}.source={text.source}: allowed are {', '.join(SOURCES)}")
            if text.source == "text" and text.path is None:
                raise ConfigError(f"{where}=text needs {where}.path=FILE_OR_FOLDER")
        self.layer_format(0)

    def layer_format(self, layer: int) -> LayerFormat:
        """Format of one layer: the recipe with that layer's own settings on top. Raises FormatError."""
        method = self.config.method
        overrides = {str(k): v for k, v in (method.layers or {}).items()}.get(str(layer), {})
        if unknown := set(overrides) - {"key", "value"}:
            raise FormatError(f"method.layers.{layer}.{min(unknown)}: known are key, value")
        sides = {
            side: from_json(Format, _without_absent(_merged(getattr(method, side), overrides.get(side, {}))), f"method.{side}")
            for side in ("key", "value")
        }
        return LayerFormat(**sides)

    def formats(self, layers: int) -> tuple[LayerFormat, ...]:
        """Formats of all layers. Raises FormatError where `method.layers` names a layer that the model lacks."""
        for name in self.config.method.layers or {}:
            if not str(name).isdigit() or int(name) >= layers:
                raise FormatError(f"method.layers.{name}: the model has layers 0 to {layers - 1}")
        return tuple(self.layer_format(layer) for layer in range(layers))


def _merged(base: Any, changes: Any) -> Any:
    if isinstance(base, dict) and isinstance(changes, dict):
        return base | {k: _merged(base.get(k), v) for k, v in changes.items()}
    return changes


def _without_absent(side: Any) -> Any:
    """A recipe says `sparse.fraction: ${outliers}`; with outliers=0 the part is absent."""
    if isinstance(side, dict) and isinstance(side.get("sparse"), dict) and side["sparse"].get("fraction") == 0:
        return {k: v for k, v in side.items() if k != "sparse"}
    return side
