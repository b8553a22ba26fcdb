"""What the examples share: data, the training loop, bytes, tables and figures."""
