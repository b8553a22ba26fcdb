"""Products whose result is transposed are made in the order in which it is read."""

import itertools

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jmp_lite import autocast, numerics

SIZES = dict(zip("bcghstuvd", (2, 3, 4, 2, 16, 24, 3, 2, 8), strict=True))
_rng = np.random.default_rng(0)


def _operands(spec: str) -> list[np.ndarray]:
    shapes = [[SIZES[i] for i in part] for part in spec.split("->")[0].split(",")]
    return [_rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def _products(fun, *args) -> list[tuple[int, ...]]:
    jaxpr = jaxprs.trace(fun, *args)
    found = jaxprs.equations(jaxpr, "dot_general")
    return [eqn.outvars[0].aval.shape for eqn in found]


@pytest.mark.parametrize(
    ("spec", "made"),
    [
        ("bsghd,btgd->bghst", "bghst"),  # logits of grouped queries
        ("btgd,bsghd->bghst", "bghst"),
        ("btgd,bsghd->gbhst", "gbhst"),
        ("sd,td->ts", "ts"),
        ("bghst,btgd->bsghd", None),  # between two dimensions of one operand
        ("sd,tud->tsu", None),
        ("stud,vd->uvst", None),
        ("sud,vd->usv", None),  # the larger operand would be transposed
        ("bshd,bthd->bhst", "bhst"),  # as it is
    ],
)
def test_a_product_is_made_in_the_order_in_which_it_is_read(spec, made):
    operands = _operands(spec)
    fun = autocast(lambda *args: jnp.sin(jnp.einsum(spec, *args)), "mixed_bfloat16")
    if made is None:
        plain = _products(lambda *args: jnp.einsum(spec, *args), *operands)
        assert _products(fun, *operands) == plain
    else:
        assert _products(fun, *operands) == [tuple(SIZES[i] for i in made)]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("spec", ["bsgd,btgd->{}", "sud,tvd->{}"])
def test_an_order_changes_no_number(spec, policy):
    """Whatever the order, and under `vmap` and in gradients, of one sign here."""
    letters = "bgst" if "b" in spec else "sutv"
    lhs, rhs = map(np.abs, _operands(spec.format(letters)))
    for order in map("".join, itertools.permutations(letters)):
        of = spec.format(order)

        def fun(lhs, rhs, of=of):
            return jnp.mean(jnp.sin(jnp.einsum(of, lhs, rhs) / 8))

        low = jax.vmap(autocast(fun, policy), (0, None))
        want = jax.vmap(fun, (0, None))
        for way in (
            lambda f: f,
            lambda f: jax.grad(lambda *args: jnp.sum(f(*args)), (0, 1)),
        ):
            pairs = zip(
                *(
                    jax.tree.leaves(way(f)(np.stack([lhs, lhs[::-1]]), rhs))
                    for f in (low, want)
                ),
                strict=True,
            )
            for found, exact in pairs:
                error = np.linalg.norm(np.asarray(found) - exact)
                assert error < 0.02 * np.linalg.norm(exact), of


def test_a_dry_run_multiplies_in_that_order():
    def fun(lhs, rhs):
        return jnp.sin(jnp.einsum("bsghd,btgd->bghst", lhs, rhs) / 8)

    operands = _operands("bsghd,btgd->bghst")
    report = numerics.dry_run(fun, "mixed_float16")(*operands)
    errors = {row.primitive: row.error for row in report.rows}
    assert 0 < errors["dot_general"] < 2e-3 and errors["sin"] < 2e-3


def test_the_sharding_that_a_program_gives_its_result_stays():
    explicit = (AxisType.Explicit, AxisType.Explicit)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=explicit)
    lhs, rhs = _operands("bsghd,btgd->bghst")
    spec = P("a", None, None, None, "b")

    def fun(lhs, rhs):
        of = "bsghd,btgd->bghst"
        return jnp.sin(jnp.einsum(of, lhs, rhs, out_sharding=spec))

    with jax.set_mesh(mesh):
        operands = [jax.device_put(x, P("a")) for x in (lhs, rhs)]
        found = jax.jit(autocast(fun, "mixed_bfloat16"))(*operands)
        np.testing.assert_allclose(found, fun(*operands), atol=0.1)
    assert jax.typeof(found).sharding.spec == spec
