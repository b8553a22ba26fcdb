"""The mutation tool: which changes it makes, and that it knows the files of today."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import mutate  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[2]


def changed(line: str) -> set[str]:
    """Return what may become of a line in a function."""
    source = f"def f(x, y):\n    {line}\n"
    found = mutate.mutations_of("f.py", source.encode())
    return {m.applied(source.encode()).decode().splitlines()[1].strip() for m in found}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x < y", {"(x <= y)", "(x >= y)"}),
        ("x is y", {"(x is not y)"}),
        ("x and y", {"(x or y)"}),
        ("not x", {"(x)"}),
        ("x = 2", {"x = (3)", "x = (2 - 1)"}),
        ("x = True", {"x = (False)"}),
        ("x = x * y", {"x = (x / y)"}),
        ("x = jnp.float32", {"x = (jnp.float16)", "x = (jnp.bfloat16)"}),
        ("x = jnp.minimum(x, y)", {"x = (jnp.maximum)(x, y)"}),
        ("x = jnp.where(c, x, y)", {"x = (x)", "x = (y)"}),
        ("x = a if c else b", {"x = (a)", "x = (b)"}),
        ("if x: y", {"if False: y"}),
        ("x = g(x, y)", {"x = (g(y, x))"}),
        ("return g(x)", {"return x"}),
        ("raise ValueError(1)", {"pass"}),
        ("x += y", {"pass"}),
        ("g(x)", {"pass"}),
        # What no result depends on.
        ("x: int = y", set()),
        ("'a docstring of 2 words'", set()),
        ("x = f'{x + 1}'", set()),
        ("warnings.warn(m, stacklevel=2)", {"pass"}),
        ("isinstance(x, y)", {"pass"}),
    ],
)
def test_a_line_and_what_becomes_of_it(line, expected):
    assert changed(line) == expected


def test_a_mutation_is_found_behind_letters_of_several_bytes():
    source = 'x = "ß→" < y\n'.encode()
    mutations = mutate.mutations_of("f.py", source)
    mutated = mutations[0].applied(source).decode()
    assert mutated in {"x = ('ß→' <= y)\n", "x = ('ß→' >= y)\n"}


def test_the_draw_is_the_same_each_time_and_takes_groups_by_turns():
    first, again = (list(itertools.islice(mutate.drawn(0), 160)) for _ in range(2))
    assert first == again
    count = len(mutate.GROUPS)
    assert [m.group for m in first[:count]] == list(mutate.GROUPS)
    assert len({m.name for m in first}) == 160
    other = list(itertools.islice(mutate.drawn(1), 160))
    assert other != first
    kinds = {m.kind for m in first}
    assert kinds >= {"comparison", "and/or", "not", "constant", "min/max", "dtype"}
    assert kinds >= {"branch", "early return", "arguments", "statement"}


def test_files_and_tests_of_each_group_are_there():
    for group in mutate.GROUPS.values():
        tests, files = mutate.matching(group.tests), mutate.matching(group.files)
        assert all(Path(test).name.startswith("test_") for test in tests)
        assert all((ROOT / file).is_file() for file in files)
    with pytest.raises(FileNotFoundError, match=r"No file matches 'no_such\*.py'"):
        mutate.matching(["no_such*.py"])
