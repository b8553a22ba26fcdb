"""Arguments that the examples share: read, checked, refused with a reason."""

import contextlib
import json
import math
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from rich.console import Console

from examples.common import results
from examples.common.precision import is_half
from jmp_lite import Policy, get_policy
from jmp_lite.states import TooManySkippedStepsError

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
HEAD_WIDTH = 32  # of the transformers' attention


def parse_policies(text: str, *, use_autocast: bool = False) -> dict[str, Policy]:
    """Return the policies that `--policy` asks for, by name.

    Args:
      text: "all" `POLICIES`, or one policy.
      use_autocast: whether they are for autocast, which lowers float32 to half.

    Returns:
      Name to policy.

    Raises:
      typer.BadParameter: `text` is no policy, or none for autocast.
    """
    try:
        policies = {n: get_policy(n) for n in (POLICIES if text == "all" else [text])}
    except ValueError as error:
        raise typer.BadParameter(
            f"{error} Or all: {', '.join(POLICIES)}.", param_hint="'--policy'"
        ) from None
    for policy in policies.values():
        if use_autocast and not (
            is_half(policy) or policy.compute_dtype == jnp.float32
        ):
            raise typer.BadParameter(
                "autocast computes in float16 or bfloat16 (or leaves float32 as it "
                f"is), got {policy}.",
                param_hint="'--policy'",
            )
    return policies


def check_loss_scale(loss_scale: float) -> float:
    """Return `--loss-scale`: 0 (dynamic) or a power of two (static), as apex's scripts.

    Raises:
      typer.BadParameter: it is neither.
    """
    is_power_of_two = 0 < loss_scale < math.inf and math.frexp(loss_scale)[0] == 0.5
    if loss_scale == 0 or is_power_of_two:
        return loss_scale
    raise typer.BadParameter(
        f"expected 0 (dynamic) or a power of two, got {loss_scale:g}."
    )


def check_width(width: int) -> int:
    """Return `--width`, of attention whose heads have `HEAD_WIDTH`.

    Raises:
      typer.BadParameter: it is no multiple.
    """
    if width % HEAD_WIDTH:
        raise typer.BadParameter(f"expected a multiple of {HEAD_WIDTH}, got {width}.")
    return width


def make_out(out: Path) -> Path | None:
    """Return a folder for results, which now exists.

    Raises:
      typer.BadParameter: it holds results of committed code, and this code is not; or
        it cannot be made.
    """
    reason = results.why_not_into(out)
    if reason:
        raise typer.BadParameter(reason)
    return make_folder(out)


def make_folder(path: Path | None) -> Path | None:
    """Return a folder that now exists; None where none is asked for.

    Raises:
      typer.BadParameter: it cannot be made.
    """
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {path}: {error.strerror}.") from None
    return path


def versions() -> dict[str, str]:
    """Return the versions of the libraries that a training depends on."""
    return {m.__name__: m.__version__ for m in (jax, flax, optax, np)}


def check_settings(checkpoints: Path | None, settings: dict[str, Any]) -> None:
    """Write what a run is beside its checkpoints; refuse to go on with another one.

    Args:
      checkpoints: the folder, if there is one.
      settings: whatever the result depends on.

    Raises:
      typer.BadParameter: what is there was made with other settings.
    """
    if checkpoints is None:
        return
    path = checkpoints / "settings.json"
    text = json.dumps(settings, indent=1)
    if not path.exists():
        # Renamed when it is whole: a run may be stopped at any moment.
        path.with_suffix(".part").write_text(text)
        path.with_suffix(".part").rename(path)
    settings, saved = json.loads(text), json.loads(path.read_text())
    others = [
        f"{key} {saved.get(key)!r} (now {settings.get(key)!r})"
        for key in {**saved, **settings}
        if saved.get(key) != settings.get(key)
    ]
    if others:
        raise typer.BadParameter(
            f"{checkpoints} holds a run with other settings: {', '.join(others)}.",
            param_hint="'--checkpoints'",
        )


@contextlib.contextmanager
def stop_if_collapsed(console: Console) -> Iterator[None]:
    """Say why a run gets nowhere any more, and exit.

    Raises:
      typer.Exit: a run raised `TooManySkippedStepsError`.
    """
    try:
        yield
    except TooManySkippedStepsError as error:
        console.print(f"Stopped: {error}", style="red", markup=False)
        raise typer.Exit(1) from None


def slow_reasons(policies: Iterable[Policy]) -> list[str]:
    """Return a line for each policy that this device is slow at, saying why."""
    with warnings.catch_warnings():
        # Said once, under the table, instead of a warning before the run.
        warnings.simplefilter("ignore")
        reasons = [policy.check_device() for policy in policies]
    return [f"Mind: {reason}." for reason in reasons if reason]


PolicyOption = Annotated[
    str, typer.Option(help="all, or a policy: mixed_float16, p=f32,c=f16,o=f32 ...")
]
AutocastOption = Annotated[
    bool, typer.Option(help="Half precision by autocast, or cast by hand.")
]
LossScaleOption = Annotated[
    float,
    typer.Option(
        callback=check_loss_scale,
        help="0: dynamic; a power of two: static. For float16 only.",
    ),
]
StepsOption = Annotated[int, typer.Option(min=1, help="Training steps.")]
WidthOption = Annotated[
    int,
    typer.Option(
        min=HEAD_WIDTH,
        callback=check_width,
        help=f"Features; a multiple of {HEAD_WIDTH}.",
    ),
]
SeedOption = Annotated[int, typer.Option(min=0, help="The first seed.")]
SeedsOption = Annotated[int, typer.Option(min=1, help="How many seeds.")]
OutOption = Annotated[Path, typer.Option(callback=make_out, help="Where to write.")]
CheckpointsOption = Annotated[
    Path | None,
    typer.Option(
        callback=make_folder,
        help="Save here; the same command again goes on from what is there.",
    ),
]
SaveEveryOption = Annotated[
    int, typer.Option(min=1, help="Steps between two checkpoints.")
]
