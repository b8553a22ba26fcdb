"""Benchmarks: each file is a program, run as `python -m benchmarks.<name>`."""
