"""Examples: each file is a program, `common/` is what they share."""
