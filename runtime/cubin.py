"""What a cubin says about its kernels: read from the ELF file itself, whatever the compiler said or left unsaid.

A kernel is a function symbol with the mark of an entry in `st_other`. Section `.nv.info` is a row of attributes; those
used here are pairs (symbol, number). `cuobjdump -elf` prints the same.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from artifacts.errors import SignpostError

_SYMTAB, _FUNCTION, _IS_ENTRY = 2, 2, 0x10
_INFO_TYPE = 0x70000000  # of `.nv.info` and of each kernel's own section
_MIN_STACK_SIZE, _REGCOUNT = 0x12, 0x2F  # attributes
_SIZED = 4  # the format of attributes whose data follow a length; others hold two bytes
_SECTION, _SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")


class CubinError(SignpostError):
    """The bytes are no cubin."""


@dataclass(frozen=True)
class Entry:
    """registers: of a thread. stack: bytes of a thread, called functions included."""

    registers: int
    stack: int


def entries(cubin: bytes) -> dict[str, Entry]:
    """The kernels in a cubin by their (mangled) names. Raises CubinError for what is no 64-bit ELF file."""
    try:
        return _entries(cubin)
    except (struct.error, IndexError, ValueError, UnicodeDecodeError) as error:
        raise CubinError(f"{len(cubin)} bytes that are no cubin: {error}") from error


def _entries(cubin: bytes) -> dict[str, Entry]:
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (at,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    sections = [_SECTION.unpack_from(cubin, at + i * size) for i in range(count)]
    data = [cubin[section[4] : section[4] + section[5]] for section in sections]
    kinds = [section[1] for section in sections]
    symbols = kinds.index(_SYMTAB)
    texts = data[sections[symbols][6]]
    registers: dict[int, int] = {}
    stacks: dict[int, int] = {}
    for kind, section, content in zip(kinds, sections, data, strict=True):
        if kind == _INFO_TYPE and section[7] == 0:  # that of the whole file
            registers |= dict(_numbers(content, _REGCOUNT))
            stacks |= dict(_numbers(content, _MIN_STACK_SIZE))
    found = {}
    for i, (name, info, other, *_) in enumerate(_SYMBOL.iter_unpack(data[symbols])):
        if info & 15 == _FUNCTION and other & _IS_ENTRY:
            text = texts[name : texts.index(b"\0", name)].decode()
            found[text] = Entry(registers.get(i, 0), stacks.get(i, 0))
    return found


def _numbers(info: bytes, wanted: int) -> Iterator[tuple[int, int]]:
    """Symbol and number of every attribute of a kind."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form == _SIZED and attribute == wanted:
            yield struct.unpack_from("<II", info, at + 4)
        at += 4 + (size if form == _SIZED else 0)
