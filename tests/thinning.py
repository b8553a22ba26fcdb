"""Which cases of a parametrised test `make test` runs, where one is enough."""

import collections
import hashlib
import types
from collections.abc import Sequence
from typing import Any

import pytest

_PLAIN = (str, int, float, bool, type(None))


def mark_all_but_one(items: Sequence[pytest.Item]) -> None:
    """Mark tests as `full`, by their marker `one_of`.

    Of the cases of a test that differ in nothing but the parameters that the marker
    names, one stays: the name of the test and its other parameters say which, so that
    one kind of half precision is not left out of all tests.
    """
    groups = collections.defaultdict(list)
    for item in items:
        names = {name for mark in item.iter_markers("one_of") for name in mark.args}
        callspec: Any = getattr(item, "callspec", None)
        if names and callspec:
            function = item.nodeid.partition("[")[0]
            groups[function, others(callspec, names)].append(item)
    for key, group in groups.items():
        kept = hashlib.sha256(repr(key).encode()).digest()[0] % len(group)
        for item in group[:kept] + group[kept + 1 :]:
            item.add_marker("full")


def others(callspec: Any, names: set[str]) -> tuple[tuple[str, Any], ...]:
    """Return the parameters that are not named, each with something that stands for it.

    That is the same in every process: an index, where the value has no name.
    """
    return tuple(
        (name, _label(value, callspec.indices[name]))
        for name, value in sorted(callspec.params.items())
        if name not in names
    )


def _label(value: Any, index: int) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, type | types.FunctionType) and "<" not in value.__qualname__:
        return value.__qualname__
    return index
