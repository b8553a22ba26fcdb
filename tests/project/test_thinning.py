"""`one_of` leaves one case of each kind to `make test`, and the same one everywhere."""

import itertools
import types
from typing import Any

import pytest
import thinning


def make_case(function: str, params: dict[str, Any], *names: str) -> Any:
    """Return what `thinning` asks of a test of pytest; it notes its new markers."""
    markers = {"one_of": [pytest.mark.one_of(name).mark for name in names]}
    case: Any = types.SimpleNamespace(nodeid=f"{function}[case]", added=[])
    case.callspec = types.SimpleNamespace(params=params)
    case.iter_markers, case.add_marker = markers.get, case.added.append
    return case


def left(
    params: dict[str, list[Any]], *names: str, turn: int = 0
) -> list[dict[str, Any]]:
    """Return the parameters of the cases that stay, of all of a test."""
    rows = [
        dict(zip(params, x, strict=True)) for x in itertools.product(*params.values())
    ]
    cases = [make_case("test_f", row, *names) for row in rows]
    others = [make_case("test_g", row) for row in rows]
    thinning.mark_all_but_one(cases + others, turn)
    assert {x for case in cases for x in case.added} <= {"full"}
    return [case.callspec.params for case in cases if not case.added]


HALVES, SIZES = ["f16", "bf16"], [1, 2, 3, 4, 5, 6]


def test_one_case_of_each_kind_is_left() -> None:
    params = {"half": HALVES, "size": SIZES}
    now, next_turn = (left(params, "half", "no", turn=turn) for turn in (0, 1))
    assert sorted(x["size"] for x in now) == SIZES
    assert {x["half"] for x in now} == {*HALVES}  # not one kind everywhere
    assert sorted(x["size"] for x in next_turn if x not in now) == SIZES
    assert len(left(params, "half", "size")) == 1
    assert len(left(params)) == 12  # without the marker


def test_objects_are_told_apart_by_their_place_and_not_by_their_text() -> None:
    here, elsewhere = (
        [
            x["half"]
            for x in left({"half": HALVES, "x": [object() for _ in SIZES]}, "half")
        ]
        for _ in range(2)
    )
    assert here == elsewhere and len(here) == 6
