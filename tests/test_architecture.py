"""Imports run down the layers, and importing the package stays light.

The rules are read off the source (AST), so that nothing has to be imported to be
checked and an import inside a function counts as much as one at the top. Relative
imports, and those of unstable JAX outside of compat.py, are refused by ruff.
"""

import ast
import graphlib
import math
from collections.abc import Iterator
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


# The checker.


def _find_in_file(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    first, *rest = path.relative_to(PACKAGE).parts
    if first != "_src":
        if path.stem not in PUBLIC or rest:
            yield "is neither private, in _src, nor in PUBLIC"
        elif path.stem != "__main__":
            yield from _find_beyond_reexports(tree)
        return
    room = rest[0].removesuffix(".py")
    if room not in FLOORS:
        yield "has no floor: give it one in FLOORS"
        return
    imports = _list_imports(tree)
    for name in imports:
        yield from _find_upward_import(name, room)
    if room != "compat":
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        for name in [*imports, *map(ast.unparse, nodes)]:
            if any(f".{version}." in f".{name}." for version in VERSION_NAMES):
                yield f"uses {name}: only compat.py asks for a version"


def _list_imports(tree: ast.Module) -> list[str]:
    """Name everything imported in full: `from a.b import c` is `a.b.c`."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def _find_upward_import(name: str, room: str) -> Iterator[str]:
    if name.partition(".")[0] == PACKAGE.name:
        target = name.removeprefix(f"{PACKAGE.name}._src.").partition(".")[0]
        floor = FLOORS.get(target, math.inf)  # what is public has none
        if target != room and floor >= FLOORS[room]:
            yield f"imports {name}: floor {floor} from floor {FLOORS[room]}"


def _find_beyond_reexports(tree: ast.Module) -> Iterator[str]:
    start = 1 if ast.get_docstring(tree) is not None else 0
    for node in tree.body[start:]:
        match node:
            case ast.Import() | ast.ImportFrom():
                continue
            case ast.If(test=test) if ast.unparse(test) == "_typing.TYPE_CHECKING":
                continue
            case ast.FunctionDef(name="__getattr__" | "__dir__"):  # of a lazy import
                continue
            case ast.With(body=body) if {type(b) for b in body} == {ast.ImportFrom}:
                continue
            case ast.Assign(targets=[ast.Name(id="__all__" | "__version__")]):
                continue
        yield f"line {node.lineno}: only re-exports belong here"


def load(*statements: str) -> list[set[str]]:
    """Name the modules that a fresh interpreter has loaded after each statement.

    JAX is told of a platform that does not exist: starting a backend raises.
    """
    code = "import sys\n" + "".join(f"{x}\nprint(*sys.modules)\n" for x in statements)
    out, _ = run_python("-c", code, JAX_PLATFORMS="no_such_platform")
    return [set(line.split()) for line in out.splitlines()]


# The house.


def test_the_package_keeps_its_rules() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert list(_find_in_file(path)) == [], path


def test_no_modules_import_each_other() -> None:
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    graph = {}
    for name, path in modules.items():
        imports = _list_imports(ast.parse(path.read_text(encoding="utf-8")))
        # A name of a module, or of something in one.
        parents = [i.rpartition(".")[0] for i in imports if i not in modules]
        graph[name] = {i for i in (*imports, *parents) if i in modules}
    graphlib.TopologicalSorter(graph).prepare()  # or it raises, and names the circle


def test_private_modules_are_imported_by_the_package_and_its_tests_alone() -> None:
    for folder in (ROOT / "examples", ROOT / "benchmarks"):
        for path in folder.rglob("*.py"):
            imports = _list_imports(ast.parse(path.read_text(encoding="utf-8")))
            assert not [name for name in imports if "jmp_lite._src" in name], path


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
