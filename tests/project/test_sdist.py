"""The source distribution holds what its tests use."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

# As tests name what is not theirs: a folder or a file at the top, and a package.
_USED = re.compile(
    r'ROOT / "([\w.-]+)|^\s*(?:from|import) (examples|benchmarks|tests)\b'
)
_ALWAYS = {"README.md", "pyproject.toml"}  # by the build backend


def used_by_tests() -> set[str]:
    lines = (
        line
        for path in (ROOT / "tests").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
    )
    return {name for line in lines for m in _USED.finditer(line) for name in m.groups()}


def test_the_sdist_holds_what_tests_use():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    include = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    used = used_by_tests() - {None} - _ALWAYS
    assert {"benchmarks", "docs", "examples"} <= used
    assert {f"/{name}" for name in used} <= set(include)
    assert {"/Makefile", "/jmp_lite", "/tests"} <= set(include)
    assert all((ROOT / name.removeprefix("/")).exists() for name in include)
