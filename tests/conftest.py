"""What every test may rely on: eight CPU devices, strict JAX, fixed randomness."""

import gc
import os

import jaxlib.version

# XLA reads these once, when JAX is first imported: before anything else.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        # On CPUs, XLA would leave out casts to bfloat16 and back, which GPUs make.
        "--xla_allow_excess_precision=false",
        # XLA's passes are those of users; LLVM's, which take a third of the tests' time
        # and change no operation, are not.
        "--xla_backend_optimization_level=0",
        # Nor do programs as small as these gain by being compiled in parts.
        "--xla_cpu_parallel_codegen_split_count=1",
        # Nor is the code that 0.10 makes of fusions, with a compiler of its own that
        # takes half of all the time. The newest is faster, and knows no such flag.
        *(
            ["--xla_cpu_use_fusion_emitters=false"]
            if jaxlib.version.__version_info__[:2] == (0, 10)
            else []
        ),
        os.environ.get("XLA_FLAGS", ""),
    ]
).strip()

# ruff: noqa: E402  (the environment has to be set above the imports of JAX)
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import jax
import pytest
import thinning

# Tracing makes many objects that soon go: by Python's own thresholds, a tenth of the
# time is spent on looking for them.
gc.set_threshold(50_000, 20, 20)

# A first call compiles, which takes longer than hypothesis thinks an example should.
_COMPILING = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("dev", max_examples=25, **_COMPILING)
hypothesis.settings.register_profile(
    "ci", max_examples=25, derandomize=True, database=None, **_COMPILING
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Keep --doctest-modules from importing the helper scripts beside the tests."""
    is_helper = collection_path.suffix == ".py" and not collection_path.name.startswith(
        "test_"
    )
    return True if is_helper else None


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases as `full` where `@pytest.mark.one_of` says that one is enough.

    On a newer JAX it is the next one: CI runs both kinds of half precision. And of the
    cases of a test every other one is enough there, but for programs of the corpus: the
    oldest JAX runs all.
    """
    is_oldest = jaxlib.version.__version_info__ == (0, 10, 0)
    thinning.mark_all_but_one(items, turn=0 if is_oldest else 1)
    if not is_oldest:
        others = [x for x in items if "autocast/test_programs.py" not in x.nodeid]
        thinning.mark_every_other(others)


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Refuse implicit promotion, which is how mixed precision goes wrong unseen.

    `@pytest.mark.standard_promotion` opts out, for tests that run other people's
    models: these lean on JAX's defaults.
    """
    if request.node.get_closest_marker("standard_promotion"):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Let go of what a file has compiled: a process may map only so much code."""
    yield
    jax.clear_caches()


@pytest.fixture
def getkey() -> Callable[[], jax.Array]:
    """Hand out PRNG keys: a fresh one at each call, the same ones in every run."""
    key = jax.random.key(20240229)

    def next_key() -> jax.Array:
        nonlocal key
        key, fresh = jax.random.split(key)
        return fresh

    return next_key
