"""Which cases of a parametrised test `make test` runs, where one is enough."""

import collections
import hashlib
from collections.abc import Sequence
from typing import Any

import pytest

_PLAIN = (str, int, float, bool, type(None))


def mark_every_other(items: Sequence[pytest.Item]) -> None:
    """Mark every other case of a parametrised test as `full`, from the second on."""
    count = collections.Counter[str]()
    for item in items:
        if not hasattr(item, "callspec") or item.get_closest_marker("full"):
            continue
        function = item.nodeid.partition("[")[0]
        if count[function] % 2:
            item.add_marker("full")
        count[function] += 1


def mark_all_but_one(items: Sequence[pytest.Item], turn: int = 0) -> None:
    """Mark tests as `full`, by their marker `one_of`.

    Of the cases of a test that differ in nothing but the parameters that the marker
    names, one stays: the name of the test and its other parameters say which, so that
    one kind of half precision is not left out of all tests.

    Args:
      items: the tests.
      turn: with another number, the next of the cases stays.
    """
    # Objects are numbered as they come: their text may differ between processes, all of
    # which have to choose the same tests.
    numbers = collections.defaultdict[Any, dict[int, int]](dict)
    groups = collections.defaultdict[Any, list[pytest.Item]](list)
    for item in items:
        names = {name for mark in item.iter_markers("one_of") for name in mark.args}
        callspec: Any = getattr(item, "callspec", None)
        if names and callspec:
            function = item.nodeid.partition("[")[0]
            known = numbers[function]
            others = tuple(
                (
                    name,
                    x if isinstance(x, _PLAIN) else known.setdefault(id(x), len(known)),
                )
                for name, x in sorted(callspec.params.items())
                if name not in names
            )
            groups[function, others].append(item)
    for key, group in groups.items():
        kept = (hashlib.sha256(repr(key).encode()).digest()[0] + turn) % len(group)
        for item in group[:kept] + group[kept + 1 :]:
            item.add_marker("full")
