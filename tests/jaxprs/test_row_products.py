"""Products without a free dimension are what they compute, a product and its sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import error, uniform
from jaxprs import equations, opened

from jmp_lite import autocast, full_precision
from jmp_lite._src.jaxprs import binding
from jmp_lite._src.jaxprs.row_products import as_sums

X, Y = uniform(0, 4, 6), uniform(1, 4, 6)

ROWS = {
    "vdot": lambda: jnp.vdot(X, Y),
    "rows": lambda: jnp.einsum("nd,nd->n", X, Y),
    "columns": lambda: jnp.einsum("nd,dn->d", X, Y.T),
    "both axes": lambda: jnp.einsum("nd,dn->", X, Y.T),
    "scan": lambda: jax.lax.map(lambda xy: xy[0] @ xy[1], (X, Y)),
    "remat": lambda: jax.checkpoint(jnp.vdot)(X, Y),
    "precision": lambda: jnp.vdot(X, Y, precision="highest"),
}
MATRICES = {
    "matrix": lambda: X @ Y.T,
    "vector": lambda: X @ Y[0],
    "outer": lambda: jnp.outer(X[0], Y[0]),
    "half": lambda: jnp.vdot(X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)),
    "marked": lambda: full_precision(jnp.vdot)(X[0], Y[0]),
}


def products(closed):
    return equations(opened(closed), "dot_general")


@pytest.mark.parametrize("name", ROWS)
def test_a_product_of_rows_is_a_product_and_a_sum(name):
    closed = jax.make_jaxpr(ROWS[name])()
    changed = as_sums(closed)
    assert products(closed) and not products(changed)
    (found,) = binding.evaluate(changed.jaxpr, changed.consts, [])
    np.testing.assert_allclose(found, ROWS[name](), rtol=1e-5)


@pytest.mark.parametrize("name", MATRICES)
def test_others_stay(name):
    closed = jax.make_jaxpr(MATRICES[name])()
    assert as_sums(closed) is closed


def test_autocast_rounds_nothing_for_it():
    def fun(x, y):
        return jnp.vdot(x, y), x @ y.T

    found, _ = autocast(fun, "mixed_bfloat16")(X, Y)
    assert error(found, jnp.vdot(X, Y)) < 1e-6
