"""Lines of derivative rules: only they change, and only inside of the context."""

import contextlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src import source_info_util  # noqa: TID251  (its keeper of lines is faked)

from jmp_lite._src.jaxprs import name_scopes, sources
from jmp_lite.numerics import first_nonfinite


@jax.custom_vjp
def clip(x: Any) -> Any:
    """Return `x + 1`; its derivative is 1 / x."""
    return x + 1.0


def backward(x: Any, ct: Any) -> Any:
    """Divide."""
    return (ct / x,)


clip.defvjp(lambda x: (x + 1.0, x), backward)


def fun(x):
    """Call what has a rule, and what has none."""
    with jax.named_scope("clip"):
        return jnp.sum(jnp.sin(clip(x)) * 2.0)


RULE = f"{__file__}:{backward.__code__.co_firstlineno + 2}"
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
    with pytest.raises(RuntimeError, match="of the rule"):
        bad = jax.custom_vjp(lambda x: x)
        bad.defvjp(lambda x: (x, x), _raise)
        first_nonfinite(jax.grad(bad))(jnp.float32(1.0))
    assert held() is before


def _raise(x, ct):
    raise RuntimeError("of the rule")


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
