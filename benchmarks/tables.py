"""A table of damages, as benchmarks are given one."""

from pathlib import Path

from hydra import compose, initialize_config_dir

from calib.__main__ import CONF
from calib.allocation.candidates import Candidates
from calib.allocation.table import Table
from calib.config import Settings, register


def load_table(path: Path, options: str) -> Table:
    """The folder that `python -m calib budget=...` made. options: of calib, that it was made with, separated by spaces.

    Raises as `Settings.of` and `Table.load`.
    """
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = Settings.of(compose("config", options.split()))
    return Table.load(path, Candidates.of(settings.config.candidates))
