"""The hazards of `lint`: a program as a list of operations, and rules over it."""
