"""Seed faults into the library, and count how many of them the tests catch.

    python tests/tools/mutate.py --limit 20    # the next call goes on where this ends

Each mutation is one small change to one file, run against the tests of that file, in a
copy of the tree. Mutations are drawn with a fixed seed, by turns from each group of
`GROUPS`: the first 50 are a sample of all groups. A mutation that no test catches has
survived: it needs a test, or it changes nothing that can be seen.

The tools of PyPI do not fit: mutmut forks the process that has imported JAX, whose
threads do not survive that, and cosmic-ray knows no other dtype for float32, which is
the fault that matters here, and draws no sample.
"""

import ast
import collections
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

ROOT = Path(__file__).parents[2]
SRC = "jmp_lite/_src"


class Group(NamedTuple):
    """Patterns of files that are mutated together, and of the tests that cover them."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    """Those that are quick and close to the files come first."""


def _of(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


_AUTOCAST_TESTS = _of("autocast", "[!dp]*", "digits", "programs")

GROUPS = {
    "loss scales": Group((f"{SRC}/loss_scale.py",), ("tests/test_loss_scale*.py",)),
    "scale_aware": Group(
        (f"{SRC}/optimizers/scale_aware.py", f"{SRC}/optimizers/base.py"),
        (
            "tests/optimizers/test_scale_aware*.py",
            "tests/test_contracts.py",
            *_of("optimizers", "master_weights", "half_params"),
        ),
    ),
    "gradients": Group(
        (f"{SRC}/gradients.py", f"{SRC}/optimizers/monitor.py"),
        ("tests/test_gradients.py", "tests/optimizers/test_monitor.py"),
    ),
    "trees": Group(
        (f"{SRC}/trees.py", f"{SRC}/dtypes.py"),
        (
            "tests/test_trees.py",
            "tests/test_dtypes.py",
            "tests/optimizers/test_scale_aware.py",
        ),
    ),
    "policies": Group(
        (f"{SRC}/policy.py", f"{SRC}/flax/module_policies.py"),
        (
            *("tests/test_policy*.py", *_of("flax", "module_policies", "policies")),
            "tests/flax/linen/test_modules.py",
        ),
    ),
    "train steps": Group(
        (f"{SRC}/flax/train_step.py", f"{SRC}/flax/*/train_state.py"),
        ("tests/flax/test_train_st*.py", "tests/flax/*/test_train_state.py"),
    ),
    "master weights": Group(
        (
            f"{SRC}/optimizers/master_weights.py",
            f"{SRC}/optimizers/remainder.py",
            f"{SRC}/optimizers/stochastic_rounding.py",
        ),
        (
            *_of("optimizers", "master_remainders", "master_weights", "remainder"),
            *_of("optimizers", "stochastic_rounding", "half_params"),
        ),
    ),
    "low-precision state": Group(
        (f"{SRC}/optimizers/blocks.py", f"{SRC}/optimizers/low_precision_state.py"),
        _of("optimizers", "blocks", "low_precision_state"),
    ),
    "checkpoints": Group((f"{SRC}/checkpoint/*.py",), ("tests/checkpoint/test_*.py",)),
    "autocast": Group((f"{SRC}/autocast/[!e_]*.py",), _AUTOCAST_TESTS),
    "jaxprs": Group(
        (f"{SRC}/jaxprs/[!_]*.py",),
        ("tests/jaxprs/test_*.py", *_AUTOCAST_TESTS, "tests/numerics/test_*.py"),
    ),
}


# --- What is mutated --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change: a piece of a file's text, and what stands there instead."""

    group: str
    file: str
    line: int
    kind: str
    start: int  # of the text, in bytes
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.start} {self.old!r} -> {self.new!r}"

    def applied(self, source: bytes) -> bytes:
        """Return the source with this change."""
        old, new = self.old.encode(), self.new.encode()
        assert source[self.start :].startswith(old)
        return source[: self.start] + new + source[self.start + len(old) :]

    def is_python(self, source: bytes) -> bool:
        with contextlib.suppress(SyntaxError):
            return bool(compile(self.applied(source), self.file, "exec"))
        return False


_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
_NAMES = {
    name: (other,)
    for one, another in (
        ("min", "max"),
        ("minimum", "maximum"),
        ("any", "all"),
        ("logical_and", "logical_or"),
        ("float16", "bfloat16"),
    )
    for name, other in ((one, another), (another, one))
} | {"float32": ("float16", "bfloat16")}
_CHOICES = {"where", "select", "cond"}
# Calls whose arguments are of different kinds, or may come in any order.
_UNSWAPPED = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast"}
_UNSWAPPED |= {"min", "max", "minimum", "maximum", "logical_and", "logical_or"}


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | str]]:
    """Yield the kind of each mutation of a node, and what replaces the node."""
    match node:
        case ast.Compare(left, [op], right):
            for other in _COMPARISONS[type(op)]:
                yield "comparison", ast.Compare(left, [other()], right)
        case ast.BoolOp(op, values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and/or", ast.BoolOp(other, values)
        case ast.UnaryOp(ast.Not(), operand):
            yield "not", operand
        case ast.Constant(bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
            yield "constant", ast.BinOp(ast.Constant(value), ast.Sub(), ast.Constant(1))
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            yield "arithmetic", ast.BinOp(left, _ARITHMETIC[type(op)](), right)
        case ast.Attribute(value, name) if name in _NAMES:
            for other in _NAMES[name]:
                yield _kind_of(name), ast.Attribute(value, other)
        case ast.Name(name, ast.Load()) if name in _NAMES:
            for other in _NAMES[name]:
                yield _kind_of(name), ast.Name(other)
        case ast.IfExp(_, body, orelse):
            yield "branch", body
            yield "branch", orelse
        case ast.If():
            yield "branch", "False"
        case ast.Call(args=args, keywords=keywords):
            if any(isinstance(arg, ast.Starred) for arg in args):
                return
            if _called(node) in _CHOICES and len(args) == 3:
                yield "branch", args[1]
                yield "branch", args[2]
            elif len(args) >= 2 and _called(node) not in _UNSWAPPED:
                swapped = [args[1], args[0], *args[2:]]
                if ast.dump(args[0]) != ast.dump(args[1]):
                    yield "arguments", ast.Call(node.func, swapped, keywords)
        case ast.Return(ast.Call(args=[first, *_])):
            if not isinstance(first, ast.Starred):
                yield "early return", ast.Return(first)
        case ast.Raise() | ast.AugAssign():
            yield "statement", "pass"
        case ast.Expr(ast.Call()):
            yield "statement", "pass"


def _kind_of(name: str) -> str:
    return "dtype" if "float" in name else "min/max"


def _mutable(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that decide results: no annotation, message or decorator."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        ignored: list[Any] = []
        match node:
            case ast.FunctionDef():
                ignored = [*node.decorator_list, node.returns]
            case ast.ClassDef():
                ignored = [*node.decorator_list]
            case ast.arg() | ast.AnnAssign():
                ignored = [node.annotation]
            case ast.JoinedStr() | ast.Raise() | ast.Slice():
                ignored = [*ast.iter_child_nodes(node)]
            case ast.Call() if _called(node) in {"warn", "field"}:
                ignored = [*node.args, *node.keywords]
            case ast.Assign() if "__all__" in ast.unparse(node.targets[0]):
                ignored = [node.value]
        for child in filter(None, ignored):
            skipped.update(id(inner) for inner in ast.walk(child))
        if id(node) not in skipped:
            yield node


def mutations_of(file: str, source: bytes, group: str = "") -> list[Mutation]:
    """Return every mutation of a source; a few of them are no Python."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = {}
    for node in _mutable(ast.parse(source)):
        for kind, replacement in changes(node):
            # Of an `if` the test alone is replaced.
            target: Any = node.test if isinstance(node, ast.If) else node
            start = starts[target.lineno - 1] + target.col_offset
            end = starts[target.end_lineno - 1] + target.end_col_offset
            if isinstance(replacement, str):
                new = replacement
            else:
                new = ast.unparse(ast.fix_missing_locations(replacement))
                new = f"({new})" if isinstance(replacement, ast.expr) else new
            old = source[start:end].decode()
            mutation = Mutation(group, file, target.lineno, kind, start, old, new)
            found[mutation.name] = mutation
    return list(found.values())


def matching(patterns: Iterable[str]) -> list[str]:
    """Return the files that match patterns, in their order.

    Raises:
      FileNotFoundError: nothing matches one of them.
    """
    files: dict[str, None] = {}
    for pattern in patterns:
        found = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
        if not found:
            raise FileNotFoundError(f"No file matches {pattern!r}: update GROUPS.")
        files |= dict.fromkeys(found)
    return list(files)


def drawn(seed: int) -> Iterator[Mutation]:
    """Yield mutations in a random order that the seed decides, from groups by turns.

    In a group each kind comes as often as the others, as long as there are any left.
    """
    rng = random.Random(seed)
    groups = []
    for name, group in GROUPS.items():
        kinds: dict[str, list[Mutation]] = {}
        for file in matching(group.files):
            for mutation in mutations_of(file, (ROOT / file).read_bytes(), name):
                kinds.setdefault(mutation.kind, []).append(mutation)
        order = []
        for _, mutations in sorted(kinds.items()):
            rng.shuffle(mutations)
            places = [(i + rng.random(), m) for i, m in enumerate(mutations)]
            order.extend(places)
        groups.append([m for _, m in sorted(order, key=lambda place: place[0])])
    while any(groups):
        for group in groups:
            while group:
                mutation = group.pop(0)
                if mutation.is_python((ROOT / mutation.file).read_bytes()):
                    yield mutation
                    break


# --- How it is run ----------------------------------------------------------------


def copy_of_the_tree(folder: Path) -> None:
    """Copy what git knows, and what it does not ignore."""
    listed = "git ls-files --cached --others --exclude-standard -z".split()
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    for name in names.decode().split("\0")[:-1]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())


def run(folder: Path, group: str, timeout: float) -> str:
    """Return what the tests of a group say of a copy as it is now.

    Raises:
      RuntimeError: pytest could not run them.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not full"]
    command += ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestWarning"]
    # A changed file of the same length and second would be taken for the old.
    settings = {"CI": "1", "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command + matching(GROUPS[group].tests),
        cwd=folder,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "timed out"
    if process.returncode == 0:
        return "survived"
    # Failed, not collected, crashed; or the interpreter did.
    if process.returncode in (1, 2, 3) or process.returncode < 0:
        return "caught"
    raise RuntimeError(f"pytest could not run the tests of {group}:\n{output}")


def main(
    out: Path = Path("out/mutations"),
    count: int = 160,
    limit: int = 10**6,
    seed: int = 0,
    timeout: float = 900.0,
    only: str = "",
) -> None:
    """Seed faults into the library, and count how many of them the tests catch.

    `count` mutations are drawn, from the group `only` if it is given; `limit` of those
    that have no result in the folder `out` run now.
    """
    drawn_now = [m for _, m in zip(range(count), drawn(seed), strict=False)]
    mutations = {m.name: m for m in drawn_now if only in ("", m.group)}
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = Path(name)
        copy_of_the_tree(folder)
        left = [m for m in mutations.values() if m.name not in results]
        for mutation in left[:limit]:
            file = folder / mutation.file
            source = file.read_bytes()
            file.write_bytes(mutation.applied(source))
            results[mutation.name] = run(folder, mutation.group, timeout)
            file.write_bytes(source)
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{results[mutation.name]}: {mutation.kind}: {mutation.name}")
        # Where a mutation survived, the tests pass. Elsewhere that is seen to, as tests
        # that fail anyway would catch everything.
        done = [m for m in mutations.values() if m.name in results]
        proven = {m.group for m in done if results[m.name] == "survived"}
        for group in sorted({m.group for m in done} - proven):
            if run(folder, group, timeout) != "survived":
                raise RuntimeError(f"Tests of {group} fail on code as it is.")
    print(dict(collections.Counter(results[m.name] for m in done)))


if __name__ == "__main__":
    typer.run(main)
