"""What is in memory when most is: read off the text of a scheduled program.

    %a = f32[8] fusion(%p)            a is made
    %b = f32[8] fusion(%a)            the peak: a and b
    %c = f32[] fusion(%b)             a is no longer read: its memory is free

The order of the text is the order in which the device works. An array lives from the
instruction that makes it to the last that reads it. Names for arrays (tuples,
bitcasts), loops, which work in the memory of what they carry, and results that take
over the memory of an operand make no new ones. Results of the whole program are not
counted: their memory is there from the beginning, or is that of a donated argument.

Limits: XLA may place arrays so that gaps remain, or share memory in more ways. The sum
differs from XLA's own peak by some percent, more on TPUs, whose arrays are padded.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import name_scopes
from jmp_lite._src.memory import hlo

_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_BODIES = re.compile(
    r"(?:body|condition|to_apply|true_computation|false_computation)=%?([\w.-]+)"
    r"|branch_computations=\{([^}]*)\}"
)
_CALLS = re.compile(r"calls=%?([\w.-]+)")
_INDEX = re.compile(r", index=([0-9]+)")
_NAMES = ("tuple", "get-tuple-element", "bitcast", "opt-barrier", "while")
_GIVEN = ("parameter", "constant")
# Instructions that may write their result over an operand.
_ELEMENTWISE = re.compile(
    r"kind=kLoop|output_to_operand_aliasing"
    r"| %?[\w.-]*(scatter|update[-_]slice)[\w.-]* ="
)
_OPENED = ("while", "conditional", "call")
_TRACED = re.compile(r"\w+\(")  # how name stacks begin, and names of arguments do not
# What scopes of JAX' own are called: they are no places in the model.
_JIT = re.compile(r"\bp?jit\([^()]*\)")
_INNER = re.compile(
    rf"while|body|cond|{compat.CLOSED_CALL}|checkpoint|remat\d*|branch_\d+_fun"
)


class Live(NamedTuple):
    layer: str  # the name-scope path of what made it
    operation: str  # its primitive, or XLA's instruction
    dtype: str  # as XLA calls it: "bf16"
    size: int  # in bytes
    made_in: str  # "forward" or "backward"; "" outside of differentiation
    elements: int


# An instruction, and the name stack of what it is made of.
_Instruction = tuple[hlo.Instruction, str]


@dataclasses.dataclass(eq=False)
class _Array:
    live: Live
    last_read: int  # the step that reads it last
    is_named: bool  # whether XLA says what it is made of


def at_peak(text: str) -> list[Live]:
    """Return what is at the peak of a scheduled program beside arguments and results.

    The text is that of its HLO module.
    """
    computations, entry = _parse(text)

    @functools.cache
    def of_body(name: str) -> list[Live]:
        # Its results are in the memory of what it carries, or counted outside.
        return _peak(computations.get(name, []), of_body)

    return of_body(entry)


def place(op_name: str) -> tuple[str, str]:
    """Return the layer and the operation of which an instruction is.

    Of a copy of an argument they are its name, and `""`.

    Examples:
      >>> place("jit(step)/transpose(jvp(decoder))/layer_0/jit(relu)/max")
      ('decoder/layer_0', 'max')
      >>> place("params['w']")
      ("params['w']", '')
    """
    if not _TRACED.match(op_name):
        return op_name, ""
    *path, operation = _JIT.sub("", op_name).split("/")
    kept = "/".join(part for part in path if part and not _INNER.fullmatch(part))
    return name_scopes.without_marks(name_scopes.clean(kept)), operation


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Return the instructions of each computation, and the name of the entry."""
    computations, entry = collections.defaultdict(list), ""
    op_names: dict[str, str] = {}  # of instructions, and of computations
    for x in hlo.parse(text):
        entry = x.computation if x.is_entry else entry
        # A fusion may have none, and is of its last instruction that has one; a copy
        # that XLA adds is of what it copies.
        sources = [*_CALLS.findall(x.line), *x.operands[:1]]
        known = (op_names[y] for y in sources if op_names.get(y))
        found = _OP_NAME.search(x.line)
        op_names[x.name] = _unescaped(found[1]) if found else next(known, "")
        op_names[x.computation] = op_names[x.name] or op_names.get(x.computation, "")
        computations[x.computation].append((x, op_names[x.name]))
    return computations, entry


def _unescaped(name: str) -> str:
    """Return a name that XLA writes with the escapes of C, of bytes of UTF-8."""
    text = name.encode().decode("unicode_escape")
    return text.encode("latin-1").decode(errors="replace")


def _peak(
    instructions: Sequence[_Instruction], of_body: Callable[[str], list[Live]]
) -> list[Live]:
    """Return what is in memory at the peak of a computation, of what it makes.

    `of_body` returns the same of a computation that the instructions call.
    """
    values: dict[str, list[_Array | None]] = {}  # None: given
    steps, root = [], set()
    for step, (x, op_name) in enumerate(instructions):
        read = [array for operand in x.operands for array in values.get(operand, [])]
        if x.opcode == "get-tuple-element":
            index = int(found[1]) if (found := _INDEX.search(x.line)) else 0
            read = read[index : index + 1]
        for array in filter(None, read):
            array.last_read = step
            if x.opcode == "while" and not array.is_named:  # it is for the loop to fill
                array.live = array.live._replace(**_origin(op_name))
                array.is_named = True
        made = []
        if x.opcode in _GIVEN:
            values[x.name] = [None] * len(x.arrays)
        elif x.opcode in _NAMES or x.opcode.endswith("-start"):
            values[x.name] = read  # what has started reads until it is done
        else:
            is_named = bool(op_name)
            made = [_Array(_live(x, op_name, a), step, is_named) for a in x.arrays]
            values[x.name] = list(made)
        if x.is_root:
            root = set(values[x.name])
        steps.append((x, made, list(filter(None, read))))
    # Results are in memory that there is already.
    steps = [(x, [a for a in made if a not in root], read) for x, made, read in steps]
    return _follow(steps, of_body)


def _follow(
    steps: Sequence[tuple[hlo.Instruction, list[_Array], list[_Array]]],
    of_body: Callable[[str], list[Live]],
) -> list[Live]:
    """Return what is in memory at the step at which it is the most."""
    live: dict[_Array, None] = {}
    now, most, largest = 0, -1, []
    for step, (x, made, read) in enumerate(steps):
        bodies = _bodies(x.line) if x.opcode in _OPENED else []
        inside = max(map(of_body, bodies), key=_total, default=[])
        for array in made:
            # It may take the memory of what is read for the last time.
            size, is_elementwise = array.live.size, _ELEMENTWISE.search(x.line)
            ends = (a for a in read if a in live and a.last_read == step)
            over = next((a for a in ends if a.live.size == size), None)
            if over and is_elementwise:
                del live[over]
                now -= over.live.size
            live[array] = None
            now += size
        if now + _total(inside) > most:
            most = now + _total(inside)
            largest = [*(array.live for array in live), *inside]
        for array in {*made, *read}:
            if array.last_read <= step and array in live:
                del live[array]
                now -= array.live.size
    return largest


def _total(found: Iterable[Live]) -> int:
    return sum(x.size for x in found)


def _bodies(line: str) -> list[str]:
    """Return the names of the computations that an instruction runs."""
    found = [name for pair in _BODIES.findall(line) for name in pair if name]
    return [name.strip().lstrip("%") for names in found for name in names.split(",")]


def _live(x: hlo.Instruction, op_name: str, array: hlo.Array) -> Live:
    origin = _origin(op_name)
    return Live(
        **origin | {"operation": origin["operation"] or x.opcode},
        dtype=array.dtype,
        size=0 if array.is_scratch else array.size,
        elements=array.size // hlo.itemsize(array.dtype),
    )


def _origin(op_name: str) -> dict[str, str]:
    layer, operation = place(op_name)
    is_backward = name_scopes.is_backward(op_name, around=False)
    is_forward = "jvp(" in op_name or name_scopes.REMATTED in op_name
    made_in = "backward" if is_backward else "forward" if is_forward else ""
    return {"layer": layer, "operation": operation, "made_in": made_in}
