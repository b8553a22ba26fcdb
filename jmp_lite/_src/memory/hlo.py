"""What an optimised program does, counted in its text.

    %body (arg: (s32[], f32[64,256], f32[16,256,256])) -> ... { ... }
    ENTRY %main (...) { ... while(%state), body=%body, known_trip_count 16 ... }

The kernels, the traffic and the collectives of a loop's body count as often as it runs.
"""

import collections
import itertools
import math
import re
from typing import NamedTuple

# "%name = shape opcode(operands), ...": the shape may be a tuple, and what is called in
# its layouts is upper case ("T(8,128)").
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ?\b([a-z][a-z0-9-]*)\((.*?)\)(?:, |$)"
)
_ARRAY = re.compile(r"\b(pred|[a-z]+[0-9]+\w*)\[([0-9,]*)\](\{[^}]*\})?")
_OPERAND = re.compile(r"%([\w.-]+)")
_ALIAS = re.compile(r"\{[0-9, ]*\}: \([0-9]+, \{[0-9, ]*\}, (?:may|must)-alias\)")

# Names for values, that no device has to do anything about.
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")
_LOOP = re.compile(r"\bcondition=%?([\w.-]+), body=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"([0-9]+)"')
_NUMBER = re.compile(r"parameter\(([0-9]+)\)")
_SLICES = ("dynamic-slice", "dynamic-update-slice")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
_FREE_CALLS = re.compile(
    r'custom_call_target="(ConcatBitcast|AssumeGatherIndicesInBound'
    r'|GatherScatterIndicesBitpacked|Sharding)"'
)
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_SUMS = ("reduce", "reduce-window", "scatter", "select-and-scatter")
_COMBINER = re.compile(r"(?:to_apply|scatter)=%([\w.-]+)")
_PRODUCTS = ("dot", "convolution")
_PRODUCT_CALLS = re.compile(r'custom_call_target="__(cublas|cudnn\$conv)')
_HOST_OPS = ("infeed", "outfeed", "send", "recv")
_HOST_CALLS = re.compile(r'custom_call_target="[^"]*(callback|Host)[^"]*"', re.I)
# What a TPU does piece by piece beside other work is in several fusions. Its channel
# alone does not tell it: all collectives of a `shard_map` have channel 1.
_CHANNEL = re.compile(r"channel_id=[0-9]+")
_METADATA = re.compile(r"metadata=\{[^}]*\}")
_FUSED = re.compile(r" fusion\(.*calls=%?([\w.-]+)")
_SCRATCH = "S(1)"  # a TPU's memory on the chip, in a layout
_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
}


class Array(NamedTuple):
    """An array of a shape, its size in bytes, and whether it is in a TPU's scratch."""

    dtype: str
    is_scalar: bool
    size: int
    is_scratch: bool


class Instruction(NamedTuple):
    """A line of a program."""

    computation: str  # the name of the one that it is in
    is_entry: bool  # whether that is the entry
    name: str
    shape: str  # as it is written
    arrays: list[Array]  # those of its shape
    opcode: str
    operands: list[str]  # the names of what it reads
    line: str  # all of it

    @property
    def is_root(self) -> bool:
        """Whether it is the result of its computation."""
        return self.line.lstrip().startswith("ROOT")


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
    """Return the instructions of the text of an HLO module, in their order."""
    found, computation, is_entry = [], "", False
    for line in text.splitlines()[1:]:
        if line and not line[0].isspace():
            is_entry = line.startswith("ENTRY")
            computation = line.removeprefix("ENTRY ").lstrip("%").partition(" ")[0]
        elif match := _INSTRUCTION.match(line):
            name, shape, opcode, operands = match.groups()
            arrays, read = _arrays(shape), _OPERAND.findall(operands)
            found.append(
                Instruction(
                    computation, is_entry, name, shape, arrays, opcode, read, line
                )
            )
    return found


def count(text: str) -> Counts:
    """Count in the text of an optimised HLO module."""
    program = parse(text)
    half_adders, fused = _half_adders(program), set(_FUSED.findall(text))
    runs, inside, loops_counted_once = _runs(program)
    slices = _slices([x for x in program if x.computation in fused])
    found, moved, calls, products = (collections.Counter() for _ in range(4))
    sizes, dtypes, pieces = {}, {}, set()
    for x in program:
        dtypes[x.name] = x.arrays[0].dtype if x.arrays else ""
        is_call = x.opcode == "custom-call" and _PRODUCT_CALLS.search(x.line)
        if is_call or x.opcode in _PRODUCTS:
            products[" ".join(dtypes.get(y, "?") for y in x.operands[:2])] += 1
        collective = x.opcode.removesuffix("-start")
        if collective in _COLLECTIVES:
            channel = _CHANNEL.search(x.line) if x.computation in fused else None
            metadata = _METADATA.findall(x.line)
            piece = (channel.group(), x.shape, *metadata) if channel else x.name
            if piece not in pieces:
                pieces.add(piece)
                times = inside[x.computation] or 1
                calls[collective] += times
                for array in _left(x.arrays, x.opcode):
                    moved[f"{collective} {array.dtype}"] += array.size * times
        else:
            found["kernels"] += runs[x.computation] * _is_kernel(x)
        sizes[x.name] = sum(a.size for a in x.arrays if not a.is_scratch)
        if times := runs[x.computation]:
            found["traffic"] += times * _traffic(x, sizes, slices)
        found["casts"] += x.opcode == "convert" and x.arrays[0].dtype[0] in "bf"
        combiner = _COMBINER.search(x.line) if x.opcode in _SUMS else None
        found["half_sums"] += combiner is not None and combiner[1] in half_adders
        found["conditionals"] += x.opcode == "conditional"
        is_of_host = x.opcode in _HOST_OPS or _HOST_CALLS.search(x.line)
        found["host_transfers"] += bool(is_of_host)
    counted = ("kernels", "casts", "half_sums", "conditionals", "host_transfers")
    return Counts(
        *(found[name] for name in counted),
        aliased=len(_ALIAS.findall(text.partition("\n")[0])),
        traffic=found["traffic"],
        collectives=dict(sorted(moved.items())),
        collective_calls=dict(sorted(calls.items())),
        products=dict(sorted(products.items())),
        loops_counted_once=loops_counted_once,
    )


def _runs(
    program: list[Instruction],
) -> tuple[collections.Counter[str], collections.Counter[str], int]:
    """Return by name how often the entry computation and those of loops run.

    And the same also of what these call, fusions say; and how many loops there are
    whose trips are not known: 1 is taken for them.
    """
    runs, inside, unknown = collections.Counter(), collections.Counter(), 0
    for x in reversed(program):  # a caller stands below what it calls
        if x.is_entry:
            runs[x.computation] = inside[x.computation] = 1
        if x.is_root or x.opcode == "while" or _CALLED.search(x.line):
            trips, loop = _TRIPS.search(x.line), _LOOP.search(x.line)
            times = int(trips[1]) if trips else 1
            unknown += loop is not None and trips is None
            for name in loop.groups() if loop else ():
                runs[name] += runs[x.computation] * times
            for name in (*(loop.groups() if loop else ()), *_CALLED.findall(x.line)):
                inside[name] += inside[x.computation] * times
    return runs, inside, unknown


class _Slices(NamedTuple):
    """What a fusion reads and writes that slices its operands, or updates a slice."""

    read: dict[int, int]  # bytes, by the index of an operand that is read by slices
    written: int | None  # the bytes of its result; None: all of it


def _slices(fused: list[Instruction]) -> dict[str, _Slices]:
    found = {}
    for name, group in itertools.groupby(fused, lambda x: x.computation):
        parameter: dict[str, int] = {}  # that a name stands for
        sizes: dict[str, int] = {}
        updates: dict[str, int] = {}  # the bytes of the slice that is written
        read, whole, written = collections.Counter(), set(), None
        for x in group:
            sizes[x.name] = sum(a.size for a in x.arrays)
            first, others = next(iter(x.operands), ""), x.operands[1:]
            if x.opcode == "parameter":
                parameter[x.name] = int(_NUMBER.findall(x.line)[0])
            elif x.opcode == "bitcast":
                for known in (parameter, updates):
                    if first in known:
                        known[x.name] = known[first]
            elif x.opcode in _SLICES:
                is_read = x.opcode == _SLICES[0]
                if first in parameter:
                    read[parameter[first]] += sizes[x.name] * is_read
                if not is_read:
                    updates[x.name] = sizes[others[0]]
                whole.update(parameter[y] for y in others if y in parameter)
            else:
                whole.update(parameter[y] for y in x.operands if y in parameter)
            if x.is_root:
                parts = x.operands if x.opcode == "tuple" else [x.name]
                if not updates.keys().isdisjoint(parts):
                    written = sum(updates.get(y, sizes[y]) for y in parts)
        read = {i: n for i, n in read.items() if i not in whole}
        found[name] = _Slices(read, written)
    return found


def itemsize(dtype: str) -> int:
    """Return the bytes of a number, of a dtype as XLA calls it."""
    return _BYTES.get(dtype, 4)


def _half_adders(program: list[Instruction]) -> set[str]:
    """Return the names of the computations that add numbers in half precision."""
    adds = {x.computation for x in program if x.opcode == "add"}
    return {
        x.computation
        for x in program
        if x.computation in adds and any(a.dtype in ("f16", "bf16") for a in x.arrays)
    }


def _arrays(shape: str) -> list[Array]:
    """Return the arrays of a shape, which may be a tuple of them."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        size = itemsize(dtype) * math.prod(int(d) for d in dims.split(",") if d)
        found.append(Array(dtype, not dims, size, _SCRATCH in layout))
    return found


def _is_free(x: Instruction) -> bool:
    is_name = x.opcode in (*_FREE, "while") or x.opcode.endswith("-done")
    return is_name or (x.opcode == "custom-call" and bool(_FREE_CALLS.search(x.line)))


def _is_kernel(x: Instruction) -> bool:
    if _is_free(x) or x.opcode.endswith("-start"):
        return False
    is_opaque = x.opcode in ("fusion", "custom-call")
    return is_opaque or not all(a.is_scalar for a in x.arrays)


def _traffic(x: Instruction, sizes: dict[str, int], slices: dict[str, _Slices]) -> int:
    """Return the bytes that an instruction reads and writes."""
    if _is_free(x):
        return 0
    if x.opcode in ("copy-start", "slice-start"):
        # From and to, and then what keeps count of it.
        size = min(a.size for a in x.arrays[:2])
        return size * sum(not a.is_scratch for a in x.arrays[:2])
    if x.opcode in _SLICES:  # the slice, which is read and written
        return 2 * sizes[x.name if x.opcode == _SLICES[0] else x.operands[1]]
    called = _FUSED.search(x.line)
    of = slices.get(called[1]) if called else None
    of = of or _Slices({}, None)
    read = (of.read.get(i, sizes.get(y, 0)) for i, y in enumerate(x.operands))
    return sum(read) + (sizes[x.name] if of.written is None else of.written)


def _left(arrays: list[Array], opcode: str) -> list[Array]:
    """Return what a collective leaves, without its operands.

    Of one that has started, the shape has what it reads as well: not of an all-reduce.
    """
    if not opcode.endswith("-start") or opcode == "all-reduce-start":
        return arrays
    arrays = [a for a in arrays if not a.is_scalar]
    return arrays[len(arrays) // 2 :]
