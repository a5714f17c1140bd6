"""The offline job: model and text in, bundle out."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers import PreTrainedModel

from artifacts import Bundle, PageGeometry, load
from calib.collect import collect
from calib.config import ConfigError, Settings
from calib.data import Tokens, calibration_tokens, evaluation_tokens
from calib.evaluate import evaluate
from calib.models import load_model, resolve_device
from calib.tap import Tap
from runtime.hf import fingerprint, rotary

PACKAGES = ("signpost-kv", "torch", "transformers", "numpy", "numba", "safetensors")


def run(settings: Settings, console: Console) -> Bundle:
    """Calibrates, saves, loads again, evaluates what was loaded, saves with the evaluation, prints the table."""
    config = settings.config
    device = resolve_device(config.device)
    with _progress(console) as progress:
        load_task = progress.add_task("loading the model", total=1)
        model, tokenizer = load_model(config.model, device)
        model_info = fingerprint(model)
        formats = settings.formats(model_info.l)
        for layer in formats:  # a format that does not fit is refused before anything is computed
            for side in (layer.key, layer.value):
                PageGeometry.of(side, model_info.h_kv, model_info.d)
        _check_length(model, "seqlen", config.seqlen)
        progress.advance(load_task)
        tokens = _step(progress, "calibration text", lambda: calibration_tokens(
            config.data, model, tokenizer, config.samples, config.seqlen, config.seed))  # fmt: skip
        bundle = calibrate(model, settings, tokens, progress)
        path = bundle.save(config.out)
        if config.eval.source != "none":
            seqlen = config.eval.seqlen or config.seqlen
            _check_length(model, "eval.seqlen", seqlen)
            text = _step(progress, "evaluation text", lambda: evaluation_tokens(
                config.eval, model, tokenizer, config.eval.tokens, seqlen, config.seed))  # fmt: skip
            shipped = load(path)
            bundle = shipped.with_evaluation(evaluate(model, shipped, text, config.eval.cache_tokens, progress))
            bundle.save(path)
    console.print(summary(bundle, path, config.seqlen))
    return bundle


def calibrate(model: PreTrainedModel, settings: Settings, tokens: Tokens, progress: Progress) -> Bundle:
    """The bundle for `model`, without evaluation."""
    config, info = settings.config, fingerprint(model)
    formats = settings.formats(info.l)
    tensors = collect(Tap(model), tokens.ids, formats, config.method, info.h_kv, info.d, progress)
    arrays = {name: t.cpu().contiguous().numpy() for name, t in tensors.items()}
    arrays["rope.inv_freq"] = rotary(model)[1].numpy()
    provenance = {
        "data": tokens.provenance(),
        "seed": config.seed,
        "settings": {k: v for k, v in settings.resolved.items() if k not in ("out", "eval")},
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "packages": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }
    return Bundle(config.method.name, info, formats, arrays, provenance)


def summary(bundle: Bundle, path: Path, n: int) -> Table:
    """The one table that a run prints."""
    table = Table(title=f"{bundle.recipe} for {bundle.model.name}", title_justify="left", show_header=False)
    geometry, files = bundle.geometry, sum(f.stat().st_size for f in path.iterdir())
    rows: list[tuple[str, str]] = [
        ("bundle", f"{path} ({files / 1024:.0f} KiB)"),
        ("bits per number, everything counted", f"{geometry.bits(n):.3f} at {n} tokens, {geometry.bits(131072):.3f} at 131072"),
        ("cache at 131072 tokens", f"{geometry.cache_bytes(131072) / 2**20:.1f} MiB, {16 / geometry.bits(131072):.2f}x less"),
    ]
    if result := bundle.evaluation:
        rows += [
            ("evaluated on", f"{result['text']['source']}: {result['tokens']} tokens in windows of {result['context']}"),
            ("loss", f"{result['loss']:.4f} nats per token, full precision {result['loss_full']:.4f} "
                     f"({result['loss_increase']:+.4f})"),
            ("perplexity", f"{result['perplexity']:.3f}, full precision {result['perplexity_full']:.3f}"),
            ("KL to full precision", f"{result['kl_mean']:.5f} mean, {result['kl_p999']:.4f} at 99.9%"),
            ("same top token", f"{100 * result['top1']:.2f}%"),
        ]  # fmt: skip
        if check := result.get("cache_check"):
            rows.append(("real cache against simulation", f"loss {check['loss_cache']:.6f} against {check['loss_simulated']:.6f} "
                         f"on {check['tokens']} tokens"))  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _check_length(model: PreTrainedModel, name: str, seqlen: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and seqlen > limit:
        raise ConfigError(f"{name}={seqlen} is above the model's {limit} positions: set {name}={limit} or less")


def _step(progress: Progress, title: str, work: Any) -> Any:
    task = progress.add_task(title, total=1)
    result = work()
    progress.advance(task)
    return result


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with torch.random.fork_rng(devices=[]), Progress(*columns, console=console) as progress:
        yield progress


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
