"""Run jmp's own tests against jmp_lite, and print what came of it as JSON.

Run by `test_jmp_compatibility.py` in a process of its own, since the name `jmp` is
taken here. jmp's test files come out of its installed wheel; every module of jmp that
they import is ours, and jmp's own code cannot be loaded.
"""

import importlib.metadata
import json
import runpy
import sys
import types
import unittest
from typing import Any

import jmp_lite
from jmp_lite._src import dtypes

TESTS = ("loss_scale_test", "policy_test")


def our_module(name: str, **private: Any) -> types.ModuleType:
    """Return a module of jmp's name that holds our public names.

    It is no package, so others of jmp are not to be found in it.
    """
    sys.modules[name] = module = types.ModuleType(name)
    vars(module).update({x: getattr(jmp_lite, x) for x in jmp_lite.__all__} | private)
    return module


def main() -> None:
    """Load and run the tests; print the counts and the names of those that failed."""
    loss_scale = our_module("jmp._src.loss_scale")
    policy = our_module("jmp._src.policy", dtype_to_names=dict(dtypes.DTYPE_NAMES))
    our_module("jmp", _src=our_module("jmp._src", loss_scale=loss_scale, policy=policy))

    paths = {
        path.stem: str(path.locate())
        for path in importlib.metadata.files("jmp") or []
        if path.suffix == ".py"
    }
    suite = unittest.TestSuite()
    for test in TESTS:
        module: Any = types.SimpleNamespace(**runpy.run_path(paths[test]))
        assert module.jmp in (loss_scale, policy)
        suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
    result = unittest.TestResult()
    suite.run(result)

    report = {
        "version": importlib.metadata.version("jmp"),
        "ran": result.testsRun,
        "skipped": len(result.skipped),
        "failed": [test.id() for test, _ in result.failures + result.errors],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
