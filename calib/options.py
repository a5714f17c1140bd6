"""The command line before Hydra composes it: what Hydra would say less clearly, or not at all."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser

from calib.config import Config, ConfigError

GROUPS = ("experiment", "launcher")  # of conf/, and no fields of the schema
KINDS = {int: "whole numbers", float: "numbers", bool: "true and false", str: "strings", NoneType: "null"}


def check_words(words: Sequence[str]) -> None:
    """Raises ConfigError for words without a value that are neither flags of Hydra's nor `~name`."""
    given, unknown = get_args_parser().parse_known_args(words)
    stray = [word for word in (*unknown, *given.overrides) if not word.startswith("~")]
    if stray:
        raise ConfigError(f"{stray[0]!r} is no option: options are written name=value, such as bits=3. See --help")


def check_names(options: Sequence[str]) -> None:
    """Raises ConfigError with the list of known options where one is unknown: Hydra names only the unknown one."""
    for override in OverridesParser.create().parse_overrides(list(options)):
        path = override.key_or_group.replace("/", ".").split("@")[0].split(".")
        if path[0] in (*GROUPS, "hydra"):
            continue
        schema: Any = Config
        for depth, name in enumerate(path):
            if not is_dataclass(schema):  # formats are checked by who reads them
                break
            known = get_type_hints(schema)
            if name not in known:
                names = [".".join([*path[:depth], k]) for k in known] + (list(GROUPS) if depth == 0 else [])
                raise ConfigError(f"unknown option {'.'.join(path)!r}: known are {', '.join(names)}. See --help")
            schema = known[name]


def allowed(option: str) -> str | None:
    """What an option may be, in words; None where the schema does not say."""
    schema: Any = Config
    *groups, name = option.split(".")
    for group in groups:
        schema = get_type_hints(schema).get(group) if is_dataclass(schema) else None
    for field in fields(schema) if is_dataclass(schema) else ():
        if field.name == name:
            hint = get_type_hints(schema)[name]
            kinds = " and ".join(KINDS.get(kind, "") for kind in get_args(hint) or (hint,))
            return field.metadata.get("allowed", kinds) or None
    return None
