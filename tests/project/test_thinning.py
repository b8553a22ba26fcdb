"""`one_of` leaves one case of each kind to `make test`, and the same one everywhere."""

from pathlib import Path

import pytest
import thinning

_CASES = """
import jax.numpy as jnp, pytest

pytestmark = pytest.mark.one_of("half", "unknown")

@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_product(half, size):
    pass

@pytest.mark.parametrize(("half", "eps"), [("f16", 1), ("bf16", 8), ("bf16", 1)])
def test_together(half, eps):
    pass

@pytest.mark.parametrize("half", ["f16", "bf16"])
@pytest.mark.parametrize(("fun", "array"), [(lambda: 1, [1]), (lambda: 2, [1])])
def test_objects(fun, array, half):
    pass

def test_alone():
    pass

@pytest.mark.one_of("half", "size")
@pytest.mark.parametrize("half", ["f16", "bf16"])
@pytest.mark.parametrize("size", [1, 2])
def test_one(half, size):
    pass
"""


class Thinned:
    """A plugin: the names of the cases that stay, and how many there are."""

    def __init__(self, folder: Path, turn: int):
        self.turn = turn
        where = ["-c", str(folder / "pytest.ini"), str(folder)]
        pytest.main(["--collect-only", "--import-mode=importlib", *where], [self])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        thinning.mark_all_but_one(items, self.turn)
        left = [item for item in items if not item.get_closest_marker("full")]
        self.names, self.count = sorted(item.name for item in left), len(items)


def test_one_case_of_each_kind_is_left(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(_CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  full\n  one_of\n")
    names = Thinned(tmp_path, 0).names
    products = [name for name in names if name.startswith("test_product")]
    sizes, halves = zip(*(n[13:-1].split("-") for n in products), strict=True)
    assert sorted(sizes) == list("123456")
    assert set(halves) == {"float16", "bfloat16"}  # not one kind everywhere
    together = [name for name in names if name.startswith("test_together")]
    assert len(together) == 2 and "test_together[bf16-8]" in together
    objects = [name.rpartition("-")[0] for name in names if "objects" in name]
    assert objects == ["test_objects[<lambda>-array0", "test_objects[<lambda>-array1"]
    assert "test_alone" in names
    assert len([name for name in names if name.startswith("test_one")]) == 1
    next_turn = Thinned(tmp_path, 1)
    assert next_turn.count == 12 + 3 + 4 + 1 + 4
    both = [x for x in names + next_turn.names if x.startswith("test_product")]
    assert len(set(both)) == 12  # the other half
