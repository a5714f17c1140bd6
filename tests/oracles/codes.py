"""Oracle of the packed layout, as bit strings (low end first) after the prose of `artifacts.codes`."""


def _low_first(code: int, bits: int) -> str:
    return "".join(str(code >> i & 1) for i in range(bits))


def pack_run(codes: list[int], bits: int) -> list[int]:
    """The words of one run of 32 codes."""
    if bits == 3:
        tail = _low_first(codes[30], 3) + _low_first(codes[31], 3)
        tens = ["".join(_low_first(code, 3) for code in codes[10 * w : 10 * w + 10]) for w in range(3)]
        words = [ten + tail[2 * w : 2 * w + 2] for w, ten in enumerate(tens)]
    else:
        run = "".join(_low_first(code, bits) for code in codes)
        words = [run[32 * w : 32 * w + 32] for w in range(bits)]
    return [int(word[::-1], 2) for word in words]
