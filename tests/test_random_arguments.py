"""Random arguments: whatever a public function raises is documented, and in our words.

Each call is drawn from one table, with right arguments, and up to two wrong ones: of
another type, not finite, huge, empty, nested, of odd dtypes and shapes. An error must
be a TypeError or a ValueError that a `raise` of this package made, with a sentence.
What is not ours passes: what a user's function raises (`loss`), the arithmetic of the
optimiser that is wrapped, `OF_JAX`, and the file system's refusal.
"""

import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import pytest
import random_arguments
from hypothesis import strategies as st
from random_arguments import CALLS, RIGHT, WRONG, P, jmp, loss

# What jax.value_and_grad and jax.jit say of the arguments that are theirs.
OF_JAX = (
    "grad requires ",
    "differentiating with respect to ",
    "Jitted function has donate_argnums=",
)
_TRANSFORMATION = "value_and_grad=value_and_grad"
PACKAGE = str(Path(jmp.__file__).parent)
HERE = random_arguments.__file__


def fault(name: str, error: BaseException) -> str:
    """Return what is wrong with an error, "" if it is documented, or not ours."""
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame.filename for frame in frames]
    ours = [i for i, file in enumerate(files) if file.startswith(PACKAGE)]
    is_last = bool(ours) and ours[-1] == len(files) - 1
    if not is_last and ours:
        is_of_user = HERE in files[ours[0] :]
        is_of_optax = any("/optax/" in file for file in files[ours[-1] :])
        is_of_trees = "mismatch" in str(error) or str(error).startswith("Expected ")
        if is_of_user or (is_of_optax and not is_of_trees):
            return ""
    of_files = name in ("save", "restore", "latest_step") and isinstance(error, OSError)
    if of_files or str(error).startswith(OF_JAX):
        return ""
    if not isinstance(error, TypeError | ValueError):
        return "another type"
    is_raised = is_last and "raise" in (frames[-1].line or "")
    return "" if is_raised and len(str(error).split()) > 3 else "not our words"


def one_call(name: str, data: Any) -> tuple[dict[str, Any], BaseException | None]:
    """Call a function of the table; return the arguments, and what was raised."""
    function, *rest = CALLS[name]
    specs = [rest[0].split(), rest[2].split() if len(rest) > 1 else []]
    tokens = [token for spec in specs for token in spec]
    wrong = data.draw(st.sets(st.sampled_from(tokens), max_size=2), label="wrong")
    drawn = {
        token: data.draw(
            WRONG if token in wrong else RIGHT[token.rpartition("=")[2]], label=token
        )
        for token in tokens
    }
    # What functions of others raise is not ours.
    fun, transformation = drawn.get("fun", loss), drawn.get(_TRANSFORMATION)
    is_ours = inspect.isfunction(fun) and fun.__module__ == loss.__module__
    hypothesis.assume(is_ours or not callable(fun) and fun is not ...)
    is_of_jax = transformation is jax.value_and_grad
    hypothesis.assume(is_of_jax or not callable(transformation))

    def call(function: Any, spec: list[str]) -> Any:
        named = {t.partition("=")[0]: drawn[t] for t in spec if "=" in t}
        return function(*(drawn[t] for t in spec if "=" not in t), **named)

    try:
        result = call(function, specs[0])
        if len(rest) > 1:
            use = rest[1] or (lambda x: x)
            call(use(result), specs[1])
    except Exception as error:
        return drawn, error
    return drawn, None


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder, with JAX' own frames in tracebacks."""
    monkeypatch.chdir(tmp_path)
    config: Any = jax.config
    filtering = config.jax_traceback_filtering
    config.update("jax_traceback_filtering", "off")
    yield
    config.update("jax_traceback_filtering", filtering)


def check(name: str, examples: int) -> None:
    checks: Any = list(hypothesis.HealthCheck)

    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=checks,
    )
    @hypothesis.given(st.data())
    def calls(data: Any) -> None:
        _, error = one_call(name, data)
        if error is not None and (what := fault(name, error)):
            raise AssertionError(f"{what}: {error!r}") from error

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls()


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", CALLS)
def test_what_a_wrong_argument_raises_is_documented_and_in_our_words(name: str) -> None:
    check(name, examples=6)


@pytest.mark.full
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", CALLS)
def test_so_it_is_of_many_random_calls(name: str) -> None:
    check(name, examples=120)


def test_an_error_in_other_words_or_of_another_type_is_found() -> None:
    def of_a(fun: Callable[[], Any]) -> str:
        with pytest.raises(Exception) as caught:
            fun()
        return fault("cast_floating", caught.value)

    assert of_a(lambda: jmp.trees.cast_floating(P, "f99")) == ""
    assert of_a(lambda: jmp.get_policy("half").unknown) == "another type"
    assert of_a(lambda: jmp.empty) == "another type"
    assert of_a(lambda: jnp.asarray("no")) == "not our words"
