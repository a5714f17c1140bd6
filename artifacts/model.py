"""What a bundle remembers of the model it was made for."""

from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, Literal

from artifacts.errors import BundleMismatchError, FormatError

MAX_LAYERS = 4096  # so that a few bytes of a manifest cannot ask for hours


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: frequency i turns the channel pair (first, second) of the first `dim` channels of a head.

    dim      rotated channels, even, at most the head dimension
    layout   `half`: pair i is (i, i + dim/2); `interleaved`: pair i is (2i, 2i + 1)
    scaling  factor on cos and sin (yarn's attention factor; 1.0 otherwise)
    kind     the scaling rule's name in the model's configuration (default, linear, llama3, yarn, ...)
    The dim/2 inverse frequencies, radians per token, are the bundle's tensor `rope.inv_freq`, float32.
    """

    dim: int
    layout: Literal["half", "interleaved"]
    scaling: float
    kind: str

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise FormatError(f"rope.dim={self.dim} must be even and at least 2")
        if not 0 < self.scaling < inf:
            raise FormatError(f"rope.scaling={self.scaling} must be a positive finite factor; 1.0 for none")

    def pairs(self) -> list[tuple[int, int]]:
        """Channel pair (first, second) of each frequency."""
        half = self.dim // 2
        return [(i, i + half) if self.layout == "half" else (2 * i, 2 * i + 1) for i in range(half)]


@dataclass(frozen=True)
class Split:
    """The share of `rank` among `world` ranks that hold as many kv heads each, in their order."""

    rank: int
    world: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise FormatError(
                f"rank={self.rank} of world={self.world}: ranks count from 0 to world - 1, and there is at least one"
            )

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world}"


WHOLE = Split(0, 1)


@dataclass(frozen=True)
class ModelFingerprint:
    """Architecture, dimensions, RoPE and hashes. `l` layers, `h_q` query and `h_kv` kv heads of `d` channels.

    config_hash   SHA-256 of the model's configuration without fields that do not change its mathematics
    weights_hash  SHA-256 over the names and shapes of all parameters: the index of the weights, not their values
    sliding       by layer, how many of the newest tokens a query sees, itself included; 0: all. Empty: 0 everywhere
    softcap       attention logits x become softcap * tanh(x / softcap); None: they stay as they are
    """

    name: str
    architecture: str
    l: int
    h_q: int
    h_kv: int
    d: int
    rope: Rope
    config_hash: str
    weights_hash: str
    sliding: tuple[int, ...] = ()
    softcap: float | None = None

    def __post_init__(self) -> None:
        if min(self.l, self.h_q, self.h_kv, self.d) < 1 or self.h_q % self.h_kv:
            raise FormatError(
                f"model dimensions l={self.l}, h_q={self.h_q}, h_kv={self.h_kv}, d={self.d} do not fit together"
            )
        if self.l > MAX_LAYERS:
            raise FormatError(f"a model of l={self.l} layers: at most {MAX_LAYERS}")
        if self.rope.dim > self.d:
            raise FormatError(f"rope.dim={self.rope.dim} is above the head dimension {self.d}")
        if self.sliding and (len(self.sliding) != self.l or min(self.sliding) < 0):
            raise FormatError(
                f"sliding has {len(self.sliding)} windows, the least {min(self.sliding)}: one for each of the "
                f"{self.l} layers, 0 where a layer sees all tokens, or none at all"
            )
        if self.softcap is not None and not 0 < self.softcap < inf:
            raise FormatError(f"softcap={self.softcap} must be positive and finite; leave it out for none")

    def window(self, layer: int) -> int:
        """How many of the newest tokens a query of this layer sees, itself included; 0: all."""
        return self.sliding[layer] if self.sliding else 0

    def share(self, world: int) -> "ModelFingerprint":
        """The model as each of `world` ranks sees it that share its heads. Raises FormatError where that is uneven."""
        if self.h_kv % world:
            raise FormatError(
                f"h_kv={self.h_kv} kv heads cannot be shared evenly by world={world} ranks: start as many as divide "
                f"{self.h_kv}"
            )
        return replace(self, h_q=self.h_q // world, h_kv=self.h_kv // world)

    def to_json(self) -> dict[str, Any]:
        """Plain data, without what only some models have where this one lacks it."""
        return {name: value for name, value in asdict(self).items() if value not in ((), None)}

    def require(self, other: "ModelFingerprint") -> None:
        """Raises BundleMismatchError naming every field in which the `other` model differs (the name may)."""
        mine, theirs = asdict(self), asdict(other)
        different = [k for k in mine if k != "name" and mine[k] != theirs[k]]
        if different:
            pairs = "; ".join(f"{k}: bundle has {_short(k, mine)}, model has {_short(k, theirs)}" for k in different)
            raise BundleMismatchError(
                f"this bundle was calibrated for {self.name!r} and does not fit {other.name!r}: {pairs}. "
                "Calibrate this model, or load the model that the bundle names"
            )


def _short(name: str, fields: dict[str, Any]) -> Any:
    """A field for messages: of hashes the first digits."""
    return fields[name][:12] if name.endswith("_hash") else fields[name]
