"""The kernels' description of packed codes against that of `artifacts.codes`, at compile time: no GPU needed."""

import pytest
from cuda.bindings import nvrtc

from artifacts.codes import BITS, RUN, pieces
from runtime.sources import kernel_folder


def compile_unit(source: str, arch: str = "sm_90a") -> str:
    """Compiles `source` with NVRTC for `arch`; returns the log, empty when all is well."""
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"unit.cu", 0, [], [])
    options = [f"--gpu-architecture={arch}".encode(), f"-I{kernel_folder()}".encode(), b"-std=c++17"]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)  # not bytes, which are not to be written to: Python has those of one character once
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    text = log.rstrip(b"\0 \n").decode()
    return text if error == nvrtc.nvrtcResult.NVRTC_SUCCESS else text or str(error)


def layout_asserts(bits: int) -> list[str]:
    """One static_assert for every bit of every code of a run."""
    return [
        f"static_assert(signpost::Codes<{bits}>::place({p.code}, {p.low + i}).word == {p.word} && "
        f"signpost::Codes<{bits}>::place({p.code}, {p.low + i}).shift == {p.shift + i}, "
        f'"code {p.code}, bit {p.low + i}");'
        for p in pieces(bits)
        for i in range(p.width)
    ]


def unpack_asserts(bits: int) -> str:
    """`unpack` and `close` against `place`, evaluated by the compiler on words that hold one bit each."""
    return f"""
constexpr __device__ bool agrees() {{
    for (int code = 0; code < {RUN}; ++code) {{
        for (int low = 0; low < {bits}; ++low) {{
            unsigned words[{bits}] = {{}};
            const signpost::BitPlace place = signpost::Codes<{bits}>::place(code, low);
            words[place.word] = 1u << place.shift;
            unsigned char codes[{RUN}] = {{}};
            signpost::Codes<{bits}>::unpack(words, codes);
            for (int i = 0; i < {RUN}; ++i) {{
                if (codes[i] != (i == code ? 1u << low : 0u)) return false;
            }}
            using Codes = signpost::Codes<{bits}>;
            unsigned wide[Codes::WIDE] = {{}};
            for (int i = 0; i < {RUN}; ++i) {{
                wide[i / Codes::PER_WORD] |= codes[i] << Codes::STRIDE * (i % Codes::PER_WORD);
            }}
            Codes::close(wide);
            for (int i = 0; i < {bits}; ++i) {{
                if (wide[i] != words[i]) return false;
            }}
        }}
    }}
    return true;
}}
static_assert(agrees(), "unpack or close does not follow place");
"""


@pytest.mark.parametrize("bits", BITS)
def test_every_bit_lies_where_python_says(bits: int) -> None:
    assert len(layout_asserts(bits)) == RUN * bits
    assert compile_unit("\n".join(['#include "codes.cuh"', *layout_asserts(bits), unpack_asserts(bits)])) == ""


def test_the_comparison_can_fail() -> None:
    wrong = layout_asserts(3)[0].replace(".word == 0", ".word == 1")
    assert "code 0, bit 0" in compile_unit('#include "codes.cuh"\n' + wrong)


def test_an_unknown_width_does_not_compile() -> None:
    assert "a code has 1, 2, 3, 4 or 8 bits" in compile_unit(
        '#include "codes.cuh"\nsigned x = signpost::Codes<5>::MASK;'
    )
