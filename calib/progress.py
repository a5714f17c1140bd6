"""Progress: bars on a terminal, lines elsewhere."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

EVERY = 60.0  # seconds between lines while a stage lasts


def bars(console: Console) -> Progress:
    """A display of bars, to be entered with `with`. A file or pipe would show them at the end only: it gets lines."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not (console.is_terminal or console.is_jupyter),
    )


def track(progress: Progress | None, title: str, total: int, done: int = 0) -> Callable[[], None]:
    """A bar of `total` steps, of which some may be done; call the result after each other. No `progress`: no bar."""
    if progress is None:
        return lambda: None
    number = progress.add_task(title, total=total, completed=done)
    if not progress.disable:
        return lambda: progress.advance(number)
    return _Lines(progress, next(task for task in progress.tasks if task.id == number))


class _Lines:
    """Lines in a bar's place: when the stage begins, when it ends, and now and then between them."""

    def __init__(self, progress: Progress, task: Task):
        self.progress, self.task = progress, task
        self.start = self.said = time.monotonic()
        self._say("")

    def __call__(self) -> None:
        self.progress.advance(self.task.id)
        now = time.monotonic()
        if self.task.finished or now - self.said >= EVERY:
            self.said = now
            self._say(f", {now - self.start:.0f} s")

    def _say(self, after: str) -> None:
        done = f"{self.task.description}: {self.task.completed:.0f} of {self.task.total:.0f}"
        self.progress.console.print(Text(done + after), soft_wrap=True)
