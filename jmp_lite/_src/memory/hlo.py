"""What an optimised program does, counted in its text.

    %body (arg: (s32[], f32[64,256], f32[16,256,256])) -> ... { ... }
    ENTRY %main (...) { ... while(%state), body=%body, known_trip_count 16 ... }

The kernels, the traffic and the collectives of a loop's body count as often as it runs.
"""

import collections
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

# "%name = shape opcode(operands), ...": the shape may be a tuple, and what is called in
# its layouts is upper case ("T(8,128)").
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ?\b([a-z][a-z0-9-]*)\((.*?)\)(?:, |$)"
)
_ARRAY = re.compile(r"\b(pred|[a-z]+([0-9]+)\w*)\[([0-9,]*)\](\{[^}]*\})?")
_REFERENCE = re.compile(r"%([\w.-]+)")
# The computations that an instruction runs, or a list of them.
_CALLED = re.compile(
    r"\b(?:calls|to_apply|condition|body|true_computation|false_computation|scatter"
    r"|branch_computations)=\{?((?:%[\w.-]+(?:, )?)+)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ALIAS = re.compile(r"\{[0-9, ]*\}: \([0-9]+, \{[0-9, ]*\}, (?:may|must)-alias\)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"([0-9]+)"')
_NUMBER = re.compile(r"\bparameter\(([0-9]+)\)")
_SCRATCH = "S(1)"  # a TPU's memory on the chip, in a layout

# Names for values, that no device has to do anything about.
_FREE = "parameter constant tuple get-tuple-element bitcast after-all while".split()
_FREE_CALLS = re.compile(
    r'custom_call_target="(ConcatBitcast|AssumeGatherIndicesInBound'
    r'|GatherScatterIndicesBitpacked|Sharding)"'
)
_READ, _UPDATE = "dynamic-slice", "dynamic-update-slice"
_COLLECTIVES = (
    "all-gather all-reduce reduce-scatter all-to-all collective-permute".split()
)
_SUMS = "reduce reduce-window scatter select-and-scatter".split()
_PRODUCTS = re.compile(
    r' (dot|convolution)\(|custom_call_target="__(cublas|cudnn\$conv)'
)
_HOST = re.compile(
    r" (infeed|outfeed|send|recv)\(|"
    r'custom_call_target="[^"]*([Cc]allback|[Hh]ost)[^"]*"'
)
# What a TPU does piece by piece beside other work is in several fusions. Its channel
# alone does not tell it: all collectives of a `shard_map` have channel 1.
_CHANNEL = re.compile(r"channel_id=[0-9]+")
_METADATA = re.compile(r"metadata=\{[^}]*\}")


class Array(NamedTuple):
    """An array of a shape."""

    dtype: str
    elements: int
    bytes: int
    is_scalar: bool
    is_scratch: bool

    @property
    def size(self) -> int:
        """Its bytes in the device's main memory."""
        return 0 if self.is_scratch else self.bytes


class Instruction(NamedTuple):
    """A line of a program."""

    computation: str  # the name of the one that it is in
    is_root: bool  # whether it is the result of its computation
    name: str
    arrays: tuple[Array, ...]  # its results
    opcode: str
    operands: list[str]  # the names of what it reads
    called: list[str]  # the names of the computations that it runs
    op_name: str  # the name stack of what it is made of, or ""
    line: str  # all of it

    @property
    def size(self) -> int:
        """The bytes of its results in the device's main memory."""
        return sum(array.size for array in self.arrays)


class Counts(NamedTuple):
    """What a program does.

    Attributes:
      kernels: what the device is told to do, one after the other: instructions of the
        entry computation and of loops, these by their trips, but names, scalars by
        themselves, collectives, and copies that go on beside the others.
      casts: conversions to a floating dtype, inside of kernels too.
      half_sums: sums of half terms to a half sum: reductions, scatters and sums over
        windows, inside of kernels too, but not collectives. A TPU rounds some float32
        sums as it writes them; those are not meant.
      conditionals: branches.
      host_transfers: what waits for the host.
      aliased: arguments whose memory a result takes over.
      traffic: bytes that kernels and copies, those in loops by their trips, read from
        and write to the device's main memory; of what is sliced or updated at an index,
        the slice. What a TPU fetches ahead of time, XLA's own count has four times (a
        copy) or five (slices that are joined); this one has it once.
      collectives: bytes that collectives leave on a device, by "opcode dtype"; those in
        loops by their trips. A TPU sums float16 two by two, in u32.
      collective_calls: how many collectives are run, by opcode. Several arrays that are
        sent together are one.
      products: matrix products and convolutions, by the dtypes of both operands, inside
        of kernels too: "f8e5m2 f8e4m3fn". An operand that is cast before the product
        has the dtype it is cast to. Attention in one kernel of cuDNN is not seen.
      loops_counted_once: how many loops there are whose trips are not known.
    """

    kernels: int
    casts: int
    half_sums: int
    conditionals: int
    host_transfers: int
    aliased: int
    traffic: int
    collectives: dict[str, int]
    collective_calls: dict[str, int]
    products: dict[str, int]
    loops_counted_once: int


def parse(text: str) -> list[Instruction]:
    """Return the instructions of the text of an HLO module, in their order.

    The entry computation is the last: a caller stands below what it calls.
    """
    found, computation = [], ""
    op_names: dict[str, str] = {}  # of instructions, and of computations
    for line in text.splitlines()[1:]:
        if line and not line[0].isspace():
            computation = line.removeprefix("ENTRY ").lstrip("%").partition(" ")[0]
        elif match := _INSTRUCTION.match(line):
            name, shape, opcode, inputs = match.groups()
            operands = _REFERENCE.findall(inputs)
            called = _REFERENCE.findall(" ".join(_CALLED.findall(line)))
            # A fusion may have no name, and is of its last instruction that has one; a
            # copy that XLA adds is of what it copies.
            of_fusion = called if opcode == "fusion" else []
            known = (op_names.get(x) for x in (*of_fusion, *operands[:1]))
            own = _OP_NAME.search(line)
            op_name = _unescaped(own[1]) if own else next(filter(None, known), "")
            op_names[name] = op_name
            op_names[computation] = op_name or op_names.get(computation, "")
            is_root = line.lstrip().startswith("ROOT")
            where = computation, is_root, name, _arrays(shape)
            found.append(Instruction(*where, opcode, operands, called, op_name, line))
    return found


def _unescaped(name: str) -> str:
    """Return a name that XLA writes with the escapes of C, of bytes of UTF-8."""
    text = name.encode().decode("unicode_escape")
    return text.encode("latin-1").decode(errors="replace")


def _arrays(shape: str) -> tuple[Array, ...]:
    """Return the arrays of a shape, which may be a tuple of them."""
    found = []
    for dtype, bits, dims, layout in _ARRAY.findall(shape):
        elements = math.prod(int(d) for d in dims.split(",") if d)
        size = elements * max(int(bits or 8) // 8, 1)
        found.append(Array(dtype, elements, size, not dims, _SCRATCH in layout))
    return tuple(found)


def count(text: str, instructions: Sequence[Instruction] = ()) -> Counts:
    """Count in the text of an optimised HLO module, and its `instructions` if known."""
    program = instructions or parse(text)
    times, scheduled, loops_counted_once = _times(program)
    half_adders, traffic = _half_adders(program), _Traffic(program)
    found, moved, calls, products = (collections.Counter() for _ in range(4))
    dtypes = {x.name: x.arrays[0].dtype for x in program if x.arrays}
    fused = {name for x in program if x.opcode == "fusion" for name in x.called}
    pieces = set()
    for x in program:
        opcode = x.opcode.removesuffix("-start")
        if opcode in _COLLECTIVES and (piece := _piece(x, fused)) not in pieces:
            pieces.add(piece)
            trips = times[x.computation] or 1
            calls[opcode] += trips
            for array in _left(x):
                moved[f"{opcode} {array.dtype}"] += trips * array.bytes
        if x.computation in scheduled:
            found["kernels"] += times[x.computation] * _is_kernel(x)
            found["traffic"] += times[x.computation] * traffic.of(x)
        if _PRODUCTS.search(x.line):
            products[" ".join(dtypes.get(y, "?") for y in x.operands[:2])] += 1
        found["casts"] += x.opcode == "convert" and x.arrays[0].dtype[0] in "bf"
        is_half_sum = x.opcode in _SUMS and not half_adders.isdisjoint(x.called)
        found["half_sums"] += is_half_sum
        found["conditionals"] += x.opcode == "conditional"
        found["host_transfers"] += bool(_HOST.search(x.line))
    counted = "kernels casts half_sums conditionals host_transfers traffic".split()
    return Counts(
        **{name: found[name] for name in counted},
        aliased=len(_ALIAS.findall(text.partition("\n")[0])),
        collectives=dict(sorted(moved.items())),
        collective_calls=dict(sorted(calls.items())),
        products=dict(sorted(products.items())),
        loops_counted_once=loops_counted_once,
    )


def _times(
    program: Sequence[Instruction],
) -> tuple[collections.Counter[str], set[str], int]:
    """Return by name how often each computation runs.

    And which of them are a sequence of kernels: the entry and the loops of it; and how
    many loops there are whose trips are not known: 1 is taken for them.
    """
    entry = program[-1].computation
    times, scheduled, unknown = collections.Counter({entry: 1}), {entry}, 0
    for x in reversed(program):
        trips = _TRIPS.search(x.line)
        for name in x.called:
            times[name] += times[x.computation] * (int(trips[1]) if trips else 1)
        if x.opcode == "while":
            unknown += trips is None
            if x.computation in scheduled:
                scheduled.update(x.called)
    return times, scheduled, unknown


def _half_adders(program: Sequence[Instruction]) -> set[str]:
    """Return the names of the computations that add numbers in half precision."""
    adds = {x.computation for x in program if x.opcode == "add"}
    half = {
        x.computation for x in program for a in x.arrays if a.dtype in ("f16", "bf16")
    }
    return adds & half


def _piece(x: Instruction, fused: set[str]) -> tuple[str | Array, ...]:
    """Return what the pieces of a collective have in common, if it is in pieces."""
    channel = _CHANNEL.search(x.line)
    if channel is None or x.computation not in fused:
        return (x.name,)
    return (channel.group(), *x.arrays, *_METADATA.findall(x.line))


def _is_free(x: Instruction) -> bool:
    is_name = x.opcode in _FREE or x.opcode.endswith("-done")
    return is_name or (x.opcode == "custom-call" and bool(_FREE_CALLS.search(x.line)))


def _is_kernel(x: Instruction) -> bool:
    if _is_free(x) or x.opcode.endswith("-start") or x.opcode in _COLLECTIVES:
        return False
    is_opaque = x.opcode in ("fusion", "custom-call")
    return is_opaque or not all(a.is_scalar for a in x.arrays)


def _left(x: Instruction) -> Sequence[Array]:
    """Return what a collective leaves, without its operands.

    Of one that has started, the shape has what it reads as well: not of an all-reduce.
    """
    if not x.opcode.endswith("-start") or x.opcode == "all-reduce-start":
        return x.arrays
    arrays = [a for a in x.arrays if not a.is_scalar]
    return arrays[len(arrays) // 2 :]


class _Traffic:
    """What instructions read and write, in bytes."""

    def __init__(self, program: Sequence[Instruction]):
        self._by_name = {x.name: x for x in program}
        self._readers = collections.defaultdict(list)
        self._parameters: dict[tuple[str, int], Instruction] = {}
        self._roots = {x.computation: x for x in program if x.is_root}
        for x in program:
            if x.opcode == "parameter":
                number = int(_NUMBER.findall(x.line)[0])
                self._parameters[x.computation, number] = x
            for name in x.operands:
                self._readers[name].append(x)

    def of(self, x: Instruction) -> int:
        if _is_free(x):
            return 0
        if x.opcode in ("copy-start", "slice-start"):
            # From and to, and then what keeps count of it.
            ends = x.arrays[:2]
            return min(a.bytes for a in ends) * sum(not a.is_scratch for a in ends)
        if x.opcode == _READ:
            return 2 * x.size
        if x.opcode == _UPDATE:
            return 2 * self._size(x.operands[1])
        if x.opcode != "fusion":
            return sum(map(self._size, x.operands)) + x.size
        (fused,) = x.called
        read = sum(
            self._read(self._parameters.get((fused, i)), self._size(name))
            for i, name in enumerate(x.operands)
        )
        return read + min(x.size, self._written(self._roots[fused]))

    def _size(self, name: str) -> int:
        return self._by_name[name].size if name in self._by_name else 0

    def _read(self, x: Instruction | None, size: int) -> int:
        """Return the bytes that a fusion reads of a parameter: all, or slices."""
        if x is None or x.is_root:
            return size
        total = 0
        for reader in self._readers[x.name]:
            if reader.opcode == "bitcast":
                total += self._read(reader, size)
            elif reader.opcode not in (_READ, _UPDATE) or reader.operands[0] != x.name:
                return size
            elif reader.opcode == _READ:
                total += reader.arrays[0].bytes
        return min(total, size)

    def _written(self, x: Instruction) -> int:
        """Return the bytes that a fusion writes of its result: all, or a slice."""
        if x.opcode in ("tuple", "bitcast"):
            return sum(self._written(self._by_name[name]) for name in x.operands)
        written = self._by_name[x.operands[1]] if x.opcode == _UPDATE else x
        return sum(array.bytes for array in written.arrays)
