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
from collections.abc import Callable, Collection, Iterable, Sequence

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import name_scopes
from jmp_lite._src.memory import hlo

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


KINDS = GRADIENTS, ACTIVATIONS, TEMPORARIES = "gradients", "activations", "temporaries"


@dataclasses.dataclass(frozen=True)
class LiveRow:
    """Arrays in memory at the peak, a row of what `of_step` found.

    Attributes:
      kind: `"gradients"`: of the backward pass, with the size of a parameter;
        `"activations"`: of the forward pass; `"temporaries"`: all others.
      layer: the name-scope path of what made them, `""` outside any scope.
      operation: its primitive, or XLA's instruction.
      dtype: as XLA calls it: `"bf16"`.
      arrays: how many.
      bytes: all of them.
    """

    kind: str
    layer: str
    operation: str
    dtype: str
    arrays: int
    bytes: int


@dataclasses.dataclass(eq=False)
class _Array:
    array: hlo.Array
    opcode: str
    op_name: str  # of what made it; of the loop that fills it, if that has none
    last_read: int  # the step that reads it last

    def row(self, parameter_sizes: Collection[int]) -> tuple[str, str, str, str]:
        """Return what the arrays of a row have in common."""
        kind = TEMPORARIES
        if name_scopes.is_backward(self.op_name, around=False):
            if self.array.elements in parameter_sizes:
                kind = GRADIENTS
        elif "jvp(" in self.op_name or name_scopes.REMATTED in self.op_name:
            kind = ACTIVATIONS
        layer, operation = place(self.op_name)
        return kind, layer, operation or self.opcode, self.array.dtype


def at_peak(
    program: Sequence[hlo.Instruction], parameter_sizes: Collection[int] = ()
) -> tuple[LiveRow, ...]:
    """Return what is at the peak of a scheduled program beside arguments and results.

    Sizes are numbers of elements. The largest rows are first.
    """
    computations = collections.defaultdict(list)
    for x in program:
        computations[x.computation].append(x)

    @functools.cache
    def of_computation(name: str) -> list[_Array]:
        # Results of one that is called are in what it carries, or counted outside.
        return _peak(computations[name], of_computation)

    rows: dict[tuple[str, str, str, str], list[int]] = collections.defaultdict(list)
    for x in of_computation(program[-1].computation):
        if x.array.size:
            rows[x.row(parameter_sizes)].append(x.array.size)
    found = [LiveRow(*row, len(sizes), sum(sizes)) for row, sizes in rows.items()]
    return tuple(sorted(found, key=lambda row: -row.bytes))


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


def _peak(
    program: Sequence[hlo.Instruction], of_computation: Callable[[str], list[_Array]]
) -> list[_Array]:
    """Return what is in memory at the peak of a computation, of what it makes.

    `of_computation` returns the same of one that the instructions call.
    """
    values: dict[str, list[_Array]] = {}  # what stands behind a name
    steps = []
    for step, x in enumerate(program):
        read = [array for name in x.operands for array in values.get(name, [])]
        if x.opcode == "get-tuple-element" and (index := _INDEX.search(x.line)):
            read = read[int(index[1]) :][:1]
        for array in read:
            array.last_read = step
            if x.opcode == "while":  # what has no name is for the loop to fill
                array.op_name = array.op_name or x.op_name
        # What has started reads until it is done.
        is_name = x.opcode in _NAMES or x.opcode.endswith("-start")
        made = [_Array(array, x.opcode, x.op_name, step) for array in x.arrays]
        values[x.name] = read if is_name else made
        steps.append((x, [] if is_name or x.opcode in _GIVEN else made, read))
    results = {array for x in program if x.is_root for array in values[x.name]}
    live: dict[_Array, None] = {}
    now, most, largest = 0, -1, []
    for step, (x, made, read) in enumerate(steps):
        bodies = x.called if x.opcode in _OPENED else []
        inside = max(map(of_computation, bodies), key=_total, default=[])
        for array in made:
            if array in results:  # in memory that there is already
                continue
            size = array.array.size
            # It may take the memory of what is read for the last time.
            ended = (a for a in read if a.last_read == step and a.array.size == size)
            over = next((a for a in ended if a in live), None)
            if over is not None and _ELEMENTWISE.search(x.line):
                del live[over]
                now -= size
            live[array] = None
            now += size
        if now + _total(inside) > most:
            most, largest = now + _total(inside), [*live, *inside]
        for array in {*made, *read}:
            if array.last_read == step and array in live:
                del live[array]
                now -= array.array.size
    return largest


def _total(found: Iterable[_Array]) -> int:
    return sum(x.array.size for x in found)
