"""Memory of a function: what is saved, and what its compiled program takes."""
