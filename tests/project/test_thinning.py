"""`one_of` leaves one case of each kind to `make test`, and the same one everywhere."""

import subprocess
import sys
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


def collected(folder: Path, *args: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *args]
    command += ["-p", "no:cacheprovider", "-c", "pytest.ini", "--rootdir", "."]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return sorted(line for line in result.stdout.splitlines() if "::" in line)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinned")
    (folder / "test_cases.py").write_text(_CASES)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  full\n  one_of\n")
    hook = (
        "import os, thinning\n"
        "def pytest_collection_modifyitems(items):\n"
        "    thinning.mark_all_but_one(items, int(os.environ.get('TURN', 0)))\n"
    )
    path = f"import sys\nsys.path.insert(0, {str(Path(thinning.__file__).parent)!r})\n"
    (folder / "conftest.py").write_text(path + hook)
    return folder


def test_one_case_of_each_kind_is_left(folder: Path, monkeypatch) -> None:
    names = [line.partition("::")[2] for line in collected(folder, "-m", "not full")]
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
    assert len(collected(folder)) == 12 + 3 + 4 + 1 + 4
    monkeypatch.setenv("TURN", "1")
    others = [x.partition("::")[2] for x in collected(folder, "-m", "not full")]
    both = [name for name in names + others if name.startswith("test_product")]
    assert len(set(both)) == 12  # the other half
