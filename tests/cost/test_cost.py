"""The cost models: terms against their symbols, how they grow, and both against times measured on an H200."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forests import examples, forests
from support.h200 import H200
from support.paths import TESTS
from treegen import Shape, Tree
from treegen.cost.account import account, assess
from treegen.cost.analytic import ScheduleLaunches, terms_of, times, total_symbol
from treegen.cost.launch_counts import ItemLaunches, MergeLaunches, item_launches
from treegen.cost.profiled import item_tokens, launches_us
from treegen.schedule.lower import lower
from treegen.strategies import strategy_from, strategy_names
from treegen.target.cost_terms import DEVICE_FACTS, ITEMS, MERGES
from treegen.target.problem import Problem
from treegen.target.targets import Constants, Target, target_from
from treegen.target.task_costs import source_of_costs, task_costs, task_rows
from treegen.target.tile_config import resident_blocks

SHAPE = Shape(32, 8, 128, dtype="fp16")
NO_ITEMS = ItemLaunches(*[np.zeros(0, np.int64)] * len(fields(ItemLaunches)))
NO_MERGES = MergeLaunches(*[np.zeros(0, np.int64)] * len(fields(MergeLaunches)))
FUSED = tuple(name for name in strategy_names() if name != "medusa")


def launches(kind: type, **counts: int) -> ItemLaunches | MergeLaunches:
    """One launch with these counts; the others are 1."""
    return kind(**{field.name: np.array([counts.get(field.name, 1)]) for field in fields(kind)})


@pytest.mark.parametrize("kind", [ItemLaunches, MergeLaunches])
@given(data=st.data())
def test_values_are_those_of_the_symbols(kind: type, data: st.DataObject) -> None:
    """Values of numbers against sympy's own arithmetic, term by term."""
    part = ITEMS if kind is ItemLaunches else MERGES
    names = [field.name for field in fields(kind)]
    counts = data.draw(st.fixed_dictionaries({name: st.integers(1, 10**6) for name in names}))
    values = {**counts, **{name: getattr(H200, name) for name in DEVICE_FACTS}}
    values |= {field.name: getattr(H200.constants, field.name) for field in fields(Constants)}
    found = terms_of(launches(kind, **counts), H200)
    assert list(found) == list(part.terms)
    for name, term in part.symbols.items():
        known = {str(symbol) for symbol in term.free_symbols}
        assert known <= set(values), f"{name} uses what nothing gives"
        values[name] = float(term.subs({symbol: values[str(symbol)] for symbol in term.free_symbols}))
        assert found[name] == pytest.approx([values[name]], rel=1e-9)


def test_every_constant_counts() -> None:
    """A constant that no term reads could not be fitted."""
    used = set().union(*(term.free_symbols for part in (ITEMS, MERGES) for term in part.symbols.values()))
    names = {str(symbol) for symbol in used | total_symbol().free_symbols}
    assert {field.name for field in fields(Constants)} <= names


@given(data=st.data())
def test_more_work_takes_no_less(data: st.DataObject) -> None:
    counted = ITEMS.counts
    counts = data.draw(st.fixed_dictionaries({name: st.integers(name == "pieces", 10**5) for name in counted}))
    # More pieces share the same `even_pieces`.
    name = data.draw(st.sampled_from([name for name in counted if name != "pieces"]))
    more = {**counts, name: counts[name] + data.draw(st.integers(1, 10**5))}
    one, other = (launches(ItemLaunches, **own) for own in (counts, more))
    less, more_us = (float(terms_of(made, H200)["items_us"][0]) for made in (one, other))
    assert more_us >= less * (1 - 1e-12)


def test_the_time_is_near_the_largest_term() -> None:
    """The soft maximum of three terms is above each of them and below 3 ** (1 / sharpness) times the largest."""
    found = terms_of(launches(ItemLaunches, full=10**6, longest_full=300, memory_bytes=10**8), H200)
    largest = max(float(found[name][0]) for name in ("chain", "throughput", "traffic"))
    assert largest <= float(found["items_us"][0]) <= largest * 3 ** (1 / H200.constants.sharpness)


def test_by_hand() -> None:
    """Launching: the first launch and every further one; unfused traffic at the memory's rate."""
    constants = replace(H200.constants, launch_us=10.0, next_launch_us=3.0, memory_fraction=0.5)
    assert times(ScheduleLaunches(NO_ITEMS, NO_MERGES, 0), H200, constants).total == 0
    assert times(ScheduleLaunches(NO_ITEMS, NO_MERGES, 1), H200, constants).total == 10
    made_of = times(ScheduleLaunches(NO_ITEMS, NO_MERGES, 4, unfused_bytes=24_000_000), H200, constants)
    assert made_of.launching == 19
    assert made_of.unfused == pytest.approx(24_000_000 / (4800e3 * 0.5))
    assert made_of.total == pytest.approx(29)
    one = launches(ItemLaunches, memory_bytes=48_000_000)
    assert terms_of(one, H200, constants)["traffic"][0] == pytest.approx(20)
    assert times(ScheduleLaunches(one, NO_MERGES, 1), H200, constants, np.array([7.0])).total == 17


@pytest.mark.parametrize("cost_model", ["analytic", "profiled"])
@pytest.mark.parametrize("target", ["h200", "a100", "cpu"])
@given(tree=forests(20, 300, salt=611), name=st.sampled_from((*strategy_names(), "auto")))
@examples(40)
def test_times_add_up(cost_model: str, target: str, tree: Tree, name: str) -> None:
    on = target_from(target)
    plan = strategy_from(name).plan(Problem(tree, SHAPE, on))
    estimate, made_of = assess(plan, lower(plan, Problem(tree, SHAPE, on)), Problem(tree, SHAPE, on), cost_model)
    parts = (made_of.launching, made_of.items, made_of.merges, made_of.unfused)
    assert all(np.isfinite(part) and part >= 0 for part in parts)
    assert estimate.time_us == made_of.total == pytest.approx(sum(parts))
    assert (estimate.time_us == 0) == (estimate.launches == 0)


def profiled(tree: Tree, name: str, target: Target = H200) -> tuple[float, np.ndarray, ItemLaunches]:
    """Profiled time of a strategy's only launch of items, the costs of its items, and its counts."""
    plan = strategy_from(name).plan(Problem(tree, SHAPE, target))
    schedule = lower(plan, Problem(tree, SHAPE, target))
    (config,) = schedule.configs
    items = item_launches(plan, schedule, Problem(tree, SHAPE, target))
    costs = task_costs(SHAPE, target)(task_rows(schedule.column("rows"), config, SHAPE), item_tokens(schedule))
    (time,) = launches_us(schedule, items, SHAPE, target)
    return float(time), costs, items


def test_a_profiled_launch_takes_its_longest_item() -> None:
    time, costs, _ = profiled(Tree.parse("20000+100*3"), "query")
    assert time == pytest.approx(float(costs.max()))


def test_a_profiled_launch_takes_the_mean_load() -> None:
    """64 items with 8 KV heads each, all on L2: they share the blocks that the device holds."""
    tree = Tree.parse("512(1*2048)")
    time, costs, items = profiled(tree, "query")
    assert time == pytest.approx(float(costs.sum()) * 8 / (int(items.resident[0]) * 132))
    assert time > float(items.memory_bytes[0]) / H200.memory_bytes_per_us


def test_a_profiled_launch_takes_its_traffic() -> None:
    """No grid knows of device memory: tasks that cost nothing wait for it."""
    grid = replace(H200.grid, microseconds=tuple(tuple(1e-6 for _ in line) for line in H200.grid.microseconds))
    target = replace(H200, grid=grid)
    time, _, items = profiled(Tree.parse("4096*256"), "query", target)
    rate = target.memory_bytes_per_us * target.constants.memory_fraction
    assert time == pytest.approx(float(items.memory_bytes[0]) / rate)


def test_a_profiled_launch_takes_its_longest_list() -> None:
    tree = Tree.parse("9000(500*7)")
    plan = strategy_from("flashforge").plan(Problem(tree, SHAPE, H200))
    schedule = lower(plan, Problem(tree, SHAPE, H200))
    (config,) = schedule.configs
    assert config.work_list
    costs = task_costs(SHAPE, H200)(task_rows(schedule.column("rows"), config, SHAPE), item_tokens(schedule))
    lanes = 8
    bounds = zip(schedule.work_indptr[:-1], schedule.work_indptr[1:], strict=True)
    longest = max(float(costs[schedule.work[begin:end] // lanes].sum()) for begin, end in bounds)
    items = item_launches(plan, schedule, Problem(tree, SHAPE, H200))
    assert launches_us(schedule, items, SHAPE, H200) == pytest.approx([longest])


def test_tasks_cost_in_proportion_to_the_bytes_of_a_token() -> None:
    wide, narrow = Shape(8, 2, 128, dtype="fp16"), Shape(8, 2, 64, dtype="fp16")
    assert task_costs(wide, H200)(16, 4096) == pytest.approx(float(H200.grid.cost(16, 4096)))
    assert task_costs(narrow, H200)(16, 4096) == pytest.approx(float(H200.grid.cost(16, 4096)) / 2)


def test_tasks_without_a_grid_come_from_the_analytic_model() -> None:
    """They rise with tokens, and as many as the device holds take as long as the model's full SMs."""
    target = target_from("h100")
    assert target.grid is None
    assert "analytic" in source_of_costs(target)
    assert source_of_costs(H200) == H200.grid.source
    costs = task_costs(SHAPE, target)(16, np.array([64, 1024, 65536]))
    assert (np.diff(costs) > 0).all()
    plan = strategy_from("query").plan(Problem(Tree.parse("1024*528"), SHAPE, target))
    schedule = lower(plan, Problem(Tree.parse("1024*528"), SHAPE, target))
    (config,) = schedule.configs
    items = item_launches(plan, schedule, Problem(Tree.parse("1024*528"), SHAPE, target))
    throughput = float(terms_of(items, target)["throughput"][0])
    single = float(task_costs(SHAPE, target)(4, 1024))
    share = single / (resident_blocks(config, SHAPE, target) * target.sms)
    assert share * 528 * 8 == pytest.approx(throughput, rel=0.01)


MEASURED = json.loads((TESTS / "support" / "measured_h200.json").read_text())


def ranks(values: list[float]) -> np.ndarray:
    """Ranks from 0, equal values sharing their mean rank."""
    array = np.array(values)
    return (array[:, None] > array).sum(1) + ((array[:, None] == array).sum(1) - 1) / 2


@pytest.mark.full
def test_against_measured_times() -> None:
    """FastTree's 45 cases by all fused strategies: what the models say of plans made now, against an H200's times."""
    assert tuple(MEASURED["strategies"]) == FUSED
    measured: list[float] = []
    estimated: dict[str, list[float]] = {"analytic": [], "profiled": []}
    for text, heads, microseconds in MEASURED["times"]:
        tree, (query, kv) = Tree.parse(text), heads.split("/")
        shape = Shape(int(query), int(kv), 128, dtype="fp16")
        for name, time in zip(FUSED, microseconds, strict=True):
            plan = strategy_from(name).plan(Problem(tree, shape, H200))
            schedule = lower(plan, Problem(tree, shape, H200))
            measured.append(time)
            for kind, entries in estimated.items():
                entries.append(account(plan, schedule, Problem(tree, shape, H200), kind).time_us)
    assert len(measured) == 45 * len(FUSED)
    for kind, entries in estimated.items():
        spearman = float(np.corrcoef(ranks(entries), ranks(measured))[0, 1])
        error = float(np.median(np.abs(np.array(entries) / np.array(measured) - 1)))
        assert spearman >= 0.98, kind
        assert error < 0.12, kind
