"""What a run prints when it is done."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from artifacts import Bundle

LONG = 131072  # tokens of a long context


def summary(bundle: Bundle, path: Path, n: int) -> Table:
    """The one table that a run prints. n: tokens at which bits are stated, besides a long context."""
    geometry, files = bundle.geometry, sum(f.stat().st_size for f in path.iterdir())
    short, long = geometry.bits(n), geometry.bits(LONG)
    rows = {
        "bundle": f"{path} ({files / 1024:.0f} KiB)",
        "bits per number, everything counted": f"{short:.3f} at {n} tokens, {long:.3f} at {LONG}",
        f"cache at {LONG} tokens": f"{geometry.cache_bytes(LONG) / 2**20:.1f} MiB, {16 / long:.2f}x less",
    } | _quality(bundle.evaluation or {})
    table = Table(title=Text(f"{bundle.recipe} for {bundle.model.name}"), title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _quality(result: Mapping[str, Any]) -> dict[str, str]:
    """Rows of the summary on an evaluation; none without one."""
    if not result:
        return {}
    rows = {
        "evaluated on": f"{result['text']['source']}: {result['tokens']} tokens in windows of {result['context']}",
        "loss": f"{result['loss']:.4f} nats per token, full precision {result['loss_full']:.4f} "
        f"({result['loss_increase']:+.4f})",
        "perplexity": f"{result['perplexity']:.3f}, full precision {result['perplexity_full']:.3f}",
        "KL to full precision": f"{result['kl_mean']:.5f} mean, {result['kl_p999']:.4f} at 99.9%",
        "same top token": f"{100 * result['top1']:.2f}%",
    }
    if check := result.get("cache_check"):
        losses = f"loss {check['loss_cache']:.6f} against {check['loss_simulated']:.6f}"
        rows["real cache against simulation"] = f"{losses} on {check['tokens']} tokens"
    return rows
