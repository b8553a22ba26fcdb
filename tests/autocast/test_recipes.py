"""The recipes of CONTRIBUTING.md work: their changes, made in a copy of the package."""

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jmp_lite

PACKAGE = Path(jmp_lite.__file__).parent
PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"

# Prints what `explain` says of operations: those of each recipe.
PROGRAM = """
import jax, jax.numpy as jnp, jmp_lite
x = jnp.ones((8, 8))
def show(primitive, fun, rules=None):
    fun = jmp_lite.explain(fun, "mixed_bfloat16", rules=rules)
    (row,) = [row for row in fun(x).rows if row.primitive == primitive]
    print(row.op_class, row.after)
show("atan", lambda x: jax.lax.atan(x @ x) @ x)
show("atan", lambda x: jax.lax.atan(x @ x))
for rules in ({}, {"exp": "exact"}):
    show("exp", lambda x: jnp.exp(x @ x), rules=rules)
    show("dot_general", lambda x: jnp.exp(x @ x), rules=rules)
"""


def diffs(heading: str) -> list[tuple[str, str, str]]:
    """Return the changes in a section: the file, and its text before and after."""
    (section,) = re.findall(
        rf"^## {heading}\n(.*?)(?=^## )", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    found = []
    for block in re.findall(r"```diff\n(.*?)```", section, re.DOTALL):
        file, *lines = textwrap.dedent(block).splitlines()
        before = [line[1:] for line in lines if not line.startswith("+")]
        after = [line[1:] for line in lines if not line.startswith("-")]
        found.append((file, "\n".join(before) + "\n", "\n".join(after) + "\n"))
    return found


def run(folder: Path) -> list[str]:
    """Return what the program prints with the package in a folder, and its error."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,  # from where `python -c` imports first
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.splitlines() + result.stderr.splitlines()[-1:]


def test_the_recipes_do_what_they_say(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "jmp_lite", ignore=ignored)
    for heading in ("Teach autocast a primitive", "Teach autocast a class"):
        changes = diffs(heading)
        assert changes, heading
        for file, old, new in changes:
            text = (tmp_path / file).read_text(encoding="utf-8")
            assert text.count(old) == 1, f"{file} does not have once: {old}"
            (tmp_path / file).write_text(text.replace(old, new), encoding="utf-8")
    plain = ["float32 bf16 -> f32", "half bf16 bf16 -> bf16"]
    exact = ["exact f32 -> f32", "half bf16 bf16 -> f32"]
    of_atan = ["promote bf16 -> bf16", "promote bf16 -> f32"]
    assert run(tmp_path) == [*of_atan, *plain, *exact]
    assert run(PACKAGE.parent) == ["unchanged f32 -> f32"] * 2 + [
        *plain,
        "ValueError: Expected the class of 'exp' to be one of ('half', 'float32', "
        "'promote', 'passthrough', 'unchanged'), got 'exact'.",
    ]
