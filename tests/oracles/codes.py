"""Oracle of the packed layout, as bit strings (low end first) after the prose of `artifacts.codes`."""


def _low_first(code: int, bits: int) -> str:
    return "".join(str(code >> i & 1) for i in range(bits))


def pack_run(codes: list[int], bits: int) -> list[int]:
    """The words of one run of 32 codes."""
    if bits == 3:
        last = [_low_first(code, 3) for code in codes[24:]]
        words = ["".join(_low_first(codes[8 * w + i], 3) + last[i][w] for i in range(8)) for w in range(3)]
    else:
        run = "".join(_low_first(code, bits) for code in codes)
        words = [run[32 * w : 32 * w + 32] for w in range(bits)]
    return [int(word[::-1], 2) for word in words]
