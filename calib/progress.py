"""Progress bars."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def bars(console: Console) -> Progress:
    """A display of bars, to be entered with `with`."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def track(progress: Progress | None, title: str, total: int, done: int = 0) -> Callable[[], None]:
    """A bar of `total` steps, of which some may be done; call the result after each other. No `progress`: no bar."""
    if progress is None:
        return lambda: None
    task = progress.add_task(title, total=total, completed=done)
    return lambda: progress.advance(task)
