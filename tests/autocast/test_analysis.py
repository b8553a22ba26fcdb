"""The worked example at the top of the analysis is what it finds, in linear time."""

import jax
import jax.numpy as jnp
import pytest
from jmp_lite._src.autocast.precision import Precision

from jmp_lite import get_policy
from jmp_lite._src.autocast import rules
from jmp_lite._src.autocast.analysis import Analyzer, CastPlan
from jmp_lite._src.autocast.options import Regions
from jmp_lite.ops import OpRules

W, B, X = jnp.ones((8, 8)), jnp.ones(8), jnp.ones((4, 8))
# The results of the equations of `f` that are half.
HALF = dict.fromkeys(("bfloat16", "float16"), ["dot_general", "add", "tanh"])


def f(w, b, x):
    with jax.numpy_rank_promotion("allow"):
        h = jnp.tanh(x @ w + b)
    return jnp.exp(h).sum(), h @ w


def plan(fun, *args, half="bfloat16", **options) -> CastPlan:
    regions = Regions(get_policy(f"mixed_{half}"))
    table = OpRules.default(half).replace(**options)
    analyzer = Analyzer(table, regions, jnp.dtype(half))
    return analyzer.plan_closed(jax.make_jaxpr(fun)(*args))


@pytest.mark.parametrize("half", HALF)
def test_the_example_of_the_analysis(half):
    found = plan(f, W, B, X, half=half)
    equations = list(zip(found.jaxpr.eqns, found.eqn_plans, strict=True))
    names = [eqn.primitive.name for eqn, _ in equations]
    assert names[-3:] == ["exp", "reduce_sum", "dot_general"]
    in_half = [eqn.primitive.name for eqn, of_eqn in equations if any(of_eqn.half_out)]
    assert in_half == HALF[half]
    assert found.outs == (Precision.FLOAT32, Precision.FLOAT32)
    # Both products read half operands, whatever their results are.
    products = [of_eqn for eqn, of_eqn in equations if "dot" in eqn.primitive.name]
    assert [of_eqn.half_in for of_eqn in products] == [(True, True)] * 2


def chained(length, last=jnp.exp):
    """Return a function of pairs of products, each of which decides on the next pair.

    If `exp` reads the `last` product, it is float32. So the arithmetic of the last pair
    is, reads the other product of the pair in float32, which decides on its pair.
    """

    def fun(w, x):
        pairs = [(x + float(i)) @ w for i in range(length)]
        of_pairs = [a * b for a, b in zip(pairs, pairs[1:], strict=False)]
        return last(pairs[-1]), [pair @ w for pair in of_pairs]

    return fun


@pytest.fixture
def visited(monkeypatch):
    """Return the equations that the analysis has decided on, each time that it did."""
    found, decide = [], rules.decide

    def counted(info, *args):
        found.append(info.eqn)
        return decide(info, *args)

    monkeypatch.setattr(rules, "decide", counted)
    return found


@pytest.mark.parametrize("half_results", [False, True])
@pytest.mark.parametrize("half", HALF)
def test_the_analysis_is_linear_in_the_program(visited, half, half_results):
    counts = []
    for length in (10, 40):
        visited.clear()
        found = plan(chained(length), W, X, half=half, half_results=half_results)
        counts.append(len(visited))
        assert len(visited) <= 4 * len(found.jaxpr.eqns)
    assert counts[1] <= 6 * counts[0]


@pytest.mark.parametrize("last", [jnp.exp, lambda x: x @ W])
def test_a_decision_passes_along_the_whole_chain(last):
    found = plan(chained(10, last), W, X, half="float16", half_results=False)
    eqns = zip(found.jaxpr.eqns, found.eqn_plans, strict=True)
    of_pairs = [p.half_out for eqn, p in eqns if eqn.primitive.name == "mul"]
    assert of_pairs == [(last is not jnp.exp,)] * 9
