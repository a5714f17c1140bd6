"""A format says what pages of keys (or of values) hold: a sum of parts, plus the window that is not in pages at all."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from artifacts.errors import FormatError
from artifacts.fields import Field, PageShape, TensorSpec
from artifacts.parts import Dense, Sparse, Window

T = TypeVar("T")


@dataclass(frozen=True)
class Format:
    """Format of one side (keys or values) of one layer.

    t       tokens per page
    dense   base codes
    sparse  outliers on top, or None
    window  tokens in full precision
    domain  `pre_rope`: keys before rotary embedding; `post_rope`: keys after it, and values
    """

    t: int
    dense: Dense
    sparse: Sparse | None = None
    window: Window = Window()
    domain: Literal["pre_rope", "post_rope"] = "post_rope"

    def __post_init__(self) -> None:
        if self.t < 1:
            raise FormatError(f"page of t={self.t} tokens: must be at least 1")

    @property
    def parts(self) -> dict[str, Dense | Sparse]:
        """The additive parts by name, in the order in which they are decoded."""
        return {"dense": self.dense} | ({"sparse": self.sparse} if self.sparse else {})

    def check(self, shape: PageShape) -> None:
        """Raises FormatError where a part does not fit the shape."""
        if shape.t != self.t:
            raise FormatError(f"format has pages of {self.t} tokens, the shape has {shape.t}")
        for part in self.parts.values():
            part.check(shape)

    def page_fields(self, shape: PageShape) -> tuple[Field, ...]:
        """Fields of all parts."""
        return tuple(f for part in self.parts.values() for f in part.page_fields(shape))

    def bundle_tensors(self, shape: PageShape) -> dict[str, TensorSpec]:
        """Tensors that all parts expect in the bundle, for one layer and side."""
        return {name: spec for part in self.parts.values() for name, spec in part.bundle_tensors(shape).items()}


@dataclass(frozen=True)
class LayerFormat:
    """Formats of one layer's keys and values."""

    key: Format
    value: Format

    def __post_init__(self) -> None:
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
    return {k: v for k, v in asdict(value).items() if v is not None}


def from_json(cls: type[T], data: Any, where: str) -> T:
    """Builds dataclass `cls` from JSON data, strictly: unknown, missing and mistyped entries raise FormatError at `where`."""
    if not isinstance(data, dict):
        raise FormatError(f"{where} must be a table of settings, not {data!r}")
    hints = get_type_hints(cls)
    known = {f.name for f in fields(cast(Any, cls))}
    if unknown := sorted(set(data) - known):
        raise FormatError(f"{where}.{unknown[0]} is not a setting: known ones are {', '.join(sorted(known))}")
    arguments = {name: _checked(hints[name], value, f"{where}.{name}") for name, value in data.items()}
    try:
        return cls(**arguments)
    except TypeError as error:
        raise FormatError(f"{where}: {error}") from error


def _checked(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type; nested dataclasses are built."""
    options = [hint] if get_origin(hint) is Literal or isinstance(hint, type) else list(get_args(hint))
    if value is None and type(None) in options:
        return None
    for option in options:
        if get_origin(option) is Literal:
            if value in get_args(option) and isinstance(value, str):
                return value
            raise FormatError(f"{where}={value!r}: allowed are {', '.join(map(str, get_args(option)))}")
        if hasattr(option, "__dataclass_fields__"):
            return from_json(option, value, where)
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if option in (int, str) and type(value) is option:
            return value
    raise FormatError(f"{where}={value!r} must be of type {getattr(hint, '__name__', hint)}")
