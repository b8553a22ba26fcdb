"""Lines of the user's code: not those of libraries; inside of rules for derivatives."""

import contextlib
import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src import source_info_util  # noqa: TID251  (its keeper of lines is faked)

from jmp_lite import explain
from jmp_lite._src.jaxprs import name_scopes, sources
from jmp_lite.numerics import first_nonfinite, lint

clip = jax.custom_vjp(lambda x: x + 1.0)


def backward(x: Any, ct: Any) -> Any:
    return (ct / x,)


clip.defvjp(lambda x: (x + 1.0, x), backward)


def fun(x):
    """Call what has a rule, and what has none."""
    with jax.named_scope("clip"):
        return jnp.sum(jnp.sin(clip(x)) * 2.0)


RULE = f"{__file__}:{backward.__code__.co_firstlineno + 1}"
CALL = f"{__file__}:{fun.__code__.co_firstlineno + 3}"


def traced(context: Any) -> Any:
    """Return the gradient's jaxpr, traced anew."""
    with context():
        return jax.make_jaxpr(jax.grad(lambda x: fun(x)))(jnp.ones(3))


def lines(closed: Any) -> dict[str, str]:
    """Return the line of each primitive."""
    return {e.primitive.name: sources.source_line(e) for e in closed.jaxpr.eqns}


def held() -> Any:
    """Return what JAX holds for the source of operations, in this thread."""
    return source_info_util._source_info_context.context


def test_only_the_lines_of_rules_change():
    plain, ruled = traced(contextlib.nullcontext), traced(sources.lines_of_rules)
    assert str(plain) == str(ruled)
    assert lines(plain)["div"] == CALL and lines(ruled)["div"] == RULE
    assert lines(plain) | {"div": RULE} == lines(ruled)
    for one, other in zip(plain.jaxpr.eqns, ruled.jaxpr.eqns, strict=True):
        assert name_scopes.of(one) == name_scopes.of(other)
        assert type(one.source_info) is type(other.source_info)


def test_what_jax_holds_is_restored():
    before = held()
    with sources.lines_of_rules():
        inside = held()
        with sources.lines_of_rules():
            assert held() is inside
        assert held() is inside is not before
        other: list[Any] = []
        thread = threading.Thread(target=lambda: other.append(type(held())))
        thread.start()
        thread.join()
        assert other == [source_info_util.SourceInfo]
    assert held() is before
    with pytest.raises(ZeroDivisionError), sources.lines_of_rules():
        jax.make_jaxpr(lambda x: clip(x) / (1 // 0))(1.0)
    assert held() is before
    bad = jax.custom_vjp(lambda x: x)
    bad.defvjp(lambda x: (x, x), lambda x, ct: (ct / (1 // 0),))
    with pytest.raises(ZeroDivisionError):
        first_nonfinite(jax.grad(bad))(jnp.float32(1.0))
    assert held() is before


class Other:
    """Another way to keep the source of operations than is known."""

    context = None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_source_info_context", None),
        ("_source_info_context", Other()),
        ("SourceInfo", None),
        ("current", lambda: held()),  # which makes no traceback
        ("current", len),  # no Python
    ],
)
def test_where_jax_is_another_lines_are_those_that_it_gives(name, value, monkeypatch):
    before = held()
    with monkeypatch.context() as patch:
        patch.delattr(source_info_util, name)
        if value is not None:
            patch.setattr(source_info_util, name, value, raising=False)
        with sources.lines_of_rules():
            inside = before if name == "_source_info_context" else held()
    assert inside is before is held()
    with sources.lines_of_rules():
        assert held() is not before


# Libraries.

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
