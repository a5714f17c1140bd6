"""`window`: tokens that stay in full precision. The first ones (sinks) for ever, the newest until they fill a page.

Sources: KVQuant (attention-sink aware: first token), KIVI and GEAR (residual buffers).
"""

from dataclasses import dataclass

from artifacts.errors import FormatError

MAX_TOKENS = (1 << 31) - 1  # positions are 32-bit


@dataclass(frozen=True)
class Window:
    """Parameters of the window.

    sinks   first tokens of a sequence that are never quantized
    recent  newest tokens that are never quantized yet. A page is packed as soon as `recent + t` tokens stand behind the
            last page, so between `recent` and `recent + t - 1` of the newest tokens are exact
    """

    sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        for name in ("sinks", "recent"):
            if not 0 <= getattr(self, name) <= MAX_TOKENS:
                raise FormatError(f"window.{name}={getattr(self, name)} must lie between 0 and {MAX_TOKENS} tokens")

    def pages(self, n: int, t: int) -> int:
        """Full pages of t tokens behind n cached tokens."""
        return max(0, (n - self.sinks - self.recent) // t)

    def exact(self, n: int, t: int) -> int:
        """Newest tokens in full precision (sinks not counted) behind n cached tokens."""
        return max(0, n - self.sinks) - self.pages(n, t) * t
