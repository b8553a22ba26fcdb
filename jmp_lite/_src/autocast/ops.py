"""The rules of autocast: the class of each primitive, and what users change of it."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, get_args

import jax
import jax.numpy as jnp

from jmp_lite._src import compat, fp8
from jmp_lite._src.jaxprs.primitives import PRIMITIVES, OpClass

CLASSES = get_args(OpClass)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OpRules:
    """The class of each primitive, and the dtype of the results of matrix products.

    Args:
      classes: primitive name to class, as a mapping or as pairs. A class is `"half"`,
        `"float32"`, `"promote"`, `"passthrough"` or `"unchanged"`.
      half_results: True: results of `"half"` primitives are half, as in torch. False:
        only where every use of them leads to another `"half"` primitive through
        nothing that is kept in float32, as in TensorFlow's pass; else they are float32.
      fp8_min_size: under a policy with `matmul_dtype="fp8"`, the least size of each
        dimension of a matrix product in fp8; sizes must also be multiples of 16.

    Raises:
      ValueError: a class or a primitive is not known.

    Examples:
      >>> rules = OpRules.default("float16").replace(tanh="float32", sort="passthrough")
      >>> rules.class_of("tanh"), rules.class_of("fft")
      ('float32', 'unchanged')
    """

    classes: Any
    half_results: bool = True
    fp8_min_size: int = fp8.MIN_SIZE

    def __post_init__(self):
        pairs = dict(self.classes)
        for name, op_class in pairs.items():
            if op_class not in CLASSES:
                raise ValueError(
                    f"Expected one of {CLASSES} for {name!r}, got {op_class!r}."
                )
        unknown = sorted(set(pairs) - set(PRIMITIVES) - compat.primitive_names())
        if unknown:
            raise ValueError(
                f"Unknown primitives {unknown}: expected names as a jaxpr prints them, "
                "such as 'dot_general' or 'reduce_sum'."
            )
        object.__setattr__(self, "classes", tuple(sorted(pairs.items())))

    @classmethod
    def default(cls, compute_dtype: Any) -> "OpRules":
        """Return the rules for a compute dtype.

        bfloat16 has the range of float32 and few digits: results of matrix products are
        half, as in torch. float16 has the digits and not the range: results are half
        only on the way from one product to the next, and powers stay float32.

        Args:
          compute_dtype: `jnp.float16` or `jnp.bfloat16`, or its name.

        Examples:
          >>> OpRules.default(jnp.bfloat16).class_of("square")
          'promote'
          >>> OpRules.default(jnp.float16).class_of("square")
          'float32'
        """
        is_f16 = jnp.dtype(compute_dtype) == jnp.float16
        classes = {
            name: known.in_f16 if is_f16 else known.op_class
            for name, known in PRIMITIVES.items()
        }
        return cls(classes, half_results=not is_f16)

    @functools.cached_property
    def _by_name(self) -> dict[str, OpClass]:
        return dict(self.classes)

    @property
    def lowers_anything(self) -> bool:
        """Whether any primitive is in the class `"half"`."""
        return "half" in self._by_name.values()

    def class_of(self, primitive: str) -> OpClass:
        """Return the class of a primitive, `"unchanged"` if it is not listed."""
        return self._by_name.get(primitive, "unchanged")

    def replace(
        self,
        *,
        half_results: bool | None = None,
        fp8_min_size: int | None = None,
        **classes: OpClass,
    ) -> "OpRules":
        """Return these rules with some primitives in another class.

        Args:
          half_results: as in the constructor; None leaves it.
          fp8_min_size: likewise.
          **classes: primitive name to class (`scatter_add` stands for `scatter-add`).
        """
        renamed = {_PRINTED.get(name, name): c for name, c in classes.items()}
        return OpRules(
            {**dict(self.classes), **renamed},
            self.half_results if half_results is None else half_results,
            self.fp8_min_size if fp8_min_size is None else fp8_min_size,
        )


def resolve_rules(
    rules: OpRules | None,
    compute_dtype: Any,
    half_results: bool | None,
    fp8_min_size: int | None,
) -> OpRules:
    """Return the rules of a call of `autocast`.

    Raises:
      TypeError: `rules` are not `OpRules`, `half_results` is not a bool, or
        `fp8_min_size` is not an integer.
    """
    rules = OpRules.default(compute_dtype) if rules is None else rules
    if not isinstance(rules, OpRules):
        raise TypeError(f"Expected OpRules, got {rules!r}.")
    if not isinstance(half_results, bool | None):
        raise TypeError(
            f"Expected half_results=True, False or None, got {half_results!r}."
        )
    if not isinstance(fp8_min_size, int | None) or isinstance(fp8_min_size, bool):
        raise TypeError(
            f"Expected an integer or None as fp8_min_size, got {fp8_min_size!r}."
        )
    return rules.replace(half_results=half_results, fp8_min_size=fp8_min_size)


# Names with a dash cannot be keywords; both spellings are in the table.
_PRINTED = {"scatter_add": "scatter-add", "scatter_mul": "scatter-mul"}


def describe(dtypes: Iterable[Any] = (jnp.bfloat16, jnp.float16)) -> str:
    """Return the table as markdown: primitive, class per dtype, source."""
    tables = [OpRules.default(dtype) for dtype in dtypes]
    names = [jnp.dtype(dtype).name for dtype in dtypes]
    lines = [f"| primitive | {' | '.join(names)} | source |", "|---" * 4 + "|"]
    for name, known in PRIMITIVES.items():
        classes = " | ".join(table.class_of(name) for table in tables)
        lines.append(f"| `{name}` | {classes} | {known.source} |")
    return "\n".join(lines)
