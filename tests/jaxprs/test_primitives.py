"""Each fact of the table holds for its primitive, on an example."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator
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
from jmp_lite._src.jaxprs import primitives
from jmp_lite._src.jaxprs.primitives import Fact, facts, named

X = np.arange(1.0, 37.0, dtype=np.float32).reshape(9, 4)
Y = 100.0 + X
ROW = np.asarray([2, 0])
MESH = jax.make_mesh((3,), ("i",), (jax.sharding.AxisType.Auto,))
WINDOW = (2, 1), (1, 1), "VALID"


def on_devices(fun: Callable[[Any], Any], **options: Any) -> Any:
    """Return a function of `X` and `Y` that runs on three rows of `X` per device."""
    rows = {"in_specs": jax.P("i"), "out_specs": jax.P("i"), "check_vma": False}
    run = jax.shard_map(fun, mesh=MESH, **rows | options)
    return lambda x, y: run(x)


varying = functools.partial(lax.pcast, axis_name="i", to="varying")
total = functools.partial(lax.psum, axis_name="i")

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
    "pvary": on_devices(varying, in_specs=jax.P(), check_vma=True),
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
    "psum": on_devices(total),
    "psum_invariant": on_devices(total, out_specs=jax.P(), check_vma=True),
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


def of(fact: int) -> Any:
    """Return the mark that runs a test on each primitive with a fact."""
    return pytest.mark.parametrize("name", [n for n in EXAMPLES if facts(n) & fact])


@functools.cache
def results(name: str) -> list[Any]:
    """Return what an example computes of `X` and `Y`, and of their negatives."""
    fun = jax.jit(EXAMPLES[name])
    return [jax.tree.map(np.asarray, fun(sign * X, sign * Y)) for sign in (1, -1)]


def numbers(*arrays: Any) -> set[float]:
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
        found = primitives.held(name, eqn.invars, 0, len(eqn.outvars))
        if name == "optimization_barrier":  # each result is one operand
            floats = floats[:1]
        assert list(found) == ([] if facts(name) & Fact.SUMS else floats)


@of(Fact.MOVES | Fact.JOINS)
def test_moves_joins_and_choices_have_numbers_of_their_operands(name: str) -> None:
    out, of_negative = map(jax.tree.leaves, results(name))
    found = numbers(out)
    assert found <= numbers(X, Y) and found & numbers(X)
    assert bool(found & numbers(Y)) is bool(facts(name) & Fact.JOINS)
    is_odd = all(np.array_equal(x, -y) for x, y in zip(out, of_negative, strict=True))
    assert is_odd is not bool(facts(name) & Fact.CHOOSES)


@of(Fact.IN_ORDER)
def test_a_result_in_order_is_the_operand_in_another_shape(name: str) -> None:
    assert np.array_equal(np.ravel(results(name)[0])[: X.size], np.ravel(X))


@of(Fact.SUMS)
def test_a_sum_is_made_of_many_numbers(name: str) -> None:
    assert not numbers(results(name)[0]) <= numbers(X)
    slopes = jax.jit(jax.jacfwd(lambda x: EXAMPLES[name](x, Y)))(X)
    assert np.max(np.sum(np.reshape(slopes, (-1, X.size)) > 0, axis=1)) > 1


def test_autocast_moves_and_joins_in_half_and_sums_in_float32() -> None:
    rules = OpRules.default("bfloat16")
    found = {name: rules.class_of(name) for name in EXAMPLES}
    moves = dict.fromkeys(named(Fact.MOVES | Fact.JOINS), "passthrough")
    expected = moves | dict.fromkeys(named(Fact.SUMS), "float32")
    assert found == {name: expected[name] for name in EXAMPLES}


@of(Fact.PERMUTES)
def test_a_permutation_has_every_number_equally_often(name: str) -> None:
    counts = collections.Counter(np.ravel(results(name)[0]).tolist())
    counts.pop(0.0, None)  # of devices that receive nothing
    assert len(set(counts.values())) == 1
    assert set(counts) == numbers(X) or name == "ppermute"


def _moves_here(name: str) -> bool:
    """Return whether this moves numbers: all of them, and not over devices."""
    moves = facts(name) & (Fact.MOVES | Fact.CHOOSES) == Fact.MOVES
    return moves and name not in ("all_gather", "pvary")


@pytest.mark.parametrize("name", list(filter(_moves_here, EXAMPLES)))
def test_the_gradient_of_a_repeated_number_alone_is_a_sum(name: str) -> None:
    def total(x):
        if name == "dynamic_slice":  # vmap maps its index alone
            at = jax.vmap(lambda i: lax.dynamic_slice(x, (i, 0), (3, 2)))
            return at(jnp.arange(4)).sum()
        if name == "gather":
            return x[jnp.stack([ROW, ROW])].sum()
        if name == "broadcast_in_dim":
            return lax.broadcast_in_dim(x, (2, 9, 4), (1, 2)).sum()
        return sum(out.sum() for out in jax.tree.leaves(EXAMPLES[name](x, Y)))

    is_sum = np.max(jax.jit(jax.grad(total))(X)) > 1
    assert is_sum == bool(facts(name) & Fact.REPEATS)


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
_OF_TWO = "add sub mul div max min rem pow atan2 add_any".split()
SEVERAL = {"clamp": 3} | dict.fromkeys(_OF_TWO, 2)
REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda x: lax.reduce_sum_p.bind(x, axes=(0,)),
    "cumsum": lax.cumsum,
    "reduce_prod": lambda x: lax.reduce_prod_p.bind(x, axes=(0,)),
    "cumprod": lax.cumprod,
}
# Not every function is defined for all numbers that it is tried on.
ignoring = functools.partial(np.errstate, all="ignore")


def in_table(fact: int) -> set[str]:
    return {name for name in named(fact) if name in ELEMENTWISE}


@functools.partial(jax.jit, static_argnums=0)
def _compute(names: tuple[str, ...], *operands: Any) -> Any:
    funs = ELEMENTWISE | REDUCTIONS
    return {name: funs[name](*operands[: SEVERAL.get(name, 1)]) for name in names}


def computed(names: Iterable[str], *operands: Any) -> dict[str, Any]:
    """Return what each function gives of as many operands as it takes: one program."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, _compute(tuple(names), *operands))


@functools.cache
def all_at(operands: bytes) -> dict[str, Any]:
    """Return what `ELEMENTWISE` gives of three operands of three numbers."""
    return computed(ELEMENTWISE, *np.frombuffer(operands).reshape(3, 3))


def test_elementwise_examples_cover_what_the_table_says_of_numbers() -> None:
    digits = Fact.ARITHMETIC | Fact.BROADCASTS | Fact.EXACT | Fact.SATURATES
    laws = Fact.LINEAR | Fact.LIMITS | Fact.EXPONENTIAL | Fact.LOGARITHM | Fact.PERIODIC
    listed = set(named(digits | laws | Fact.NEAR_ONE))
    listed |= set(named(Fact.FRACTION)) & set(named(Fact.ELEMENTWISE))
    assert listed <= set(ELEMENTWISE) | set(REDUCTIONS)
    assert not set(ELEMENTWISE) - set(primitives.PRIMITIVES)


def test_what_is_elementwise_has_its_operands_at_each_place() -> None:
    order, operands = np.asarray([2, 0, 1]), np.asarray([[0.9, 0.3, 0.5]] * 3)
    names = ELEMENTWISE | REDUCTIONS
    straight, moved = (computed(names, *x) for x in (operands, operands[:, order]))
    found = {
        name
        for name, y in straight.items()
        if y.shape == order.shape
        and np.allclose(moved[name], y[order], rtol=1e-6, equal_nan=True)
    }
    assert found == set(ELEMENTWISE)
    known = set(named(Fact.ELEMENTWISE))
    assert set(ELEMENTWISE) <= known and not known & set(REDUCTIONS)
    assert known & set(EXAMPLES) == {"select_n", "stop_gradient"}


def test_what_broadcasts_is_elementwise_in_several_operands() -> None:
    names = in_table(Fact.BROADCASTS)
    # `add_any` adds gradients, which have one shape.
    assert names == set(SEVERAL) - {"add_any"}

    @jax.jit
    def slopes(*x):
        by_each = {n: jax.jacfwd(ELEMENTWISE[n], range(SEVERAL[n])) for n in names}
        return {name: of(*x[: SEVERAL[name]]) for name, of in by_each.items()}

    operands = np.asarray([[1.5, 2.5], [2.0, 3.0], [3.0, 4.0]], np.float32)
    for name, found in slopes(*operands).items():
        assert all(x[0, 1] == x[1, 0] == 0.0 for x in found), name


def test_arithmetic_is_exact_on_small_whole_numbers() -> None:
    whole = np.asarray([1.0, 2.0, 4.0, -2.0])
    args = np.stack([np.roll(whole, i) for i in range(3)])
    arithmetic, rounded = set(named(Fact.ARITHMETIC)), "tanh logistic erf exp sin rsqrt"
    names = sorted({*arithmetic, *rounded.split()})
    exact, half = computed(names, *args), computed(names, *args.astype(np.float16))
    assert {n for n in names if np.array_equal(half[n], exact[n])} == arithmetic


def test_rounding_before_what_is_exact_is_rounding_after() -> None:
    args = np.random.default_rng(0).standard_normal((3, 4000)).astype(np.float32)
    after, found = computed(ELEMENTWISE, *args), set(ELEMENTWISE)

    def is_same(x, y):
        return np.array_equal(np.float32(x), np.float32(y), equal_nan=True)

    for dtype in (jnp.bfloat16, jnp.float16):
        before = computed(ELEMENTWISE, *args.astype(dtype))
        with ignoring():
            rounded = {name: y.astype(dtype) for name, y in after.items()}
        found &= {name for name, y in rounded.items() if is_same(y, before[name])}
    whole = {"floor", "ceil", "round"}  # rounded, a number may be another whole one
    assert found - whole == in_table(Fact.EXACT)


@ignoring()
def test_what_saturates_does() -> None:
    one = set(ELEMENTWISE) - set(SEVERAL)
    results = computed(one, np.asarray([1, 2, 30, 31, -30, -31], np.float32))
    found = {
        name
        for name, y in results.items()
        if y[0] != y[1] and y[2] == y[3] and abs(y[4] - y[5]) < 1e-9
    }
    assert found == in_table(Fact.SATURATES)


# Positive operands of functions that are defined for one number each, or for several.
A, B = (np.asarray(x) for x in ([2.9, 1.7, 0.9], [0.8, 0.4, 2.3]))
Law = Callable[..., tuple[Any, Any]]


@ignoring()
def agree(name: str, law: Law) -> bool:
    """Return whether both sides of an equation agree for an elementwise primitive."""

    def fun(x):
        return all_at(np.resize(x, (3, 3)).tobytes())[name]

    one, other = law(fun, np.stack([A, B, A + B])[: SEVERAL.get(name, 1)])
    return np.allclose(one, other, rtol=1e-9)


LAWS: dict[str, Law] = {
    "LINEAR": lambda fun, x: (fun(x[:, ::-1] - 3 * x), fun(x[:, ::-1]) - 3 * fun(x)),
    "EXPONENTIAL": lambda fun, x: (fun(2 * x), fun(x) ** 2),
    "LOGARITHM": lambda fun, x: (fun(x**3), 3 * fun(x)),
    "PERIODIC": lambda fun, x: (fun(x + 2 * np.pi), fun(x)),
}


@pytest.mark.parametrize("law", LAWS)
def test_a_law_holds_for_those_of_which_the_table_says_so(law: str) -> None:
    fact = getattr(Fact, law)
    found = {name for name in ELEMENTWISE if agree(name, LAWS[law])}
    found -= {"sign"}  # which is constant here
    of_one = fact != Fact.LINEAR
    assert (found - set(SEVERAL) if of_one else found) == in_table(fact)


def test_limits_give_one_of_their_operands_by_size() -> None:
    def law(fun, x):
        y, shifted = fun(x), fun(x + 4.0)
        return (y == x).any(0) & np.isclose(shifted, y + 4.0), True

    found = {name for name in SEVERAL if agree(name, law)}
    assert found == in_table(Fact.LIMITS)


def test_comparisons_compare() -> None:
    for name in named(Fact.COMPARES):
        of_sizes = np.asarray(getattr(lax, name)(X[0], X[0, ::-1]))
        assert of_sizes.dtype == bool and (of_sizes.any() or name == "eq")
    assert not [n for n in EXAMPLES if jax.tree.leaves(results(n)[0])[0].dtype == bool]


def test_degrees_are_those_of_scaled_operands() -> None:
    scales = np.asarray([2.0, 3.0, 5.0])[:, None]

    def law(name):
        def of_scaled(fun, x):
            powers = primitives.degrees(name, {"y": 3}) or (np.nan,)
            scale = np.prod(scales[: len(powers), 0] ** powers)
            return fun(x * scales[: len(x)]), scale * fun(x)

        return of_scaled

    found = {name for name in ELEMENTWISE if agree(name, law(name))}
    assert found == {name for name in ELEMENTWISE if primitives.degrees(name, {"y": 3})}
    assert {"mul", "div", "square", "integer_pow", "sqrt", "rsqrt", "abs"} <= found
    for product in named(Fact.PRODUCT):
        assert primitives.degrees(product, {}) == (1, 1)


def test_numpy_has_the_same_function_with_its_extremes_at_ends_or_zero() -> None:
    at = np.linspace(-1.0, 1.0, 201)
    both = at[:, None] - 0.5, at[None] + 2.0
    for name, values in computed(primitives.ON_HOST, *both).items():
        operands, of_numpy = both[: SEVERAL.get(name, 1)], primitives.ON_HOST[name]
        np.testing.assert_array_max_ulp(values, of_numpy(*operands))
        ends = [x[np.isin(x, [x.min(), x.max(), 0.0])] for x in operands]
        corners = of_numpy(*np.meshgrid(*ends))
        assert values.min() == corners.min() and values.max() == corners.max(), name


def test_loops_calls_and_parts_are_primitives() -> None:
    known = compat.primitive_names() | {"remat2", "checkpoint"}  # one, by two names
    assert {*primitives.FOLLOWED, *primitives.PARTS} <= known
    assert not set(primitives.CHECKPOINTS).isdisjoint(compat.primitive_names())


@ignoring()
def test_what_reads_digits_is_steep_or_jumps() -> None:
    """Its relative change is more than 100 times that of an operand around 1 or -1."""
    x = np.linspace(0.4, 1.6, 20001)
    funs = {n: f for n, f in ELEMENTWISE.items() if n not in SEVERAL}
    funs |= {"pow": lambda x: x**200.0, "rem": lambda x: jnp.fmod(x, 0.75)}
    with jax.enable_x64(True):
        run = jax.jit(lambda x: {name: fun(x) for name, fun in funs.items()})
        both = jax.tree.map(np.asarray, (run(x), run(-x)))

    def is_steep(y):
        size = np.maximum(np.minimum(np.abs(y[1:]), np.abs(y[:-1])), 1e-3)
        return np.any(np.abs(np.diff(y)) / size > 100 * (x[1] - x[0]))

    found = {name for name in funs if any(is_steep(results[name]) for results in both)}
    angles = {"cos", "tan"}  # steep where they are 0 or infinite, as are sums
    assert found - angles == in_table(Fact.NEAR_ONE | Fact.FRACTION)


def test_a_product_sums_products() -> None:
    x, image, sizes = jnp.ones((8, 8)), jnp.ones((1, 1, 8, 8)), jnp.asarray([4, 4])
    found = {
        "dot_general": lambda: lax.dot(x, x),
        "conv_general_dilated": lambda: lax.conv(image, image, (1, 1), "SAME"),
        "ragged_dot_general": lambda: lax.ragged_dot(x, jnp.stack([x, x]), sizes),
    }
    for name, run in found.items():
        assert name in str(jax.make_jaxpr(run)()).replace("ragged_dot[", name)
        assert run().max() > 1.0
    assert {"ragged_dot", *found} == set(named(Fact.PRODUCT))


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
    "rare": "atan polynomial ragged_all_to_all scatter-max scatter-min "
    "select_and_gather_add select_and_scatter_add",
}


def test_every_primitive_of_jax_has_a_record_or_a_reason() -> None:
    reasons = {name for names in WITHOUT.values() for name in names.split()}
    new = compat.primitive_names() - set(primitives.PRIMITIVES) - reasons
    assert not new, f"Give {sorted(new)} a line in jaxprs/primitives.py, or a reason."
