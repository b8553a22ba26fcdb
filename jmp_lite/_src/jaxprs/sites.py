"""Sites, the operations of a program: what, where, and how often each runs.

Sites inside the calls, loops and branches of `FOLLOWED` are listed one by one. Anything
else that holds a jaxpr (`shard_map`, `pallas_call`, …) is one site.
"""

import dataclasses
from collections.abc import Iterable

import jax.numpy as jnp

from jmp_lite._src.jaxprs import control_flow, core, name_scopes, sources
from jmp_lite._src.jaxprs.core import Eqn, Jaxpr
from jmp_lite._src.jaxprs.derivatives import derivatives
from jmp_lite._src.jaxprs.primitives import LOOPS


@dataclasses.dataclass(frozen=True)
class Site:
    """One operation at one place of a program."""

    primitive: str  # its name, as a jaxpr prints it
    layer: str  # its name-scope path, "" outside any scope
    line: str  # `file:line` of the user's code
    # "backward" for operations that transposition made and for derivatives that only
    # these use; else "forward", as for recomputation in `jax.checkpoint`.
    direction: str
    dtype: str  # that of its first floating result, or of its first result
    times: int | None = 1  # it runs; None inside a `while`
    loops: int = 0  # how many are around it


TOP = Site("", "", "", "forward", "")


def sites(jaxpr: Jaxpr) -> list[Site]:
    """Return the sites of an open jaxpr in the order in which a walk numbers them."""
    derivative_ids = derivatives(jaxpr)
    found = []

    def visit(jaxpr: Jaxpr, around: Site) -> None:
        for eqn in jaxpr.eqns:
            site = site_of(eqn, around)
            bodies = control_flow.bodies_of(eqn)
            for sub in bodies or ():
                visit(sub.jaxpr, in_loop(eqn, site))
            if bodies is None:
                layer = name_scopes.without_marks(site.layer)
                direction = "backward" if id(eqn) in derivative_ids else site.direction
                site = dataclasses.replace(site, layer=layer, direction=direction)
                found.append(site)

    visit(jaxpr, TOP)
    return found


def count_sites(eqns: Iterable[Eqn]) -> int:
    """Return how many sites equations have, their sub-jaxprs included."""
    return sum(1 for _ in control_flow.site_eqns(eqns))


def site_of(eqn: Eqn, around: Site = TOP) -> Site:
    """Return the site of an equation in the call, loop or branch around it."""
    stack = name_scopes.of(eqn)
    is_backward = name_scopes.is_backward(stack, around.direction == "backward")
    dtypes = [d for d in map(core.dtype_of, eqn.outvars) if d is not None]
    floating = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    return dataclasses.replace(
        around,
        primitive=eqn.primitive.name,
        layer=name_scopes.join(around.layer, stack),
        line=sources.source_line(eqn, around.line),
        direction="backward" if is_backward else "forward",
        dtype=str((floating or dtypes or [""])[0]),
    )


def in_loop(eqn: Eqn, site: Site) -> Site:
    """Return the site around the sub-jaxprs of an equation."""
    if eqn.primitive.name not in LOOPS:
        return site
    trips = control_flow.trips(eqn)
    times = None if site.times is None or trips is None else site.times * trips
    return dataclasses.replace(site, times=times, loops=site.loops + 1)
