"""The work of `tune --suite`: measures policies over the suite of batches, keeps the fastest, and prints a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from treegen.cli.arguments import check_shapes_of_batches, pairs_in, print_table
from treegen.cli.progress_bars import progress_bar
from treegen.ir.errors import BackendError, InputError

_DEFAULT_HEADS = "32:8,8:1"


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """The options of the command; None for defaults. heads: "query:KV" pairs with commas. seeds: those of suites."""

    heads: str | None
    head_dim: int | None
    dtype: str | None
    kv_dtype: str | None
    window_left: int | None
    family: str | None
    data: Path | None
    seeds: Sequence[int]
    candidates: int
    repeats: int
    json: Path | None


def tune_suite(options: SuiteOptions) -> None:
    """Measures policies, stores those that are faster than the weighed choices, and prints them and a table by family.

    Policies are stored, and results written to `options.json`, after each setting of heads.
    """
    import torch

    from treegen.autotune_cache.entry import policy_text
    from treegen.autotune_cache.policy_cache import POLICY_CACHE
    from treegen.backends.devices import current_target, default_device
    from treegen.bench.batch_case import BatchShapes
    from treegen.bench.batch_runs import BatchSettings
    from treegen.bench.bench_runs import machine
    from treegen.bench.suite_tuning import MeasuredBatch, measure_suite, save_suite, suite_entries, suite_table
    from treegen.tuning.timing import copy_gbps
    from treegen.workloads.batches import chosen_batches

    heads = pairs_in(options.heads or _DEFAULT_HEADS)
    check_shapes_of_batches(heads, options.head_dim, options.dtype, options.kv_dtype)
    suites = {seed: chosen_batches(options.data, options.family, seed) for seed in options.seeds}
    chosen = [(seed, batch) for seed, suite in suites.items() for batch in suite if batch.requests[-1].queries == 1]
    if not chosen:
        raise InputError("family", options.family, "has no batches that can be tuned", "name other families")
    if options.data is None:
        print("batches of traces are left out: name the folder of recorded traces with --data")
    if not torch.cuda.is_available():
        raise BackendError("device", "cpu", "is not a CUDA device to measure on", "run it on a GPU")
    window_left = -1 if options.window_left is None else options.window_left
    target, settings = current_target(), BatchSettings(repeats=options.repeats, window_left=window_left)
    source = f"medians of {options.repeats} launches on a cold L2, {target.name}"
    source += f", window_left {window_left}" if window_left >= 0 else ""
    found: list[MeasuredBatch] = []
    latent = [(seed, batch) for seed, batch in chosen if batch.mla]
    settings_of_heads = [([text], [(seed, batch) for seed, batch in chosen if not batch.mla]) for text in heads]
    if latent:
        settings_of_heads.append(([], latent))
    device_facts = machine(copy_gbps())
    for texts, of_heads in settings_of_heads:
        with progress_bar(len(of_heads)) as on_batch:
            for seed, batch in of_heads:
                measured = measure_suite(
                    [batch],
                    BatchShapes(texts, options.head_dim or 128, options.dtype or "bf16", options.kv_dtype),
                    target,
                    settings,
                    default_device(),
                    most=options.candidates,
                    on_batch=on_batch,
                )
                found += (replace(each, seed=seed) for each in measured)
        entries = suite_entries(found, source)
        for entry in entries:
            POLICY_CACHE.store(entry)
        if options.json is not None:
            save_suite(options.json, device_facts, found, entries)
    for entry in entries:
        print(f"{entry.key.shape}, {entry.key.bucket}: {policy_text(entry.policy)}, {entry.source.partition(': ')[2]}")
    print_table(suite_table(found, entries))
