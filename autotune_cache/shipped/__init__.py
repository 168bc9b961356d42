r"""Policies that were measured as the fastest before a release: a file per GPU, with a line per policy.

Made on an H200, of the trees of FastTree's kernel benchmark, by

    treegen warm fasttree_kernel_bench.json --heads 32:8 --heads 32:32 --heads 16:1 --heads 64:8 --heads 28:4 \
        --head-dim 64 --head-dim 128 --dtype fp16 --dtype bf16

    treegen cache export autotune_cache/shipped/h200.json

Keys hold treegen.version.KERNEL_VERSION and SPACE_VERSION. After raising either, measure the policies again and replace
all of them together.
"""
