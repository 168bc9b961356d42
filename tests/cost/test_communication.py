"""Links: the formulas of collectives, and the error of the model against those of two H200s."""

from dataclasses import replace

import pytest

from treegen.cost.communication import (
    MODES,
    Collective,
    Link,
    all_gather,
    all_reduce,
    all_to_all,
    best_merge,
    merge_cost,
    merge_modes,
    packed_bytes,
    reduce_scatter,
)
from treegen.cost.known_links import LINKS, link_named
from treegen.ir.errors import InputError
from treegen.ir.shape import Shape

STATES = {rows: rows * 32 for rows in (64, 256)}  # 32 heads of 128 elements
MEASURED = [
    (all_gather(4 * STATES[64], 2), 12.9),
    (all_gather(4 * STATES[256], 2), 9.3),
    (reduce_scatter(512 * STATES[64], 2), 12.6),
    (reduce_scatter(512 * STATES[256], 2), 24.7),
    (reduce_scatter(256 * STATES[64], 2), 12.3),
    (reduce_scatter(256 * STATES[256], 2), 17.1),
    (all_to_all(packed_bytes(64, 16, 128, 2), 2), 13.6),
    (all_to_all(packed_bytes(256, 16, 128, 2), 2), 17.1),
    (all_reduce(512 * STATES[64], 2), 19.3),
    (all_reduce(512 * STATES[256], 2), 33.8),
]
"""Microseconds of collectives of two H200s, in CUDA graphs with NCCL. The first two show the noise: the larger one took
less time."""
DIRECT = {
    ("all", 8): 5.6, ("all", 64): 7.2, ("all", 256): 13.5, ("own", 8): 5.8, ("own", 64): 6.3, ("own", 256): 9.8,
}  # fmt: skip
"""Microseconds of direct merges of rows of 32 heads, of two H100s in CUDA graphs."""


def test_the_model_of_nvlink_is_near_what_two_gpus_measured() -> None:
    link = link_named("nvlink")
    errors = [link.time_us(collective) / measured - 1 for collective, measured in MEASURED]
    shown = [f"{each.name} {each.sent}: {error:+.0%}" for (each, _), error in zip(MEASURED, errors, strict=True)]
    print(*shown, sep="\n")
    assert max(map(abs, errors)) < 0.205, shown
    assert max(map(abs, errors[2:])) < 0.115, shown
    assert (sum(error**2 for error in errors) / len(errors)) ** 0.5 < 0.10, shown


def test_the_model_of_direct_merges_is_near_what_two_gpus_measured() -> None:
    link, shape = link_named("nvlink"), Shape(32, 8, 128, dtype="bf16")
    for (wanted, rows), measured in DIRECT.items():
        predicted = merge_cost("direct", wanted, rows, shape, 2, link, 4000.0).time_us
        assert abs(predicted / measured - 1) < 0.08, (wanted, rows, predicted)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_bytes_and_messages_of_collectives(ranks: int) -> None:
    """As of rings: a rank sends each byte of a gather to all others, and a part of a sum to each."""
    size = 960 * 64
    assert all_gather(size, ranks)[1:] == (size * (ranks - 1), ranks - 1)
    assert all_to_all(size, ranks)[1:] == (size * (ranks - 1), ranks - 1)
    assert reduce_scatter(size, ranks)[1:] == (size * (ranks - 1) // ranks, ranks - 1)
    assert all_reduce(size, ranks)[1:] == (2 * (size * (ranks - 1) // ranks), 2 * (ranks - 1))
    parts = all_gather(size // ranks, ranks)
    assert all_reduce(size, ranks).sent == reduce_scatter(size, ranks).sent + parts.sent


def test_time_is_latency_and_messages_and_bytes() -> None:
    link = Link("x", latency_us=10.0, hop_us=2.0, gigabytes=50.0)
    assert link.time_us(Collective("any", 100_000, 4)) == 10 + 2 * 3 + 2
    assert link.time_us(Collective("any", 0, 0)) == 10


@pytest.mark.parametrize("field", ["latency_us", "hop_us", "gigabytes", "direct_us", "direct_gigabytes"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "12", True])
def test_links_of_impossible_numbers(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        Link("x", **{"latency_us": 1.0, "hop_us": 1.0, "gigabytes": 1.0, field: value})


def test_unknown_links() -> None:
    with pytest.raises(InputError, match="link = pigeons: is unknown; use one of nvlink, 400g"):
        link_named("pigeons")


def test_few_ranks_exchange_and_many_gather_all_heads() -> None:
    """States in 16 bits go to all ranks; sums in 32 bits cost two collectives, but no more bytes with more ranks.

    Ranks of a host, where the link allows it, write them into each other's memory.
    """
    shape = Shape(32, 8, 128)

    def chosen(link: Link) -> dict[tuple[int, int], str]:
        sizes = [(ranks, rows) for ranks in (2, 8, 64) for rows in (8, 4096)]
        return {size: best_merge("all", size[1], shape, size[0], link, 4000.0).mode for size in sizes}

    apart = replace(LINKS["nvlink"], direct_us=None)
    assert chosen(apart) == {
        (2, 8): "exchange", (8, 8): "exchange", (64, 8): "exchange",
        (2, 4096): "exchange", (8, 4096): "gather", (64, 4096): "gather",
    }  # fmt: skip
    assert chosen(LINKS["nvlink"]) == {
        (2, 8): "direct", (8, 8): "direct", (64, 8): "exchange",
        (2, 4096): "exchange", (8, 4096): "gather", (64, 4096): "gather",
    }  # fmt: skip
    for ranks, rows, link in ((2, 8, apart), (9, 8, LINKS["nvlink"]), (2, 2048, LINKS["nvlink"])):
        assert merge_modes("all", rows, shape, ranks, link) == ("exchange", "gather")
    assert merge_modes("own", 1024, shape, 2, LINKS["nvlink"]) == MODES


def test_kernels_before_and_after_move_more_bytes_for_more_rows() -> None:
    shape = Shape(32, 8, 128)
    few, many = (merge_cost("exchange", "own", rows, shape, 8, LINKS["nvlink"], 4000.0) for rows in (1, 4096))
    assert 5 < few.local_us < 5.1
    assert many.local_us > 2 * few.local_us
    assert many.time_us == many.link_us + many.local_us
