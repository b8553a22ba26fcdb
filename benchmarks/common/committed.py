"""The committed results: which there are, and the command that measures each."""

import contextlib
import json
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from examples.common.results import COMMITTED

_OUT = "--out benchmarks/results"
_PROGRAMS = "python -m benchmarks.programs"
# Models whose steps were timed on a GPU, and how.
TIMED = {
    "transformer": "--model transformer --dtype bfloat16 --rounds 10",
    # Stopped after the first model, when the time on the device was up.
    "cnn": "--model cnn --model unet --model vit --model llama --model moe "
    "--model lstm --model llama_in_a_scan --model mlp --dtype bfloat16 --rounds 15",
    "unet": "--model unet --dtype bfloat16 --rounds 10",
    "vit": "--model vit --dtype bfloat16 --rounds 10",
    "llama": "--model llama --dtype bfloat16 --rounds 10",
}
# Every committed result, and the command that measures it.
RESULTS: dict[str, str] = {
    **{
        f"cpu/{folder}/results.json": (
            f"python -m examples.{folder.partition('-')[0]} --seeds 3 "
            f"{options}{_OUT}/cpu/{folder}"
        )
        for folder, options in (
            ("digits", ""),
            ("digits-autocast", "--autocast "),
            ("resnet", ""),
            ("transformer", ""),
            ("transformer-with_policy", "--no-autocast "),
        )
    },
    **{
        f"cpu/{name}.json": f"python -m benchmarks.{name} {options}{_OUT}/cpu"
        for name, options in (
            ("step_overhead", ""),
            ("convergence", ""),
            ("advised", "--seeds 8 "),
            ("fp8_accuracy", ""),
            ("storage_accuracy", ""),
            ("many_leaves", ""),
            ("autocast_trace", "--rounds 7 "),
            ("tree_stats", ""),
            ("checkpoint_save", "--folder /dev/shm "),
        )
    },
    "h100/step_overhead.json": (
        "python -m benchmarks.step_overhead --leaves 1 --leaves 16 --rounds 30 "
        f"--steps 20 {_OUT}/h100"
    ),
    **{
        f"h100/train_step-{model}.json": (
            f"python -m benchmarks.train_step {options} {_OUT}/h100"
        )
        for model, options in TIMED.items()
    },
    **{
        f"{device}-compiled/programs-ci.json": f"{_PROGRAMS} {_OUT}"
        for device in ("h100", "a100", "v100", "v5e")
    },
    **{
        f"{device}-compiled/programs-full.json": (
            f"{_PROGRAMS} --device {device} --size full {_OUT}"
        )
        for device in ("h100", "v5e")
    },
    **{
        f"{device}-compiled/memory.json": (
            f"python -m benchmarks.memory --device {device} {options}{_OUT}"
        )
        # To compile for a TPU takes minutes for each row.
        for device, options in (
            ("h100", ""),
            ("v5e", "--layers 2 --width 1024 --heads 8 --vocabulary 8192 "),
        )
    },
    "rtx4090-compiled/small_gpu.json": f"python -m benchmarks.small_gpu {_OUT}",
}


# What `loaded` collects: the keys of a dict are in order, and each is there once.
_NAMES: ContextVar[dict[str, None]] = ContextVar("names of loaded results")


@contextlib.contextmanager
def loaded() -> Iterator[dict[str, None]]:
    """Collect the names of the results that are loaded inside, each once."""
    token = _NAMES.set({})
    try:
        yield _NAMES.get()
    finally:
        _NAMES.reset(token)


def load(name: str) -> dict[str, Any]:
    """Return a committed result.

    Raises:
      KeyError: nothing is said to measure it.
      FileNotFoundError: there is none.
    """
    if name not in RESULTS:
        raise KeyError(f"expected one of {', '.join(RESULTS)}, got {name!r}")
    _NAMES.get({})[name] = None
    return json.loads((COMMITTED / name).read_text(encoding="utf-8"))
