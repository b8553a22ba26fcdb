"""The pages of the reference have every public name once, with an example."""

import importlib.util
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
assert _SPEC and _SPEC.loader
hooks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(hooks)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("docs/reference", "jmp_lite"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "docs" / "reference.md", tmp_path / "docs")
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), "utf-8")


def test_every_public_name_is_in_the_reference_with_an_example() -> None:
    assert list(hooks.reference_faults()) == []


def test_every_public_module_is_known() -> None:
    modules = (ROOT / "jmp_lite").glob("[!_]*.py")
    names = {"jmp_lite", *(f"jmp_lite.{path.stem}" for path in modules)}
    assert names == set(hooks._PUBLIC)


def test_a_name_without_docs_is_seen(copy: Path) -> None:
    page = copy / "docs" / "reference" / "trees.md"
    change(page, "::: jmp_lite.all_finite\n", "::: jmp_lite.all_finites\n")
    page.write_text(page.read_text("utf-8") + "\n::: jmp_lite.select_tree\n", "utf-8")
    folder = copy / "jmp_lite" / "_src"
    (folder / "trees.py").write_text("def cast_like():\n    ...\n", "utf-8")
    step = folder / "checkpoint" / "save_restore.py"
    change(step, ">>> latest_step(tempfile.mkdtemp()) is None", "")
    change(step, "      >>> import tempfile\n      \n", "")
    assert list(hooks.reference_faults(copy)) == [
        "jmp_lite.all_finite is 0 times in docs/reference, expected once: "
        "`::: jmp_lite.all_finite`",
        "jmp_lite.all_finite has no docstring",
        "jmp_lite.cast_floating has no docstring",
        "jmp_lite.cast_like has no docstring",
        "jmp_lite.select_tree is 2 times in docs/reference, expected once: "
        "`::: jmp_lite.select_tree`",
        "jmp_lite.select_tree has no docstring",
        "jmp_lite.checkpoint.latest_step has no example, and names no function "
        "that has one",
        "jmp_lite.all_finites is in docs/reference, but is not public",
    ]
