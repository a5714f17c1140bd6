"""The prefixes of an engine: each in a sequence of its cache that is for prefixes, until it is kept no more."""

from runtime.requests import Prefix, RequestError


class Prefixes(dict[int, Prefix]):
    """By sequence, out of `sequences`."""

    def __init__(self, sequences: range):
        super().__init__()
        self.sequences, self._made = sequences, 0

    def make(self, tokens: tuple[int, ...]) -> Prefix:
        """A new one. Raises RequestError where no sequence is free."""
        if not self.sequences:
            raise RequestError("this engine has no sequences for prefixes: make it with prefixes=1 or more")
        free = next((i for i in self.sequences if i not in self), None)
        if free is None:
            raise RequestError(
                f"the sequences for prefixes (prefixes={len(self.sequences)}) are taken by {self.names()}: drop one; "
                "it is free when the requests that were submitted with it have begun"
            )
        self._made += 1
        self[free] = prefix = Prefix(tokens, self._made, free)
        return prefix

    def require(self, prefix: Prefix) -> None:
        """Raises RequestError for one that no request of this engine can begin with."""
        if not isinstance(prefix, Prefix):
            raise RequestError(f"{prefix!r} is no prefix: give what `Engine.prefix` returned")
        if prefix.error is not None:
            raise prefix.failure()
        if prefix.dropped:
            raise RequestError(f"{prefix} was dropped: make it again (Engine.prefix)")
        if prefix not in self.values():
            raise RequestError(f"{prefix} is another engine's: make it with this one (Engine.prefix)")

    def names(self, but: object = None) -> str:
        """All but one."""
        return ", ".join(str(prefix) for prefix in self.values() if prefix is not but)
