"""`python -m calib model=... method=... bits=...`: calibrates a model and writes a bundle."""

import logging
import os
import sys
from dataclasses import fields
from pathlib import Path

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from rich.console import Console

from artifacts.errors import SignpostError
from calib.config import Config, Settings, register

_HERE = Path(__file__).parent
# In a wheel the configuration travels inside the package; in a checkout it is the folder conf/.
CONF = _HERE / "_conf" if (_HERE / "_conf").is_dir() else _HERE.parent / "conf"
GROUPS = ("experiment",)  # groups that are no fields of the schema


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def _main(composed: DictConfig) -> None:
    from calib.pipeline import run  # heavy imports only once the options are known to be sound

    console = Console(stderr=True)
    try:
        run(Settings.of(composed), console)
    except (SignpostError, OSError) as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)


def _check_options(arguments: list[str]) -> None:
    """Exits with the list of known options where one is unknown: Hydra names only the unknown one."""
    known = sorted({f.name for f in fields(Config)} | set(GROUPS))
    options = [a for a in arguments if "=" in a and not a.startswith("-")]
    try:
        names = [o.key_or_group for o in OverridesParser.create().parse_overrides(options)]
    except HydraException as error:
        sys.exit(f"error: {error}")
    for name in names:
        root = name.replace("/", ".").split(".")[0].split("@")[0]
        if root not in known and root != "hydra":
            sys.exit(f"error: unknown option {name!r}: known are {', '.join(known)} (and hydra.*). See --help")


def main() -> None:
    """Entry point."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "0")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    register()
    _check_options(sys.argv[1:])
    _main()


if __name__ == "__main__":
    main()
