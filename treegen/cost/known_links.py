"""Known links between GPUs, as data."""

from __future__ import annotations

from treegen.cost.communication import Link
from treegen.ir.errors import InputError

LINKS = {
    link.name: link
    for link in (
        Link("nvlink", latency_us=11.0, hop_us=1.5, gigabytes=190.0, direct_us=5.3, direct_gigabytes=260.0),
        Link("400g", latency_us=20.0, hop_us=2.5, gigabytes=45.0),
    )
}
"""nvlink: between Hopper GPUs, fitted to ten collectives of 8 KiB to 4 MiB on two H200s with NCCL in CUDA graphs. Their
times are within 20 %, the larger ones within 11 %, and direct merges of 8 to 256 rows of 32 heads on two H100s within
8 % (tests/cost/test_communication.py). Larger transfers go faster: 370 GB/s at 64 MiB. What a hop costs comes from
all-reduces of two ranks; more ranks were not measured. 400g: a network adapter of 400 Gb/s for each GPU; assumed."""

DEFAULT_LINK = "nvlink"


def link_named(name: str) -> Link:
    """Returns a known link. Raises InputError for another name."""
    if name not in LINKS:
        raise InputError("link", name, "is unknown", f"use one of {', '.join(LINKS)}")
    return LINKS[name]
