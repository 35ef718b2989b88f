"""Progress of long work on stderr: a bar by rich on a terminal, otherwise numbered lines."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yields what to call with a line after each of `total` steps."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
    except ImportError:
        Console = None
    if Console is None or not sys.stderr.isatty():
        done = 0

        def step(line: str) -> None:
            nonlocal done
            done += 1
            print(f"[{done}/{total}] {line}", file=sys.stderr, flush=True)

        yield step
        return
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=sys.stderr, stderr=True)) as bar:
        task = bar.add_task("", total=total)

        def advance(line: str) -> None:
            bar.console.print(line, markup=False, highlight=False)
            bar.advance(task)

        yield advance
