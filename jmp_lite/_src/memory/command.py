"""`jmp-lite memory package.module:make_step`: `of_step` on the command line."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

import jax

from jmp_lite._src import extras, reports
from jmp_lite._src.memory.devices import DEVICES
from jmp_lite._src.memory.step import of_step

DOES_NOT_FIT = 3
"""The exit status if the step needs more than the limit."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns the step, and a tuple of its "
        "arguments or of their shapes",
    )
    command.add_argument(
        "--device", choices=list(DEVICES), help="compile for it (default: this machine)"
    )
    command.add_argument(
        "--devices", type=int, help="how many, if the arguments are sharded"
    )
    command.add_argument(
        "--fits",
        metavar="SIZE",
        help=f"a limit, such as 24GB: the exit status is {DOES_NOT_FIT} above it",
    )
    command.add_argument(
        "--donate",
        type=int,
        nargs="+",
        default=(),
        metavar="ARGUMENT",
        help="the indices of the arguments whose memory results take over",
    )
    command.add_argument("--every", action="store_true", help="print every row")
    command.add_argument(
        "--json", action="store_true", help="print JSON instead of a table"
    )


def run(options: argparse.Namespace) -> int:
    if options.device and not os.environ.get("JAX_PLATFORMS"):
        # Nothing here needs an accelerator, and one that is absent would be looked for.
        jax.config.update("jax_platforms", "cpu")
    sys.path.insert(0, os.getcwd())
    _show(f"tracing {options.target}")
    step, args = load(options.target)
    _show(f"compiling for {options.device or 'this machine'}")
    measure = of_step(
        step,
        options.device,
        donate_argnums=options.donate,
        devices=options.devices,
        fits=options.fits,
    )
    report = measure(*args)
    if options.json:
        print(report.to_json())
    elif options.every:
        with extras.needed("numerics"):
            import rich
        rich.print(report.table(every=True))
    else:
        print(report)
    return DOES_NOT_FIT if report.fits is False else 0


def load(target: str) -> tuple[Callable[..., object], Sequence[object]]:
    """Return the step and the arguments that `"package.module:function"` returns.

    Mistakes in the name raise a `ValueError`; what the function raises stays as it is.
    """
    name, _, attribute = target.partition(":")
    if not attribute or name.endswith(".py") or "/" in name or "\\" in name:
        raise ValueError(
            f"Expected package.module:function, got {target!r}: write "
            "my_model:make_step, in the folder of my_model.py."
        )
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"There is no module {error.name!r} here.") from None
        raise
    make = getattr(module, attribute, None)
    if not callable(make):
        raise ValueError(f"{name} has no function {attribute!r}.")
    match made := make():
        case (step, tuple() | list() as args) if callable(step):
            return step, args
    parts = made if isinstance(made, tuple) else (made,)
    got = ", ".join(type(part).__name__ for part in parts)
    raise ValueError(
        f"Expected that {target} returns a step and a tuple of its arguments, got "
        f"{got}: write return step, (params, opt_state, batch)."
    )


def _show(text: str) -> None:
    """Show on stderr what goes on, if that is a terminal."""
    if sys.stderr.isatty():
        print(f"{reports.printable(text)} ...", file=sys.stderr, flush=True)
