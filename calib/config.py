"""Configuration: the schema. Values live in `conf/`; Hydra composes them, `Settings.of` turns them into dataclasses."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from artifacts import Bundle, Format, LayerFormat
from artifacts.codes import BITS
from artifacts.errors import FormatError, SignpostError
from artifacts.format import from_json
from artifacts.parts.sparse import LARGEST
from calib.choices import LayerRecipe, split

WEIGHTS = ("none", "fisher", "fisher_scaled")
SOURCES = ("generated", "text", "wikitext2", "c4", "none")
MAX_SEED = 2**32 - 1
SHARES = f"numbers from 0 (none) to {LARGEST}"
DEVICES = r"auto|cpu|cuda(:\d+)?|split"
WORK = ".signpost-work"
FOR_RECIPES = ("bits", "outliers", "sinks", "codebook")  # options that recipes may read
_ELSEWHERE = {
    "bits": "widths are said by part, such as method.value.dense.bits",
    "outliers": "recipes with outliers have the part `sparse`, as kvquant",
    "sinks": "windows are said by side, such as method.key.window.sinks",
    "codebook": "codebooks are said by part, such as method.value.dense.codebook",
}
CHECKED = 96  # tokens through the real cache, where pages are no larger
CODEBOOKS = ("nuq", "uniform-fit", "nuq-qnorm", "nf", "uniform")  # of numbers that have a range
NAMED = ("first_half", "second_half", "sliding")


class ConfigError(SignpostError, ValueError):
    """A setting has a value that cannot work. The message names it, what is allowed and the way out."""


@dataclass
class ModelConfig:
    """Which model.

    name      for people
    path      folder, hub id, or `tiny`
    revision  of the hub
    dtype     auto, float32, bfloat16, float16
    seqlen    tokens per calibration window where the option `seqlen` is not given
    """

    name: str = MISSING
    path: str = MISSING
    revision: str | None = None
    dtype: str = "auto"
    seqlen: int = 2048


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
    cache_tokens  tokens that are also decoded one by one through the real cache, as a check (0: no check; null: 96, or
                  more where that fills no page of some side)
    """

    tokens: int | None = 8192
    seqlen: int | None = None
    cache_tokens: int | None = None


@dataclass
class MethodConfig:
    """A recipe over the parts of the format algebra; see `artifacts.format.Format` for what `key` and `value` may hold,
    and `calib.choices` for numbers that they may leave to calibration.

    weights  of the signposts' k-means: none, fisher, fisher_scaled (KVQuant's objective, F_ii * s_i^2); also of the
             spectra that ranks are chosen by (none, or times the mean squared gradient)
    bins     of the histogram over normalized numbers
    seed     of random rotations
    layers   settings that differ in some layers: {0: {key: {dense: {bits: 8}}}}, or null for full precision: {0: null}.
             A key is a layer, a range (`0-3`), `first_half` or `second_half` of the model's layers, or `sliding`: those
             that see a window of tokens only. Where several keys cover a layer, halves come first, then sliding, then
             ranges, then single layers, the later on top. Where some layers of a model slide and others do not, those
             that do stay in full precision unless a key covers them: {sliding: {}} gives them the recipe's formats
    """

    name: str = MISSING
    key: Any = MISSING
    value: Any = MISSING
    weights: str = "fisher_scaled"
    bins: int = 16384
    seed: int = 0
    layers: Any = field(default_factory=dict)


@dataclass
class CandidatesConfig:
    """What `budget` chooses from.

    key, value  base (settings of a format but page size and window) and variants (by name, what differs from base)
    fillings    list of {t, sinks, recent}: page sizes, and which tokens stay in full precision
    tokens      of calibration text on which damage is measured
    weights, bins, seed  of the fits, as of a method
    """

    name: str = MISSING
    key: Any = MISSING
    value: Any = MISSING
    fillings: Any = MISSING
    tokens: int = 8192
    weights: str = "fisher_scaled"
    bins: int = 16384
    seed: int = 0


@dataclass
class Config:
    """Everything that `python -m calib` takes. Metadata: what is allowed, where the type does not say all."""

    model: ModelConfig = field(default_factory=ModelConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    data: TextConfig = field(default_factory=TextConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    candidates: CandidatesConfig = field(default_factory=CandidatesConfig)
    budget: str | None = None
    table: str | None = None
    speed: str | None = None
    most_us: float | None = None
    bits: int = field(default=4, metadata={"allowed": ", ".join(map(str, BITS))})
    outliers: float = field(default=0.01, metadata={"allowed": SHARES})
    sinks: int = 1
    codebook: str = field(default="nuq", metadata={"allowed": ", ".join(CODEBOOKS)})
    samples: int = 16
    seqlen: int = 2048
    seed: int = 0
    device: str = "auto"
    work: str | None = None
    checkpoint: float = 60.0
    dry_run: bool = False
    out: str = MISSING


def register(scratch: str = ".") -> None:
    """Gives Hydra the schema against which `conf/` is checked. scratch: folder for what Hydra leaves behind."""
    OmegaConf.register_new_resolver("bundle_path", _bundle_path, replace=True)
    OmegaConf.register_new_resolver("scratch", lambda: scratch, replace=True)
    ConfigStore.instance().store(name="schema", node=Config)


def _bundle_path(model: str, method: str, budget: str | None, *, _root_: DictConfig) -> str:
    """Where a bundle goes that nobody has named: by model and recipe, and what was set for the recipe."""
    if budget:
        return f"bundles/{model}-auto-{budget}"
    used = [name for name in FOR_RECIPES if name not in unread(_root_)]
    width = [f"{_root_.bits}bit"] if "bits" in used else []
    others = [name for name in used if name != "bits" and _root_[name] != getattr(Config, name)]
    return "-".join([f"bundles/{model}", method, *width, *(f"{name}{_root_[name]}" for name in others)])


def unread(composed: DictConfig) -> frozenset[str]:
    """Which of the options for recipes the one at hand does not read, or, with a budget, the candidates."""
    read = OmegaConf.to_yaml(composed.method if composed.budget is None else composed.candidates, resolve=False)
    return frozenset(name for name in FOR_RECIPES if f"${{{name}}}" not in read)


def _require_read(composed: DictConfig, given: Sequence[str]) -> None:
    """Raises ConfigError where an option was given that nothing reads, unless it asks for none where there is none."""
    for name in sorted(unread(composed)):
        values = [text.partition("=")[2] for text in given if text.startswith(f"{name}=")]
        if not values or (name != "bits" and composed[name] == 0):
            continue
        where = f"method={composed.method.name} does not read it ({_ELSEWHERE[name]})"
        if composed.budget is not None:
            where = f"budget={composed.budget} chooses from candidates={composed.candidates.name}, which do not read it"
        raise ConfigError(f"{name}={values[-1]}: {where}: leave it out")


@dataclass(frozen=True)
class Settings:
    """The validated configuration; what the rest of calib sees. unread: options that have no part in it."""

    config: Config
    unread: frozenset[str] = frozenset()

    @classmethod
    def of(cls, composed: DictConfig, given: Sequence[str] = ()) -> "Settings":
        """Converts what Hydra composed; given: options as they were given. Raises ConfigError or FormatError before any
        model is loaded."""
        try:
            config = OmegaConf.to_object(composed)
        except MissingMandatoryValue as error:
            raise ConfigError(f"{error.full_key} has no value: set {error.full_key}=...") from error
        except OmegaConfBaseException as error:  # an interpolation that leads nowhere
            raise ConfigError(f"{error.full_key}: {str(error.msg).splitlines()[0]}") from error
        if not isinstance(config, Config):
            raise ConfigError("the configuration does not follow the schema: does config.yaml start from `schema`?")
        for text in (config.data, config.eval):
            if text.path is not None:
                text.source = "text"
        settings = cls(config, unread(composed))
        settings._validate()
        _require_read(composed, given)
        return settings

    @property
    def work(self) -> Path:
        """Folder of what a killed run continues from, and of what runs may share."""
        return Path(self.config.out).parent / WORK if self.config.work is None else Path(self.config.work)

    @property
    def table(self) -> Path:
        """Folder of what was measured and fitted for budgets."""
        c = self.config
        return Path(c.out).parent / f"{c.model.name}-{c.candidates.name}.table" if c.table is None else Path(c.table)

    @property
    def counted_at(self) -> int:
        """Tokens at which a run states bits: the budget's length, or the windows'."""
        from calib.allocation.budget import Budget

        return Budget.parse(self.config.budget).length if self.config.budget else self.config.seqlen

    @property
    def resolved(self) -> dict[str, Any]:
        """Plain data of the configuration, for provenance: all of it that something reads."""
        return {name: value for name, value in asdict(self.config).items() if name not in self.unread}

    def _validate(self) -> None:
        c = self.config
        paths = {"out": c.out, "work": c.work, "table": c.table, "speed": c.speed}
        parts = {"model.path": c.model.path, "data.path": c.data.path, "eval.path": c.eval.path}
        if empty := [name for name, path in (paths | parts).items() if path == ""]:
            raise ConfigError(f"{empty[0]}= is empty: name a path, or leave the option out")
        if not re.fullmatch(DEVICES, c.device):
            raise ConfigError(f"device={c.device}: allowed are auto, cpu, cuda, cuda:0, ..., split")
        _at_least({"samples": (c.samples, 1), "seqlen": (c.seqlen, 2), "sinks": (c.sinks, 0), "seed": (c.seed, 0)})
        if not 0 <= c.outliers <= LARGEST:
            raise ConfigError(f"outliers={c.outliers}: allowed are {SHARES}; outliers=0 keeps none")
        if c.codebook not in CODEBOOKS:
            raise ConfigError(f"codebook={c.codebook}: allowed are {', '.join(CODEBOOKS)}")
        if not c.checkpoint >= 0:
            raise ConfigError(f"checkpoint={c.checkpoint} must be at least 0: seconds between saves of a running pass")
        if c.dry_run and c.budget is not None:
            raise ConfigError("dry_run plans recipes, not budgets: leave one of them out")
        if c.most_us is not None and (c.speed is None or not c.most_us > 0):
            raise ConfigError(
                f"most_us={c.most_us}: microseconds above 0, by a file of times (speed=FILE, which "
                "`python -m benchmarks.pair_speed` writes, in a checkout of Signpost)"
            )
        if c.speed is not None and c.budget is None:
            raise ConfigError(f"speed={c.speed}: only a choice by budget= weighs times; set one, or leave it out")
        if c.seed > MAX_SEED:
            raise ConfigError(f"seed={c.seed} must be at most {MAX_SEED}")
        if c.method.weights not in WEIGHTS:
            raise ConfigError(f"method.weights={c.method.weights}: allowed are {', '.join(WEIGHTS)}")
        if c.method.bins < 256:
            raise ConfigError(f"method.bins={c.method.bins}: at least 256, or boundaries between signposts get coarse")
        if c.candidates.weights not in WEIGHTS or c.candidates.bins < 256:
            raise ConfigError(
                f"candidates.weights={c.candidates.weights}, candidates.bins={c.candidates.bins}: allowed are "
                f"{', '.join(WEIGHTS)}, and at least 256 bins"
            )
        _check_text(c.data, "data", [source for source in SOURCES if source != "none"])
        _check_text(c.eval, "eval", SOURCES)
        if c.eval.source != "none":
            self._validate_eval()
        for override in (None, *self._overrides()) if c.budget is None else ():  # a budget takes the method's place
            if recipe := self._recipe([override] if override else []):
                self._check_pages(recipe.formats)

    def _validate_eval(self) -> None:
        e, seqlen = self.config.eval, self.eval_seqlen
        _at_least({"eval.seqlen": (seqlen, 2)})
        if e.tokens is not None and e.tokens < seqlen:
            window = f"eval.seqlen={seqlen}" if e.seqlen is not None else f"seqlen={seqlen} (eval.seqlen=null takes it)"
            raise ConfigError(
                f"eval.tokens={e.tokens} do not fill one window of {window}: raise eval.tokens, set it to null for all "
                "of the text, or lower the window"
            )
        if e.cache_tokens is not None and (e.cache_tokens < 0 or e.cache_tokens == 1):
            raise ConfigError(
                f"eval.cache_tokens={e.cache_tokens}: at least 2 (one predicts the next), or 0 for no check"
            )

    def cache_tokens(self, bundle: Bundle) -> int:
        """Tokens that are checked through the real cache: enough for a page of every side, and some behind it."""
        if self.config.eval.cache_tokens is not None:
            return self.config.eval.cache_tokens
        windows = [(side.format.window, side.format.t) for side in bundle.geometry.sides]
        filled = max((window.sinks + window.recent + t for window, t in windows), default=0)
        return min(max(CHECKED, filled + CHECKED // 3), self.eval_seqlen)

    @property
    def eval_seqlen(self) -> int:
        """Tokens per window of evaluation."""
        return self.config.seqlen if self.config.eval.seqlen is None else self.config.eval.seqlen

    def require_positions(self, limit: int | None) -> None:
        """Raises ConfigError for windows beyond a model's positions, if these are known."""
        evaluated = {"eval.seqlen": self.eval_seqlen} if self.config.eval.source != "none" else {}
        for name, seqlen in ({"seqlen": self.config.seqlen} | evaluated).items():
            if limit and seqlen > limit:
                raise ConfigError(f"{name}={seqlen} is above the model's {limit} positions: set {name}={limit} or less")

    def _check_pages(self, layer: LayerFormat) -> None:
        for name, fmt in (("key", layer.key), ("value", layer.value)):
            group = fmt.dense.group if fmt.dense and fmt.dense.axis == "channel" else 0
            if group and fmt.window.recent % group:
                below = fmt.window.recent // group * group
                raise ConfigError(
                    f"method.{name}.window.recent={fmt.window.recent} is not a multiple of dense.group={group}: "
                    f"groups of tokens leave the window whole, set {below} or {below + group}"
                )
            needed = fmt.t + fmt.window.sinks
            if self.config.seqlen < needed:
                raise ConfigError(
                    f"seqlen={self.config.seqlen} does not fill a page of {fmt.t} tokens behind {fmt.window.sinks} "
                    f"sinks: set seqlen to at least {needed}"
                )

    def _overrides(self) -> list["_Override"]:
        """`method.layers` in the order in which they apply. Raises FormatError."""
        layers = self.config.method.layers or {}
        if not isinstance(layers, dict):
            raise FormatError(f"method.layers={layers!r} must be a table of layers, such as {{0: {{key: {{t: 64}}}}}}")
        for name, sides in layers.items():
            if sides is None:
                continue
            if not isinstance(sides, dict) or (unknown := sorted(set(map(str, sides)) - {"key", "value"})):
                named = unknown[0] if isinstance(sides, dict) else repr(sides)
                raise FormatError(f"method.layers.{name}: {named} is not a side: known are key, value")
        return sorted(_Override(str(name), sides) for name, sides in layers.items())

    def _recipe(self, overrides: Sequence["_Override"]) -> LayerRecipe | None:
        """The recipe with the settings of these overrides on top; None for full precision. Raises FormatError."""
        if overrides and overrides[-1].sides is None:
            return None
        formats, rules = {}, {}
        for side in ("key", "value"):
            table, where = getattr(self.config.method, side), f"method.{side}"
            for override in overrides:
                if override.sides and side in override.sides:
                    table, where = merged(table, override.sides[side]), f"method.layers.{override.name}.{side}"
            table, rules[side] = split(_without_absent(table), where)
            formats[side] = from_json(Format, table, where)
        return LayerRecipe(LayerFormat(**formats), **rules)

    def recipes(self, layers: int, sliding: Sequence[int] = ()) -> tuple[LayerRecipe | None, ...]:
        """Formats of all layers and what they leave to calibration; None for layers in full precision.

        sliding: the layers' windows, as in `ModelFingerprint`. Raises FormatError where `method.layers` names layers
        that the model lacks.
        """
        overrides = self._overrides()
        for override in overrides:
            covered = override.covered(layers, sliding)
            if not covered and override.name == "sliding":
                raise FormatError(f"method.layers.{override.name}: the model has no layers that slide, leave it out")
            if max(covered, default=0) >= layers:
                raise FormatError(f"method.layers.{override.name}: the model has layers 0 to {layers - 1}")
        mixed = 0 in sliding
        found: list[LayerRecipe | None] = []
        for layer in range(layers):
            own = [o for o in overrides if layer in o.covered(layers, sliding)]
            bounded = mixed and sliding[layer] > 0 and not own
            found.append(None if bounded else self._recipe(own))
        return tuple(found)

    def formats(self, layers: int, sliding: Sequence[int] = ()) -> tuple[LayerFormat | None, ...]:
        """Formats of all layers, with stand-ins where calibration has yet to choose a number. Raises as `recipes`."""
        return tuple(recipe.formats if recipe else None for recipe in self.recipes(layers, sliding))


@dataclass(frozen=True)
class _Override:
    """One entry of `method.layers`: which layers (see `MethodConfig`) and what differs there; None: no format."""

    name: str
    sides: dict[str, Any] | None

    def __post_init__(self) -> None:
        if not self.covered(2, (1, 1)):
            raise FormatError(
                f"method.layers.{self.name}: layers are numbers from 0, ranges such as 0-3, {', '.join(NAMED[:-1])} or "
                f"{NAMED[-1]}"
            )

    def covered(self, layers: int, sliding: Sequence[int] = ()) -> Sequence[int]:
        """Layers of a model with so many; a range may reach beyond it. Empty for a name that means none."""
        if self.name == "sliding":
            return [layer for layer, window in enumerate(sliding) if window]
        if self.name in NAMED:
            return range(layers // 2) if self.name == NAMED[0] else range(layers // 2, layers)
        first, dash, last = self.name.partition("-")
        known = first.isdecimal() and (last.isdecimal() if dash else True)
        return range(int(first), int(last or first) + 1) if known else range(0)

    def __lt__(self, other: "_Override") -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, int]:
        if self.name in NAMED:
            return 0, NAMED.index(self.name)
        return 2 - ("-" in self.name), self.covered(2)[0]


def _at_least(values: dict[str, tuple[int, int]]) -> None:
    for name, (value, least) in values.items():
        if value < least:
            raise ConfigError(f"{name}={value} must be at least {least}")


def _check_text(text: TextConfig, where: str, sources: Sequence[str]) -> None:
    if text.source not in sources:
        raise ConfigError(f"{where}.source={text.source}: allowed are {', '.join(sources)}")
    if text.source == "text" and text.path is None:
        raise ConfigError(f"{where}=text needs {where}.path=FILE_OR_FOLDER")


def merged(base: Any, changes: Any) -> Any:
    if isinstance(base, dict) and isinstance(changes, dict):
        return base | {k: merged(base.get(k), v) for k, v in changes.items()}
    return changes


def _without_absent(side: Any) -> Any:
    """A recipe says `sparse.fraction: ${outliers}`; with outliers=0 the part is absent."""
    if isinstance(side, dict) and isinstance(side.get("sparse"), dict) and side["sparse"].get("fraction") == 0:
        return {k: v for k, v in side.items() if k != "sparse"}
    return side
