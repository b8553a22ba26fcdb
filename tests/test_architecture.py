"""Imports run down the layers, and importing the package stays light.

The rules are read off the source (AST), so that nothing has to be imported to be
checked and an import inside a function counts as much as one at the top. Relative
imports, and those of unstable JAX outside of compat.py, are refused by ruff.
"""

import ast
import functools
import graphlib
import math
from pathlib import Path

import pytest
from commands import run_python

import jmp_lite
from jmp_lite._src import extras

ROOT = Path(__file__).parent.parent
PACKAGE = Path(jmp_lite.__file__).parent

# The modules users import. They only re-export; `_src` does not import them.
PUBLIC = ("__init__", "__main__", *extras.NAMESPACES)
# A module or a subpackage of `_src` -> its floor. Imports run to a lower floor only;
# inside one subpackage they are free. A new module needs a line here.
FLOORS = {
    "__init__": 0,
    "arguments": 0,
    "compat": 0,
    "dtypes": 1,
    "extras": 0,
    "new_primitives": 1,
    "fp8": 2,
    "reports": 2,
    "trees": 2,
    "jaxprs": 3,
    "policy": 3,
    "loss_scale": 4,
    "gradients": 5,
    "optimizers": 5,
    "autocast": 5,
    "numerics": 6,
    "flax": 6,
    "checkpoint": 7,
    "doctor": 7,
    "memory": 7,
}

VERSION_NAMES = ("__version__", "__version_info__", "importlib.metadata")
LOADED_WHERE_USED = ("equinox", "flax", "matplotlib", "orbax", "rich", "shtab", "typer")


@functools.cache
def imports_of(path: Path) -> list[str]:
    """Name everything imported in full: `from a.b import c` is `a.b.c`."""
    names = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def load(*statements: str) -> list[set[str]]:
    """Name the modules that a fresh interpreter has loaded after each statement.

    JAX is told of a platform that does not exist: starting a backend raises.
    """
    code = "import sys\n" + "".join(f"{x}\nprint(*sys.modules)\n" for x in statements)
    out, _ = run_python("-c", code, JAX_PLATFORMS="no_such_platform")
    return [set(line.split()) for line in out.splitlines()]


def test_imports_run_down_the_layers() -> None:
    for path in (PACKAGE / "_src").rglob("*.py"):
        room = path.relative_to(PACKAGE / "_src").parts[0].removesuffix(".py")
        assert room in FLOORS, f"{path} has no floor: give it one in FLOORS"
        for name in imports_of(path):
            if not name.startswith(f"{PACKAGE.name}."):
                continue
            target = name.removeprefix(f"{PACKAGE.name}._src.").partition(".")[0]
            floor = FLOORS.get(target, math.inf)  # what is public has none
            assert target == room or floor < FLOORS[room], f"{path} imports {name}"


def test_what_is_not_private_is_for_users() -> None:
    others = {path.stem for path in PACKAGE.rglob("*.py") if "_src" not in path.parts}
    assert others == {*PUBLIC}


def test_only_compat_asks_for_a_version() -> None:
    for path in (PACKAGE / "_src").rglob("*.py"):
        asks = any(name in path.read_text("utf-8") for name in VERSION_NAMES)
        assert asks == (path.stem == "compat"), path


def test_no_modules_import_each_other() -> None:
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    graph = {}
    for name, path in modules.items():
        imports = imports_of(path)
        # A name of a module, or of something in one.
        parents = [i.rpartition(".")[0] for i in imports if i not in modules]
        graph[name] = {i for i in (*imports, *parents) if i in modules}
    graphlib.TopologicalSorter(graph).prepare()  # or it raises, and names the circle


def test_private_modules_are_imported_by_the_package_and_its_tests_alone() -> None:
    for folder in (ROOT / "examples", ROOT / "benchmarks"):
        for path in folder.rglob("*.py"):
            assert not [x for x in imports_of(path) if "jmp_lite._src" in x], path


def test_modules_are_loaded_when_they_are_needed() -> None:
    """What the package loads beyond JAX and optax is what every user needs."""
    before, package, numerics, with_extras = load(
        "import jax, optax",
        "import jmp_lite",
        "jmp_lite.numerics.lint",
        "jmp_lite.linen.with_policy, jmp_lite.nnx.TrainState, jmp_lite.checkpoint.save",
    )
    added = package - before - {"jax.experimental.jet"}  # which takes a millisecond
    assert {name.partition(".")[0] for name in added} == {"jmp_lite"}
    parts = {".".join(name.split(".")[:3]) for name in added}
    later = ("checkpoint", "doctor", "flax", "memory", "numerics")
    assert parts.isdisjoint(f"jmp_lite.{name}" for name in PUBLIC)
    assert parts.isdisjoint(f"jmp_lite._src.{name}" for name in later)
    assert "jax.extend" not in package  # half of the import time, with numerics
    assert "jmp_lite.numerics" in numerics and {"flax", "orbax"} <= with_extras
    assert numerics.isdisjoint(LOADED_WHERE_USED)


def test_public_modules_are_attributes_and_no_others() -> None:
    assert "numerics" in dir(jmp_lite)
    with pytest.raises(AttributeError, match="'jmp_lite' has no attribute 'numeric'"):
        jmp_lite.numeric  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
