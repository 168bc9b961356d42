"""Policies that were measured as the fastest before a release, one `<digest>.json` per key.

Made on an H200, of the trees of FastTree's kernel benchmark, by

    treegen warm fasttree_kernel_bench.json --heads 32:8 --heads 32:32 --heads 16:1 --heads 64:8 --heads 28:4 \
        --head-dim 64 --head-dim 128 --dtype fp16 --dtype bf16

Keys hold digests of templates and search space: after a change of either the entries are made again and replaced, all
of them together.
"""
