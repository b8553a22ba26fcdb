"""How far a run is: bars in a terminal; elsewhere, as in a log, a line now and then."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import rich.progress
from rich.console import Console

SECONDS = 30.0  # between two lines

Item = TypeVar("Item")
Update = Callable[[str, int, str], None]  # name, steps completed, what to say of it


@contextlib.contextmanager
def progress(
    console: Console, title: str, names: Sequence[str], *, total: int, done: int = 0
) -> Iterator[Update]:
    """Show how far several runs are.

    Args:
      console: where.
      title: what to write before each name.
      names: of the runs.
      total: how many steps each takes.
      done: how many of them it starts with.

    Yields:
      `update(name, completed, status)`, which writes nothing to a quiet console.
    """
    labels = {name: f"{title} {name}".strip() for name in names}
    if not console.is_interactive:
        yield _lines(console, labels, total)
        return
    with rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.fields[status]}"),
        console=console,
    ) as bars:
        tasks = {
            name: bars.add_task(label, total=total, completed=done, status="")
            for name, label in labels.items()
        }
        yield lambda name, completed, status: bars.update(
            tasks[name], completed=completed, status=status
        )


def track(
    items: Iterable[Item], title: str, *, total: int, console: Console | None = None
) -> Iterator[Item]:
    """Yield items, and show how many are done.

    Args:
      items: `total` of them.
      title: what to write before their number.
      total: how many.
      console: where; by default stdout.
    """
    with progress(console or Console(), title, [""], total=total) as update:
        for count, item in enumerate(items, 1):
            yield item
            update("", count, "")


def _lines(console: Console, labels: dict[str, str], total: int) -> Update:
    last = dict.fromkeys(labels, time.monotonic())

    def update(name: str, completed: int, status: str) -> None:
        now = time.monotonic()
        if completed == total or now - last[name] >= SECONDS:
            last[name] = now
            text = f"{labels[name]}: {completed} of {total}  {status}"
            console.print(text.rstrip(), highlight=False, markup=False)

    return update
