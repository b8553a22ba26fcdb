"""Figures of programs that are made of their counts."""

REDUCTIONS = ("all-reduce", "reduce-scatter")


def fp8_products(products: dict[str, int]) -> int:
    """Return how many products, by their dtypes, have an operand in fp8."""
    return sum(n for dtypes, n in products.items() if "f8" in dtypes)


def sent(
    collectives: dict[str, int], opcodes: tuple[str, ...], dtypes: tuple[str, ...] = ()
) -> int:
    """Return the bytes that these collectives leave on a device; all dtypes if none."""
    keys = ((key, *key.split()) for key in collectives)
    return sum(
        collectives[key]
        for key, opcode, dtype in keys
        if opcode in opcodes and (not dtypes or dtype in dtypes)
    )
