"""The command line: `jmp-lite doctor`, or `python -m jmp_lite doctor`; `memory`."""

import argparse
import functools
import sys
from collections.abc import Sequence

import jmp_lite
from jmp_lite._src import doctor, extras, reports
from jmp_lite._src.jaxprs import sources
from jmp_lite._src.memory import command as memory_command


def main(args: Sequence[str] | None = None, prog: str = "jmp-lite") -> int:
    """Run the command line, that of this process by default; return its exit status."""
    parser = _parser(prog)
    options = parser.parse_args(args)
    if "run" not in options:
        parser.print_help()
        return 0
    try:
        return options.run(options) or 0
    except (ModuleNotFoundError, RuntimeError, TypeError, ValueError) as error:
        if sources.is_of_user(error):
            raise
        print(reports.printable(str(error), keep="\n"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog, description="Mixed precision for JAX.", allow_abbrev=False
    )
    parser.add_argument(
        "--version", action="version", version=f"jmp_lite {jmp_lite.__version__}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add = functools.partial(commands.add_parser, allow_abbrev=False)

    text = "Measure half precision on this machine and recommend a policy."
    command = add("doctor", help=text, description=text)
    command.set_defaults(run=_doctor)
    command.add_argument(
        "--json", action="store_true", help="print JSON instead of tables"
    )
    command.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="approximate time for measurements (default: 10)",
    )

    text = "Compile a train step, and say what it needs of a device's memory."
    command = add("memory", help=text, description=text)
    command.set_defaults(run=memory_command.run)
    memory_command.add_arguments(command)

    text = "Print a script that completes the arguments of jmp-lite in a shell."
    in_bash = f'{text} In bash: eval "$(jmp-lite completion bash)"'
    command = add("completion", help=text, description=in_bash)
    command.set_defaults(run=_completion)
    command.add_argument("shell", choices=["bash", "zsh", "fish"])
    return parser


def _doctor(options: argparse.Namespace) -> None:
    show = _show_progress if sys.stderr.isatty() else lambda share: None
    diagnosis = doctor.diagnose(seconds=options.seconds, on_progress=show)
    print(diagnosis.to_json() if options.json else diagnosis)


def _show_progress(share: float) -> None:
    """Show on stderr how much is done, so that stdout holds the result only."""
    line = f"timing matrix products: {share:.0%}" if share < 1 else ""
    print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _completion(options: argparse.Namespace) -> None:
    with extras.needed("completion"):
        import shtab
    print(shtab.complete(_parser("jmp-lite"), options.shell))


if __name__ == "__main__":
    sys.exit(main(prog="python -m jmp_lite"))
