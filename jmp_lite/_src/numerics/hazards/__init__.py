"""What `lint` looks for: a program as a list of operations, and rules over it."""

__all__ = []
