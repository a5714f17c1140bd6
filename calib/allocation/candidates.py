"""What a budget chooses from: formats of keys and of values, each with every filling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from artifacts import Format, LayerFormat, PageGeometry
from artifacts.errors import FormatError
from artifacts.fields import SideName
from artifacts.format import from_json, to_json
from calib.allocation.budget import Budget
from calib.choices import LayerRecipe
from calib.config import CandidatesConfig, ConfigError, MethodConfig, merged

SIDES: tuple[SideName, SideName] = ("key", "value")


@dataclass(frozen=True)
class Filling:
    """When pages fill: tokens per page, and which tokens stay exact."""

    t: int
    sinks: int = 0
    recent: int = 0


@dataclass(frozen=True)
class Candidates:
    """Variants of both sides by name, as tables of settings without page size and window, and the fillings."""

    variants: Mapping[SideName, Mapping[str, Mapping[str, Any]]]
    fillings: tuple[Filling, ...]
    config: CandidatesConfig

    @classmethod
    def of(cls, config: CandidatesConfig) -> "Candidates":
        """From the options. Raises ConfigError or FormatError for what no format can be."""
        variants: dict[SideName, dict[str, Any]] = {}
        for side in SIDES:
            table = getattr(config, side)
            if not isinstance(table, dict) or table.keys() != {"base", "variants"} or not table["variants"]:
                raise ConfigError(
                    f"candidates.{side}: a table with base (settings of a format) and variants (by name, what differs "
                    "from base; at least one)"
                )
            variants[side] = {
                str(name): merged(table["base"], change or {}) for name, change in table["variants"].items()
            }
        if not isinstance(config.fillings, list) or not config.fillings:
            raise ConfigError(
                "candidates.fillings: a list of {t: tokens per page, sinks: ..., recent: ...}, at least one"
            )
        fillings = tuple(
            from_json(Filling, filling, f"candidates.fillings.{i}") for i, filling in enumerate(config.fillings)
        )
        found = cls(variants, fillings, config)
        for side in SIDES:
            for name in variants[side]:
                for filling in fillings:
                    found.format(side, name, filling)
        return found

    def names(self, side: SideName) -> list[str]:
        """Names of a side's variants, in order."""
        return list(self.variants[side])

    def format(self, side: SideName, name: str, filling: Filling) -> Format:
        """The format of one variant and filling. Raises FormatError naming the variant."""
        settings = {"t": filling.t, "window": {"sinks": filling.sinks, "recent": filling.recent}}
        if given := settings.keys() & self.variants[side][name].keys():
            raise FormatError(
                f"candidates.{side}: {sorted(given)[0]} of a variant; page size and window belong into fillings"
            )
        return from_json(Format, {**self.variants[side][name], **settings}, f"candidates.{side}.variants.{name}")

    def recipes(self, l: int, sliding: Sequence[int] = ()) -> list[list[LayerRecipe | None]]:
        """Uniform recipes that between them hold every variant of both sides, all at the first filling.

        sliding: as in `ModelFingerprint`; where some layers slide, these stay in full precision, which is bounded.
        """
        lists = [[self.format(side, name, self.fillings[0]) for name in self.names(side)] for side in SIDES]
        count = max(map(len, lists))
        pairs = [LayerFormat(*(formats[i % len(formats)] for formats in lists)) for i in range(count)]
        exact = [0 in sliding and window > 0 for window in sliding or [0] * l]
        return [[None if exact[layer] else LayerRecipe(pair) for layer in range(l)] for pair in pairs]

    def check(self, h_kv: int, d: int) -> None:
        """Raises FormatError, which names it and the way out, for a candidate that does not fit the model."""
        for side in SIDES:
            for name in self.names(side):
                for filling in self.fillings:
                    try:
                        PageGeometry.of(self.format(side, name, filling), h_kv, d, side)
                    except FormatError as error:
                        others = "; candidates=plain has no bands" if self.variants[side][name].get("banded") else ""
                        raise FormatError(f"candidates.{side}.variants.{name}: {error}{others}") from error

    def costs(self, side: SideName, h_kv: int, d: int, n: int) -> tuple[list[int], list[int]]:
        """Bytes of every candidate of one side of one layer at n tokens, and how many sinks it keeps.

        Variants in order, each with all fillings. Counted: what the cache takes, and the bundle's tensors.
        """
        formats = [self.format(side, name, filling) for name in self.names(side) for filling in self.fillings]
        geometries = [PageGeometry.of(fmt, h_kv, d, side) for fmt in formats]
        return [g.cache_bytes(n, 2) + g.bundle_bytes for g in geometries], [fmt.window.sinks for fmt in formats]

    def middle(self, side: SideName, h_kv: int, d: int) -> int:
        """The variant of middling size: fillings are measured with it."""
        bits = [PageGeometry.of(self.format(side, n, self.fillings[0]), h_kv, d, side).bits for n in self.names(side)]
        return sorted(range(len(bits)), key=lambda i: bits[i])[(len(bits) - 1) // 2]

    def require_length(self, budget: Budget) -> None:
        """Raises ConfigError where what a filling costs depends on a length that the budget does not name."""
        if budget.tokens is None and len(self.fillings) > 1:
            raise ConfigError(
                f"budget={budget.text} names no length, but the candidates keep different windows exact, which cost "
                f"less the longer the context is: say budget={budget.text}@32K, or give candidates.fillings one entry"
            )

    @property
    def method(self) -> MethodConfig:
        """The fits' settings."""
        c = self.config
        return MethodConfig(c.name, None, None, c.weights, c.bins, c.seed)

    @property
    def data(self) -> dict[str, Any]:
        """Everything that the candidates are, as plain data."""
        first = self.fillings[0]
        return {
            "key": {name: to_json(self.format("key", name, first)) for name in self.names("key")},
            "value": {name: to_json(self.format("value", name, first)) for name in self.names("value")},
            "fillings": [{"t": f.t, "sinks": f.sinks, "recent": f.recent} for f in self.fillings],
            "weights": self.config.weights,
            "bins": self.config.bins,
            "seed": self.config.seed,
        }
