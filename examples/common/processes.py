"""One program in several processes: started on this machine, or found on many hosts."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax
import typer


def launch(processes: int, devices: int) -> int:
    """Run this very command in processes on this machine's CPU; stop all if one fails.

    Args:
      processes: how many.
      devices: CPU devices of each.

    Returns:
      What to exit with.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, *sys.orig_argv[1:], "--coordinator", coordinator]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    # So that the processes are stopped below when this one is asked to stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # They inherit that Ctrl-C, which a terminal sends to all, is for this one alone.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    children = [
        subprocess.Popen([*command, "--process", str(i)], env=environment)
        for i in range(processes)
    ]
    signal.signal(signal.SIGINT, interrupt)
    with ThreadPoolExecutor(processes) as pool:
        ends = {pool.submit(child.wait): i for i, child in enumerate(children)}
        try:
            for end in as_completed(ends):
                code = end.result()
                if code:
                    how = f"signal {-code}" if code < 0 else f"exit status {code}"
                    print(
                        f"Process {ends[end]} of {processes} ended with {how}; the "
                        "others, which would wait for it, are stopped.",
                        file=sys.stderr,
                    )
                    return 1
        finally:
            for child in children:
                child.kill()
    return 0


def join(
    processes: int, process: int | None, coordinator: str | None, *, hosts: bool
) -> None:
    """Make this process one of several, or leave it alone.

    Raises:
      typer.BadParameter: arguments that do not go together, or other processes than
        they say.
    """
    if (process is None) != (coordinator is None):
        raise typer.BadParameter("--process and --coordinator go together.")
    if process is not None:
        if hosts:
            raise typer.BadParameter("expected --hosts or --coordinator, got both.")
        if not 0 <= process < processes:
            raise typer.BadParameter(
                f"expected less than --processes, which is {processes}; got {process}.",
                param_hint="'--process'",
            )
        jax.distributed.initialize(coordinator, processes, process)
    elif hosts:
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise typer.BadParameter(
                f"JAX finds no TPU pod slice, Slurm or Open MPI here ({error}): say "
                "--coordinator, --processes and --process.",
                param_hint="'--hosts'",
            ) from None
    if processes and jax.process_count() != processes:
        raise typer.BadParameter(
            f"expected {processes} processes, got {jax.process_count()}.",
            param_hint="'--processes'",
        )
