"""Lowering: a plan becomes a schedule, and passes turn it into what is launched."""
