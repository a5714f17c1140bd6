"""Numbers of a format that a recipe leaves to calibration: a rule stands where the number would.

    lowrank: {rank: {mean: 4}, block_rank: {mean: 2}}                every layer its own ranks, so much on average
    sketch: {m: 256, outliers: {share: 0.0125}, outlier_m: 128}      channels with that share of their head's norm

Formats hold numbers and nothing else, so until the statistics are there a stand-in takes the number's place. What the
rules mean in detail, the fits of the parts say: `calib/fits/lowrank.py`, `calib/fits/sketch.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from artifacts import LayerFormat
from artifacts.errors import FormatError

Open = Mapping[str, float]  # `part.field` of what is left open, and the number of its rule


@dataclass(frozen=True)
class LayerRecipe:
    """Formats of one layer, and what calibration has yet to choose of its keys and of its values."""

    formats: LayerFormat
    key: Open = field(default_factory=dict)
    value: Open = field(default_factory=dict)


class _Rule(NamedTuple):
    """name; what its number may be, in words and as a test; what stands in for the field until it is chosen."""

    name: str
    allowed: str
    fits: Callable[[float], bool]
    stand_in: Callable[[float], int]


_MEAN = _Rule("mean", "above 0", lambda x: 0 < x < float("inf"), lambda x: max(1, round(x)))
RULES = {
    "lowrank.rank": _MEAN,
    "lowrank.block_rank": _MEAN,
    "sketch.outliers": _Rule("share", "between 0 and 1", lambda x: 0 < x < 1, lambda x: 1),
}


def split(table: Any, where: str) -> tuple[Any, dict[str, float]]:
    """A side's settings with stand-ins in the place of rules, and the numbers of the rules by field.

    where: what the settings are called, for errors. Raises FormatError for a rule that the field does not have.
    """
    found: dict[str, float] = {}
    for name, rule in RULES.items():
        part, _, setting = name.partition(".")
        settings = table.get(part) if isinstance(table, dict) else None
        if not isinstance(settings, dict) or not isinstance(settings.get(setting), dict):
            continue
        given = settings[setting]
        number = given.get(rule.name)
        if given.keys() != {rule.name} or type(number) not in (int, float) or not rule.fits(number):
            raise FormatError(
                f"{where}.{name}={given}: a number is allowed, or {{{rule.name}: X}} with X {rule.allowed}, "
                "which lets calibration choose"
            )
        found[name] = float(number)
        table = table | {part: table[part] | {setting: rule.stand_in(number)}}
    return table, found
