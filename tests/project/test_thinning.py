"""`one_of` leaves one case of each kind to `make test`, and the same one everywhere."""

import itertools
import types
from typing import Any

import pytest
import thinning


def left(params: dict[str, list[Any]], *names: str, turn: int = 0) -> list[Any]:
    """Return the parameters of the cases that stay, of all of a test."""
    cases = []
    for row in itertools.product(*params.values()):
        marks = {"one_of": [pytest.mark.one_of(name).mark for name in names]}
        case: Any = types.SimpleNamespace(nodeid="test_f[case]", added=[])
        given = dict(zip(params, row, strict=True))
        case.callspec = types.SimpleNamespace(params=given)
        case.iter_markers, case.add_marker = marks.get, case.added.append
        cases.append(case)
    thinning.mark_all_but_one(cases, turn)
    assert {x for case in cases for x in case.added} <= {"full"}
    return [case.callspec.params for case in cases if not case.added]


def test_one_case_of_each_kind_is_left() -> None:
    sizes = [1, 2, 3, 4, 5, 6]
    params = {"half": ["f16", "bf16"], "size": sizes}
    now, next_turn = (left(params, "half", "no", turn=turn) for turn in (0, 1))
    assert sorted(x["size"] for x in now) == sizes
    assert {x["half"] for x in now} == {"f16", "bf16"}  # not one kind everywhere
    assert sorted(x["size"] for x in next_turn if x not in now) == sizes
    assert len(left(params, "half", "size")) == 1
    assert len(left(params)) == 12  # without the marker
    # Objects are told apart by their place: their text differs between processes.
    objects = {"half": params["half"], "x": [object() for _ in sizes]}
    kept = [x["half"] for x in left(objects, "half")]
    objects["x"] = [object() for _ in sizes]
    assert kept == [x["half"] for x in left(objects, "half")] and len(kept) == 6


def test_every_other_case_is_left_and_each_test() -> None:
    cases = []
    for name in ("test_f[a]", "test_f[b]", "test_g[a]", "test_f[c]", "test_h"):
        case: Any = types.SimpleNamespace(nodeid=name, added=[])
        case.callspec = None
        if "[" not in name:
            del case.callspec
        case.get_closest_marker = lambda marker: None
        case.add_marker = case.added.append
        cases.append(case)
    thinning.mark_every_other(cases)
    assert [case.nodeid for case in cases if case.added] == ["test_f[b]"]
