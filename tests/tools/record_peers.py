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
UNBOUNDED = {"min_loss_scale": 0.0, "max_loss_scale": 2.0**126}
# The names of their arguments and of ours that do the same, in order.
ARGUMENTS = {
    "torch": (
        "init_scale growth_interval growth_factor backoff_factor",
        "loss_scale period factor backoff_factor",
    ),
    "keras": ("initial_scale dynamic_growth_steps", "loss_scale period"),
    "jmp": (
        "loss_scale period factor min_loss_scale",
        "loss_scale period factor min_loss_scale",
    ),
    "flax": (
        "scale growth_interval growth_factor minimum_scale",
        "loss_scale period factor min_loss_scale",
    ),
}


def run(peer: str, *values: float) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return a peer, its arguments, and ours that should do the same."""
    theirs, ours = (dict(zip(x.split(), values, strict=True)) for x in ARGUMENTS[peer])
    if peer == "flax":
        theirs["backoff_factor"] = 1 / theirs["growth_factor"]
        ours["period"] += 1  # it grows on the step after `growth_interval` clean ones
    return peer, theirs, UNBOUNDED | ours


RUNS = [
    run("torch", 2.0**16, 5, 2.0, 0.5),
    run("torch", 2.0**16, 1, 2.0, 0.5),
    run("torch", 1000.0, 4, 1.5, 0.7),
    run("torch", 2.0**16, 3, 4.0, 0.5),
    run("keras", 2.0**15, 5),
    run("keras", 2.0**15, 1),
    run("jmp", 2.0**15, 5, 2, 1.0),
    run("jmp", 2.0**15, 4, 4, 0.25),
    run("jmp", 10.0, 3, 3, 0.37),
    run("flax", 2.0**16, 4, 2.0, 1.0),
]


# So many steps take a scale of 2**15 out of float32's range, one by one.
FAR = 300
EXTREMES = [
    run("torch", 2.0**15, 1, 2.0, 0.5),
    run("keras", 2.0**15, 1),
    run("jmp", 2.0**15, 1, 2, 0.0),
]


def scales_of(peer: str, bits: str, arguments: dict[str, Any]) -> list[list[float]]:
    """Return the scales of a peer as pairs of how many steps, and the scale."""
    step = PEERS[peer](**arguments)
    groups = itertools.groupby(step(gradient) for gradient in gradients(bits))
    return [[len(list(group)), scale] for scale, group in groups]


def main() -> None:
    """Run every peer on every sequence and write the recording."""
    metadata = importlib.import_module("importlib.metadata")
    head = {
        "recorded_by": "tests/tools/record_peers.py",
        "versions": {
            name: metadata.version(name)
            for name in ("torch", "keras", "jmp", "flax", "jax")
        },
        "extremes": [
            {
                "peer": peer,
                # As text: JSON has no inf.
                "after_finite": repr(scales_of(peer, "1" * FAR, theirs)[-1][1]),
                "after_non_finite": repr(scales_of(peer, "0" * FAR, theirs)[-1][1]),
            }
            for peer, theirs, _ in EXTREMES
        ],
    }
    lines = []
    for peer, theirs, ours in RUNS:
        recorded = {
            name: {"finite": bits, "scales": scales_of(peer, bits, theirs)}
            for name, bits in sequences(ours["period"]).items()
        }
        found = {"peer": peer, "theirs": theirs, "ours": ours, "sequences": recorded}
        lines.append(json.dumps(found))
    OUTPUT.parent.mkdir(exist_ok=True)
    runs = ",\n".join(lines)
    OUTPUT.write_text(f'{json.dumps(head)[:-1]}, "runs": [\n{runs}\n]}}\n')


if __name__ == "__main__":
    main()
