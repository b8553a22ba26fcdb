"""Memory: what the backward pass keeps, and what it computes again."""

from jmp_lite._src.autocast.recompute import save_products

__all__ = ["save_products"]
