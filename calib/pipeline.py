"""The offline job: model and text in, bundle out."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from rich.console import Console
from rich.progress import Progress
from rich.text import Text
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from artifacts import Bundle, PageGeometry, load
from artifacts.bundle import SIDES, Tensor
from artifacts.errors import FormatError
from calib.collect import collect, observes
from calib.config import ConfigError, Settings
from calib.data import Tokens, calibration_tokens, evaluation_tokens, generated_source
from calib.devices import place
from calib.evaluate import evaluate
from calib.inputs import of_model, versions
from calib.memory import within_memory
from calib.names import model_path
from calib.passes import ALONE, Work
from calib.progress import bars
from calib.ranks import Ranks
from calib.store import Store
from calib.tap import Tap
from runtime.hf_load import load_causal_lm
from runtime.hf_model import fingerprint, kv_heads, require_keys_and_values, require_one_rope, rotary, sliding_windows

# What to say where the model itself does not fit: what was done, and the way out.
LOADING = ("while loading the model", "set device=split to spread it over all GPUs, or model.dtype=bfloat16")
# Settings that leave the tensors of a recipe's bundle as they are.
UNSEEN = ("out", "eval", "work", "checkpoint", "budget", "table", "speed", "most_us", "candidates", "dry_run")


def run(settings: Settings, console: Console, store: Store) -> Bundle | None:
    """Calibrates, saves, loads again, evaluates what was loaded, saves with the evaluation.

    What the model's configuration rules out is refused before the long work starts; `calib.early` has refused the rest.
    An error during evaluation leaves the calibrated bundle. Of several ranks the first one reads, writes and evaluates;
    the others return None.
    """
    config, placed = settings.config, place(settings.config.device)
    ranks = Ranks.join(placed.device)
    ranks.agree({"configuration": json.dumps(settings.resolved, sort_keys=True), "versions": versions()})
    if ranks.first:
        check_formats(settings)
    dtype = model_dtype(config.model.dtype, placed.device)
    with within_memory(*LOADING):
        source = load_causal_lm(config.model.path, dtype, str(placed.device), config.model.revision, placed.gpus)
    with bars(console) if ranks.first else nullcontext() as progress:  # not before: loading has bars of its own
        work = Work(ranks, store, of_model(source[0]), config.checkpoint)
        text = evaluation_text(settings, source, progress) if ranks.first else None
        none = Tokens(torch.empty(0, config.seqlen, dtype=torch.int64), "none needed")
        needed = _needed(settings, source[0])
        tokens = ranks.share(calibration_text(settings, source, work, progress) if ranks.first and needed else none)
        assert tokens is not None
        bundle = calibrate(source[0], settings, tokens, progress, work)
        return finished(bundle, settings, source[0], text, console, progress) if ranks.first else None


def check_formats(settings: Settings) -> Any:
    """The model's configuration, before the model is loaded.

    Raises UnsupportedModelError, FormatError or ConfigError for what it rules out, or where it cannot be had.
    """
    model = known_config(settings)
    require_keys_and_values(model)
    for layer in settings.formats(model.num_hidden_layers, sliding_windows(model)):
        for side in SIDES if layer else ():
            try:
                PageGeometry.of(getattr(layer, side), *heads(model), side)
            except FormatError as error:
                raise FormatError(f"method.{side}: {error}") from error
    settings.require_positions(positions(model))
    return model


def finished(
    bundle: Bundle,
    settings: Settings,
    model: PreTrainedModel,
    text: Tokens | None,
    console: Console,
    progress: Progress | None,
) -> Bundle:
    """The bundle as it was saved and loaded again, evaluated on the text if there is one."""
    path = bundle.save(settings.config.out)
    bundle = load(path)
    if text is not None:
        console.print(Text(f"saved {path}"), soft_wrap=True)
        n = settings.eval_seqlen
        with within_memory(f"in a window of eval.seqlen={n} tokens", f"set eval.seqlen={n // 2}; {path} is calibrated"):
            try:
                result = evaluate(model, bundle, text, settings.cache_tokens(bundle), progress)
            except KeyboardInterrupt as stop:
                stop.args = (f"{path} is saved, without its evaluation",)
                raise
        bundle = bundle.with_evaluation(result)
        bundle.save(path)
    return bundle


Source = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def _needed(settings: Settings, model: PreTrainedModel) -> bool:
    """Whether the formats fit anything: generating text takes a while."""
    info = fingerprint(model)
    return observes(settings.recipes(info.l, info.sliding), settings.config.method, info.h_kv, info.d)


def calibration_text(settings: Settings, source: Source, work: Work, progress: Progress | None) -> Tokens:
    """What to calibrate on."""
    config = settings.config
    wanted = (config.samples, config.seqlen, config.seed)
    if config.data.source != "generated" or work.store is None:
        return calibration_tokens(config.data, *source, *wanted, progress)
    key = dict(work.inputs) | {"generated": wanted}
    if stored := work.store.get(key):
        return Tokens(stored[0]["ids"], generated_source(config.seed))
    tokens = calibration_tokens(config.data, *source, *wanted, progress)
    work.store.put(key, [{"ids": tokens.ids}])
    return tokens


def evaluation_text(settings: Settings, source: Source, progress: Progress | None) -> Tokens | None:
    e = settings.config.eval
    if e.source == "none":
        return None
    return evaluation_tokens(e, *source, e.tokens, settings.eval_seqlen, settings.config.seed, progress)


def model_dtype(name: str, device: torch.device) -> str:
    """On the CPU float32 is both exact and faster than emulated half precision."""
    return "float32" if name == "auto" and device.type == "cpu" else name


def known_config(settings: Settings) -> Any:
    """The model's configuration, before gigabytes are read. Raises ConfigError where it cannot be had."""
    model = settings.config.model
    path = model_path(model.path)
    try:
        return AutoConfig.from_pretrained(path, revision=model.revision).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(_unknown(path, error)) from error


def _unknown(path: str, error: BaseException) -> str:
    """Why there is no configuration of a model, and the way out."""
    if isinstance(error.__cause__, LocalEntryNotFoundError):
        return (
            f"model.path={path} is no folder, the hub's cache (HF_HOME) does not have it, and the hub was not reached: "
            f"download it where there is a network (hf download {path}), or name a folder (model=local "
            "model.path=FOLDER)"
        )
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"model.path={path}: {reason} Name a folder that holds a Hugging Face model, or a hub id"


def heads(model: Any) -> tuple[int, int]:
    """KV heads and channels of a head by a model's configuration."""
    return kv_heads(model), getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads


def positions(model: Any) -> int | None:
    """Tokens of the longest text by a model's configuration, if it says."""
    return getattr(model, "max_position_embeddings", None)


def calibrate(
    model: PreTrainedModel, settings: Settings, tokens: Tokens, progress: Progress | None = None, work: Work = ALONE
) -> Bundle:
    """The bundle for `model`, without evaluation; every rank of `work` returns the same.

    Raises UnsupportedModelError and what `collect` raises.
    """
    config, info = settings.config, fingerprint(model)
    recipes = settings.recipes(info.l, info.sliding)
    require_one_rope(model, settings.formats(info.l, info.sliding))
    work = replace(work, inputs=dict(work.inputs) | {"tokens": tokens.digest, "shape": list(tokens.ids.shape)})
    formats, tensors = collect(Tap(model), tokens.ids, recipes, config.method, info.h_kv, info.d, progress, work)
    return Bundle(config.method.name, info, formats, arrays(model, tensors), provenance(model, settings, tokens))


def arrays(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensor]:
    """A bundle's tensors: those that were fitted, and the model's RoPE."""
    found: dict[str, Tensor] = {name: t.cpu().contiguous().numpy() for name, t in tensors.items()}
    return found | {"rope.inv_freq": rotary(model)[1].numpy()}


def provenance(
    model: PreTrainedModel, settings: Settings, tokens: Tokens, unseen: Sequence[str] = UNSEEN
) -> dict[str, Any]:
    """What a bundle says of how it was made. unseen: settings that have nothing to do with it."""
    config = settings.config
    used = {name: value for name, value in settings.resolved.items() if name not in unseen}
    # Bundles travel, and folder names tell of their owners: names of the model and of the text have to do.
    used["model"]["path"] = fingerprint(model).name
    used["data"]["path"] = config.data.path and Path(config.data.path).name
    return {
        "data": tokens.provenance(),
        "seed": config.seed,
        "settings": used,
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "packages": versions(),
    }
