r"""Names are text, not code: of scopes, leaves and steps, in every report and format.

A name may hold rich's markup, HTML, matplotlib's `$`, ESC, a line break.
"""

import dataclasses
import functools
import html
import io
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from printed import printed

import jmp_lite as jmp
from jmp_lite import memory, numerics
from jmp_lite.__main__ import main
from jmp_lite._src import reports
from jmp_lite._src.checkpoint.leaves import Cast, Casts
from jmp_lite._src.flax import module_policies
from tests.test_doctor import DIAGNOSIS

# For rich, matplotlib, HTML, terminals, Python, XLA's own text.
NAME = '_x[/y][link=a]:smile:$\\frac{$<b>&amp;\x1b[31m\r\x08\u202eé"\nraise KeyError'
W, X = jnp.eye(8), 4.0 * jnp.ones((8, 8))


def loss(w, x):
    with jax.named_scope(NAME):
        h = jnp.square(1e3 * x) @ w / 1e6
    return jnp.mean(jnp.log(jnp.abs(h @ w) + 1.0))


def masked(x):
    with jax.named_scope(NAME):
        return jnp.log(jnp.where(x > 5.0, x, -1e9))


STEP = jax.grad(loss)
MODULE = module_policies.ModuleDtypes(NAME, "Dense", ("f32",), "f16", ("f16",), NAME)
MAKE: dict[str, Callable[[], Any]] = {
    "explain": lambda: jmp.explain(loss, "mixed_float16")(W, X),
    "lint": lambda: numerics.lint(masked, "half")(X.astype("float16")),
    "dry_run": lambda: numerics.dry_run(loss, "mixed_float16")(W, X),
    "advise": lambda: numerics.advise(loss, "mixed_float16")(W, X),
    "first_nonfinite": lambda: numerics.first_nonfinite(masked)(X),
    "argument": lambda: numerics.first_nonfinite(lambda tree: tree)(
        {NAME: jnp.array(jnp.nan)}
    ),
    "tree_stats": lambda: numerics.tree_stats({NAME: X}, "f16", histogram=True),
    "saved": lambda: memory.saved(loss)(W, X),
    "of_step": lambda: memory.of_step(STEP)(W, X),
    "compare": lambda: memory.compare({NAME: (STEP, (W, X))}),
    "modules": lambda: module_policies.Explanation((MODULE,)),
}


@functools.cache
def make(report: str) -> Any:
    """Return a report in which something has the name."""
    return MAKE[report]()


def squeezed(text: str) -> str:
    """Return a text without the spaces and lines of its layout."""
    return "".join(text.split())


@pytest.mark.parametrize("report", MAKE)
def test_a_name_is_shown_as_text(report: str) -> None:
    made, shown = make(report), reports.printable(NAME)
    text, page = str(made), made._repr_html_()
    table = printed(made.table(every=True), width=300)
    assert shown in text
    for each in (text, page, table):
        assert reports.printable(each, keep="\n") == each
    assert html.escape(shown) in page and squeezed(shown) in squeezed(table)
    again = type(made).from_json(made.to_json())
    assert str(again) == text and again.to_json() == made.to_json()
    assert made.to_json().isascii()


def test_the_text_of_an_advice_runs_no_name() -> None:
    advice, found = make("advise"), {"jmp": jmp}
    exec(str(advice), found)
    assert found["policy"] == advice.policy
    assert [pattern for pattern, _ in advice.policy.rules] != [""]


@pytest.mark.parametrize("figure", ["dry_run.plot", "tree_stats.plot", "compare.plot"])
def test_a_name_in_a_figure_is_no_formula(figure: str) -> None:
    report, _, method = figure.partition(".")
    made = getattr(make(report), method)()
    labels = [label.get_text() for label in made.axes[0].get_yticklabels()]
    assert any(reports.printable(NAME) in label for label in labels)
    made.savefig(io.BytesIO())  # raises where a `$` begins a formula


def test_a_name_on_the_command_line_and_in_errors_is_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["memory", f"os:{NAME}"]) == 1
    shown = str(Casts({NAME: Cast("float32", "float16", 0)}))
    assert shown == f"{reports.printable(NAME)}  float32 -> float16"
    assert "\x1b" not in str(dataclasses.replace(DIAGNOSIS, findings=(NAME,)))
    error = capsys.readouterr().err
    assert repr(NAME)[1:-1] in error
    assert squeezed(f"tracing os:{reports.printable(NAME)}") in squeezed(error)


def test_a_product_named_in_an_error_is_text() -> None:
    def fun(w, x):
        with jax.named_scope("\x1b[31mred"):
            return x @ w

    arguments = jmp.trees.cast_floating((W, X), "float16")
    with pytest.raises(ValueError, match=r"in \\x1b\[31mred") as caught:
        numerics.dry_run(fun, "mixed_float16")(*arguments)
    assert "\x1b" not in str(caught.value)
