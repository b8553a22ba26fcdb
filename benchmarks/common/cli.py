"""Arguments that the benchmarks share."""

from collections.abc import Callable, Iterable
from typing import Annotated

import typer


def some_of(known: Iterable[str]) -> Callable[[Iterable[str]], list[str]]:
    """Return a callback that passes on names, each once, if all of them are known.

    It raises `typer.BadParameter` if one is not.
    """
    known = list(known)

    def check(names: Iterable[str]) -> list[str]:
        for name in names:
            if name not in known:
                raise typer.BadParameter(
                    f"expected some of {', '.join(known)}, got {name!r}."
                )
        return list(dict.fromkeys(names))

    return check


TaskStepsOption = Annotated[
    int | None, typer.Option(min=1, help="By default what each task needs.")
]
