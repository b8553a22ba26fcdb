"""The worked example at the top of the analysis is what the analysis finds."""

import jax
import jax.numpy as jnp
import pytest

from jmp_lite import OpRules, get_policy
from jmp_lite._src.autocast.analysis import Analyzer
from jmp_lite._src.autocast.precision import Precision
from jmp_lite._src.autocast.regions import Regions

W, B, X = jnp.ones((8, 8)), jnp.ones(8), jnp.ones((4, 8))
# The results of the equations of `f` that are half.
HALF = {
    "bfloat16": ["dot_general", "add", "tanh"],
    "float16": [],
}


def f(w, b, x):
    with jax.numpy_rank_promotion("allow"):
        h = jnp.tanh(x @ w + b)
    return jnp.exp(h).sum(), h @ w


@pytest.mark.parametrize("half", HALF)
def test_the_example_of_the_analysis(half):
    regions = Regions(get_policy(f"mixed_{half}"))
    analyzer = Analyzer(OpRules.default(half), regions, jnp.dtype(half))
    plan = analyzer.plan_closed(jax.make_jaxpr(f)(W, B, X))
    equations = list(zip(plan.jaxpr.eqns, plan.eqn_plans, strict=True))
    names = [eqn.primitive.name for eqn, _ in equations]
    assert names[-3:] == ["exp", "reduce_sum", "dot_general"]
    found = [eqn.primitive.name for eqn, of_eqn in equations if any(of_eqn.half_out)]
    assert found == HALF[half]
    assert plan.outs == (Precision.FLOAT32, Precision.FLOAT32)
    # Both products read half operands, whatever their results are.
    products = [of_eqn for eqn, of_eqn in equations if "dot" in eqn.primitive.name]
    assert [of_eqn.half_in for of_eqn in products] == [(True, True)] * 2
