"""Do the tests of other libraries pass with `autocast` in their transformations?

    make peers                                       # all suites
    .venv-peers/bin/python tests/tools/peers_suites.py optax

For the versions that are installed, it takes the sources into out/peers (what is there
is not downloaded again) and runs a part of their tests with `through_autocast`. Under
rules that change nothing, what passes without autocast must pass. In bfloat16, numbers
may differ: there an AssertionError of a test that passes under the former is allowed.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
OUT = TOOLS.parents[1] / "out" / "peers"
SUITES = {  # `transform_test.py` of haiku needs TensorFlow
    "equinox": "tests/test_{}.py: ad jit vmap stateful checkpoint errors nn while_loop",
    "flax": "tests/{}_test.py: linen/linen_transforms linen/linen_combinators "
    "linen/linen_recurrent nnx/transforms nnx/module nnx/optimizer nnx/mutable_array",
    "optax": "optax/{}: transforms losses projections",
    "dm-haiku": "haiku/_src/{}_test.py: stateful lift layer_stack recurrent attention",
}
# Tests that measure time; and those that fail in a function that is traced abstractly,
# also by `jax.jit`: they await an error while it runs, or pass no tracers. Flax' hijax
# variables (experimental) fail in `jax.checkpoint` and `jax.eval_shape` under `jit`,
# too, where a function that is traced again changes one.
EXCEPT = (
    "not (speed or unperturbed_output or assert_dce or diff_state or hijax "
    "or pytree_value)"
)
# The sdist of equinox has no tests.
EQUINOX = "https://github.com/patrick-kidger/equinox/archive/refs/tags/v{}.tar.gz"


def source(name: str) -> Path:
    """Return the folder with the source of the version that is installed."""
    version = importlib.metadata.version(name)
    folder = OUT / f"{name.replace('-', '_')}-{version}"
    if not folder.exists():
        OUT.mkdir(parents=True, exist_ok=True)
        archive = f"{folder}.tar.gz"
        if name == "equinox":
            urllib.request.urlretrieve(EQUINOX.format(version), archive)
        else:
            options = f"-q --no-deps --no-binary :all: --dest={OUT}".split()
            pip = [sys.executable, "-m", "pip", "download", *options]
            subprocess.run([*pip, f"{name}=={version}"], check=True)
        with tarfile.open(archive) as files:
            files.extractall(OUT, filter="data")
    return folder


def run(name: str, mode: str) -> dict[str, list[str]]:
    """Return the outcome of each test; of one that failed, the error and its text."""
    folder, out = source(name), OUT / f"{name}-{mode}.json"
    out.unlink(missing_ok=True)
    pattern, stems = SUITES[name].split(": ")
    tests = [pattern.format(stem) for stem in stems.split()]
    options = "-q -p through_autocast -p no:cacheprovider --tb=short".split()
    command = [sys.executable, "-m", "pytest", *options, "-k", EXCEPT, *tests]
    env = os.environ | {
        "PYTHONPATH": f"{TOOLS}{os.pathsep}{TOOLS.parents[1]}",
        "THROUGH_AUTOCAST": mode,
        "THROUGH_AUTOCAST_OUT": str(out),
    }
    with open(OUT / f"{name}-{mode}.log", "w") as log:
        subprocess.run(command, env=env, cwd=folder, stdout=log, stderr=log)
    if not out.exists():
        raise RuntimeError(f"The tests of {name} did not run: see {log.name}")
    return json.loads(out.read_text())


def main(names: list[str]) -> int:
    """Print a table, and what failed; return whether anything did."""
    print("| suite | tests | pass as they are | fail unchanged | fail in bfloat16 |")
    print("|---|---|---|---|---|", flush=True)
    faults = []
    for name in names:
        as_is = run(name, "as_is")
        passed = [test for test, outcome in as_is.items() if outcome == ["passed"]]
        counts = [len(as_is), len(passed)]
        for mode in ("unchanged", "bfloat16"):
            outcomes = run(name, mode)
            allowed = ["passed", "AssertionError" if mode == "bfloat16" else "passed"]
            got = {test: outcomes.get(test, ["not run"]) for test in passed}
            failed = [
                f"{mode}: {t}: {o}" for t, o in got.items() if o[0] not in allowed
            ]
            faults += failed
            counts.append(len(failed))
        print(f"| {name} |", " | ".join(map(str, counts)), "|", flush=True)
    print(*faults, sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(SUITES)))
