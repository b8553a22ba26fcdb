"""Pages of docs/ as what they are made of: text and blocks of Python, in order."""

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

_BLOCK = re.compile(r"^```python\n(.*?)^```$\n?", re.M | re.S)


class Part(NamedTuple):
    """A part of a page."""

    kind: Literal["text", "python"]
    source: str
    """Without the fence of a block, and without empty lines around it."""


def parts(page: str) -> Iterator[Part]:
    """Yield the parts of a page; blocks inside of lists are text."""
    # The odd ones are what the pattern's group matched.
    for i, source in enumerate(_BLOCK.split(page)):
        if source.strip():
            yield Part("python" if i % 2 else "text", source.strip("\n"))


def run(path: Path) -> dict[str, Any]:
    """Run the blocks of a page in one namespace; return it."""
    module = types.ModuleType(path.stem)
    for part in parts(path.read_text(encoding="utf-8")):
        if part.kind == "python":
            exec(compile(part.source, str(path), "exec"), module.__dict__)
    return module.__dict__
