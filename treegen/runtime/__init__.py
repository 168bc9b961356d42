"""Kernels that callers hold: their calls, updates, fixed capacity, copies, and running batches."""
