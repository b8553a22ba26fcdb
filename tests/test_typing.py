"""The types that users see: wrapped functions keep their signature.

pyright and mypy check one small program in strict mode. They must accept each line, but
reject the lines that are marked with `# error`.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from commands import run_python

import jmp_lite

ROOT = Path(jmp_lite.__file__).parent.parent

PROGRAM = """
import jax
import jax.numpy as jnp
import jmp_lite as jmp
import optax  # type: ignore[import-untyped]


def loss(w: jax.Array, *, decay: float = 0.0) -> jax.Array:
    return jnp.sum(w) + decay


def loss_and_steps(w: jax.Array, step: int = 0) -> tuple[jax.Array, int]:
    return jnp.sum(w), step + 1


@jmp.autocast(policy="mixed_bfloat16")
def decorated(w: jax.Array, *, decay: float = 0.0) -> jax.Array:
    return loss(w, decay=decay)


def use(w: jax.Array, scale: jmp.LossScale) -> None:
    autocast: jax.Array = jmp.autocast(loss, "mixed_float16")(w, decay=0.1)
    jmp.autocast(loss)(w, dekay=0.1)  # error
    jmp.autocast(loss)("w")  # error
    out: jax.Array = decorated(w, decay=0.1)
    decorated(w, dekay=0.1)  # error
    jmp.autocast("mixed_float16")  # error
    jmp.autocast(loss, polizy="mixed_float16")  # error

    full: jax.Array = jmp.full_precision(loss)(w, decay=0.1)
    jmp.full_precision(loss)(w, dekay=0.1)  # error
    halved: jax.Array = jmp.in_half(loss, except_=("decay",))(w, decay=0.1)
    jmp.in_half(loss)(w, dekay=0.1)  # error
    summed: jax.Array = jmp.sums_in_float32(loss)(w, decay=0.1)
    jmp.sums_in_float32(loss)(w, dekay=0.1)  # error

    value: jax.Array
    steps: int
    wrong: str
    value, _ = jmp.scaled_value_and_grad(loss, loss_scale=scale)(w, decay=0.1)
    jmp.scaled_value_and_grad(loss, loss_scale=scale)(w, dekay=0.1)  # error
    jmp.scaled_value_and_grad(loss)(w)  # error
    fun = jmp.scaled_value_and_grad(loss_and_steps, loss_scale=scale, has_aux=True)
    (value, steps), _ = fun(w, step=3)
    (value, wrong), _ = fun(w)  # error
    fun(w, steps=3)  # error

    grads = jmp.scaled_grad(loss, loss_scale=scale)(w, decay=0.1)
    jmp.scaled_grad(loss, loss_scale=scale)(w, dekay=0.1)  # error
    grad = jmp.scaled_grad(loss_and_steps, loss_scale=scale, has_aux=True)
    _, steps = grad(w, step=3)
    _, wrong = grad(w)  # error
    grad(w, steps=3)  # error
    either = jmp.scaled_grad(loss_and_steps, loss_scale=scale, has_aux=bool(w))(w)
    print(autocast, out, full, halved, summed, value, steps, wrong, grads, either)


def optimise(w: jax.Array) -> None:
    tx = jmp.scale_aware(optax.sgd(0.1))
    opt_state = tx.init(w)
    skipped: jax.Array = opt_state.skipped_steps
    updates, opt_state = tx.update(w, opt_state, w, value=w)
    skipped = opt_state.skipped_steps
    opt_state.skiped_steps  # error
    tx.update(w)  # error
    # As any optax transformation, and any optax state.
    chained = optax.chain(tx, optax.scale(1.0))
    state: optax.OptState = tx.init(params=w)
    updates, state = tx.update(w, state, w)
    general: optax.GradientTransformationExtraArgs = tx
    print(skipped, updates, chained, general)


def look(w: jax.Array) -> None:
    report = jmp.explain(loss, "mixed_bfloat16")(w, decay=0.1)
    half: float = report.half_flops_share
    jmp.explain(loss)(w, dekay=0.1)  # error
    jmp.explain(loss)("w")  # error
    print(half)
"""
LINES = PROGRAM.splitlines()
REJECTED = {i for i, line in enumerate(LINES, 1) if line.endswith("# error")}


def run(folder: Path, *command: str) -> str:
    program = "-m", *command, "program.py"
    return run_python(*program, cwd=folder, status=1, MYPYPATH=str(ROOT))[0]


def check(errors: dict[int, str]) -> None:
    described = {LINES[line - 1]: error for line, error in errors.items()}
    assert errors.keys() == REJECTED, described


def test_pyright_in_strict_mode(tmp_path: Path) -> None:
    text = "# pyright: strict" + PROGRAM
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    options = ("--outputjson", "--pythonpath", sys.executable)
    found = json.loads(run(tmp_path, "pyright", *options))
    errors = [e for e in found["generalDiagnostics"] if e["severity"] == "error"]
    check({e["range"]["start"]["line"] + 1: e["message"] for e in errors})


def test_public_types_are_complete(tmp_path: Path) -> None:
    """As of a wheel, without the checkout beside it."""
    shutil.copytree(ROOT / "jmp_lite", tmp_path / "jmp_lite")
    (tmp_path / "elsewhere").mkdir()
    command = "-m pyright --verifytypes jmp_lite --ignoreexternal --outputjson".split()
    # Pyright verifies what the first Python of PATH imports.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found, _ = run_python(
        *command,
        cwd=tmp_path / "elsewhere",
        status=1,  # as any type is unknown: that of a subclass of a tuple of optax
        **{"PATH": path, "PYTHONPATH": str(tmp_path)},
    )
    score = json.loads(found)["typeCompleteness"]["completenessScore"]
    assert score > 0.98, found


@pytest.mark.full  # it reads the same lines, and takes longer
def test_mypy_in_strict_mode(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    # Errors in this program only, not in the packages that it imports.
    options = ("--strict", "--follow-imports=silent", "--output=json")
    cache = f"--cache-dir={ROOT / '.mypy_cache'}"
    found = run(tmp_path, "mypy", *options, cache).splitlines()
    errors = [e for e in map(json.loads, found) if e["severity"] == "error"]
    check({e["line"]: e["message"] for e in errors})
