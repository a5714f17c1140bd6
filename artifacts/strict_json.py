"""JSON as bundles hold it: one table, every key once, finite numbers, integers of at most 64 bits."""

import json
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from artifacts.errors import FormatError

INTEGER_LIMIT = 1 << 63
TABLE_LIMIT = 1 << 16  # tables and lists: each costs far more memory and time than its two bytes
_ENCODER = json.JSONEncoder(indent=2, allow_nan=False)


def parse_object(data: bytes) -> dict[str, Any]:
    """The table in `data`, UTF-8. Raises FormatError for anything else."""
    if (tables := data.count(b"[") + data.count(b"{")) > TABLE_LIMIT:
        raise FormatError(f"{tables} tables and lists, at most {TABLE_LIMIT} are read")
    try:
        text = data.decode()
        value = json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_finite,
        )
        if r"\ud" in text.lower():  # half a surrogate pair is no text: nobody could print it
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise FormatError(f"holds a {type(value).__name__}, not a table")
    return value


def dump(data: Mapping[str, Any]) -> bytes:
    """Indented JSON. Raises ValueError (NaN, infinity) and TypeError for what is not plain JSON data, FormatError for
    what `parse_object` would refuse."""
    text = "".join(chunks(data)).encode()
    parse_object(text)
    return text


def chunks(data: Mapping[str, Any]) -> Iterator[str]:
    """What `dump` makes, in small pieces: a hash needs no copy of the whole."""
    yield from _ENCODER.iterencode(data)
    yield "\n"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def _integer(literal: str) -> int:
    # Twenty characters hold every 64-bit integer; longer ones would be slow to read and slower to print.
    if len(literal) > 20 or not -INTEGER_LIMIT <= (value := int(literal)) < INTEGER_LIMIT:
        raise ValueError(f"{literal[:20]}... is not a 64-bit integer")
    return value


def _finite(literal: str) -> float:
    if not isfinite(value := float(literal)):
        raise ValueError(f"{literal[:20]} is not a finite number")
    return value
