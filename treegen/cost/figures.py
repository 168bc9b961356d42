"""Figures as text: bytes, counts and times with units that fit them."""

from __future__ import annotations


def byte_text(amount: int) -> str:
    """Writes bytes in the largest binary unit that leaves at least 1: `1.5 MiB`."""
    value, units = float(amount), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{amount} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def count_text(amount: int) -> str:
    """Writes a number with the largest decimal prefix that leaves at least 1: `3.2 G`."""
    value, prefixes = float(amount), ["", "k", "M", "G", "T", "P"]
    while value >= 1000 and len(prefixes) > 1:
        value /= 1000
        del prefixes[0]
    return f"{value:.1f} {prefixes[0]}" if prefixes[0] else f"{amount} "


def time_text(microseconds: float) -> str:
    """Writes microseconds, or milliseconds from 10,000 microseconds on: `41.2 us`."""
    return f"{microseconds:.1f} us" if microseconds < 10_000 else f"{microseconds / 1000:.1f} ms"
