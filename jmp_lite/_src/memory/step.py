"""`of_step`: what the program of a step takes, and what is in memory at its peak."""

import collections
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import jax

from jmp_lite._src import arguments, compat, dtypes, fp8, reports, trees
from jmp_lite._src.autocast.checks import check_function, takes_function
from jmp_lite._src.memory import classes as roles
from jmp_lite._src.memory import devices as targets
from jmp_lite._src.memory import hlo, liveness, program
from jmp_lite._src.memory.saved import total
from jmp_lite._src.reports import size

P = ParamSpec("P")

RESULTS = "results"


@dataclasses.dataclass(frozen=True)
class StepReport(reports.Report):
    """What `of_step` found: all bytes are those of one device.

    Attributes:
      device: what the step was compiled for.
      devices: how many of them.
      memory: what one has; None if that is not known.
      limit: the bytes of `fits`, or None.
      peak: the most that is in memory: arguments, results and temporaries. It is XLA's
        own figure, or their sum where that leaves out temporaries, as on CPUs, with the
        arguments that the step does not read, which XLA leaves out.
      arguments: the bytes of each class of arguments.
      parameter_count: how many parameters there are, on all devices together.
      results: bytes of results that are in no donated argument's memory.
      donated: bytes of arguments whose memory a result takes over.
      temporaries: what the program allocates beside arguments and results.
      live: what is in memory at the peak beside arguments and results, the largest
        first, in rows of `kind`, `layer`, `operation`, `dtype`, `arrays` and `bytes`.
      traffic: bytes that kernels read and write; loops by their trips.
      bytes_accessed: XLA's own count of them, with the bodies of loops once.
      flops: multiplications and additions in matrix products, on all devices together.
      counts: what else is counted in the program: kernels, casts, collectives, ...
    """

    device: str
    devices: int
    memory: int | None
    limit: int | None
    peak: int
    arguments: dict[str, int]
    parameter_count: int
    results: int
    donated: int
    temporaries: int
    live: tuple[liveness.LiveRow, ...]
    traffic: int
    bytes_accessed: int
    flops: int
    counts: dict[str, Any]

    _derived = ("fits", "by_class", "kernels", "bytes_a_parameter")

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the limit; None without a limit."""
        return None if self.limit is None else self.peak <= self.limit

    @property
    def kernels(self) -> int:
        """How many kernels the step runs."""
        return self.counts["kernels"]

    @property
    def bytes_a_parameter(self) -> float:
        """The bytes of parameters and optimiser state, for each parameter."""
        held = (self.arguments.get(x, 0) for x in (roles.PARAMETERS, roles.STATE))
        return self.devices * sum(held) / max(self.parameter_count, 1)

    @property
    def by_class(self) -> dict[str, int]:
        """The bytes at the peak, by class; what is not attributed is temporary.

        Results are those that donating arguments would save. XLA has temporaries in
        the memory of the others, as long as these are not computed.
        """
        found = {name: n for name, n in self.arguments.items() if n}
        for kind in liveness.KINDS:
            found[kind] = sum(row.bytes for row in self.live if row.kind == kind)
        rest = max(self.peak - sum(found.values()), 0)
        found[RESULTS] = min(rest, self.results)
        found[liveness.TEMPORARIES] += rest - found[RESULTS]
        return found

    @property
    def verdict(self) -> str:
        """The first line: whether it fits, or the peak."""
        each = f"each of {self.devices} × " if self.devices > 1 else ""
        on = f"on {each}{self.device}"
        if self.limit is None:
            of = f" of {size(self.memory)}" if self.memory else ""
            return f"peak: {size(self.peak)}{of} {on}"
        left = self.limit - self.peak
        name, largest = max(self.by_class.items(), key=lambda item: item[1])
        answer = f"yes, it fits: {size(self.peak)}, {size(left)} are left"
        if not self.fits:
            answer = f"no, it does not fit: {size(self.peak)}, {size(-left)} too much"
        return f"{answer}; largest: {name}, {size(largest)}; {on}"

    def _table(self, every):
        held = self.arguments | {RESULTS: self.by_class[RESULTS]}
        rows = [
            (name, "", "not donated" if name == RESULTS else "argument", "", "", n)
            for name, n in held.items()
            if n
        ]
        groups = collections.defaultdict(list)
        for row in self.live:
            layer = row.layer if every else ""
            groups[row.kind, layer, row.operation, row.dtype].append(row)
        for (kind, _, operation, dtype), found in groups.items():
            layer = reports.span(row.layer for row in found)
            arrays, n = sum(x.arrays for x in found), sum(x.bytes for x in found)
            rows.append((kind, layer, operation, dtype, f"{arrays}", n))
        rows.sort(key=lambda row: -row[-1])
        notes = [
            f"temporaries {size(self.temporaries)}",
            f"donated {size(self.donated)}",
            f"{self.bytes_a_parameter:.2f} bytes a parameter in parameters and state",
            f"{self.kernels} kernels",
            f"{self.traffic / 1e9:.3g} GB read and written",
            f"{self.flops:.3g} FLOPs in products",
        ]
        if products := self.counts["products"]:
            found = (f"{n} of {dtypes}" for dtypes, n in products.items())
            notes.append(f"products, by the dtypes of operands: {', '.join(found)}")
        if loops := self.counts["loops_counted_once"]:
            notes.append(f"{loops} loops, whose trips are not known, count once")
        return reports.Table(
            (self.verdict, "in memory at the peak:"),
            ("class", "layer", "op", "dtype", "×", "size", "share"),
            [
                (*cells, size(n), reports.percent(n / max(self.peak, 1)))
                for *cells, n in rows
                if every or n > 0.001 * self.peak
            ],
            numbers=("×", "size", "share"),
            caption="; ".join(notes),
        )


@takes_function
def of_step(
    step: Callable[P, object],
    device: str | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    devices: int | None = None,
    fits: str | None = None,
    classes: Mapping[str | int, str] | None = None,
) -> Callable[P, StepReport]:
    """Return a function of the same arguments that says what its program needs.

    The step is compiled, for a device that need not be there, and not run.

    Args:
      step: the function: a train step, plain or jitted (by `jax.jit`, `nnx.jit` or
        `eqx.filter_jit`). Numbers and flags are constants, unless JAX or nnx jits it.
      device: what to compile for: `"h100"`, `"h200"`, `"b200"`, `"a100"`, `"v100"`,
        `"l4"`, `"rtx4090"`, `"v5e"`, `"v5p"`, `"v6e"`, `"cpu"`; None: this machine.
        GPUs need `pip install "jmp-lite[memory-gpu]"`, TPUs `"jmp-lite[memory-tpu]"`.
      donate_argnums: the arguments whose memory results take over, as in `jax.jit`; a
        step that JAX or nnx jits has its own.
      devices: how many, if arguments have shardings over so many: on a mesh from
        `mesh`, or on any other of that shape.
      fits: a limit, such as `"24GB"` or `"80GiB"`: the report begins with yes or no.
        For a card that has no name here, take the next older one: `"v100"` with
        `fits="16GB"` for a T4.
      classes: what arguments are, by name or index, where they do not tell:
        `{"ema": "other state"}`, or `"parameters"`, `"optimiser state"`, `"batch"`.

    Returns:
      A function that returns a `StepReport`; arguments may be
      `jax.ShapeDtypeStruct`s.

    Raises:
      TypeError: `step` is no function, JAX cannot trace it, or an argument is missing.
      ValueError: a device, a limit or a class is not known; `devices` is not the number
        of devices that the arguments are sharded over.
      ModuleNotFoundError: the compiler is not installed; it says how to install it.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> tx = optax.adam(1e-3)
      >>> def step(params, opt_state, x):
      ...     grads = jax.grad(lambda w: jnp.mean((x @ w["w"]) ** 2))(params)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state
      >>> params = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
      >>> opt_state = jax.eval_shape(tx.init, params)
      >>> x = jax.ShapeDtypeStruct((8, 64), "float32")
      >>> measure = of_step(step, donate_argnums=(0, 1), fits="1MB")
      >>> report = measure(params, opt_state, x)
      >>> report.fits, report.arguments["parameters"], report.bytes_a_parameter
      (True, 16384, 12.0009765625)
    """
    check_function(step, "of_step")
    given_classes = arguments.mapping(classes, "classes", "arguments to what they are")
    for name, value in given_classes.items():
        arguments.one_of(value, f"the class of the argument {name!r}", roles.CLASSES)
    donated = arguments.positions(donate_argnums, "donate_argnums", least=0)
    limit = None if fits is None else parse_bytes(fits)
    target = None if device is None else targets.find(device)

    def measure(*args: P.args, **kwargs: P.kwargs) -> StepReport:
        # Under `jax.disable_jit`, too, it is the program that `jit` compiles.
        with warnings.catch_warnings(), jax.disable_jit(False):
            if device is not None:  # what is slow here need not be slow there
                warnings.filterwarnings("ignore", module=fp8.__name__)
            built = program.build(step, args, kwargs, device, devices, donated)
        given = built.args, built.kwargs
        if not jax.tree.leaves(built.result):
            raise ValueError(
                "The step returns no array, and XLA compiles what is returned alone. "
                "Return what it computes, such as the new parameters and the loss, or "
                "pass nnx.jit(step) if it updates nnx modules in place."
            )
        names = roles.classes_of_leaves(step, *given, built.result, given_classes)
        arrays = [_of_jax(x) for x in jax.tree.leaves(given) if trees.is_array(x)]
        sizes = [dtypes.packed(program.shard_bytes(x), x.dtype) for x in arrays]
        held = {(x.shape, x.dtype): n for x, n in zip(arrays, sizes, strict=True)}
        unread = [held.get(x, 0) for x in _not_read(built.compiled)]
        pairs = zip(names, arrays, strict=True)
        parameters = [x for name, x in pairs if name == roles.PARAMETERS]
        parameter_sizes = {
            program.shard_bytes(x) // x.dtype.itemsize for x in parameters
        }
        memory = built.compiled.memory_analysis()
        costs = compat.cost_analysis(built.compiled)
        instructions = hlo.parse(built.text)
        counts = hlo.count(built.text, instructions)._asdict()
        here = f"this machine ({jax.devices()[0].device_kind})"
        return StepReport(
            device=target.title if target else here,
            devices=built.count,
            memory=target.memory if target else None,
            limit=limit,
            peak=peak_of(memory) + sum(unread),
            arguments=total(zip(names, sizes, strict=True)),
            parameter_count=sum(x.size for x in parameters),
            results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            donated=memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            live=liveness.at_peak(instructions, parameter_sizes),
            traffic=counts["traffic"],
            # A program that hands on what it is given has none.
            bytes_accessed=int(costs.get("bytes accessed", 0)),
            flops=built.flops,
            counts=counts,
        )

    return measure


def _of_jax(x: Any) -> Any:
    """Return the shape of an array, in the dtype that it has for JAX."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=getattr(x, "sharding", None))


def _not_read(compiled: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Return the shapes and dtypes of arguments that a program leaves out, unread."""
    flat = functools.partial(jax.tree.leaves, is_leaf=lambda x: x is None)
    pairs = zip(flat(compiled.in_avals), flat(compiled.input_shardings), strict=True)
    return [(x.shape, x.dtype) for x, at in pairs if at is None and x is not None]


def peak_of(memory: Any) -> int:
    """Return the peak that XLA gives, with what is temporary.

    XLA leaves that out on CPUs, and for GPUs in JAX 0.10.0: its peak is then that of
    arguments and results. From JAX's compilation cache it is 0.
    """
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    held -= memory.alias_size_in_bytes
    peak, temporary = memory.peak_memory_in_bytes, memory.temp_size_in_bytes
    return held + temporary if peak - held < temporary / 2 else peak


def parse_bytes(text: str) -> int:
    """Return the number of bytes that a limit names; raise if it has no unit.

    Examples:
      >>> parse_bytes("24GB"), parse_bytes("1.5 GiB"), parse_bytes("1kB")
      (24000000000, 1610612736, 1000)
    """
    form = r"([0-9]*\.?[0-9]+) ?([KMGT])(I?)B"
    found = re.fullmatch(form, str(text).upper())
    if found is None or not float(found[1]):
        raise ValueError(
            f'Expected a limit with its unit, such as fits="24GB" or "80GiB", got '
            f"{text!r}."
        )
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** ("KMGT".index(found[2]) + 1))
