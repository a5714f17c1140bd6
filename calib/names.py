"""Models by the names that calibration gives them: what `conf/model` says, without torch."""

from functools import cache
from pathlib import Path

import yaml

HOME = Path(__file__).parent
# In a wheel the configuration travels inside the package; in a checkout it is the folder conf/.
CONF = HOME / "_conf" if (HOME / "_conf").is_dir() else HOME.parent / "conf"


@cache
def named_models() -> dict[str, str]:
    """Folders and hub ids by name; `tiny` is the embedded model."""
    paths = {file.stem: yaml.safe_load(file.read_text()).get("path") for file in (CONF / "model").glob("*.yaml")}
    known = {name: path for name, path in paths.items() if path not in (None, "???")}  # `local` leaves it open
    return known | {"tiny": str(HOME / "tiny")}


def model_path(name: str) -> str:
    """Folder or hub id to load from: a model's folder of that name, what `named_models` knows by it, or the name
    itself. A bundle's folder may have the same name."""
    return name if Path(name, "config.json").exists() else named_models().get(name, name)
