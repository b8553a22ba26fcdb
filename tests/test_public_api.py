"""The public names: sorted, complete, documented, and where they say they are."""

import ast
import builtins
import dataclasses
import importlib
import inspect
import pathlib
import pkgutil
import re
import types
from typing import Any

import pytest

import jmp_lite

SECTIONS = re.compile(r"^(Args|Attributes|Returns|Raises|Examples|References):$", re.M)

MODULES = ["jmp_lite"] + [
    f"jmp_lite.{info.name}"
    for info in pkgutil.iter_modules(jmp_lite.__path__)
    if not info.name.startswith("_")
]
# A union of classes is documented where they are.
DOCUMENTED = {
    name: value
    for name, value in vars(jmp_lite).items()
    if name in jmp_lite.__all__
    and not isinstance(value, types.UnionType | types.ModuleType)
}
FUNCTIONS = [n for n, value in DOCUMENTED.items() if inspect.isfunction(value)]
CLASSES = [n for n, value in DOCUMENTED.items() if isinstance(value, type)]
# An exception is made by us, with a message.
OURS = [n for n in CLASSES if issubclass(DOCUMENTED[n], Exception)]
# A state is a NamedTuple that a factory makes.
STATES = [n for n in CLASSES if issubclass(DOCUMENTED[n], tuple)]


def sections(value: Any) -> dict[str, str]:
    """Return the text under each Google-style heading of a docstring."""
    parts = SECTIONS.split(inspect.getdoc(value) or "")
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parameters(value: Any) -> list[str]:
    """Return the names that a caller may pass, `*` and `**` ones included."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.init]
    stars = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    signature = inspect.signature(value)
    return [stars.get(p.kind, "") + p.name for p in signature.parameters.values()]


def raised_in(function: Any) -> list[type]:
    """Return the errors that a function's own source raises."""
    tree = ast.parse(inspect.getsource(function))
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    names = [
        exc.func.id
        for exc in raised
        if isinstance(exc, ast.Call) and isinstance(exc.func, ast.Name)
    ]
    known = vars(builtins) | function.__globals__
    return [known[name] for name in names]


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted_and_complete(name):
    module = importlib.import_module(name)
    names = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    # Public modules that need nothing more are imported with the package.
    names |= {"memory", "numerics"} if name == "jmp_lite" else set()
    assert module.__all__ == sorted(names)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_public_object_is_defined_in_the_package_and_opens_with_one_sentence(name):
    value = DOCUMENTED[name]
    assert value.__module__.startswith("jmp_lite.")
    assert getattr(importlib.import_module(value.__module__), name) is value
    assert value.__qualname__ == name
    first = (inspect.getdoc(value) or "").partition("\n\n")[0]
    assert first.endswith(".") and "\n" not in first and len(first) <= 88


@pytest.mark.parametrize("name", sorted({*DOCUMENTED} - {*OURS}))
def test_parameters_are_documented_and_an_example_checks_something(name):
    value, found = DOCUMENTED[name], sections(DOCUMENTED[name])
    heading = "Attributes" if name in STATES else "Args"
    documented = re.findall(r"^  ([*\w]+): \S", found.get(heading, ""), re.M)
    if name in STATES:
        assert documented == list(value._fields)
        return  # the examples of what makes them show them
    assert documented == parameters(value)
    lines = [line.strip() for line in found.get("Examples", "").strip().splitlines()]
    assert any(line.startswith(">>> ") for line in lines)
    # It is a doctest: the run collects the package (`testpaths`). A function that only
    # raises shows that it does not.
    checks = not lines[-1].startswith((">>>", "..."))
    assert checks or inspect.signature(value).return_annotation is None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_returns_and_raises(name):
    function, documented = DOCUMENTED[name], sections(DOCUMENTED[name])
    returns_nothing = inspect.signature(function).return_annotation is None
    assert ("Returns" in documented) == (not returns_nothing)
    for error in raised_in(function):
        # By its own name or that of what it is.
        names = [f"{base.__name__}:" for base in error.__mro__]
        assert any(name in documented.get("Raises", "") for name in names), error


@pytest.mark.parametrize("name", sorted({*CLASSES} - {*OURS, *STATES}))
def test_every_public_method_has_a_docstring(name):
    for method, member in vars(DOCUMENTED[name]).items():
        if callable(member) or isinstance(member, property):
            documented = (member.__doc__ or "").strip()
            assert documented or method.startswith("_"), method


def test_the_package_is_typed():
    assert (pathlib.Path(jmp_lite.__path__[0]) / "py.typed").is_file()
