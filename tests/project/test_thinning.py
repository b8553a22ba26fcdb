"""`one_of` leaves one case of each kind to `make test`, and the same one everywhere."""

import types
from collections.abc import Sequence
from typing import Any

import pytest
import thinning


def cases_of(names: tuple[str, ...], sizes: Sequence[Any]) -> list[Any]:
    """Return the cases of a test of two kinds of half and some sizes."""
    cases = []
    marks = {"one_of": [pytest.mark.one_of(name).mark for name in names]}
    for half in ("f16", "bf16"):
        for size in sizes:
            case = types.SimpleNamespace(nodeid="test_f[case]", added=[])
            params = {"half": half, "size": size}
            case.callspec = types.SimpleNamespace(params=params)
            case.iter_markers, case.add_marker = marks.get, case.added.append
            case.get_closest_marker = lambda name: None
            cases.append(case)
    return cases


def left(*names: str, sizes: Sequence[Any] = range(6), turn: int = 0) -> list[Any]:
    """Return the parameters of the cases that are not marked `full`."""
    cases = cases_of(names, sizes)
    thinning.mark_all_but_one(cases, turn)
    return [tuple(case.callspec.params.values()) for case in cases if not case.added]


def test_one_case_of_each_kind_is_left() -> None:
    now, next_turn = left("half", "no"), left("half", "no", turn=1)
    assert sorted(size for _, size in now) == [*range(6)]
    assert {half for half, _ in now} == {"f16", "bf16"}  # not one kind everywhere
    assert sorted(size for _, size in {*next_turn} - {*now}) == [*range(6)]
    assert len(left("half", "size")) == 1
    assert len(left()) == 12  # without the marker
    # Objects are told apart by their place: their text differs between processes.
    one, other = (left("half", sizes=[object() for _ in range(6)]) for _ in range(2))
    assert [half for half, _ in one] == [half for half, _ in other]


def test_every_other_case_is_left() -> None:
    cases = cases_of((), range(3))
    thinning.mark_every_other(cases)
    assert [case.added for case in cases] == [[], ["full"]] * 3
