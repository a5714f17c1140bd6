"""Another budget from a table that is there, without importing torch or transformers, which would take longer."""

import hashlib
import os
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from artifacts import Bundle, load
from calib.allocation.budget import Budget
from calib.allocation.candidates import Candidates
from calib.allocation.speed import Speed
from calib.allocation.table import RECORD, Table
from calib.config import ConfigError, ModelConfig, Settings
from calib.names import model_path

CONFIG = "model_config"  # in a table's provenance: sha256 of the file, and positions, the longest text


def again(settings: Settings) -> Bundle | None:
    """The bundle of the budget, saved; None where `calib.allocation.job` has to look: at a table that is not there or
    was measured with another configuration of the model, at what an evaluation or several ranks need.

    Raises what `choice`, a table and a destination raise.
    """
    config, path = settings.config, settings.table
    if config.eval.source != "none" or os.environ.get("WORLD_SIZE", "1") != "1" or not (path / RECORD).exists():
        return None
    budget, candidates, speed = choice(settings)
    table = Table.load(path, candidates)
    known = table.provenance.get(CONFIG) or {"sha256": None}
    if known["sha256"] is None or known["sha256"] != config_digest(config.model):
        return None
    settings.require_positions(known["positions"])
    table.bundle(budget, speed).save(config.out)
    return load(config.out)


def choice(settings: Settings) -> tuple[Budget, Candidates, Speed | None]:
    """What to choose by and from, and the times that `speed` names.

    Raises ConfigError, FormatError and SpeedError for what none of them can be, ConfigError for lengths of text that no
    filling can be measured with.
    """
    config = settings.config
    budget, candidates = Budget.parse(config.budget or ""), Candidates.of(config.candidates)
    candidates.require_length(budget)
    needed = max(filling.t + filling.sinks for filling in candidates.fillings)
    if config.seqlen < needed:
        raise ConfigError(
            f"seqlen={config.seqlen} does not fill a page behind the sinks: set seqlen to at least {needed}"
        )
    if config.candidates.tokens < 1:
        raise ConfigError(f"candidates.tokens={config.candidates.tokens} must be at least 1")
    times = None if config.speed is None else Speed.load(Path(config.speed), config.most_us, candidates)
    return budget, candidates, times


def config_digest(model: ModelConfig) -> str | None:
    """Of a model's configuration, in its folder or in the hub's cache; None where neither has it."""
    path = model_path(model.path)
    file: object = Path(path) / "config.json"
    if not Path(path).is_dir():
        try:
            file = try_to_load_from_cache(path, "config.json", revision=model.revision)
        except HFValidationError:
            return None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if isinstance(file, str | Path) else None
