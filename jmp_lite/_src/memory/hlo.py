"""What an optimised program does, counted in its text.

Instructions in the body of a loop count once: write the loops out.
"""

import collections
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


class Counts(NamedTuple):
    """What a program does.

    Attributes:
      kernels: what the device is told to do, one after the other: instructions of the
        entry computation but names, scalars by themselves, collectives, and copies that
        go on beside the others.
      casts: conversions to a floating dtype, inside of kernels too.
      half_sums: sums of half terms to a half sum: reductions, scatters and sums over
        windows, inside of kernels too, but not collectives. A TPU rounds some float32
        sums as it writes them; those are not meant.
      conditionals: branches.
      host_transfers: what waits for the host.
      aliased: arguments whose memory a result takes over.
      traffic: bytes that kernels and copies of the entry computation read from and
        write to the device's main memory. XLA's own count does not tell the memories
        of a TPU apart: what is fetched ahead of time it has four times (a copy) or five
        (slices that are joined) before anything reads it; this one has it once.
      collectives: bytes that collectives leave on a device, by "opcode dtype". A TPU
        sums float16 two by two, in u32.
      collective_calls: how many collectives there are, by opcode. Several arrays that
        are sent together are one.
      products: matrix products and convolutions, by the dtypes of both operands, inside
        of kernels too: "f8e5m2 f8e4m3fn". An operand that is cast before the product
        has the dtype it is cast to. Attention in one kernel of cuDNN is not seen.
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


def count(text: str) -> Counts:
    """Count in the text of an optimised HLO module."""
    header, *lines = text.splitlines()
    in_entry, half_adders = False, _half_adders(lines)
    in_fusion, fused = False, set(_FUSED.findall(text))
    found, moved, calls, products = (collections.Counter() for _ in range(4))
    sizes, dtypes, pieces = {}, {}, set()
    for line in lines:
        if line and not line[0].isspace():
            in_entry = line.startswith("ENTRY")
            in_fusion = line.lstrip("%").partition(" ")[0] in fused
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, shape, opcode, operands = match.groups()
        arrays = _arrays(shape)
        dtypes[name] = arrays[0].dtype if arrays else ""
        if _is_product(opcode, line):
            of_operands = [dtypes.get(x, "?") for x in _OPERAND.findall(operands)]
            products[" ".join(of_operands[:2])] += 1
        collective = opcode.removesuffix("-start")
        if collective in _COLLECTIVES:
            channel = _CHANNEL.search(line) if in_fusion else None
            piece = (
                (channel.group(), shape, *_METADATA.findall(line)) if channel else name
            )
            if piece not in pieces:
                pieces.add(piece)
                calls[collective] += 1
                for array in _left(arrays, opcode):
                    moved[f"{collective} {array.dtype}"] += array.size
        elif in_entry:
            found["kernels"] += _is_kernel(arrays, opcode, line)
        if in_entry:
            sizes[name] = sum(a.size for a in arrays if not a.is_scratch)
            read = sum(sizes.get(x, 0) for x in _OPERAND.findall(operands))
            found["traffic"] += _traffic(arrays, opcode, line, read + sizes[name])
        found["casts"] += opcode == "convert" and arrays[0].dtype[0] in "bf"
        found["half_sums"] += _is_half_sum(opcode, line, half_adders)
        found["conditionals"] += opcode == "conditional"
        found["host_transfers"] += opcode in _HOST_OPS or bool(_HOST_CALLS.search(line))
    return Counts(
        kernels=found["kernels"],
        casts=found["casts"],
        half_sums=found["half_sums"],
        conditionals=found["conditionals"],
        host_transfers=found["host_transfers"],
        aliased=len(_ALIAS.findall(header)),
        traffic=found["traffic"],
        collectives=dict(sorted(moved.items())),
        collective_calls=dict(sorted(calls.items())),
        products=dict(sorted(products.items())),
    )


def itemsize(dtype: str) -> int:
    """Return the bytes of a number, of a dtype as XLA calls it."""
    return _BYTES.get(dtype, 4)


def _half_adders(lines: list[str]) -> set[str]:
    """Return the names of the computations that add numbers in half precision."""
    adds, halves, computation = set(), set(), ""
    for line in lines:
        if line and not line[0].isspace():
            computation = line.removeprefix("ENTRY ").lstrip("%").partition(" ")[0]
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        if match.group(3) == "add":
            adds.add(computation)
        if any(a.dtype in ("f16", "bf16") for a in _arrays(match.group(2))):
            halves.add(computation)
    return adds & halves


def _is_half_sum(opcode: str, line: str, half_adders: set[str]) -> bool:
    combiner = _COMBINER.search(line)
    if combiner is None or opcode not in _SUMS:
        return False
    return combiner.group(1) in half_adders


class _Array(NamedTuple):
    dtype: str
    is_scalar: bool
    size: int
    is_scratch: bool


def _arrays(shape: str) -> list[_Array]:
    """Return the arrays of a shape, which may be a tuple of them."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        size = itemsize(dtype) * math.prod(int(d) for d in dims.split(",") if d)
        found.append(_Array(dtype, not dims, size, _SCRATCH in layout))
    return found


def _is_product(opcode: str, line: str) -> bool:
    is_call = opcode == "custom-call" and bool(_PRODUCT_CALLS.search(line))
    return is_call or opcode in _PRODUCTS


def _is_free(opcode: str, line: str) -> bool:
    is_name = opcode in _FREE or opcode.endswith("-done")
    return is_name or (opcode == "custom-call" and bool(_FREE_CALLS.search(line)))


def _is_kernel(arrays: list[_Array], opcode: str, line: str) -> bool:
    if _is_free(opcode, line) or opcode.endswith("-start"):
        return False
    is_opaque = opcode in ("fusion", "custom-call")
    return is_opaque or not all(a.is_scalar for a in arrays)


def _traffic(arrays: list[_Array], opcode: str, line: str, touched: int) -> int:
    if _is_free(opcode, line):
        return 0
    if opcode not in ("copy-start", "slice-start"):
        return touched
    # From and to, and then what keeps count of it.
    size = min(a.size for a in arrays[:2])
    return size * sum(not a.is_scratch for a in arrays[:2])


def _left(arrays: list[_Array], opcode: str) -> list[_Array]:
    """Return what a collective leaves, without its operands.

    Of one that has started, the shape has what it reads as well: not of an all-reduce.
    """
    if not opcode.endswith("-start") or opcode == "all-reduce-start":
        return arrays
    arrays = [a for a in arrays if not a.is_scalar]
    return arrays[len(arrays) // 2 :]
