"""Each format of the shared list in the emulator, with the list's own heads: our error over fp16 attention's.

    python -m tests.cuda.accuracy [PART PARTS]    (every PARTS-th case from PART on; minutes on two cores, no GPU)

Prints, for sequences of tests/gpu/test_attention.py's lengths, the largest of ours / max(fp16's, half of its floor):
that test allows 2.
"""

import sys

from tests.cuda.attention_emulated import ALLOWED, FLOOR, Emulated
from tests.formats import CASES, Case
from tests.gpu import paged


def ratio(case: Case) -> float:
    """The largest of all sequences."""
    t = max(case.key.t, case.value.t)
    lengths = [1, t - 1, t, t + 1, 5 * t + 37, 1003]
    scene = paged.Scene.of(case, lengths)
    q = scene.query()
    out, found = scene.run(q), []
    for i in range(len(lengths)):
        reference = scene.oracle(q, i)
        ours, half = (paged.relative(x, reference) for x in (out[i], scene.half(q, i)))
        found.append(ours / max(half, FLOOR / ALLOWED))
    return max(found)


def main() -> None:
    """Prints a line for each case."""
    paged.DEVICE, paged.PagedAttention = "cpu", Emulated  # type: ignore[misc]
    part, parts = map(int, sys.argv[1:3] or (0, 1))
    for case in CASES[part::parts]:
        print(f"{ratio(case):.2f} {case.name}", flush=True)


if __name__ == "__main__":
    main()
