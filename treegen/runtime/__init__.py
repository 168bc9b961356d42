"""The kernel that callers hold, and its life: calls, updates, capacity, running batches."""
