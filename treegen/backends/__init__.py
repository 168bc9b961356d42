"""Backends: execute schedules, check the tensors of calls, and compare results with an oracle."""
