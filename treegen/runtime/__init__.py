"""The kernel that callers hold, and its life: calls, updates, growth, capacity."""
