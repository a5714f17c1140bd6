"""The offline job with a budget: measures once, then solves; with the table of an earlier run, without the model."""

import json
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.text import Text
from transformers import PreTrainedModel

from artifacts import Bundle, CacheGeometry, load
from calib.allocation.again import CONFIG, choice, config_digest
from calib.allocation.budget import Budget
from calib.allocation.candidates import SIDES, Candidates
from calib.allocation.damage import measure
from calib.allocation.solve import require_room
from calib.allocation.speed import Speed
from calib.allocation.table import RECORD, Table, TableError, fitted
from calib.collect import collect_all
from calib.config import ConfigError, Settings
from calib.data import Tokens
from calib.devices import place
from calib.inputs import of_model, versions
from calib.memory import within_memory
from calib.passes import Work
from calib.pipeline import (
    LOADING,
    UNSEEN,
    arrays,
    calibration_text,
    evaluation_text,
    finished,
    heads,
    known_config,
    model_dtype,
    positions,
    provenance,
)
from calib.progress import bars
from calib.ranks import Ranks
from calib.store import Store
from calib.tap import Tap
from runtime.hf_load import load_causal_lm
from runtime.hf_model import (
    config_hash,
    fingerprint,
    require_keys_and_values,
    require_one_rope,
    sliding_windows,
    text_config,
)

_METHOD = ("method", "bits", "outliers", "sinks")  # settings that a budget takes the place of


def run(settings: Settings, console: Console, store: Store) -> Bundle | None:
    """Measures damages or loads their table, solves for the budget, saves the bundle, evaluates it.

    What the model's configuration rules out is refused before the long work; `calib.early` has refused the rest. Of
    several ranks the first one reads, writes, solves and evaluates; the others return None.
    """
    config, placed = settings.config, place(settings.config.device)
    budget, candidates, speed = choice(settings)
    ranks = Ranks.join(placed.device)
    ranks.agree({"configuration": json.dumps(settings.resolved, sort_keys=True), "versions": versions()})
    path = settings.table
    known = ranks.share((path / RECORD).exists() if ranks.first else None)
    needed = not known or config.eval.source != "none"
    model = _config(settings, needed)
    if model is not None:
        _check(settings, candidates, budget, speed, model)
    if ranks.first:
        table = _known(path, candidates, settings, model) if known else None
        bundle = table.bundle(budget, speed) if table else None
        if not known:
            console.print(Text(f"no table at {path} yet: measuring all candidates"), soft_wrap=True)
        if bundle and not needed:
            bundle.save(config.out)
            return load(config.out)
    if known and not (ranks.first and needed):
        return None
    dtype = model_dtype(config.model.dtype, placed.device)
    with within_memory(*LOADING):
        source = load_causal_lm(config.model.path, dtype, str(placed.device), config.model.revision, placed.gpus)
    with bars(console) if ranks.first else nullcontext() as progress:
        text = evaluation_text(settings, source, progress) if ranks.first else None
        if not known:
            work = Work(ranks, store, of_model(source[0]), config.checkpoint)
            tokens = ranks.share(calibration_text(settings, source, work, progress) if ranks.first else None)
            assert tokens is not None
            table = tabulate(source[0], settings, candidates, tokens, progress, work)
            if ranks.first:
                console.print(Text(f"saved {table.save(path)}"), soft_wrap=True)
                bundle = table.bundle(budget, speed)
        if not ranks.first:
            return None
        assert bundle is not None
        bundle.model.require(fingerprint(source[0]))
        return finished(bundle, settings, source[0], text, console, progress)


def tabulate(
    model: PreTrainedModel,
    settings: Settings,
    candidates: Candidates,
    tokens: Tokens,
    progress: Progress | None,
    work: Work,
) -> Table:
    """Fits and measures all candidates; every rank of `work` returns the same."""
    info, start = fingerprint(model), time.monotonic()
    work = replace(work, inputs=dict(work.inputs) | {"tokens": tokens.digest, "shape": list(tokens.ids.shape)})
    recipes = candidates.recipes(info.l, info.sliding)
    for recipe in recipes:
        require_one_rope(model, [layer.formats if layer else None for layer in recipe])
    found = collect_all(Tap(model), tokens.ids, recipes, candidates.method, info.h_kv, info.d, progress, work)
    bundles = tuple(Bundle("candidates", info, formats, arrays(model, tensors)) for formats, tensors in found)
    fitting, start = time.monotonic() - start, time.monotonic()
    windows = max(1, min(tokens.ids.shape[0], settings.config.candidates.tokens // tokens.ids.shape[1]))
    damages = measure(model, tokens.ids[:windows], candidates, fitted(candidates, bundles), progress, work)
    origin = provenance(model, settings, tokens, (*UNSEEN, *_METHOD)) | {
        "candidates": candidates.data,
        CONFIG: {"sha256": config_digest(settings.config.model), "positions": positions(text_config(model))},
        "measured_on": f"{windows} x {tokens.ids.shape[1]} tokens of the calibration text",
        "seconds": {"fitting": round(fitting, 1), "measuring": round(time.monotonic() - start, 1)},
    }
    return Table(candidates, damages, bundles, origin)


def _config(settings: Settings, needed: bool) -> Any | None:
    """The model's configuration; None where it cannot be had and nothing but a comparison with a table needs it."""
    try:
        return known_config(settings)
    except ConfigError:
        if needed:
            raise
        return None


def _check(settings: Settings, candidates: Candidates, budget: Budget, speed: Speed | None, model: Any) -> None:
    """Raises FormatError, SpeedError or ConfigError for what the options and the model's configuration rule out."""
    require_keys_and_values(model)
    candidates.check(*heads(model))
    if speed is not None:
        speed.require_heads(model.num_attention_heads, *heads(model))
    full = CacheGeometry.of([None] * model.num_hidden_layers, *heads(model), sliding_windows(model))
    allowed = budget.allowed(full.numbers(budget.length))
    exact = candidates.recipes(len(full.layers), full.sliding)[0]
    kept = CacheGeometry.of([layer.formats if layer else None for layer in exact], full.h_kv, full.d, full.sliding)
    require_room(
        len(kept.pairs),
        [candidates.costs(side, full.h_kv, full.d, budget.length) for side in SIDES],
        allowed - kept.exact_bytes(budget.length),
        None if speed is None else speed.pace(candidates),
    )
    settings.require_positions(positions(model))


def _known(path: Path, candidates: Candidates, settings: Settings, model: Any | None) -> Table:
    """The saved table. Raises TableError where it is damaged, of other candidates or of another model."""
    table = Table.load(path, candidates)
    if model is not None and config_hash(model) != table.model.config_hash:
        raise TableError(
            f"table={path} was measured for {table.model.name}, not for model={settings.config.model.name}: "
            "name another folder (table=), or that model"
        )
    return table
