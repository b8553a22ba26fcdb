"""Record how other libraries move their loss scale, for `test_loss_scale_machine.py`.

Runs each peer for real: a parameter, a gradient that is finite or not, the peer's own
step. Not a part of the test suite: it needs an environment of its own, and is run by
hand when a peer or a sequence is added::

    python -m venv peers
    peers/bin/pip install jmp==0.0.4 torch keras flax
    KERAS_BACKEND=torch peers/bin/python tests/tools/record_peers.py

It rewrites `tests/data/peers.json`. Per run: the peer, its arguments, ours that should
do the same, and sequences of steps ("1" is a finite one, "0" is not) with the scale
after each step, as pairs [how many steps, scale]. These scales stay in the range where
every peer is defined (torch and keras have no floor, and none has our ceiling); what a
peer does beyond it is recorded under "extremes".
"""

import importlib
import itertools
import json
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Any

STEPS = 48
OUTPUT = pathlib.Path(__file__).parents[1] / "data" / "peers.json"


def sequences(period: int) -> dict[str, str]:
    """Return named sequences; some are made to upset a machine of this period."""
    rng = random.Random(period)
    named = {
        "finite": "1" * STEPS,
        "non-finite": "0" * STEPS,
        "alternating": "10" * STEPS,
        "one too few": ("1" * (period - 1) + "0") * STEPS,
        "just enough": ("1" * period + "0") * STEPS,
        "pairs of bad": ("1" * period + "00") * STEPS,
        "burst": "0" * 7 + "1" * (STEPS - 14) + "0" * 7,
    }
    for share in (2, 5, 10):
        draws = ("0" if rng.randrange(share) == 0 else "1" for _ in range(STEPS))
        named[f"random, 1 bad in {share}"] = "".join(draws)
    return {name: bits[:STEPS] for name, bits in named.items()}


def gradients(bits: str) -> Iterator[float]:
    """Yield a gradient per step: 1, or by turns inf, -inf and NaN."""
    bad = [float("inf"), float("-inf"), float("nan")]
    for step, bit in enumerate(bits):
        yield 1.0 if bit == "1" else bad[step % 3]


# A peer's step: takes a gradient, returns the scale after it.
Step = Callable[[float], float]


def torch_step(**arguments: Any) -> Step:
    """`torch.amp.GradScaler`."""
    torch = importlib.import_module("torch")
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", **arguments)

    def step(gradient):
        optimizer.zero_grad()
        scaler.scale(parameter * gradient).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    return step


def keras_step(**arguments: Any) -> Step:
    """`keras.optimizers.LossScaleOptimizer`."""
    keras = importlib.import_module("keras")
    variable = keras.Variable(1.0)
    inner = keras.optimizers.SGD(0.0)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, **arguments)
    optimizer.build([variable])

    def step(gradient):
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        return float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))

    return step


def jmp_step(**arguments: Any) -> Step:
    """`jmp.DynamicLossScale`."""
    jmp, jnp = importlib.import_module("jmp"), importlib.import_module("jax.numpy")
    # jmp wants arrays of the right dtype, as its own examples do not.
    floats = {k: jnp.float32(v) for k, v in arguments.items() if "scale" in k}
    scales = [jmp.DynamicLossScale(**(arguments | floats))]

    def step(gradient):
        scales.append(scales[-1].adjust(jmp.all_finite(jnp.float32(gradient))))
        return float(scales[-1].loss_scale)

    return step


def flax_step(**arguments: Any) -> Step:
    """`flax.training.dynamic_scale.DynamicScale`."""
    module = importlib.import_module("flax.training.dynamic_scale")
    jnp = importlib.import_module("jax.numpy")
    scales = [module.DynamicScale(**arguments)]

    def step(gradient):
        fun = scales[-1].value_and_grad(lambda x, g: x * g)
        scales.append(fun(jnp.float32(1), jnp.float32(gradient))[0])
        return float(scales[-1].scale)

    return step


PEERS = {"torch": torch_step, "keras": keras_step, "jmp": jmp_step, "flax": flax_step}
# The widest bounds that ours can have.
CEILING = {"max_loss_scale": 2.0**126}
UNBOUNDED = {"min_loss_scale": 0.0} | CEILING
# A peer, its arguments, and ours that should do the same.
Run = tuple[str, dict[str, Any], dict[str, Any]]


def torch_run(scale: float, period: int, factor: float, backoff: float) -> Run:
    theirs = {"init_scale": scale, "growth_interval": period, "growth_factor": factor}
    theirs |= {"backoff_factor": backoff}
    ours = {"loss_scale": scale, "period": period, "factor": factor}
    return "torch", theirs, ours | {"backoff_factor": backoff, **UNBOUNDED}


def keras_run(scale: float, period: int) -> Run:
    theirs = {"initial_scale": scale, "dynamic_growth_steps": period}
    return "keras", theirs, {"loss_scale": scale, "period": period, **UNBOUNDED}


def jmp_run(scale: float, period: int, factor: int, floor: float) -> Run:
    theirs = {"loss_scale": scale, "period": period, "factor": factor}
    theirs |= {"min_loss_scale": floor}
    return "jmp", theirs, theirs | CEILING


def flax_run(scale: float, interval: int, factor: float, floor: float) -> Run:
    theirs = {"scale": scale, "growth_interval": interval, "growth_factor": factor}
    theirs |= {"backoff_factor": 1 / factor, "minimum_scale": floor}
    # Flax grows on the step after `growth_interval` clean ones.
    ours = {"loss_scale": scale, "period": interval + 1, "factor": factor}
    return "flax", theirs, ours | {"min_loss_scale": floor, **CEILING}


RUNS = [
    torch_run(2.0**16, 5, 2.0, 0.5),
    torch_run(2.0**16, 1, 2.0, 0.5),
    torch_run(1000.0, 4, 1.5, 0.7),
    torch_run(2.0**16, 3, 4.0, 0.5),
    keras_run(2.0**15, 5),
    keras_run(2.0**15, 1),
    jmp_run(2.0**15, 5, 2, 1.0),
    jmp_run(2.0**15, 4, 4, 0.25),
    jmp_run(10.0, 3, 3, 0.37),
    flax_run(2.0**16, 4, 2.0, 1.0),
]


# So many steps take a scale of 2**15 out of float32's range, one by one.
FAR = 300
EXTREMES = [
    torch_run(2.0**15, 1, 2.0, 0.5),
    keras_run(2.0**15, 1),
    jmp_run(2.0**15, 1, 2, 0.0),
]


def scales_of(peer: str, bits: str, arguments: dict[str, Any]) -> list[float]:
    """Return the scale of a peer after each step."""
    step = PEERS[peer](**arguments)
    return [step(gradient) for gradient in gradients(bits)]


def run_lengths(scales: list[float]) -> list[list[float]]:
    """Return the scales as pairs of how many steps, and the scale."""
    groups = itertools.groupby(scales)
    return [[len(list(group)), scale] for scale, group in groups]


def main() -> None:
    """Run every peer on every sequence and write the recording."""
    metadata = importlib.import_module("importlib.metadata")
    recorded = [
        {
            "peer": peer,
            "theirs": theirs,
            "ours": ours,
            "sequences": {
                name: {
                    "finite": bits,
                    "scales": run_lengths(scales_of(peer, bits, theirs)),
                }
                for name, bits in sequences(ours["period"]).items()
            },
        }
        for peer, theirs, ours in RUNS
    ]
    names = ("torch", "keras", "jmp", "flax", "jax")
    extremes = [
        {
            "peer": peer,
            # As text: JSON has no inf.
            "after_finite": repr(scales_of(peer, "1" * FAR, theirs)[-1]),
            "after_non_finite": repr(scales_of(peer, "0" * FAR, theirs)[-1]),
        }
        for peer, theirs, _ in EXTREMES
    ]
    head = {
        "recorded_by": "tests/tools/record_peers.py",
        "versions": {name: metadata.version(name) for name in names},
        "extremes": extremes,
    }
    lines = ",\n".join(json.dumps(run) for run in recorded)
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(f'{json.dumps(head)[:-1]}, "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
