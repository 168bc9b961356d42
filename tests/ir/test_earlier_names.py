"""JSON texts with the names that fields had earlier are read, and options of `cohort` with their earlier names."""

from __future__ import annotations

import json

import pytest

from treegen import Shape, Tree, strategies
from treegen.ir.errors import StrategyError
from treegen.ir.plan import Plan
from treegen.ir.schedule import Schedule
from treegen.schedule.lower import lower
from treegen.search.policies import policy_of, strategy_of
from treegen.strategies.registry import strategy_from
from treegen.target.problem import Problem
from treegen.target.targets import target_from

PROBLEM = Problem(Tree.parse("100(70*2)"), Shape(4, 2, 64, dtype="fp16"), target_from("h200"))
PLAN = (
    '{"format":1,"kind":"plan","strategy":"cascade","tiles":[],"mask":"interval","blocks":0,"merge":"reduce",'
    '"row_indptr":[0,1,2,3],"row_lo":[0,0,1],"row_hi":[2,1,2],"segment_indptr":[0,1,2,3],"node":[0,1,2],'
    '"start":[0,0,0],"stop":[100,70,70],"seen_lo":[0,0,0],"seen_hi":[2,1,1],"stage":[0,1,1],"fixed_block":0}'
)
CONFIG = (
    '{"rows":16,"tokens":32,"block":16,"mask":"none","warps":2,"stages":3,'
    '"dealt":false,"merging":false,"full":true,"waiting":false}'
)
SCHEDULE = (
    f'{{"format":1,"kind":"schedule","classes":[{CONFIG},{CONFIG}],"class_indptr":[0,1,3],"rows":[0,1],'
    '"merge_rows":[0,1],"merge_indptr":[0,2,4],"merge_slots":[0,2,1,3],"stage_indptr":[0,1,2],'
    '"merge_stage_indptr":[0,0,2],"work_indptr":[0],"work":[],"epilogue_indptr":[0],"epilogue_slots":[],'
    '"row_positions":[],"items":[[0,2,0,3,0,1,0,0],[0,1,3,2,2,1,2,1],[1,1,5,2,4,1,3,2]],'
    '"tiles":[[0,32,0,2],[32,32,0,2],[64,32,0,2],[100,32,0,1],[132,32,0,1],[170,32,0,1],[202,32,0,1]],'
    '"blocks":[[96,4,0,2],[0,0,0,0],[164,6,0,1],[0,0,0,0],[234,6,0,1],[0,0,0,0]]}'
)


def test_plans() -> None:
    plan = strategy_from("cascade").plan(PROBLEM)
    assert Plan.from_json(PLAN).to_json() == plan.to_json()


def test_schedules() -> None:
    schedule = lower(strategy_from("cascade").plan(PROBLEM), PROBLEM)
    assert Schedule.from_json(SCHEDULE).to_json() == schedule.to_json()
    assert "merge_partials" in json.loads(schedule.to_json())


def test_options_of_cohort() -> None:
    assert strategies.cohort(64, apart=2) == strategies.cohort(64, split_shared_rows=2)
    assert strategies.cohort(cut=(1,)) == strategies.cohort(cut_nodes=(1,))
    assert str(strategies.cohort(64, apart=2)) == "cohort(head_rows=64, split_shared_rows=2)"
    with pytest.raises(StrategyError, match="earlier name of split_shared_rows"):
        strategies.cohort(64, apart=2, split_shared_rows=3)


def test_measured_policies() -> None:
    measured = strategy_of({"strategy": "cohort", "head_rows": 64, "apart": 2})
    assert policy_of(measured) == {"strategy": "cohort", "head_rows": 64, "split_shared_rows": 2}
