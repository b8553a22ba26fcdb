"""Seed faults into the library, and count how many of them the tests catch.

    python tests/tools/mutate.py --limit 20    # the next call goes on where this ends
    python tests/tools/mutate.py --full        # runs the `full` tests on survivors too
    python tests/tools/mutate.py --list        # the mutations; runs nothing

Each mutation is one small change to one file, run against the tests of that file, in a
copy of the tree. Mutations are drawn with a fixed seed, by turns from each group of
`GROUPS`: the first 50 are a sample of all groups. A mutation that no test catches has
survived: it needs a test, or it changes nothing that can be seen.

Compare two revisions, or two selections of tests (`--marked`), with the same seed.
"""

import ast
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).parents[2]
SRC = "jmp_lite/_src"


@dataclasses.dataclass(frozen=True)
class Group:
    """Files that are mutated together, and the tests that cover them.

    Attributes:
      files: patterns of files, from the root.
      tests: patterns of tests; those that are quick and close to the files first.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]


_AUTOCAST_TESTS = (
    "tests/autocast/test_[!dp]*.py",
    "tests/autocast/test_digits.py",
    "tests/autocast/test_programs.py",
)

GROUPS = {
    "loss scales": Group((f"{SRC}/loss_scale.py",), ("tests/test_loss_scale*.py",)),
    "scale_aware": Group(
        (f"{SRC}/optimizers/scale_aware.py", f"{SRC}/optimizers/base.py"),
        (
            "tests/optimizers/test_scale_aware*.py",
            "tests/test_contracts.py",
            "tests/optimizers/test_master_weights.py",
            "tests/optimizers/test_half_params.py",
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
            "tests/test_policy*.py",
            "tests/flax/test_module_policies.py",
            "tests/flax/test_policies.py",
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
            "tests/optimizers/test_master_remainders.py",
            "tests/optimizers/test_master_weights.py",
            "tests/optimizers/test_remainder.py",
            "tests/optimizers/test_stochastic_rounding.py",
            "tests/optimizers/test_half_params.py",
        ),
    ),
    "low-precision state": Group(
        (
            f"{SRC}/optimizers/blocks.py",
            f"{SRC}/optimizers/low_precision_state.py",
        ),
        (
            "tests/optimizers/test_blocks.py",
            "tests/optimizers/test_low_precision_state.py",
        ),
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
        """Return what tells a mutation from others."""
        return f"{self.file}:{self.line}:{self.start} {self.old!r} -> {self.new!r}"

    def applied(self, source: bytes) -> bytes:
        """Return the source with this change."""
        old = self.old.encode()
        assert source[self.start : self.start + len(old)] == old
        return (
            source[: self.start] + self.new.encode() + source[self.start + len(old) :]
        )

    def is_python(self, source: bytes) -> bool:
        """Return whether the source with this change can be compiled."""
        try:
            compile(self.applied(source), self.file, "exec")
        except SyntaxError:
            return False
        return True


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
    "min": ("max",),
    "max": ("min",),
    "minimum": ("maximum",),
    "maximum": ("minimum",),
    "any": ("all",),
    "all": ("any",),
    "logical_and": ("logical_or",),
    "logical_or": ("logical_and",),
    "float32": ("float16", "bfloat16"),
    "float16": ("bfloat16",),
    "bfloat16": ("float16",),
}
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
        if isinstance(node, ast.FunctionDef):
            ignored = [*node.decorator_list, node.returns]
        elif isinstance(node, ast.ClassDef):
            ignored = list(node.decorator_list)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            ignored = [node.annotation]
        elif isinstance(node, ast.JoinedStr):
            ignored = list(node.values)
        elif isinstance(node, ast.Raise | ast.Slice):
            ignored = list(ast.iter_child_nodes(node))
        elif isinstance(node, ast.Call) and _called(node) in {"warn", "field"}:
            ignored = [*node.args, *node.keywords]
        elif isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0]):
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


RESULTS = ("caught", "timed out", "caught by full", "survived")


class Copy:
    """A copy of the files of the working tree, in which tests run."""

    def __init__(self, folder: Path):
        """Copy what git knows, and what it does not ignore."""
        self.folder = folder
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
        for name in names.decode().split("\0")[:-1]:
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def run(self, tests: list[str], marked: str, timeout: float) -> str:
        """Return what tests say of the copy as it is now, as in `RESULTS`."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", *("-m", marked), *tests]
        command += ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestWarning"]
        environment = os.environ | {
            "CI": "1",
            "PYTHONPATH": str(self.folder),
            # A changed file of the same length and second would be taken for the old.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
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
        if process.returncode in (0, 5):  # 5: no test is left by the marker
            return "survived"
        if process.returncode in (1, 2, 3):  # failed, not collected, crashed
            return "caught"
        if process.returncode < 0:
            return "caught"  # the interpreter crashed
        raise RuntimeError(f"pytest could not run {' '.join(tests)}:\n{output}")

    def judge(self, mutation: Mutation, marked: str, full: bool, timeout: float) -> str:
        """Return what the tests say of a mutation; the copy is as it was afterwards."""
        path = self.folder / mutation.file
        source = path.read_bytes()
        tests = matching(GROUPS[mutation.group].tests)
        path.write_bytes(mutation.applied(source))
        try:
            result = self.run(tests, marked, timeout)
            if result == "survived" and full:
                if self.run(tests, f"not ({marked})", 4 * timeout) != "survived":
                    return "caught by full"
            return result
        finally:
            path.write_bytes(source)


def table_of(results: list[dict[str, Any]]) -> Table:
    """Return how many mutations of each file were caught."""
    table = Table(title="Mutations", caption="timed out: counted as caught")
    for column in ("file", *RESULTS, "caught %"):
        table.add_column(column, justify="left" if column == "file" else "right")
    files = sorted({r["file"] for r in results})
    for name in [*files, "all"]:
        rows = [r["result"] for r in results if name in (r["file"], "all")]
        counts = [rows.count(result) for result in RESULTS]
        share = 100 * (1 - counts[-1] / len(rows))
        table.add_row(
            name, *map(str, counts), f"{share:.0f}", end_section=name != "all"
        )
    return table


def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path(
        "out/mutations"
    ),
    count: Annotated[int, typer.Option(help="Mutations to draw.")] = 160,
    limit: Annotated[int, typer.Option(help="Run at most so many now.")] = 10**6,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    workers: Annotated[int, typer.Option(help="Copies that run at once.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for a mutation.")] = 900.0,
    marked: Annotated[
        str, typer.Option(help="Tests to run, as pytest's -m.")
    ] = "not full",
    full: Annotated[bool, typer.Option("--full", help="Then the others.")] = False,
    only: Annotated[str, typer.Option(help="Draw from one group.")] = "",
    show: Annotated[bool, typer.Option("--list", help="Run nothing.")] = False,
) -> None:
    """Seed faults into the library, and count how many of them the tests catch."""
    console = Console()
    mutations = [m for _, m in zip(range(count), drawn(seed), strict=False)]
    mutations = [m for m in mutations if only in ("", m.group)]
    if show:
        for mutation in mutations:
            console.print(
                f"{mutation.kind}: {mutation.name}", highlight=False, markup=False
            )
        return
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    by_name = {r["name"]: r for r in before.get("mutations", [])}
    passed: list[str] = before.get("passed", [])  # groups, on code that is not mutated
    todo = [m for m in mutations if m.name not in by_name][:limit]
    console.print(
        f"{len(mutations)} mutations, {len(mutations) - len(todo)} not run now."
    )

    def write() -> list[dict[str, Any]]:
        done = [by_name[m.name] for m in mutations if m.name in by_name]
        settings: dict[str, Any] = {"seed": seed, "count": count, "marked": marked}
        settings |= {"full": full, "passed": passed}
        path.write_text(json.dumps(settings | {"mutations": done}, indent=1) + "\n")
        return done

    progress = Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, progress:
        copies = [Copy(Path(folder) / str(i)) for i in range(workers)]
        bar = progress.add_task("mutated", total=len(todo))

        def judge(mutation: Mutation) -> None:
            copy = copies.pop()
            start = time.monotonic()
            result = copy.judge(mutation, marked, full, timeout)
            copies.append(copy)
            by_name[mutation.name] = dataclasses.asdict(mutation) | {
                "name": mutation.name,
                "result": result,
                "seconds": round(time.monotonic() - start, 1),
            }
            write()
            progress.advance(bar)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(judge, todo))
        # Where a mutation survived, the tests pass. Elsewhere that is seen to, as tests
        # that fail anyway would catch everything.
        survived = {r["group"] for r in by_name.values() if r["result"] == "survived"}
        unproven = sorted({m.group for m in todo} - survived - set(passed))
        progress.update(bar, description="unchanged", total=len(todo) + len(unproven))
        for group in unproven:
            if (
                copies[0].run(matching(GROUPS[group].tests), marked, timeout)
                != "survived"
            ):
                for mutation in todo:
                    if mutation.group == group:
                        del by_name[mutation.name]
                write()
                raise RuntimeError(
                    f"Tests of {group} fail on code that is not mutated."
                )
            passed.append(group)
            progress.advance(bar)
    done = write()
    if not done:
        return
    console.print(table_of(done))
    for row in done:
        if row["result"] == "survived":
            console.print(f"survived: {row['name']}", highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
