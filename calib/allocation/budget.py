"""How many bytes the cache may take, from the option `budget`."""

import re
from dataclasses import dataclass

from artifacts import CacheGeometry
from calib.config import ConfigError

LONG = 131072  # tokens at which bits count where no length is given
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)(?:@(\d+)([KM]?))?")
_BYTES = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
_TOKENS = {"": 1, "K": 1024, "M": 1024**2}
_HOW = "such as budget=2.5bits@32K (everything counted, at 32768 tokens) or budget=8GiB@128K (one sequence)"


@dataclass(frozen=True)
class Budget:
    """Bytes of one sequence's cache and of the bundle's tensors, or bits per cached number, at `tokens` tokens.

    text    as it was given
    bits    per cached number, or None
    size    bytes, or None
    tokens  None where no length was given
    """

    text: str
    bits: float | None
    size: int | None
    tokens: int | None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """From `2.5bits`, `2.5bits@32K`, `8GiB@128K`. Raises ConfigError for anything else."""
        found = _FORM.fullmatch(text.strip())
        if not found or (found[2] != "bits" and found[2] not in _BYTES):
            raise ConfigError(f"budget={text}: say bits, or bytes in {', '.join(_BYTES)}, {_HOW}")
        number, tokens = float(found[1]), int(found[3]) * _TOKENS[found[4]] if found[3] else None
        if tokens == 0:
            raise ConfigError(f"budget={text}: a length of 0 tokens has no cost; name the length that matters, {_HOW}")
        if found[2] == "bits":
            if number >= 16:
                raise ConfigError(
                    f"budget={text}: full precision takes 16 bits, so there is nothing to choose; name fewer than 16"
                )
            return cls(text, number, None, tokens)
        if tokens is None:
            raise ConfigError(f"budget={text}: how much fits depends on the length; say it, {_HOW}")
        return cls(text, None, int(number * _BYTES[found[2]]), tokens)

    @property
    def length(self) -> int:
        """Tokens at which the cost counts."""
        return LONG if self.tokens is None else self.tokens

    def allowed(self, numbers: int) -> int:
        """Bytes in the place of so many numbers in full precision. Raises ConfigError where fp16 would fit as well."""
        allowed = int(self.bits * numbers / 8) if self.bits is not None else self.size or 0
        if allowed >= 2 * numbers:
            raise ConfigError(
                f"budget={self.text}: full precision takes {2 * numbers} bytes at {self.length} tokens, which fits; "
                "there is nothing to choose, name less or a longer context"
            )
        return allowed


def spent(geometry: CacheGeometry, tokens: int) -> int:
    """Bytes that count against a budget: the cache of one sequence and the bundle's tensors."""
    return geometry.cache_bytes(tokens) + geometry.bundle_bytes
