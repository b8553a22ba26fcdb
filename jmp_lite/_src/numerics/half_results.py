"""Which layers may have results of matrix products in half, by what was measured."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jmp_lite._src.autocast import products
from jmp_lite._src.numerics.faults import Fault
from jmp_lite._src.numerics.report import DryRunReport, OpStats
from jmp_lite._src.policy import pattern_of, split_at_model
from jmp_lite._src.reports import size


def gained(before: DryRunReport, after: DryRunReport) -> list[OpStats]:
    """Return the forward results that are half in the second dry run alone, in order.

    They are half only because results of products are.
    """
    results = ([x for x in r.rows if not x.is_operand] for r in (before, after))
    return [
        new
        for old, new in zip(*results, strict=True)
        if new.is_half and not old.is_half and new.direction == "forward"
    ]


def out_of_range(
    found: Sequence[OpStats], half: Collection[str], headroom: float, dtype: Any
) -> dict[str, str]:
    """Return which layers with half results must not have them by their range, and why.

    By what is half because of these, in order: `headroom` times it must be in range.
    """
    largest, reasons = float(jnp.finfo(dtype).max), {}
    for i, row in enumerate(found):
        if row.max_abs * headroom <= largest:
            continue
        # An operation of another layer has half operands of these: of the nearest
        # before it, to begin with.
        nearest = [x.layer for x in found[i::-1] if x.layer in half][:1]
        for layer in nearest or half:
            what = (
                f"reaches {row.max_abs:.3g}, and {headroom:g} times that is beyond "
                f"{largest:.3g}"
            )
            reasons.setdefault(layer, _reason(layer, row, what))
    return reasons


def inaccurate(faults: Sequence[Fault], half: Collection[str]) -> dict[str, str]:
    """Return which layers with half results must not have them by faults, and why."""
    reasons = {}
    for fault in faults:
        suspects = [fault.row.layer, *(fault.row.cause or ())[:1]]
        for layer in [x for x in suspects if x in half] or half:
            reasons.setdefault(layer, _reason(layer, fault.row, fault.what()))
    return reasons


def not_measured(layer: str) -> str:
    """Return why a layer that earlier advice does not know has no half results."""
    why = "the advice passed as `previous` did not measure this layer. Advice without"
    return _stays(layer, f"{why} `previous` measures it")


def _reason(layer: str, row: OpStats, what: str) -> str:
    where = f" in {row.layer or 'no scope'}" if row.layer != layer else ""
    return _stays(layer, f"{row.primitive}{where} at {row.line} {what}")


def _stays(layer: str, why: str) -> str:
    name = layer or "Outside any scope"
    return f"{name}: results of products stay in float32: {why}."


def summary(found: Sequence[OpStats], headroom: float, dtype: Any) -> str:
    """Return in one line what half results save; "" if there are none."""
    of_products = [row for row in found if row.primitive in products.NAMES]
    if not of_products:
        return ""
    largest = max(row.max_abs for row in of_products)
    saved = sum(2 * row.size for row in of_products)  # 4 bytes become 2
    plural = "" if len(of_products) == 1 else "s"
    return (
        f"Half results of {len(of_products)} matrix product{plural} save "
        f"{size(saved)} of {size(2 * saved)}: they reach {largest:.3g}, and "
        f"{headroom:g} times that is below {float(jnp.finfo(dtype).max):.3g}."
    )


def output_rules(results: Mapping[str, bool]) -> tuple[dict[str, bool], bool]:
    """Return patterns for layers, by whether their results of products may be half.

    The patterns are in their order of precedence, each with whether results are half.
    Also returns whether one matches scopes of `autocast` only, no module of linen.
    """
    has_modules = any(split_at_model(layer)[0] for layer in results)
    # For `with_policy`, "" is the model, whose output this would be.
    everywhere = results.get("", False) and not has_modules
    rules = [*_rules("", everywhere, results), *[("", True)] * everywhere]
    patterns = {pattern_of(layer): is_half for layer, is_half in rules}
    of_modules = [all(split_at_model(layer)) for layer, _ in rules]
    return patterns, has_modules and not all(of_modules)


def _rules(
    scope: str, around: bool, results: Mapping[str, bool]
) -> Iterator[tuple[str, bool]]:
    """Yield the rules for the scopes in a scope, inner ones first.

    `around` says whether the rule around it makes results half.
    """
    start = f"{scope}/" if scope else ""
    inside = {x: r for x, r in results.items() if x and f"{x}/".startswith(start)}
    if scope and set(inside.values()) == {not around}:
        yield scope, not around
        return
    own = inside.get(scope, around)
    depth = len(scope.split("/")) if scope else 0
    for child in dict.fromkeys("/".join(x.split("/")[: depth + 1]) for x in inside):
        if child != scope:
            yield from _rules(child, own, results)
    if own != around:
        yield scope, own
