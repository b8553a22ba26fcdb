"""The pages of the reference have every public name once, with an example."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
assert _SPEC and _SPEC.loader
hooks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(hooks)


def test_every_public_name_is_in_the_reference_with_an_example() -> None:
    assert list(hooks.reference_faults()) == []


def test_every_public_module_is_known() -> None:
    modules = (ROOT / "jmp_lite").glob("[!_]*.py")
    names = {"jmp_lite", *(f"jmp_lite.{path.stem}" for path in modules)}
    assert names == set(hooks._PUBLIC)
