"""Lines of the user's code: not those of libraries."""

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jmp_lite import explain
from jmp_lite.numerics import lint

LIBRARY = """
import jax
import jax.numpy as jnp
from jmp_lite import explain

def product(x):
    return x @ x

@jax.custom_vjp
def ruled(x):
    return x @ x

ruled.defvjp(lambda x: (ruled(x), x), lambda x, g: (g @ x,))
jitted = jax.jit(product)

def call(fun, x):
    return fun(x)

def main(x, found):
    found += [row.line for row in explain(product, "mixed_bfloat16")(x).rows]
"""


@pytest.fixture(params=["site-packages", "dist-packages"])
def library(request: Any, tmp_path: Path) -> Any:
    """Return a module that is installed where installed libraries are."""
    path = tmp_path / request.param / "unheard_of" / "ops.py"
    path.parent.mkdir(parents=True)
    path.write_text(LIBRARY)
    spec: Any = importlib.util.spec_from_file_location("unheard_of.ops", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def user(fun: Callable[[Any], Any], x: Any) -> Any:
    return fun(x)


def user_called_by_the_library(library: Any, x: Any) -> Any:
    return library.call(lambda x: x @ x, x)


def line(fun: Any) -> str:
    """Return that of the only statement of a function."""
    return f"{__file__}:{fun.__code__.co_firstlineno + 1}"


X = jnp.ones((8, 8))


@pytest.mark.parametrize("name", ["product", "ruled", "jitted"])
def test_a_line_of_any_library_is_that_of_its_call(library: Any, name: str) -> None:
    fun = getattr(library, name)
    rows = explain(lambda x: user(fun, x), "mixed_bfloat16")(X).rows
    assert {row.line for row in rows if row.flops} == {line(user)}
    report = lint(lambda x: user(fun, x), "mixed_bfloat16")(X)
    assert {finding.line for finding in report.findings} == {line(user)}


def test_a_function_that_a_library_calls_is_the_users(library: Any) -> None:
    fun = user_called_by_the_library
    (row,) = explain(lambda x: fun(library, x), "mixed_bfloat16")(X).rows
    assert row.line == line(fun)


def test_lines_of_a_program_that_is_installed_are_its_own(library: Any) -> None:
    found: list[str] = []
    thread = threading.Thread(target=library.main, args=(X, found))
    thread.start()  # where no frame is of this file
    thread.join()
    of_product = library.product.__code__.co_firstlineno + 1
    assert found == [f"{library.__file__}:{of_product}"]
