"""All reports share one face: text, tables, notebooks, JSON."""

import jax
import jax.numpy as jnp
import pytest
from printed import printed

import jmp_lite as jmp
from jmp_lite import numerics
from jmp_lite._src.flax import module_policies
from tests.test_doctor import DIAGNOSIS

WIDTH = 16


def many_layers(w, x):
    for i in range(46):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.log(jnp.tanh(x @ w) ** 2 + 1e-9)
    return jnp.mean(x)


ARGS = (jnp.eye(WIDTH), jnp.ones((WIDTH, WIDTH)))


MODULE = module_policies.ModuleDtypes("net", "Dense", ("f32",), "f16", ("f16",), "<b>")
MADE = {
    "explain": lambda: jmp.explain(many_layers, "mixed_float16")(*ARGS),
    "dry_run": lambda: numerics.dry_run(many_layers, "mixed_float16")(*ARGS),
    "lint": lambda: numerics.lint(many_layers, "mixed_float16")(*ARGS),
    "advice": lambda: numerics.advise(
        lambda w, x: jnp.mean(jnp.tanh(x @ w)), "mixed_float16"
    )(*ARGS),
    "nonfinite": lambda: numerics.first_nonfinite(lambda w, x: jnp.log(x - w).sum())(
        *ARGS
    ),
    "tree_stats": lambda: numerics.tree_stats({f"{i}": ARGS for i in range(46)}, "f16"),
    "doctor": lambda: DIAGNOSIS,
    "modules": lambda: module_policies.Explanation((MODULE,) * 46),
}


@pytest.mark.parametrize("name", MADE)
def test_all_reports_share_one_face(name):
    report = MADE[name]()
    text = str(report)
    assert 1 <= len(text.splitlines()) <= 45 and "OpDecision(" not in text
    assert "<td" in report._repr_html_() and "<b>" not in report._repr_html_()
    assert printed(report.table()) and printed(report.table(every=True))
    assert str(type(report).from_json(report.to_json())) == text
    with pytest.raises(ValueError, match=f"JSON of an? {type(report).__name__}"):
        type(report).from_json('{"rows": 1}')


def test_statistics_that_are_traced_are_printed_as_they_are():
    def count(x):
        stats = numerics.tree_stats(x, "f16")
        assert "Tracer" in str(stats)
        return stats

    stacked = jax.vmap(count)(jnp.ones((2, 3)))
    assert str(stacked).startswith("TreeStats(")
