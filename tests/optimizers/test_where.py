"""Where each transformation of optax belongs: the table of the docs, row by row.

Each is run inside of `scale_aware`, before or around it, and after it, on a stream of
scaled gradients with one overflow. What goes wrong is what the table says, no more.
"""

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import bitwise
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optimizers import bits_without_scale

import jmp_lite
from jmp_lite import DynamicLossScale, numerics, scale_aware

# Optax promotes by itself: an int32 count plus a float.
pytestmark = [
    pytest.mark.standard_promotion,
    # It warns of two of them around `scale_aware`, where these tests put them as well.
    pytest.mark.filterwarnings("ignore:An optimiser around scale_aware"),
]

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "optimisers.md"
_RATE = 0.1
_MASK = {"w": True, "b": False}


def _sgd() -> Any:
    return optax.sgd(_RATE)


def _every_other(step: Any, **extra: Any) -> Any:
    del extra
    return step % 2 == 0


# Links of a chain.
_LINKS: dict[str, Any] = {
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "apply_every": lambda: optax.apply_every(2),
    "centralize": optax.centralize,
    "clip": lambda: optax.clip(0.5),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.5),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.5),
    "contrib.reduce_on_plateau": lambda: contrib.reduce_on_plateau(patience=1),
    "ema": lambda: optax.ema(0.9),
    "freeze": lambda: optax.freeze(_MASK),
    "keep_params_nonnegative": optax.keep_params_nonnegative,
    "monitor": lambda: optax.monitor({"norm": optax.tree.norm}),
    "normalize_by_update_norm": optax.normalize_by_update_norm,
    "scale": lambda: optax.scale(0.5),
    "scale_by_adam": optax.scale_by_adam,
    "scale_by_backtracking_linesearch": (
        lambda: optax.scale_by_backtracking_linesearch(2)
    ),
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(
        min_dim_size_to_factor=2
    ),
    "scale_by_lbfgs": lambda: optax.scale_by_lbfgs(2),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(
        0.5, flip_sign=False
    ),
    "scale_by_lion": optax.scale_by_lion,
    "scale_by_polyak": optax.scale_by_polyak,
    "scale_by_rms": optax.scale_by_rms,
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda n: 1 / (1 + n)),
    "scale_by_sign": optax.scale_by_sign,
    "scale_by_trust_ratio": optax.scale_by_trust_ratio,
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
    "trace": lambda: optax.trace(0.9),
    "zero_nans": optax.zero_nans,
}
# What wraps another optimiser.
_WRAPPERS: dict[str, Any] = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, _every_other),
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, _every_other
    ),
    "contrib.mechanize": contrib.mechanize,
    "contrib.sam": lambda tx: contrib.sam(
        tx, optax.chain(contrib.normalize(), optax.sgd(0.05))
    ),
    "contrib.schedule_free": lambda tx: contrib.schedule_free(tx, _RATE),
    "flatten": optax.flatten,
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(tx, optax.scale(rate))
    )(lambda n: 1 / (1 + n)),
    "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
    "low_precision_state": lambda tx: jmp_lite.low_precision_state(tx, min_size=1),
    "masked": lambda tx: optax.masked(tx, _MASK),
    "master_weights": jmp_lite.master_weights,
    "partition": lambda tx: optax.partition({True: tx, False: _sgd()}, _MASK),
    "stochastic_rounding": lambda tx: jmp_lite.stochastic_rounding(
        tx, jax.random.key(0)
    ),
}

_NEED_LOSS = {
    "contrib.reduce_on_plateau",
    "scale_by_backtracking_linesearch",
    "scale_by_polyak",
}

# What an overflow is, where that is not inf.
_BAD = {"zero_nans": jnp.nan}


def _scaled(inner: Any) -> Any:
    # It grows after two steps, so that gradients of different scales are met.
    return scale_aware(inner, DynamicLossScale(2.0**6, period=2))


class _Orders(NamedTuple):
    """An optimiser with a loss scale, and what it would be in float32 without."""

    scaled: Any
    plain: Any


def _orders(name: str) -> dict[str, _Orders]:
    if name in _WRAPPERS:
        wrap, inner = _WRAPPERS[name], optax.adam(_RATE)
        plain = wrap(inner)
        return {
            "inside": _Orders(_scaled(plain), plain),
            "before": _Orders(wrap(_scaled(inner)), plain),
        }
    link, chain = _LINKS[name], optax.chain
    first, last = chain(link(), _sgd()), chain(_sgd(), link())
    orders = {
        "inside": _Orders(_scaled(first), first),
        "before": _Orders(chain(link(), _scaled(_sgd())), first),
        "after": _Orders(chain(_scaled(_sgd()), link()), last),
    }
    if name == "monitor":
        del orders["inside"]
    return orders


def _loss(params: Any) -> Any:
    return sum(jnp.sum(jnp.cosh(x)) for x in jax.tree.leaves(params))


def _extra(params: Any) -> dict[str, Any]:
    value, grad = jax.value_and_grad(_loss)(params)
    return {"value": value, "grad": grad, "value_fn": _loss}


_PARAMS = {
    "w": jnp.linspace(0.2, 1.1, 6).reshape(2, 3),
    "b": jnp.array([0.3, -0.0, 0.7]),
}


def _params(name: str) -> Any:
    if name == "lookahead":
        return optax.LookaheadParams.init_synced(_PARAMS)
    return _PARAMS


_FINITE = 3  # then one that is not, then two more


def _grads(bad: float) -> list[Any]:
    rng = np.random.default_rng(0)
    grads = [
        {
            "w": jnp.asarray(rng.normal(size=(2, 3)), jnp.float32),
            "b": jnp.asarray([rng.normal(), 0.0, 1.0], jnp.float32),
        }
        for _ in range(_FINITE + 3)
    ]
    grads[_FINITE]["w"] = grads[_FINITE]["w"].at[-1].set(bad)
    return grads


class _Step(NamedTuple):
    params: Any
    state: Any


def _run(name: str, orders: dict[str, _Orders]) -> dict[str, list[tuple[_Step, _Step]]]:
    """Return the parameters and state after each step, with a scale and without."""
    params = _params(name)

    def one(tx, before, grads):
        extra = _extra(before.params) if name in _NEED_LOSS else {}
        updates, state = tx.update(grads, before.state, before.params, **extra)
        return _Step(optax.apply_updates(before.params, updates), state)

    @jax.jit
    def step(before, grads):
        def both(tx, before):
            scale = jmp_lite.get_loss_scale(before[0].state)
            return (
                one(tx.scaled, before[0], scale.scale(grads)),
                one(tx.plain, before[1], grads),
            )

        return {place: both(tx, before[place]) for place, tx in orders.items()}

    now = {
        place: tuple(_Step(params, tx.init(params)) for tx in pair)
        for place, pair in orders.items()
    }
    steps = {place: [] for place in orders}
    for i, grads in enumerate(_grads(_BAD.get(name, jnp.inf))):
        after = step(now, grads)
        for place in orders:
            scaled, plain = after[place]
            now[place] = scaled, (now[place][1] if i == _FINITE else plain)
            steps[place].append(now[place])
    return steps


def _close(left: Any, right: Any) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.allclose(a, b, 1e-5, 1e-6, equal_nan=True) for a, b in pairs)


def _effects(steps: list[tuple[_Step, _Step]]) -> set[str]:
    """Return what goes wrong, in the words of the table."""
    (before, plain), (after, _) = steps[_FINITE - 1 : _FINITE + 1]
    end, _ = steps[-1]
    effects = set()
    if not _close(before.params, plain.params):
        effects.add("scaled")
    if not jmp_lite.loss_scale_metrics(end.state)["skipped_steps"]:
        return effects | {"hides"}
    if not _close(before.params, after.params):
        effects.add("moves")
    if bits_without_scale(before.state) != bits_without_scale(after.state):
        effects.add("state")
    return effects


def _rows() -> dict[str, list[str]]:
    """Return the row of each transformation in the table of the docs."""
    section = _PAGE.read_text().split("## Where each transformation belongs")[1]
    table = re.search(r"\n\| transformations \|.*?\n\n", section, re.DOTALL)
    assert table is not None
    rows = [line.strip("| ").split(" | ") for line in table[0].split("\n")[3:-2]]
    return {name: row for row in rows for name in re.findall("`([^`]+)`", row[0])}


_EFFECTS = {"scaled", "hides", "moves", "state"}


def _words(cell: str) -> set[str]:
    return _EFFECTS & set(re.findall("[a-z]+", cell))


ROWS = _rows()
_NAMES = {**_LINKS, **_WRAPPERS}


@functools.cache
def _runs(name: str) -> dict[str, list[tuple[_Step, _Step]]]:
    return _run(name, _orders(name))


def _found(name: str) -> dict[str, set[str]]:
    return {place: _effects(steps) for place, steps in _runs(name).items()}


def test_the_table_names_what_is_tested_here():
    assert ROWS.keys() == _NAMES.keys()


# `make test` runs one transformation of each row: that all take steps inside is also
# the test of optimisers inside.
_FIRST = {tuple(row): name for name, row in sorted(ROWS.items(), reverse=True)}
over_names = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in _FIRST.values() else [pytest.mark.full])
        for name in sorted(_NAMES)
    ],
)


@over_names
def test_inside_is_float32_and_elsewhere_is_as_the_table_says(name):
    place, *cells = ROWS[name][1:4]
    found = _found(name)
    if name == "monitor":
        assert place == "after"
        tx = _scaled(optax.chain(_sgd(), _LINKS[name]()))
        with pytest.raises(ValueError, match="Put a transformation that changes it"):
            tx.update(_PARAMS, tx.init(_PARAMS), _PARAMS)
    else:
        assert place in ("inside", "anywhere")
        assert found["inside"] == set()
        steps = _runs(name)["inside"]
        (before, _), (after, _) = steps[_FINITE - 1 : _FINITE + 1]
        bitwise.assert_same(after.params, before.params)
        end, plain = steps[-1]
        assert _close(end.params, plain.params)
    for cell, where in zip(cells, ("before", "after"), strict=True):
        effects = found.get(where, set())
        assert effects <= _words(cell)
        assert where in found or where == "after" and name in _WRAPPERS
        assert cell != "–" or where not in found
        assert cell != "as inside" or not effects
        if place == "inside" and where == "before":
            assert effects, "it may stand before or around as well"


@pytest.mark.full
@pytest.mark.parametrize("row", sorted({tuple(row) for row in ROWS.values()}))
def test_each_effect_in_a_row_is_that_of_one_of_its_names(row):
    names = [name for name, other in ROWS.items() if tuple(other) == row]
    for cell, where in ((row[2], "before"), (row[3], "after")):
        assert _words(cell) == set().union(*(_found(n).get(where, ()) for n in names))


@over_names
def test_lint_names_what_the_table_says_it_names(name):
    def loss(params, x):
        half = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)
        return jnp.mean(half.astype(jnp.float32) ** 2) + jnp.sum(params["b"] ** 2)

    def found(tx):
        def step(params, state, x):
            loss_scale = jmp_lite.get_loss_scale(state)
            fast = getattr(params, "fast", params)
            grads = jmp_lite.scaled_grad(loss, loss_scale=loss_scale)(fast, x)
            extra = _extra(params) if name in _NEED_LOSS else {}
            updates, state = tx.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state

        params = _params(name)
        report = numerics.lint(step, "mixed_float16")(
            params, tx.init(params), jnp.ones((4, 2))
        )
        return {finding.rule for finding in report.findings}

    row, effects = ROWS[name], _found(name)
    for place, orders in _orders(name).items():
        rules, named = found(orders.scaled), set()
        if place != "inside" and effects[place]:
            named = set(re.findall("`([a-z]+(?:-[a-z]+)+)`", row[4]))
        if named:
            assert rules == named
        elif not effects[place]:
            assert rules == set()
