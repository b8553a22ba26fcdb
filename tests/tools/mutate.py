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
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

ROOT = Path(__file__).parents[2]
SRC, TESTS = "jmp_lite/_src", "tests"

# Patterns of files that are mutated together, in SRC, and of the tests that cover them,
# in TESTS: those that are quick and close to the files come first. MISUSE is of all.
MISUSE = "test_mistakes.py"
GROUPS = {
    "loss scales": ("loss_scale.py", "test_loss_scale*.py"),
    "scale_aware": (
        "optimizers/scale_aware.py optimizers/base.py",
        "optimizers/test_scale_aware*.py test_contracts.py "
        "optimizers/test_master_weights.py optimizers/test_half_params.py",
    ),
    "gradients": (
        "gradients.py optimizers/monitor.py",
        "test_gradients.py optimizers/test_monitor.py",
    ),
    "trees": (
        "trees.py dtypes.py",
        "test_trees.py test_dtypes.py optimizers/test_scale_aware.py",
    ),
    "policies": (
        "policy.py flax/module_policies.py",
        "test_policy*.py flax/test_module_policies.py flax/test_policies.py "
        "flax/linen/test_modules.py",
    ),
    "train steps": (
        "flax/train_step.py flax/*/train_state.py",
        "flax/test_train_st*.py flax/*/test_train_state.py",
    ),
    "master weights": (
        "optimizers/master_weights.py optimizers/remainder.py "
        "optimizers/stochastic_rounding.py",
        "optimizers/test_master*.py optimizers/test_remainder.py "
        "optimizers/test_stochastic_rounding.py optimizers/test_half_params.py",
    ),
    "low-precision state": (
        "optimizers/blocks.py optimizers/low_precision_state.py",
        "optimizers/test_blocks.py optimizers/test_low_precision_state.py",
    ),
    "checkpoints": ("checkpoint/*.py", "checkpoint/test_*.py"),
    "autocast": (
        "autocast/[!e_]*.py new_primitives.py",
        "autocast/test_[!dp]*.py autocast/test_digits.py autocast/test_programs.py",
    ),
    "jaxprs": (
        "jaxprs/[!_]*.py",
        "jaxprs/test_*.py autocast/test_[!dp]*.py autocast/test_digits.py "
        "autocast/test_programs.py numerics/test_*.py",
    ),
}


# --- What is mutated --------------------------------------------------------------


class Mutation(NamedTuple):
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
        before, after = source[: self.start], source[self.start :]
        assert after.startswith(self.old.encode())
        return before + self.new.encode() + after.removeprefix(self.old.encode())

    def is_python(self) -> bool:
        with contextlib.suppress(SyntaxError):
            return bool(ast.parse(self.applied((ROOT / self.file).read_bytes())))
        return False


_OTHERS: dict[type[ast.AST], tuple[type[Any], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
}
_NAMES = {"float32": ("float16", "bfloat16")}
for _one, _other in (
    *((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div)),
):
    _OTHERS |= {_one: (_other,), _other: (_one,)}
for _name, _another in (
    *(("min", "max"), ("minimum", "maximum"), ("any", "all")),
    *(("logical_and", "logical_or"), ("float16", "bfloat16")),
):
    _NAMES |= {_name: (_another,), _another: (_name,)}
_CHOICES = {"where", "select", "cond"}
# Calls whose arguments are of different kinds, or may come in any order.
_UNSWAPPED = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast"}
_UNSWAPPED |= {"min", "max", "minimum", "maximum", "logical_and", "logical_or"}


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def changes(node: ast.AST) -> Iterator[ast.AST | str]:
    """Yield what may stand in place of a node; of an `if`, in place of its test."""
    match node:
        case ast.Compare(ops=[op]):
            yield from (_with(node, ops=[other()]) for other in _OTHERS[type(op)])
        case ast.BoolOp(op=op) | ast.BinOp(op=op):
            yield from (_with(node, op=other()) for other in _OTHERS.get(type(op), ()))
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Attribute(attr=name):
            yield from (_with(node, attr=other) for other in _NAMES.get(name, ()))
        case ast.Name(name, ast.Load()):
            yield from map(ast.Name, _NAMES.get(name, ()))
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.If():
            yield "False"
        case ast.Call(args=[_, one, other]) if _called(node) in _CHOICES:
            yield from (one, other)
        case ast.Call(args=[one, other, *rest]) if _called(node) not in _UNSWAPPED:
            is_starred = any(isinstance(arg, ast.Starred) for arg in node.args)
            if not is_starred and ast.dump(one) != ast.dump(other):
                yield _with(node, args=[other, one, *rest])
        case ast.Return(ast.Call(args=[first, *_])):
            if not isinstance(first, ast.Starred):
                yield ast.Return(first)
        case ast.Raise() | ast.AugAssign() | ast.Expr(ast.Call()):
            yield "pass"


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
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    found = {}
    for node in _mutable(ast.parse(source)):
        for new in changes(node):
            target: Any = node.test if isinstance(node, ast.If) else node
            start = starts[target.lineno - 1] + target.col_offset
            end = starts[target.end_lineno - 1] + target.end_col_offset
            if isinstance(new, ast.AST):
                text = ast.unparse(ast.fix_missing_locations(new))
                new = f"({text})" if isinstance(new, ast.expr) else text
            place = group, file, target.lineno, type(node).__name__, start
            mutation = Mutation(*place, source[start:end].decode(), new)
            found[mutation.name] = mutation
    return list(found.values())


def matching(folder: str, patterns: str) -> list[str]:
    """Return the files in a folder that match patterns, in their order.

    Raises:
      FileNotFoundError: nothing matches one of them.
    """
    files: dict[str, None] = {}
    for pattern in patterns.split():
        found = sorted((ROOT / folder).glob(pattern))
        if not found:
            raise FileNotFoundError(f"No file matches {pattern!r}: update GROUPS.")
        files |= dict.fromkeys(str(path.relative_to(ROOT)) for path in found)
    return list(files)


def drawn(seed: int) -> Iterator[Mutation]:
    """Yield mutations in a random order that the seed decides, from groups by turns.

    In a group each kind comes as often as the others, as long as there are any left.
    """
    rng = random.Random(seed)
    groups = []
    for name, (files, _) in GROUPS.items():
        kinds: dict[str, list[Mutation]] = {}
        for file in matching(SRC, files):
            for mutation in mutations_of(file, (ROOT / file).read_bytes(), name):
                kinds.setdefault(mutation.kind, []).append(mutation)
        order = []
        for _, mutations in sorted(kinds.items()):
            rng.shuffle(mutations)
            order += [(i + rng.random(), m) for i, m in enumerate(mutations)]
        groups.append(m for _, m in sorted(order) if m.is_python())
    for turn in itertools.zip_longest(*groups):
        yield from filter(None, turn)


# --- How it is run ----------------------------------------------------------------


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
        command + matching(TESTS, f"{GROUPS[group][1]} {MISUSE}"),
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
    drawn_now = itertools.islice(drawn(seed), count)
    mutations = [m for m in drawn_now if only in ("", m.group)]
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = Path(name)
        ignored = shutil.ignore_patterns(".*", "out", "shared", "__pycache__")
        shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
        for mutation in [m for m in mutations if m.name not in results][:limit]:
            file = folder / mutation.file
            source = file.read_bytes()
            file.write_bytes(mutation.applied(source))
            results[mutation.name] = run(folder, mutation.group, timeout)
            file.write_bytes(source)
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{results[mutation.name]}: {mutation.kind}: {mutation.name}")
        # Where a mutation survived, the tests pass. Elsewhere that is seen to, as tests
        # that fail anyway would catch everything.
        done = [m for m in mutations if m.name in results]
        proven = {m.group for m in done if results[m.name] == "survived"}
        for group in sorted({m.group for m in done} - proven):
            if run(folder, group, timeout) != "survived":
                raise RuntimeError(f"Tests of {group} fail on code as it is.")
    print(dict(collections.Counter(results[m.name] for m in done)))


if __name__ == "__main__":
    typer.run(main)
