"""The house stands: imports run downwards, and importing the package stays light.

The rules are read off the source (AST), so that nothing has to be imported to be
checked and an import inside a function counts as much as one at the top.
"""

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import jmp_lite

PACKAGE = Path(jmp_lite.__file__).parent
MAX_LINES = 400

# A module or a subpackage -> its floor. Imports run to a lower floor only; inside one
# subpackage they are free. A new module needs a line here.
FLOORS = {
    "compat": 0,
    "dtypes": 0,
    "extras": 0,
    "trees": 1,
    "measurements": 1,
    "tracebacks": 1,
    "policy": 2,
    "loss_scale": 3,
    "module_policies": 3,
    "gradients": 4,
    "optimizers": 4,
    "autocast": 4,
    "rollback": 5,
    "attention": 5,
    "numerics": 5,
    "linen": 6,
    "nnx": 6,
    "checkpoint": 6,
    "doctor": 6,
    "__main__": 7,
    "__init__": 7,
}

UNSTABLE_JAX = ("jax.extend", "jax._src")
VERSION_NAMES = ("__version__", "__version_info__", "importlib.metadata")
LOADED_WHERE_USED = ("equinox", "flax", "matplotlib", "orbax", "rich")


# The checker.


def find_violations(package: Path) -> list[str]:
    """List what breaks the rules in a package's source, as `file: problem`."""
    return [
        f"{path.relative_to(package)}: {problem}"
        for path in sorted(package.rglob("*.py"))
        for problem in _find_in_file(path, package)
    ]


def _find_in_file(path: Path, package: Path) -> Iterator[str]:
    room = path.relative_to(package).parts[0].removesuffix(".py")
    if room not in FLOORS:
        yield "has no floor: give it one in FLOORS"
        return
    source = path.read_text(encoding="utf-8")
    lines = len(source.splitlines())
    if lines > MAX_LINES:
        yield f"{lines} lines: past {MAX_LINES} it is two concepts"
    tree = ast.parse(source)
    if room == "__init__":
        yield from _find_beyond_reexports(tree)
    for name in _list_imports(tree):
        yield from _find_upward_import(name, room, package.name)
    if room != "compat":
        for name in _list_imports(tree) + _list_attributes(tree):
            yield from _find_compat_business(name)


def _list_imports(tree: ast.Module) -> list[str]:
    """Name everything imported in full: `from a.b import c` is `a.b.c`."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def _list_attributes(tree: ast.Module) -> list[str]:
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return [ast.unparse(node) for node in nodes]


def _find_upward_import(name: str, room: str, package: str) -> Iterator[str]:
    root, *rest = name.split(".")
    if root == "":
        yield f"imports {name}: relative, so its floor cannot be read"
    if root != package:
        return
    # What is not a room is a name the package exports: the top floor.
    target = rest[0] if rest and rest[0] in FLOORS else "__init__"
    if target != room and FLOORS[target] >= FLOORS[room]:
        yield (
            f"imports {name}: floor {FLOORS[target]} from floor {FLOORS[room]}, "
            "expected a lower one"
        )


def _find_compat_business(name: str) -> Iterator[str]:
    if any(f"{name}.".startswith(f"{unstable}.") for unstable in UNSTABLE_JAX):
        yield f"uses {name}: only compat.py touches unstable JAX"
    if any(f".{name}.".find(f".{version}.") >= 0 for version in VERSION_NAMES):
        yield f"uses {name}: only compat.py asks for a version"


def _find_beyond_reexports(tree: ast.Module) -> Iterator[str]:
    start = 1 if ast.get_docstring(tree) is not None else 0
    for node in tree.body[start:]:
        match node:
            case ast.ImportFrom():
                pass
            case ast.Assign(targets=[ast.Name(id="__all__" | "__version__")]):
                pass
            case _:
                yield f"line {node.lineno}: only re-exports belong here"


def list_modules_after(statement: str, path: Path | None = None) -> set[str]:
    """Name the top-level modules a fresh interpreter has loaded after a statement.

    JAX is told of a platform that does not exist: starting a backend raises.
    """
    paths = [str(path)] if path else []
    environment = os.environ | {
        "JAX_PLATFORMS": "no_such_platform",
        "PYTHONPATH": os.pathsep.join([*paths, str(PACKAGE.parent)]),
    }
    code = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    if result.returncode:
        raise RuntimeError(result.stderr)
    return {name.partition(".")[0] for name in result.stdout.split()}


# The house.


def test_the_package_keeps_its_rules() -> None:
    assert find_violations(PACKAGE) == []


def test_importing_the_package_loads_no_optional_library() -> None:
    loaded = list_modules_after("import jmp_lite")
    assert {"jax", "jmp_lite", "numpy", "optax"} <= loaded
    assert loaded.isdisjoint(LOADED_WHERE_USED)


# The checker can fail.


@pytest.mark.parametrize(
    ("file", "source", "problem"),
    [
        ("trees.py", "from house import policy", "imports house.policy: floor 2 from"),
        ("trees.py", "import house.policy as p", "imports house.policy: floor 2 from"),
        ("trees.py", "from house.policy import P", "house.policy.P: floor 2 from"),
        ("gradients.py", "import house.optimizers", "floor 4 from floor 4"),
        ("policy.py", "from house import Policy", "floor 7 from floor 2"),
        ("policy.py", "import house", "floor 7 from floor 2"),
        ("trees.py", "def f():\n  from house import nnx", "floor 6 from floor 1"),
        ("optimizers/a.py", "import house.numerics.b", "floor 5 from floor 4"),
        ("trees.py", "from . import dtypes", "relative"),
        ("attic.py", "", "has no floor"),
        ("attic/a.py", "", "has no floor"),
        ("trees.py", "\n" * 401, "401 lines"),
        ("trees.py", "import jax.extend.core", "unstable JAX"),
        ("trees.py", "from jax._src import core", "unstable JAX"),
        ("trees.py", "from jax import extend", "unstable JAX"),
        ("trees.py", "import jax\njax._src.core.eval_jaxpr", "unstable JAX"),
        ("trees.py", "import jax\njax.__version__", "asks for a version"),
        ("trees.py", "from jax import __version__", "asks for a version"),
        ("trees.py", "from importlib import metadata", "asks for a version"),
        ("__init__.py", "def f(): ...", "line 1: only re-exports"),
        ("__init__.py", '"""Doc."""\nx = 1', "line 2: only re-exports"),
    ],
)
def test_a_planted_violation_is_found(
    tmp_path: Path, file: str, source: str, problem: str
) -> None:
    path = tmp_path / "house" / file
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")
    violations = find_violations(tmp_path / "house")
    assert any(v.startswith(f"{file}: ") and problem in v for v in violations)


def test_a_house_in_order_has_no_violations(tmp_path: Path) -> None:
    files = {
        "__init__.py": """
            '''A house.'''
            from house.policy import Policy
            __version__ = "1"
            __all__ = ["Policy"]
            """,
        "compat.py": "import jax\nfrom jax.extend import core\njax.__version__",
        "policy.py": "import jax.extensions\nfrom house import compat",
        "optimizers/a.py": "from house.optimizers import b\nfrom house import policy",
    }
    for file, source in files.items():
        path = tmp_path / "house" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source), encoding="utf-8")
    assert find_violations(tmp_path / "house") == []


def test_a_heavy_import_is_seen(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("import rich.table", encoding="utf-8")
    assert "rich" in list_modules_after("import heavy", tmp_path)


def test_a_started_backend_is_seen() -> None:
    with pytest.raises(RuntimeError, match="no_such_platform"):
        list_modules_after("import jax; jax.devices()")
