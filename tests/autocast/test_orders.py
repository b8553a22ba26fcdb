"""Products whose result is transposed are made in the order in which it is read."""

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from arrays import largest_error
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jmp_lite import autocast

SIZES = dict(zip("bcghstuvd", (2, 3, 4, 2, 16, 24, 3, 2, 8), strict=True))
POLICIES = ["mixed_bfloat16", "mixed_float16", "p=f32,c=bf16,o=f32,r=f32"]
_rng = np.random.default_rng(0)


def _operands(spec: str) -> list[np.ndarray]:
    shapes = [[SIZES[i] for i in part] for part in spec.split("->")[0].split(",")]
    return [_rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def _products(fun, *args) -> list[tuple[int, ...]]:
    jaxpr = jaxprs.trace(fun, *args)
    found = jaxprs.equations(jaxpr, "dot_general")
    return [eqn.outvars[0].aval.shape for eqn in found]


@pytest.mark.one_of("policy")
@pytest.mark.parametrize("policy", POLICIES)
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
def test_a_product_is_made_in_the_order_in_which_it_is_read(spec, made, policy):
    operands = _operands(spec)
    fun = autocast(lambda *args: jnp.sin(jnp.einsum(spec, *args)), policy)
    if made is None:
        plain = _products(lambda *args: jnp.einsum(spec, *args), *operands)
        assert _products(fun, *operands) == plain
    else:
        assert _products(fun, *operands) == [tuple(SIZES[i] for i in made)]


@pytest.mark.one_of("policy")
@pytest.mark.parametrize("policy", POLICIES)
def test_an_order_changes_no_number(policy):
    """Whatever the order, and under `vmap` and in gradients, of one sign here."""
    parts, letters = "bsgd,btgd", "bgst"
    orders = ["bgst", "bgts", "gbst", "gbts", "sbgt", "bsgt"]
    lhs, rhs = map(np.abs, _operands(f"{parts}->{letters}"))
    weights = _rng.uniform(size=[SIZES[i] for i in letters])

    def gradients(cast, dtype, orders):
        def grad(lhs, rhs, order):
            of = np.transpose(weights, [letters.index(i) for i in order]).astype(dtype)

            @cast
            def loss(lhs, rhs):
                out = jnp.einsum(f"{parts}->{order}", lhs, rhs)
                return jnp.mean(jnp.sin(out / 8) * of)

            def total(lhs, rhs):
                each = jax.vmap(loss, (0, None))(lhs, rhs)
                return jnp.sum(each), each

            return jax.grad(total, (0, 1), has_aux=True)(lhs, rhs)

        of_each = jax.jit(lambda *args: {i: grad(*args, order=i) for i in orders})
        return of_each(np.stack([lhs, lhs[::-1]]).astype(dtype), rhs.astype(dtype))

    with jax.enable_x64(True):
        exact = gradients(lambda fun: fun, "float64", [letters])[letters]
    found = gradients(lambda fun: autocast(fun, policy), "float32", orders)
    for order in orders:
        assert largest_error(found[order], exact) < 0.02, order


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
