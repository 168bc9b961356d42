"""Several GPUs: heads and KV divided among the ranks of torch.distributed, and attention states merged across them."""

from treegen.cost.communication import Link
from treegen.distributed.compile_parallel import compile, compile_batch
from treegen.distributed.measured_links import measure_link
from treegen.distributed.merge_across import merge_across
from treegen.distributed.parallel import Parallel
from treegen.distributed.parallel_kernels import Merge, ParallelBatchKernel, ParallelKernel
from treegen.ir.tree.shards import Shard

__all__ = [
    "Link",
    "Merge",
    "Parallel",
    "ParallelBatchKernel",
    "ParallelKernel",
    "Shard",
    "compile",
    "compile_batch",
    "measure_link",
    "merge_across",
]
