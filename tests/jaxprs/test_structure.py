"""Which jaxprs are traced or compiled once: those of equal structure."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_lite._src import compat
from jmp_lite._src.jaxprs.structure import numbering, structure

X = jnp.ones((3, 3))
NUMBER = numbering(lambda eqn: (None, ()))


def structure_of(fun: Callable[..., Any], *args: Any) -> Any:
    opened = compat.open_jaxpr(jax.make_jaxpr(fun)(*(args or (X, X))))
    return structure(opened, lambda eqn: (None, ()), number=NUMBER)


def layer(x, y):
    return jnp.tanh(x @ y + 1.0) * jnp.sin(x)


def test_scopes_and_lines_do_not_count():
    def in_scope(x, y):
        with jax.named_scope("layer_7"):
            return jnp.tanh(x @ y + 1.0) * jnp.sin(x)

    assert structure_of(layer) == structure_of(in_scope)
    assert hash(structure_of(layer)) == hash(structure_of(in_scope))


def in_jit(number: float) -> Callable[..., Any]:
    return lambda x, y: jax.jit(lambda x: x + number)(x)


def dot(precision: Any) -> Callable[..., Any]:
    return lambda x, y: lax.dot(x, y, precision=precision)


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "primitive": (lambda x, y: x + y, lambda x, y: x - y),
    "operands": (lambda x, y: x + y, lambda x, y: x + x),
    "order": (lambda x, y: x - y, lambda x, y: y - x),
    "results": (lambda x, y: (x, x + y), lambda x, y: (y, x + y)),
    "literal": (lambda x, y: x + 1.0, lambda x, y: x + 2.0),
    "zero": (lambda x, y: x * 0.0, lambda x, y: x * -0.0),
    "parameter": (lambda x, y: x.sum(0), lambda x, y: x.sum(1)),
    "inside_a_call": (in_jit(1.0), in_jit(2.0)),
    "precision": (dot(None), dot(lax.Precision.HIGHEST)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_changes_the_numbers_counts(name):
    one, other = map(structure_of, PAIRS[name])
    assert one != other
    assert one == structure_of(PAIRS[name][0])


def test_dtypes_count():
    half = X.astype(jnp.bfloat16)
    assert structure_of(jnp.tanh, X) != structure_of(jnp.tanh, half)


def test_constants_of_equal_bits_are_equal():
    def fun(value):
        return structure_of(lambda x: jax.jit(lambda x: x + value)(x), X)

    ones = np.ones((3, 3), np.float32)
    assert fun(ones) == fun(ones.copy()) != fun(2 * ones)


def test_a_parameter_that_cannot_be_hashed_is_equal_to_itself_alone():
    primitive = compat.Primitive("with_options")
    primitive.def_abstract_eval(lambda aval, options: aval)
    options: list[dict[str, Any]] = [{"axis": 0}, {"axis": 0}]

    def fun(i):
        return structure_of(lambda x: primitive.bind(x, options=options[i]), X)

    assert fun(0) == fun(0) != fun(1)
