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
def show(primitive, fun, half="bfloat16", rules=None):
    fun = jmp_lite.explain(fun, f"mixed_{half}", rules=rules)
    (row,) = [row for row in fun(x).rows if row.primitive == primitive]
    print(row.op_class, row.after)
show("atan", lambda x: jnp.sin(jax.lax.atan(x @ x) @ x))
show("dot_general", lambda x: jax.lax.erf_inv(x @ x))
rules = {"cumsum": "rounded"}
for half in ("bfloat16", "float16"):
    show("cumsum", lambda x: jnp.tanh(jnp.cumsum(x @ x, 0)) @ x, half, rules)
    show("tanh", lambda x: jnp.tanh(jnp.cumsum(x @ x, 0)) @ x, half, rules)
    show("cumsum", lambda x: jnp.log(jnp.cumsum(x @ x, 0)), half, rules)
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
    kinds = "primitive", "reader that needs digits", "class"
    for heading in (f"Teach autocast a {kind}" for kind in kinds):
        changes = diffs(heading)
        assert changes, heading
        for file, old, new in changes:
            text = (tmp_path / file).read_text(encoding="utf-8")
            assert text.count(old) == 1, f"{file} does not have once: {old}"
            (tmp_path / file).write_text(text.replace(old, new), encoding="utf-8")
    of_class = [
        line
        for half in ("bf16", "f16")
        for line in (
            f"rounded f32 -> {half}",
            f"promote {half} -> {half}",
            "rounded f32 -> f32",  # a logarithm needs its digits
        )
    ]
    of_digits = "half bf16 bf16 -> f32"
    assert run(tmp_path) == ["promote bf16 -> bf16", of_digits, *of_class]
    assert run(PACKAGE.parent) == [
        "unchanged f32 -> f32",
        "half bf16 bf16 -> bf16",
        "ValueError: Expected the class of 'cumsum' to be one of ('half', 'float32', "
        "'promote', 'passthrough', 'unchanged'), got 'rounded'.",
    ]
