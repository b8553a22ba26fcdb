"""The rule table of autocast: which primitive may run in half precision.

Four classes; a primitive in none of them is kept in the dtype the program gave it.

  lower   matrix products: operands cast to the compute dtype, results too, unless only
          f32 is asked of them (then they come from the f32 accumulator)
  full    what overflows, underflows or loses digits in half: operands stay f32
  widest  elementwise arithmetic: half where every operand is, else f32
  follow  moves and choices of numbers: as widest, but the value is still the same
          number, so a parameter that was only moved is still a parameter

The table is data. Sources, by what their lists say of the op under its name there:
  tf      TensorFlow's auto_mixed_precision_lists.h: allow, infer, deny, clear
  torch   torch/aten autocast_mode.h: lower_precision_fp, fp32, promote
  apex    apex.amp.lists: FP16_FUNCS, FP32_FUNCS, CASTS
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jmp_lite._src import compat

OpClass = Literal["lower", "full", "widest", "follow", "keep"]
CLASSES = ("lower", "full", "widest", "follow", "keep")

# What each class is made of: a group of primitives, and where the choice comes from.
_TABLE: dict[OpClass, tuple[tuple[str, str], ...]] = {
    "lower": (
        ("dot_general ragged_dot ragged_dot_general", "tf allow, torch lower, apex 16"),
        ("conv_general_dilated", "tf allow, torch lower, apex 16"),
    ),
    "full": (
        ("exp exp2 expm1 log log1p pow", "tf deny, torch fp32, apex 32"),
        ("rsqrt sqrt cbrt", "torch fp32 (rsqrt), apex 32"),
        ("sinh cosh tan asin acos asinh acosh atanh", "torch fp32, apex 32"),
        ("erf_inv lgamma digamma polygamma igamma igammac", "torch fp32 (erfinv)"),
        ("igamma_grad_a random_gamma_grad bessel_i0e bessel_i1e", "of the same kind"),
        ("regularized_incomplete_beta zeta", "of the same kind"),
        ("reduce_sum reduce_prod cumsum cumprod", "tf deny, torch fp32, apex 32"),
        ("cumlogsumexp reduce_window_sum", "torch fp32, apex 32"),
        ("scatter-add scatter-mul scatter_add scatter_mul", "sums"),
        ("psum psum2 psum_invariant reduce_scatter unreduced_psum", "sums"),
        ("add_any", "sums: of the gradients of what is used more than once"),
        ("rem floor ceil round", "torch promote (fmod); half has few whole numbers"),
    ),
    "widest": (
        ("add sub mul div neg", "tf infer, torch promote"),
        ("max min abs sign clamp", "tf clear, torch promote"),
        ("square integer_pow", "tf infer; summed or in f16: f32"),
        ("tanh logistic erf erfc atan2", "tf infer, torch promote (atan2)"),
        ("one_minus_square", "the derivative of tanh, from jax 0.12 on"),
    ),
    "follow": (
        ("broadcast_in_dim reshape transpose squeeze expand_dims rev copy", "tf clear"),
        ("slice dynamic_slice gather concatenate split pad tile", "tf clear"),
        ("dynamic_update_slice scatter select_n", "tf clear"),
        ("reduce_max reduce_min argmax argmin cummax cummin", "tf clear"),
        ("reduce_window_max reduce_window_min reduce_and reduce_or", "tf clear"),
        ("eq ne lt le gt ge is_finite stop_gradient name", "tf clear"),
        ("pmax pmin all_gather all_gather_invariant all_to_all", "moves"),
        ("ppermute pvary pbroadcast optimization_barrier", "moves"),
        ("device_put sharding_constraint", "moves"),
    ),
}

# f16 ends at 65504: a square does that to any x above 255. bf16 has f32's range.
_FULL_IN_F16 = "square integer_pow"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OpRules:
    """Which class each primitive belongs to, and what becomes of matmul results.

    Args:
      classes: primitive name to class, as a mapping or as pairs.
      low_results: True: results of `lower` primitives are half, as torch has it.
        False: only where every use of them leads to another `lower` primitive through
        nothing that is kept in f32 (TensorFlow's painting); else they are f32.

    Raises:
      ValueError: a class or a primitive is not known.

    Examples:
      >>> rules = default_rules(jnp.float16).replace(tanh="full", sort="follow")
      >>> rules.class_of("tanh"), rules.class_of("fft")
      ('full', 'keep')
    """

    classes: Any
    low_results: bool = True

    def __post_init__(self):
        pairs = dict(self.classes)
        for name, op_class in pairs.items():
            if op_class not in CLASSES:
                raise ValueError(
                    f"Expected one of {CLASSES} for {name!r}, got {op_class!r}."
                )
        unknown = sorted(set(pairs) - set(_SOURCES) - compat.primitive_names())
        if unknown:
            raise ValueError(
                f"Unknown primitives {unknown}: expected names as a jaxpr prints them, "
                "such as 'dot_general' or 'reduce_sum'."
            )
        object.__setattr__(self, "classes", tuple(sorted(pairs.items())))

    @functools.cached_property
    def _by_name(self) -> dict[str, OpClass]:
        return dict(self.classes)

    @property
    def lowers_anything(self) -> bool:
        """Whether any primitive is in the class `lower`."""
        return "lower" in self._by_name.values()

    def class_of(self, primitive: str) -> OpClass:
        """Return the class of a primitive, `"keep"` where it is not listed."""
        return self._by_name.get(primitive, "keep")

    def replace(
        self, *, low_results: bool | None = None, **classes: OpClass
    ) -> "OpRules":
        """Return these rules with some primitives in another class.

        Args:
          low_results: as in the constructor; None leaves it.
          **classes: primitive name to class (`scatter_add` stands for `scatter-add`).
        """
        renamed = {_PRINTED.get(name, name): c for name, c in classes.items()}
        return OpRules(
            {**dict(self.classes), **renamed},
            self.low_results if low_results is None else low_results,
        )


# Names with a dash cannot be keywords; both spellings are in the table.
_PRINTED = {"scatter_add": "scatter-add", "scatter_mul": "scatter-mul"}

_SOURCES: dict[str, str] = {
    name: source
    for groups in _TABLE.values()
    for names, source in groups
    for name in names.split()
}


def default_rules(compute_dtype: Any) -> OpRules:
    """Return the rules for a compute dtype.

    bf16 has the range of f32 and few digits: results of matrix products are low, as in
    torch. f16 has the digits and not the range: they are low only on the way from one
    product to the next, and powers stay f32.

    Args:
      compute_dtype: `jnp.float16` or `jnp.bfloat16`.

    Returns:
      The table of this module as `OpRules`.

    Examples:
      >>> default_rules(jnp.bfloat16).class_of("square")
      'widest'
      >>> default_rules(jnp.float16).class_of("square")
      'full'
    """
    classes = {
        name: op_class
        for op_class, groups in _TABLE.items()
        for names, _ in groups
        for name in names.split()
    }
    if compute_dtype == jnp.float16:
        classes |= dict.fromkeys(_FULL_IN_F16.split(), "full")
    return OpRules(classes, low_results=compute_dtype != jnp.float16)


def describe(dtypes: Iterable[Any] = (jnp.bfloat16, jnp.float16)) -> str:
    """Return the table as markdown: primitive, class per dtype, source."""
    tables = [default_rules(dtype) for dtype in dtypes]
    names = [jnp.dtype(dtype).name for dtype in dtypes]
    lines = [f"| primitive | {' | '.join(names)} | source |", "|---" * 4 + "|"]
    for name, source in _SOURCES.items():
        classes = " | ".join(table.class_of(name) for table in tables)
        lines.append(f"| `{name}` | {classes} | {source} |")
    return "\n".join(lines)
