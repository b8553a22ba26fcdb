"""Arguments that the examples share: read, checked, refused with a reason."""

import math
import warnings
from collections.abc import Iterable
from pathlib import Path

import jax.numpy as jnp
import typer

from examples.common.precision import is_half
from jmp_lite import Policy, get_policy


def parse_policies(
    text: str, names: Iterable[str], *, use_autocast: bool
) -> dict[str, Policy]:
    """Return the policies that `--policy` asks for, by name.

    Args:
      text: "all", or one policy.
      names: what "all" stands for.
      use_autocast: whether they are for autocast, which lowers float32 to half.

    Returns:
      Name to policy.

    Raises:
      typer.BadParameter: `text` is no policy, or none for autocast.
    """
    try:
        policies = {n: get_policy(n) for n in (names if text == "all" else [text])}
    except ValueError as error:
        raise typer.BadParameter(
            f"{error} Or all: {', '.join(names)}.", param_hint="'--policy'"
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


def make_folder(path: Path) -> Path:
    """Return `--out`, a folder that now exists.

    Raises:
      typer.BadParameter: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {path}: {error.strerror}.") from None
    return path


def slow_reasons(policies: Iterable[Policy]) -> list[str]:
    """Return why this device is slow at these policies; nothing where it is fast."""
    with warnings.catch_warnings():
        # Said once, under the table, instead of a warning before the run.
        warnings.simplefilter("ignore")
        reasons = [policy.check_device() for policy in policies]
    return [reason for reason in reasons if reason]
