"""Known links between GPUs, as data."""

from __future__ import annotations

from treegen.cost.communication import Link
from treegen.ir.errors import InputError

LINKS = {
    link.name: link
    for link in (
        Link("nvlink", latency_us=12.0, hop_us=1.0, gigabytes=370.0),
        Link("400g", latency_us=20.0, hop_us=2.5, gigabytes=45.0),
    )
}
"""nvlink: between Hopper GPUs of one host; latency and gigabytes as measured on two H200s, hop_us assumed. 400g: a
network adapter of 400 Gb/s for each GPU; assumed."""


def link_named(name: str) -> Link:
    """Returns a known link. Raises InputError for another name."""
    if name not in LINKS:
        raise InputError("link", name, "is unknown", f"use one of {', '.join(LINKS)}")
    return LINKS[name]
