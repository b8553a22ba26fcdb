"""The mutation tool: which changes it makes, and that it knows the files of today."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import mutate  # pyright: ignore[reportMissingImports]


def changed(line: str) -> set[str]:
    """Return what may become of a line in a function."""
    source = f"def f(x, y):\n    {line}\n"
    found = mutate.mutations_of("f.py", source.encode())
    return {m.applied(source.encode()).decode().splitlines()[1].strip() for m in found}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x < y", {"(x <= y)", "(x >= y)"}),
        ("x = jnp.float32", {"x = (jnp.float16)", "x = (jnp.bfloat16)"}),
        ("x = jnp.where(c, x, y)", {"x = (x)", "x = (y)"}),
        ("if x: y", {"if False: y"}),
        ("raise ValueError(1)", {"pass"}),
        # What no result depends on.
        ("x: int = y", set()),
        ("x = f'{x + 1}'", set()),
    ],
)
def test_a_line_and_what_becomes_of_it(line, expected):
    assert changed(line) == expected


def test_every_pattern_matches_a_file():
    for files, tests in mutate.GROUPS.values():
        mutate.matching(mutate.SRC, files)  # or it raises
        mutate.matching(mutate.TESTS, tests)
