"""Checks that rows have the same bits in every batch in batch-invariant mode, and measures what the mode costs.

    python benchmarks/batch_invariance.py [--batches 50] [--block 16] [--heads 32:8] [--dtype bf16] [TREE ...]

Some rows, the probes, are computed in random batches. The other rows share any part of their paths or nothing; orders,
trees and places in the cache differ, and plans are made for GPUs with different numbers of SMs. Kernels are updated
from batch to batch; one of them has a fixed capacity. All bits of out and lse are compared with those of each probe
alone, and values with the float64 oracle. The same comparison is then made without the mode. Finally trees are timed
with and without the mode: medians on a cold L2 cache (treegen.tuning.timing), with every output checked. Without a CUDA
device the torch backend is compared, and nothing is timed.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

import treegen
from treegen.backends.check_inputs import TORCH_DTYPES
from treegen.backends.devices import current_target, default_device
from treegen.ir.tree.kv import KVRuns
from treegen.report.explain import explain
from treegen.strategies import Strategy, batch_invariant, strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import Target

TREES = (
    "1,64/4096,256",
    "1,256/256,32",
    "1,4,16,512/1024,256,128,32",
    "1,8,64/8192,2048,512",
    "1,10/4000,400",
    "256*1024",
)
LENGTHS = (1, 60, 512, 513, 1000, 2048, 3000, 5000)
MOST_OTHERS = 48


class Batch(NamedTuple):
    """A tree with its tensors, and the row of each probe in it."""

    tree: treegen.Tree
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    rows: dict[int, int]


class Batches:
    """Random batches of probes and other rows.

    K and V of a token, and the query of a probe, are the same in all batches. block: tokens that are shared and stored
    together.
    """

    def __init__(self, shape: treegen.Shape, block: int, device: torch.device) -> None:
        self._block, self._dtype = block, TORCH_DTYPES[shape.dtype]
        lengths = [-(-length // block) for length in LENGTHS]
        common = lengths[-1] // 2
        self._tokens = common * block
        begins = [common + sum(lengths[:number]) for number in range(len(lengths))]
        self.probes = [
            [*range(common), *range(begin, begin + length)][:length]
            for begin, length in zip(begins, lengths, strict=True)
        ]
        self._others = common + sum(lengths)
        generator = torch.Generator(device).manual_seed(0)
        size = (2, (self._others + 100_000 // block) * block, shape.num_kv_heads, shape.head_dim)
        self._kv = torch.randn(size, generator=generator, device=device, dtype=self._dtype)
        rows = (len(LENGTHS) + MOST_OTHERS, shape.num_qo_heads, shape.head_dim)
        self._q = torch.randn(rows, generator=generator, device=device, dtype=self._dtype)

    def alone(self, probe: int) -> Batch:
        """Makes a batch of one probe."""
        return self._made([(self.probes[probe], probe)], random.Random(probe))

    def random(self, seed: int) -> Batch:
        """Makes a batch of some probes among other rows."""
        source = random.Random(seed)
        kept = source.sample(range(len(self.probes)), source.randint(1, len(self.probes)))
        rows, fresh = [(self.probes[probe], probe) for probe in kept], self._others
        for _ in range(source.randint(0, MOST_OTHERS)):
            like = source.choice(rows)[0]
            shared = like[: source.choice((0, len(like), source.randint(0, len(like))))]
            more = source.choice((0, 1, source.randint(0, 64), source.randint(0, 2000))) // self._block
            rows.append(([*shared, *range(fresh, fresh + more)], -1))
            fresh += more
        source.shuffle(rows)
        return self._made(rows, source)

    def _made(self, rows: list[tuple[list[int], int]], source: random.Random) -> Batch:
        block = self._block
        tree = treegen.Tree.from_paths([path for path, _ in rows], block_size=block)
        page = block * source.choice((1, 2, 16))  # pages of several blocks give longer runs
        pages = -(-tree.tokens.astype(np.int64) // page)
        order = np.random.default_rng(source.randrange(1 << 30)).permutation(int(pages.sum()) + 5)
        tree = tree.with_kv(KVRuns.from_pages(tree.tokens, np.split(order, np.cumsum(pages))[:-1], page))
        device = self._kv.device
        caches = torch.randn(2, len(order) * page, *self._kv.shape[2:], device=device).to(self._dtype)
        for row, (path, _) in enumerate(rows):
            tokens = (np.array(path, np.int64)[:, None] * block + np.arange(block)).reshape(-1)
            slots = torch.from_numpy(tree.slots(row).astype(np.int64)).to(device)
            caches[:, slots] = self._kv[:, torch.from_numpy(tokens).to(device)]
        query = [probe if probe >= 0 else len(LENGTHS) + row % MOST_OTHERS for row, (_, probe) in enumerate(rows)]
        places = {probe: row for row, (_, probe) in enumerate(rows) if probe >= 0}
        return Batch(tree, self._q[query], *caches, places)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's bits as integers."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def results(kernel: treegen.Kernel, batch: Batch) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yields every probe of a batch with the bits of its out and lse."""
    kernel.update(batch.tree)
    rows = kernel.capacity.max_rows if kernel.capacity else len(batch.q)
    q = torch.zeros(rows, *batch.q.shape[1:], dtype=batch.q.dtype, device=batch.q.device)
    q[: len(batch.q)] = batch.q
    out, lse = kernel(q, batch.k_cache, batch.v_cache, return_lse=True)
    for probe, row in batch.rows.items():
        yield probe, bits(out[row]), bits(lse[row])


def compare(shape: treegen.Shape, strategy: Strategy, block: int, count: int, target: Target) -> str:
    """Compares the probes' bits in `count` random batches, and reports in one line."""
    batches = Batches(shape, block, default_device())
    first = batches.random(0).tree
    # Groups depend on the number of SMs; bits must not.
    targets = (target, replace(target, sms=1), replace(target, sms=16))
    kernels = [treegen.compile(first, strategy=strategy, shape=shape, target=own) for own in targets]
    most = {"max_rows": len(LENGTHS) + MOST_OTHERS, "max_items": 2048, "max_slots": 2048}
    if strategy.batch_invariant:
        kernels.append(treegen.compile(first, strategy=strategy, shape=shape, target=target, **most))
    known = {}
    for probe in range(len(LENGTHS)):
        known |= {probe: found for probe, *found in results(kernels[0], batches.alone(probe))}
    compared = differing = 0
    worst, passed = 0.0, True
    for number in range(count):
        batch, kernel = batches.random(number), kernels[number % len(kernels)]
        for probe, *found in results(kernel, batch):
            compared += 1
            differing += not all(map(torch.equal, found, known[probe]))
        if number % 10 == 0:
            kernels[0].update(batch.tree)
            report = kernels[0].verify(batch.q, batch.k_cache, batch.v_cache)
            worst, passed = max(worst, report.out_error), passed and report.passed
    return (
        f"{strategy}, {kernels[0].backend}, {shape}: {count} batches, {compared} rows compared, {differing} differ; "
        f"out error at most {worst:.1e}{'' if passed else ', WRONG'}"
    )


def main() -> None:
    """Prints a line per comparison, and a line per tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs="*", default=TREES, help=f"trees to time (default: {len(TREES)} trees)")
    parser.add_argument("--batches", type=int, default=50, help="random batches to compare (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of the mode's chunks (default: %(default)s)")
    parser.add_argument("--block", type=int, default=1, help="tokens of the mode's blocks (default: %(default)s)")
    parser.add_argument("--heads", default="32:8", help="query heads:KV heads (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="elements of a head (default: %(default)s)")
    parser.add_argument("--dtype", default="bf16", help="element type (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of a median (default: %(default)s)")
    arguments = parser.parse_args()
    heads = map(int, arguments.heads.split(":"))
    shape, target = treegen.Shape(*heads, arguments.head_dim, dtype=arguments.dtype), current_target()
    mode, auto = batch_invariant(arguments.chunk, arguments.block), strategy_from("auto")
    for strategy in (mode, auto):
        print(compare(shape, strategy, arguments.block, arguments.batches, target))
    if not torch.cuda.is_available():
        return
    from treegen.tuning.kernel_meter import KernelMeter

    meter = KernelMeter(arguments.repeats)
    for text in arguments.trees:
        tree = treegen.Tree.parse(text)
        (plain_us, plain_error), (mode_us, mode_error) = (
            meter(Problem(tree, shape, target), own) for own in (auto, mode)
        )
        expected = [explain(tree, [own], shape, target).entries[0].estimate.time_us for own in (auto, mode)]
        print(
            f"{text}: {plain_us or 0:.1f} us, batch-invariant {mode_us or 0:.1f} us, "
            f"{(mode_us or 0) / (plain_us or 1):.2f}x (estimated {expected[1] / expected[0]:.2f}x), "
            f"errors {plain_error:.1e}, {mode_error:.1e}"
        )


if __name__ == "__main__":
    main()
