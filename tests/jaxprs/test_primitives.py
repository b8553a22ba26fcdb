"""Each fact of the table holds for its primitive, on an example."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from jmp_lite._src import compat
from jmp_lite._src.autocast.options import OpRules
from jmp_lite._src.jaxprs.primitives import (
    CHECKPOINTS,
    FOLLOWED,
    ON_HOST,
    PARTS,
    PRIMITIVES,
    Fact,
    degrees,
    facts,
    held,
    named,
)

X = np.arange(1.0, 37.0, dtype=np.float32).reshape(9, 4)
Y = 100.0 + X
ROW = np.asarray([2, 0])
MESH = jax.make_mesh((3,), ("i",), (jax.sharding.AxisType.Auto,))
WINDOW = (2, 1), (1, 1), "VALID"


def on_devices(fun: Callable[[Any], Any], check_vma: bool = False) -> Any:
    """Return a function of `X` and `Y` that runs on three rows of `X` per device."""
    rows = jax.P("i")
    out = jax.P() if check_vma else rows
    options = {"mesh": MESH, "in_specs": rows, "out_specs": out}
    return lambda x, y: jax.shard_map(fun, check_vma=check_vma, **options)(x)


# The name of a primitive -> a function of `X` and `Y` that it computes.
EXAMPLES: dict[str, Callable[[Any, Any], Any]] = {
    "broadcast_in_dim": lambda x, y: lax.broadcast_in_dim(x, (9, 1, 4), (0, 2)),
    "reshape": lambda x, y: x.reshape(4, 9),
    "squeeze": lambda x, y: lax.squeeze(lax.broadcast(x, (1,)), [0]),
    "copy": lambda x, y: jnp.copy(x),
    "transpose": lambda x, y: x.T,
    "rev": lambda x, y: lax.rev(x, (1,)),
    "slice": lambda x, y: x[1:, ::2],
    "dynamic_slice": lambda x, y: lax.dynamic_slice(x, ROW, (2, 3)),
    "gather": lambda x, y: x[ROW],
    "split": lambda x, y: lax.split(x, (1, 3), 1),
    "unstack": lambda x, y: jnp.unstack(x),
    "tile": lambda x, y: jnp.tile(x, (2, 1)),
    "concatenate": lambda x, y: jnp.concatenate([x, y]),
    "stack": lambda x, y: jnp.stack([x, y]),
    "pad": lambda x, y: lax.pad(x, y[0, 0], ((1, 2, 0), (0, 0, 1))),
    "dynamic_update_slice": lambda x, y: lax.dynamic_update_slice(x, y[:2, :2], (2, 0)),
    "scatter": lambda x, y: jnp.asarray(x).at[ROW].set(y[:2]),
    "select_n": lambda x, y: jnp.where(x > 8, x, y),
    "reduce_max": lambda x, y: jnp.max(x, 1),
    "reduce_min": lambda x, y: jnp.min(x, 1),
    "cummax": lambda x, y: lax.cummax(x, axis=1, reverse=True),
    "cummin": lambda x, y: lax.cummin(x, axis=1),
    "reduce_window_max": lambda x, y: lax.reduce_window(x, -np.inf, lax.max, *WINDOW),
    "reduce_window_min": lambda x, y: lax.reduce_window(x, np.inf, lax.min, *WINDOW),
    "pmax": on_devices(lambda x: lax.pmax(x, "i")),
    "pmin": on_devices(lambda x: lax.pmin(x, "i")),
    "stop_gradient": lambda x, y: lax.stop_gradient(x),
    "name": lambda x, y: checkpoint_name(x, "x"),
    "optimization_barrier": lambda x, y: lax.optimization_barrier((x, y))[0],
    "pvary": lambda x, y: jax.shard_map(
        lambda x: lax.pcast(x, "i", to="varying"),
        mesh=MESH,
        in_specs=jax.P(),
        out_specs=jax.P("i"),
    )(x),
    "device_put": lambda x, y: jax.device_put(x, jax.devices()[0]),
    "sharding_constraint": lambda x, y: lax.with_sharding_constraint(
        x, jax.NamedSharding(MESH, jax.P("i"))
    ),
    "all_gather": on_devices(lambda x: lax.all_gather(x, "i")),
    "all_to_all": on_devices(lambda x: lax.all_to_all(x, "i", 0, 0)),
    "ppermute": on_devices(lambda x: lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 0)])),
    "reduce_sum": lambda x, y: jnp.sum(x, 1),
    "cumsum": lambda x, y: jnp.cumsum(x, 1),
    "cumlogsumexp": lambda x, y: lax.cumlogsumexp(x, 1),
    "reduce_window_sum": lambda x, y: lax.reduce_window(x, 0.0, lax.add, *WINDOW),
    "scatter-add": lambda x, y: jnp.asarray(x).at[ROW].add(x[7:]),
    "psum": on_devices(lambda x: lax.psum(x, "i")),
    "psum_invariant": on_devices(lambda x: lax.psum(x, "i"), check_vma=True),
    "reduce_scatter": on_devices(lambda x: lax.psum_scatter(x, "i")),
}
# Names that other versions of JAX print, or that only keywords of `OpRules` have.
OTHERS = {
    "expand_dims",
    "pbroadcast",
    "all_gather_invariant",
    "psum2",
    "unreduced_psum",
    "scatter_add",
}
# From JAX 0.12 on; before, other primitives compute the same.
NEW = {"stack", "unstack"}


def of(fact: Fact) -> Any:
    """Return the mark that runs a test on each primitive with a fact."""
    return pytest.mark.parametrize("name", [n for n in EXAMPLES if facts(n) & fact])


def numbers(*arrays: Any) -> set[float]:
    """Return the numbers of arrays."""
    return {float(n) for x in jax.tree.leaves(arrays) for n in np.ravel(x)}


def eqns_of(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of those in it."""
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        yield eqn
        for sub in compat.jaxprs_of(eqn):
            yield from eqns_of(sub)


def test_every_primitive_of_the_table_has_an_example() -> None:
    moves_and_sums = named(Fact.MOVES | Fact.JOINS | Fact.SUMS)
    assert set(moves_and_sums) == set(EXAMPLES) | OTHERS


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_result_holds_numbers_of_its_floating_operands(name: str) -> None:
    jaxpr = jax.make_jaxpr(EXAMPLES[name])(X, Y)
    eqns = [eqn for eqn in eqns_of(jaxpr) if eqn.primitive.name == name]
    assert eqns or name in NEW
    for eqn in eqns:
        floats = [v for v in eqn.invars if v.aval.dtype == np.float32]
        found = held(name, eqn.invars, 0, len(eqn.outvars))
        if name == "optimization_barrier":  # each result is one operand
            floats = floats[:1]
        assert list(found) == ([] if facts(name) & Fact.SUMS else floats)


@of(Fact.MOVES)
def test_a_move_has_numbers_of_one_operand(name: str) -> None:
    assert numbers(EXAMPLES[name](X, Y)) <= numbers(X)


@of(Fact.JOINS)
def test_a_join_has_numbers_of_several_operands(name: str) -> None:
    found = numbers(EXAMPLES[name](X, Y))
    assert found <= numbers(X, Y)
    assert found & numbers(X) and found & numbers(Y)


@of(Fact.MOVES | Fact.JOINS)
def test_only_a_choice_depends_on_the_numbers(name: str) -> None:
    positive, negative = EXAMPLES[name](X, Y), EXAMPLES[name](-X, -Y)
    pairs = zip(jax.tree.leaves(positive), jax.tree.leaves(negative), strict=True)
    is_odd = all(np.array_equal(a, -np.asarray(b)) for a, b in pairs)
    assert is_odd is not bool(facts(name) & Fact.CHOOSES)


@of(Fact.IN_ORDER)
def test_a_result_in_order_is_the_operand_in_another_shape(name: str) -> None:
    out = np.ravel(EXAMPLES[name](X, Y))
    assert np.array_equal(out[: X.size], np.ravel(X))


@of(Fact.SUMS)
def test_a_sum_is_made_of_many_numbers(name: str) -> None:
    out = EXAMPLES[name](X, Y)
    assert not numbers(out) <= numbers(X)
    slopes = jax.jacfwd(lambda x: EXAMPLES[name](x, Y))(X).reshape(out.size, X.size)
    assert np.max(np.sum(slopes > 0, axis=1)) > 1


def test_autocast_moves_and_joins_in_half_and_sums_in_float32() -> None:
    rules = OpRules.default("bfloat16")
    found = {name: rules.class_of(name) for name in EXAMPLES}
    moves = dict.fromkeys(named(Fact.MOVES | Fact.JOINS), "passthrough")
    expected = moves | dict.fromkeys(named(Fact.SUMS), "float32")
    assert found == {name: expected[name] for name in EXAMPLES}


@of(Fact.PERMUTES)
def test_a_permutation_has_every_number_equally_often(name: str) -> None:
    counts = collections.Counter(np.ravel(EXAMPLES[name](X, Y)).tolist())
    counts.pop(0.0, None)  # of devices that receive nothing
    assert len(set(counts.values())) == 1
    assert set(counts) == numbers(X) or name == "ppermute"


@of(Fact.REPEATS)
def test_the_gradient_of_a_repeated_number_is_a_sum(name: str) -> None:
    def total(x):
        if name == "dynamic_slice":  # vmap maps its index alone
            at = jax.vmap(lambda i: lax.dynamic_slice(x, (i, 0), (3, 2)))
            return at(jnp.arange(4)).sum()
        twice = jnp.stack([ROW, ROW]) if name == "gather" else None
        out = x[twice] if name == "gather" else EXAMPLES[name](x, Y)
        wide = name == "broadcast_in_dim"
        return (lax.broadcast_in_dim(x, (2, 9, 4), (1, 2)) if wide else out).sum()

    assert jnp.max(jax.grad(total)(jnp.asarray(X))) > 1


# Functions of one number each, or of several.
ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **{n: getattr(lax, n) for n in "add sub mul div max min rem pow atan2".split()},
    **{n: getattr(lax, n) for n in "neg abs sign square floor ceil round".split()},
    **{n: getattr(lax, n) for n in "tanh logistic erf erfc exp expm1 log".split()},
    **{n: getattr(lax, n) for n in "log1p sqrt rsqrt sin cos acos asin".split()},
    **{n: getattr(lax, n) for n in "acosh atanh sinh cosh asinh tan cbrt".split()},
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "log2": jnp.log2,  # a primitive from jax 0.12 on
    "exp2": lax.exp2,
    "clamp": lambda x, y, z: lax.clamp(x, y, z),
    "add_any": ad.add_jaxvals,
}
SEVERAL = {"clamp": 3} | dict.fromkeys(
    "add sub mul div max min rem pow atan2 add_any".split(), 2
)
REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda x: lax.reduce_sum_p.bind(x, axes=(0,)),
    "cumsum": lax.cumsum,
    "reduce_prod": lambda x: lax.reduce_prod_p.bind(x, axes=(0,)),
    "cumprod": lax.cumprod,
}


def in_table(fact: Fact) -> set[str]:
    return {name for name in named(fact) if name in ELEMENTWISE}


def test_elementwise_examples_cover_what_the_table_says_of_numbers() -> None:
    digits = Fact.ARITHMETIC | Fact.BROADCASTS | Fact.EXACT | Fact.SATURATES
    laws = Fact.LINEAR | Fact.LIMITS | Fact.EXPONENTIAL | Fact.LOGARITHM | Fact.PERIODIC
    listed = set(named(digits | laws | Fact.NEAR_ONE | Fact.FRACTION))
    assert listed <= set(ELEMENTWISE) | set(REDUCTIONS)
    assert not set(ELEMENTWISE) - set(PRIMITIVES)


def test_what_is_elementwise_has_its_operands_at_each_place() -> None:
    order, operands = np.asarray([2, 0, 1]), np.asarray([[0.9, 0.3, 0.5]] * 3)

    def commutes(name):
        fun, count = (ELEMENTWISE | REDUCTIONS)[name], SEVERAL.get(name, 1)
        moved = fun(*jnp.asarray(operands[:count, order]))
        result = fun(*jnp.asarray(operands[:count]))
        is_same = result.shape == order.shape and np.allclose(
            moved, result[order], rtol=1e-6, equal_nan=True
        )
        return is_same

    assert {name for name in ELEMENTWISE if commutes(name)} == set(ELEMENTWISE)
    assert not {name for name in REDUCTIONS if commutes(name)}
    known = set(named(Fact.ELEMENTWISE))
    assert set(ELEMENTWISE) <= known and not known & set(REDUCTIONS)
    assert known & set(EXAMPLES) == {"select_n", "stop_gradient"}


def test_what_broadcasts_is_elementwise_in_several_operands() -> None:
    operands = jnp.asarray([1.5, 2.5]), jnp.asarray([2.0, 3.0]), jnp.asarray([3.0, 4.0])
    for name in in_table(Fact.BROADCASTS):
        count = SEVERAL[name]
        by_each = jax.jacfwd(ELEMENTWISE[name], tuple(range(count)))(*operands[:count])
        assert all(x[0, 1] == x[1, 0] == 0.0 for x in by_each), name
    # `add_any` adds gradients, which have one shape.
    assert in_table(Fact.BROADCASTS) == set(SEVERAL) - {"add_any"}


def test_arithmetic_is_exact_on_small_whole_numbers() -> None:
    whole = np.asarray([1.0, 2.0, 4.0, -2.0])

    def is_exact(name, dtype=np.float16):
        fun = (ELEMENTWISE | REDUCTIONS)[name]
        with jax.enable_x64(True):
            count = SEVERAL.get(name, 1)
            args = [np.roll(whole, i) for i in range(count)]
            exact = fun(*map(jnp.asarray, args))
            half = fun(*[jnp.asarray(x, dtype) for x in args])
            return np.array_equal(np.float64(half), exact)

    assert all(map(is_exact, named(Fact.ARITHMETIC)))
    rounded = "tanh logistic erf exp sin rsqrt".split()
    assert not any(map(is_exact, rounded))


def test_rounding_before_what_is_exact_is_rounding_after() -> None:
    args = np.random.default_rng(0).standard_normal((3, 4000)).astype(np.float32)

    def is_same(name):
        fun, count = ELEMENTWISE[name], SEVERAL.get(name, 1)
        for dtype in (jnp.bfloat16, jnp.float16):
            after = jnp.asarray(fun(*args[:count]), dtype)
            before = fun(*[jnp.asarray(x, dtype) for x in args[:count]])
            if not np.array_equal(after, before, equal_nan=True):
                return False
        return True

    found = {name for name in ELEMENTWISE if is_same(name)}
    whole = {"floor", "ceil", "round"}  # rounded, a number may be another whole one
    assert found - whole == in_table(Fact.EXACT)


def test_what_saturates_does() -> None:
    def saturates(fun):
        at = fun(jnp.float32([1.0, 2.0, 30.0, 31.0, -30.0, -31.0]))
        return at[0] != at[1] and at[2] == at[3] and abs(at[4] - at[5]) < 1e-9

    found = {n for n, f in ELEMENTWISE.items() if n not in SEVERAL and saturates(f)}
    assert found == in_table(Fact.SATURATES)


# Positive operands of functions that are defined for one number each, or for several.
A, B = (np.asarray(x) for x in ([2.9, 1.7, 0.9], [0.8, 0.4, 2.3]))


def having(law: Callable[..., tuple[Any, Any]]) -> set[str]:
    """Return the elementwise primitives for which both sides of an equation agree."""
    found = set()
    with jax.enable_x64(True):
        for name, fun in ELEMENTWISE.items():
            operands = np.stack([A, B, A + B])[: SEVERAL.get(name, 1)]
            one, other = law(lambda x, fun=fun: fun(*map(jnp.asarray, x)), operands)
            if np.allclose(one, other, rtol=1e-9):
                found.add(name)
    return found


def test_what_is_linear_adds_up() -> None:
    def law(fun, x):
        return fun(x[:, ::-1] - 3.0 * x), fun(x[:, ::-1]) - 3.0 * fun(x)

    assert having(law) == in_table(Fact.LINEAR)


def test_limits_give_one_of_their_operands_by_size() -> None:
    def law(fun, x):
        y, shifted = np.asarray(fun(x)), np.asarray(fun(x + 4.0))
        is_one = (y == x).any(0) & np.isclose(shifted, y + 4.0)
        return np.where(is_one, 0.0, 1.0), np.zeros(3)

    assert having(law) & set(SEVERAL) == in_table(Fact.LIMITS)


def test_exponentials_and_logarithms_swap_sums_and_products() -> None:
    exponential = having(lambda fun, x: (fun(2 * x), fun(x) ** 2))
    logarithm = having(lambda fun, x: (fun(x**3), 3 * fun(x)))
    one = set(ELEMENTWISE) - set(SEVERAL) - {"sign"}  # which is constant here
    assert exponential & one == in_table(Fact.EXPONENTIAL)
    assert logarithm & one == in_table(Fact.LOGARITHM)


def test_a_turn_changes_no_angle() -> None:
    found = having(lambda fun, x: (fun(x + 2 * np.pi), fun(x)))
    assert found - set(SEVERAL) - {"sign"} == in_table(Fact.PERIODIC)


def test_comparisons_compare() -> None:
    for name in named(Fact.COMPARES):
        of_sizes = np.asarray(getattr(lax, name)(X[0], X[0, ::-1]))
        assert of_sizes.dtype == bool and (of_sizes.any() or name == "eq")
    others = [n for n in EXAMPLES if EXAMPLES[n](X, Y)[0].dtype == bool]
    assert not others


def test_degrees_are_those_of_scaled_operands() -> None:
    scales = np.asarray([2.0, 3.0, 5.0])[:, None]

    def law(name):
        def of_scaled(fun, x):
            powers = degrees(name, {"y": 3}) or (np.nan,)
            scale = np.prod(scales[: len(powers), 0] ** powers)
            return fun(x * scales[: len(x)]), scale * fun(x)

        return of_scaled

    found = {name for name in ELEMENTWISE if name in having(law(name))}
    assert found == {name for name in ELEMENTWISE if degrees(name, {"y": 3})}
    assert {"mul", "div", "square", "integer_pow", "sqrt", "rsqrt", "abs"} <= found
    x, w = jnp.asarray(X), jnp.asarray(Y.T)
    np.testing.assert_allclose((2.0 * x) @ (3.0 * w), 6.0 * (x @ w))
    assert degrees("dot_general", {}) == degrees("conv_general_dilated", {}) == (1, 1)


def test_numpy_has_the_same_function_with_its_extremes_at_ends_or_zero() -> None:
    at = np.linspace(-1.0, 1.0, 201)
    for name, of_numpy in ON_HOST.items():
        count = SEVERAL.get(name, 1)
        operands = [at[:, None] - 0.5, at[None] + 2.0][:count]
        with jax.enable_x64(True):
            values = np.asarray(ELEMENTWISE[name](*map(jnp.asarray, operands)))
        np.testing.assert_array_max_ulp(values, of_numpy(*operands))
        ends = [x[np.isin(x, [x.min(), x.max(), 0.0])] for x in operands]
        corners = of_numpy(*np.meshgrid(*ends))
        assert values.min() == corners.min() and values.max() == corners.max()


def test_loops_calls_and_parts_are_primitives() -> None:
    known = compat.primitive_names() | {"remat2", "checkpoint"}  # one, by two names
    assert {*FOLLOWED, *PARTS} <= known
    assert not set(CHECKPOINTS).isdisjoint(compat.primitive_names())


def test_what_reads_digits_is_steep_or_jumps() -> None:
    """Its relative change is more than 100 times that of an operand around 1 or -1."""
    of_one = {"pow": lambda x: x**200.0, "rem": lambda x: jnp.fmod(x, 0.75)}

    def is_steep(fun):
        with jax.enable_x64(True):
            x = jnp.linspace(0.4, 1.6, 20001)
            for at in (x, -x):
                y = fun(at)
                size = jnp.maximum(jnp.minimum(jnp.abs(y[1:]), jnp.abs(y[:-1])), 1e-3)
                if jnp.nanmax(jnp.abs(jnp.diff(y)) / size) > 100 * (x[1] - x[0]):
                    return True
        return False

    one = {n: of_one.get(n, f) for n, f in ELEMENTWISE.items() if n not in SEVERAL}
    found = {name for name, fun in (one | of_one).items() if is_steep(fun)}
    angles = {"cos", "tan"}  # steep where they are 0 or infinite, as are sums
    assert found - angles == in_table(Fact.NEAR_ONE | Fact.FRACTION)


def test_a_product_sums_products() -> None:
    x, image = jnp.ones((8, 8)), jnp.ones((1, 1, 8, 8))
    sizes = jnp.asarray([4, 4], jnp.int32)
    found = {
        "dot_general": lambda: x @ x,
        "conv_general_dilated": lambda: lax.conv(
            image, image[..., :2, :2], (1, 1), "SAME"
        ),
        "ragged_dot_general": lambda: lax.ragged_dot(x, jnp.ones((2, 8, 8)), sizes),
    }
    names = {"ragged_dot", *found}
    for name, run in found.items():
        assert name in str(jax.make_jaxpr(run)()).replace("ragged_dot[", name)
        assert run().max() > 1.0
    assert names == set(named(Fact.PRODUCT))


# Primitives without a record: they run as the program has them.
WITHOUT = {
    "of programs, which are looked into": "call closed_call cond custom_jvp_call "
    "custom_lin custom_linear_solve custom_vjp_call eval_jaxpr jit pjit remat2 scan "
    "while reduce reduce_window select_and_scatter",
    "of integers, bools, keys and references": "after_all and axis_index clz "
    "create_token eq_to le_to lt_to empty2 get iota not or population_count "
    "random_bits random_fold_in random_gamma random_seed random_split reduce_xor "
    "rng_bit_generator rng_uniform shift_left shift_right_arithmetic swap "
    "shift_right_logical threefry2x32 xor",
    "casts and bits, which mean a dtype": "bitcast_convert_type convert_element_type "
    "nextafter reduce_precision",
    "of complex numbers": "complex conj fft imag real",
    "solvers": "cholesky eig eigh hessenberg householder_product "
    "lu qr schur svd triangular_solve tridiagonal tridiagonal_solve",
    "rare": "approx_top_k atan polynomial ragged_all_to_all scatter-max scatter-min "
    "select_and_gather_add select_and_scatter_add sort top_k",
}


def test_every_primitive_of_jax_has_a_record_or_a_reason() -> None:
    reasons = {name for names in WITHOUT.values() for name in names.split()}
    new = compat.primitive_names() - set(PRIMITIVES) - reasons
    assert not new, f"Give {sorted(new)} a line in jaxprs/primitives.py, or a reason."
