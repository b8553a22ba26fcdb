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
import optax_table
import pytest
from optax_table import NEED_LOSS, RATE, loss_arguments, sgd
from optimizers import HALF_WRAPPERS, bits_without_scale, low, over

import jmp_lite
from jmp_lite import DynamicLossScale, numerics, scale_aware

# Optax promotes by itself: an int32 count plus a float.
pytestmark = [
    pytest.mark.standard_promotion,
    # It warns of two of them around `scale_aware`, where these tests put them as well.
    pytest.mark.filterwarnings("ignore:An optimiser around scale_aware"),
]

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "optimisers.md"
_LINKS = optax_table.LINKS | {
    "monitor": lambda: optax.monitor({"norm": optax.tree.norm})
}
_WRAPPERS: dict[str, Any] = {
    **optax_table.WRAPPERS,
    **HALF_WRAPPERS,
    "low_precision_state": low,
}

# What an overflow is, where that is not inf.
_BAD = {"zero_nans": jnp.nan}


def _scaled(inner) -> Any:
    # It grows after two steps, so that gradients of different scales are met.
    return scale_aware(inner, DynamicLossScale(2.0**6, period=2))


def _orders(name: str) -> dict[str, tuple[Any, Any]]:
    """Return, by place, an optimiser with a loss scale and what it is without."""
    if name in _WRAPPERS:
        wrap, inner = _WRAPPERS[name], optax.adam(RATE)
        plain = wrap(inner)
        return {
            "inside": (_scaled(plain), plain),
            "before": (wrap(_scaled(inner)), plain),
        }
    link, chain = _LINKS[name], optax.chain
    first, last = chain(link(), sgd()), chain(sgd(), link())
    orders = {
        "inside": (_scaled(first), first),
        "before": (chain(link(), _scaled(sgd())), first),
        "after": (chain(_scaled(sgd()), link()), last),
    }
    if name == "monitor":  # inside it is refused, in the test of inner optimisers
        del orders["inside"]
    return orders


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
    w, b = rng.normal(size=(_FINITE + 3, 2, 3)), rng.normal(size=(_FINITE + 3, 3))
    w[_FINITE, -1], b[:, 1:] = bad, [0.0, 1.0]
    w, b = (jnp.asarray(x, jnp.float32) for x in (w, b))
    return [{"w": w[i], "b": b[i]} for i in range(_FINITE + 3)]


class _Step(NamedTuple):
    params: Any
    state: Any


@functools.cache
def _runs(name: str) -> dict[str, list[tuple[_Step, _Step]]]:
    """Return, by place, what is after each step, with a scale and without."""
    params, orders = _params(name), _orders(name)
    plains = {id(plain): plain for _, plain in orders.values()}

    def one(tx, before, grads):
        extra = loss_arguments(before.params) if name in NEED_LOSS else {}
        updates, state = tx.update(grads, before.state, before.params, **extra)
        return _Step(optax.apply_updates(before.params, updates), state)

    def scaled_one(tx, before, grads):
        loss_scale = jmp_lite.get_loss_scale(before.state)
        return one(tx, before, loss_scale.scale(grads))

    @jax.jit
    def step(ours, theirs, grads):
        return (
            {k: scaled_one(tx, ours[k], grads) for k, (tx, _) in orders.items()},
            {k: one(tx, theirs[k], grads) for k, tx in plains.items()},
        )

    ours = {k: _Step(params, tx.init(params)) for k, (tx, _) in orders.items()}
    theirs = {k: _Step(params, tx.init(params)) for k, tx in plains.items()}
    steps = {place: [] for place in orders}
    for i, grads in enumerate(_grads(_BAD.get(name, jnp.inf))):
        ours, stepped = step(ours, theirs, grads)
        theirs = theirs if i == _FINITE else stepped
        for place, (_, plain) in orders.items():
            steps[place].append((ours[place], theirs[id(plain)]))
    return steps


def _close(left, right) -> bool:
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
    section = _PAGE.read_text().split("## Where in a chain each optax")[1]
    table = re.search(r"\n\| transformations \|.*?\n\n", section, re.DOTALL)
    assert table is not None
    rows = [line.strip("| ").split(" | ") for line in table[0].split("\n")[3:-2]]
    return {name: row for row in rows for name in re.findall("`([^`]+)`", row[0])}


_EFFECTS = {"scaled", "hides", "moves", "state"}


def _words(cell: str) -> set[str]:
    return _EFFECTS & set(re.findall("[a-z]+", cell))


ROWS = _rows()
_NAMES = {**_LINKS, **_WRAPPERS}


def _found(name: str) -> dict[str, set[str]]:
    return {place: _effects(steps) for place, steps in _runs(name).items()}


def test_the_table_names_what_is_tested_here():
    assert ROWS.keys() == _NAMES.keys()


# `make test` runs one transformation of those with the same place and effects: how ours
# treats them inside is the test of optimisers inside.
_FIRST = {
    (row[1], *(frozenset(_words(cell)) for cell in row[2:4])): name
    for name, row in sorted(ROWS.items(), reverse=True)
}
over_names = over("name", sorted(_NAMES), *sorted(set(_FIRST.values())))


@over_names
def test_inside_is_float32_and_elsewhere_is_as_the_table_says(name):
    place, *cells = ROWS[name][1:4]
    found = _found(name)
    if name == "monitor":
        assert place == "after"
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
            extra = loss_arguments(params) if name in NEED_LOSS else {}
            updates, state = tx.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state

        params = _params(name)
        report = numerics.lint(step, "mixed_float16")(
            params, tx.init(params), jnp.ones((4, 2))
        )
        return {finding.rule for finding in report.findings}

    row, effects = ROWS[name], _found(name)
    for place, (scaled, _) in _orders(name).items():
        rules, named = found(scaled), set()
        if place != "inside" and effects[place]:
            pattern = "`([a-z]+(?:-[a-z]+)+)`(?: (before|after))?"
            pairs = re.findall(pattern, row[4])
            named = {rule for rule, where in pairs if where in ("", place)}
        if named or not effects[place]:
            assert rules == named
