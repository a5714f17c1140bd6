"""A format says what pages of keys (or of values) hold: a sum of parts, plus the window that is not in pages at all."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from sys import float_info
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from artifacts.errors import FormatError, shown
from artifacts.fields import Field, PageShape, TensorSpec
from artifacts.parts import Banded, Center, Dense, LowRank, Rotate, Sketch, Sparse, Window

T = TypeVar("T")


@dataclass(frozen=True)
class Format:
    """Format of one side (keys or values) of one layer.

    t       tokens per page
    dense   base codes, or None
    banded  base codes of a width by band of channels instead, or None
    sparse  outliers on top, or None
    lowrank factors of what the parts before left, or None
    sketch  estimate of products with what the parts before left (keys only), or None
    window  tokens in full precision
    domain  `pre_rope`: keys before rotary embedding; `post_rope`: keys after it, and values
    center  means taken off first, or None
    rotate  matrix applied next, or None
    """

    t: int
    dense: Dense | None = None
    sparse: Sparse | None = None
    window: Window = field(default_factory=Window)
    domain: Literal["pre_rope", "post_rope"] = "post_rope"
    center: Center | None = None
    rotate: Rotate | None = None
    lowrank: LowRank | None = None
    sketch: Sketch | None = None
    banded: Banded | None = None

    def __post_init__(self) -> None:
        if self.t < 1:
            raise FormatError(f"page of t={self.t} tokens: must be at least 1")
        if not self.dense and not self.banded and not self.sketch:
            raise FormatError("a page needs a part that covers every number: set dense, banded or sketch")
        if self.dense and self.banded:
            raise FormatError("dense and banded are both codes of every number: set one of them")
        if self.sketch and self.domain == "pre_rope":
            raise FormatError(
                "sketch with domain=pre_rope: the query is projected once, and RoPE would turn it for every token; "
                "set domain=post_rope"
            )
        if self.center and self.domain == "pre_rope":
            raise FormatError(
                "center with domain=pre_rope: RoPE turns the means by position, so softmax would see them; "
                "set domain=post_rope, or leave center out (zero points of channels do the same)"
            )
        if self.rotate and self.domain == "pre_rope":
            raise FormatError(
                "rotate with domain=pre_rope: the rotation by head does not commute with RoPE, so the query could not "
                "be rotated once for all tokens; set domain=post_rope, or leave rotate out"
            )

    @property
    def masked(self) -> bool:
        """Whether codes of values become operands by masks, for which pages have them in an order of their own
        (`artifacts.order`): their numbers are evenly spaced, and no outliers are added to them. Keys have one order."""
        return self.dense is not None and self.dense.evenly_spaced and self.sparse is None

    @property
    def transforms(self) -> dict[str, Center | Rotate]:
        """What is applied to vectors before the parts, by name, in this order; undone in the opposite order."""
        return {name: t for name, t in (("center", self.center), ("rotate", self.rotate)) if t}

    @property
    def parts(self) -> dict[str, Dense | Banded | Sparse | LowRank | Sketch]:
        """The additive parts by name; each encodes what those before it left."""
        named = (
            ("dense", self.dense),
            ("banded", self.banded),
            ("sparse", self.sparse),
            ("lowrank", self.lowrank),
            ("sketch", self.sketch),
        )
        return {name: part for name, part in named if part}

    def check(self, shape: PageShape) -> None:
        """Raises FormatError where a part does not fit the shape."""
        if shape.t != self.t:
            raise FormatError(f"format has pages of {self.t} tokens, the shape has {shape.t}")
        for part in (*self.transforms.values(), *self.parts.values()):
            part.check(shape)

    def page_fields(self, shape: PageShape) -> tuple[Field, ...]:
        """Fields of all parts."""
        return tuple(f for part in self.parts.values() for f in part.page_fields(shape))

    def bundle_tensors(self, shape: PageShape) -> dict[str, TensorSpec]:
        """Tensors that all parts expect in the bundle, for one layer and side."""
        parts = (*self.transforms.values(), *self.parts.values())
        return {name: spec for part in parts for name, spec in part.bundle_tensors(shape).items()}

    def check_tensors(self, shape: PageShape, tensors: Mapping[str, NDArray[np.generic]]) -> None:
        """Raises FormatError for numbers of the bundle's tensors that readers of pages could not live with."""
        if self.banded:
            self.banded.check_tensors(shape, tensors)


@dataclass(frozen=True)
class LayerFormat:
    """Formats of one layer's keys and values."""

    key: Format
    value: Format

    def __post_init__(self) -> None:
        if self.value.sketch:
            raise FormatError(
                "value.sketch: a sketch estimates products with the query, values need vectors; leave it out"
            )
        if self.value.domain != "post_rope":
            raise FormatError("value.domain=pre_rope: values are not rotated; leave the domain out")
        if self.key.window.sinks != self.value.window.sinks:
            raise FormatError(
                f"key.window.sinks={self.key.window.sinks} and value.window.sinks={self.value.window.sinks} differ: "
                "a sink is a token, set both the same"
            )

    @property
    def sinks(self) -> int:
        """First tokens in full precision."""
        return self.key.window.sinks


def to_json(value: Any) -> dict[str, Any]:
    """A format dataclass as plain JSON data, absent parts left out."""
    return asdict(value, dict_factory=lambda items: {name: item for name, item in items if item is not None})


def from_json(cls: type[T], data: Any, where: str) -> T:
    """Builds dataclass `cls` from JSON data, strictly: unknown, missing and mistyped entries raise FormatError."""
    if not isinstance(data, dict):
        raise FormatError(f"{where} must be a table of settings, not {shown(data)}")
    hints = _hints(cast(Any, cls))
    if unknown := [name for name in data if name not in hints]:
        raise FormatError(f"{where}.{unknown[0][:60]} is not a setting: known ones are {', '.join(hints)}")
    required = [f.name for f in fields(cast(Any, cls)) if f.default is f.default_factory is MISSING]
    if missing := [name for name in required if name not in data]:
        raise FormatError(f"{where}.{missing[0]} is missing: {', '.join(required)} must be set")
    arguments = {name: _checked(hints[name], value, f"{where}.{name}") for name, value in data.items()}
    try:
        return cls(**arguments)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _checked(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type: int, float, str, literal, dataclass (which is built), one of these or None, or a
    tuple of one of them."""
    if type(None) in get_args(hint):
        if value is None:
            return None
        (hint,) = (option for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise FormatError(f"{where}={shown(value)} must be a list")
        return tuple(_checked(get_args(hint)[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if is_dataclass(hint):
        return from_json(cast(type, hint), value, where)
    if get_origin(hint) is Literal:
        if isinstance(value, str) and value in get_args(hint):
            return value
        raise FormatError(f"{where}={shown(value)}: allowed are {', '.join(get_args(hint))}")
    if hint is float and type(value) in (int, float) and abs(value) <= float_info.max:
        return float(value)
    if hint is not float and type(value) is hint:
        return value
    wanted = "a finite number" if hint is float else f"of type {hint.__name__}"
    raise FormatError(f"{where}={shown(value)} must be {wanted}")
