"""A library that is not installed is named, with the command that installs it.

What is imported is tried in a process of its own, in which the library cannot be found.
"""

import ast
import json
import tomllib
from pathlib import Path

import pytest
from commands import run_python

import jmp_lite
from examples.common import requirements
from jmp_lite._src import extras

ROOT = Path(__file__).parents[2]
PACKAGE = Path(jmp_lite.__file__).parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
OPTIONAL = {name.partition(".")[0] for n in extras.LIBRARIES.values() for name in n}

# Its finder stands before all others, so the libraries look as if they were not there.
_HIDE = """
import json, sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hide())
"""
_TRY = """
def error_of(statement):
    try:
        exec(statement, globals())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

print(json.dumps([error_of(statement) for statement in json.loads(sys.argv[1])]))
"""


def errors_without(hidden: set[str], *statements: str) -> list[str | None]:
    """Return what each statement raises where libraries are missing, or None."""
    code = _HIDE.format(hidden=hidden) + _TRY
    return json.loads(run_python("-c", code, json.dumps(statements))[0])


def says(library: str, extra: str) -> str:
    command = f'pip install "jmp-lite[{extra}]", in a clone ".[{extra}]"'
    return f"ModuleNotFoundError: {library} is not installed: {command}"


def test_what_is_imported_asks_for_its_library():
    expected = {
        "import jmp_lite.linen": says("flax", "flax"),
        "from jmp_lite.nnx import TrainState": says("flax", "flax"),
        "from jmp_lite import checkpoint": says("orbax", "checkpoint"),
        # Which they import first.
        "import examples.digits": says("orbax", "examples"),
        "import benchmarks.convergence": says("orbax", "examples"),
    }
    errors = errors_without({"flax", "orbax"}, *expected)
    assert errors == list(expected.values())


_REPORTS = """
import jax.numpy as jnp, jmp_lite as jmp
from jmp_lite.numerics import dry_run, lint, tree_stats
x = jnp.ones((2, 2), jnp.float32)
explained = jmp.explain(jnp.dot, "mixed_float16")(x, x)
dry = dry_run(jnp.dot, "mixed_float16")(x, x)
linted = lint(jnp.dot, "mixed_float16")(x, x)
stats = tree_stats({"w": x}, "f16", histogram=True)
"""
_TABLES = [
    *("explained.table()", "dry.table()", "linted.table()", "stats.table()"),
    "from jmp_lite._src.flax import module_policies as m; m.Explanation(()).table()",
]
_FIGURES = [
    *("dry.plot()", "stats.plot()"),
    "from jmp_lite._src.numerics.plot import plot_histograms",
]


def test_tables_and_figures_ask_for_their_library():
    hidden = {"rich", "matplotlib"}
    first, *errors = errors_without(hidden, _REPORTS, *_TABLES, *_FIGURES)
    assert first is None  # what makes the reports needs neither
    libraries = ["rich"] * len(_TABLES) + ["matplotlib"] * len(_FIGURES)
    assert errors == [says(library, "numerics") for library in libraries]


def test_the_doctor_needs_no_extra_and_completion_asks_without_a_traceback():
    code = """
from jmp_lite.__main__ import main
assert main(["doctor", "--json", "--seconds", "0.1"]) == 0
sys.exit(main(["completion", "bash"]))
"""
    hide = _HIDE.format(hidden=OPTIONAL | {"typer"})
    out, err = run_python("-c", hide + code, status=1)
    assert json.loads(out)["devices"]
    assert err == says("shtab", "completion").partition(": ")[2] + "\n"


def test_what_an_extra_does_not_install_is_not_blamed_on_it():
    with pytest.raises(ModuleNotFoundError, match="^No module named 'no_such'$"):
        with extras.needed("flax"):
            import no_such  # noqa: F401  # pyright: ignore[reportMissingImports]


def test_the_extras_are_those_of_the_project():

    def modules(extra: str) -> set[str]:
        found = set()
        for wanted in EXTRAS[extra]:
            name, _, others = wanted.partition(">")[0].rstrip("]").partition("[")
            inner = [modules(other) for other in others.split(",") if other]
            found |= set.union(*inner) if inner else {name.replace("-", ".")}
        return found

    known = extras.LIBRARIES | {"examples": requirements.LIBRARIES}
    for extra, libraries in known.items():
        assert modules(extra) == set(libraries)


def unguarded(source: str) -> list[str]:
    """Name what a source imports from optional libraries outside of `needed`."""
    names: list[str] = []
    left: list[ast.AST] = [ast.parse(source)]
    while left:
        match left.pop():
            case ast.With(items=[item]) if "extras.needed(" in ast.unparse(item):
                pass
            case ast.Import(names=aliases):
                names += [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(module)):
                names += [module]
            case node:
                left += ast.iter_child_nodes(node)
    return [name for name in names if name.partition(".")[0] in OPTIONAL]


def test_no_import_of_an_optional_library_is_forgotten():
    # The public modules ask for all that is in these folders.
    guarded = {"flax", "checkpoint"}
    found = {
        str(path.relative_to(PACKAGE)): unguarded(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if not guarded & set(path.relative_to(PACKAGE).parts)
    }
    assert {path: names for path, names in found.items() if names} == {}
    for name in ("linen", "nnx", "checkpoint"):
        assert "extras.needed(" in (PACKAGE / f"{name}.py").read_text()
