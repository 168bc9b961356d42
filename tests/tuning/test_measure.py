"""Measuring candidates in a process of their own: what becomes of each, and that none harms another or the caller."""

import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

import treegen
from support import meters
from support.forests import examples, forests
from support.h200 import H200
from support.meters import Deed, Unpicklable
from support.paths import TESTS
from support.processes import in_background, started
from treegen import Shape, Tree, TreegenError
from treegen.backends import oracle
from treegen.backends.triton_program import TritonProgram
from treegen.ir.errors import BackendError, InputError, TreeError
from treegen.schedule.lower import lower
from treegen.strategies import Strategy, cohort, deft_flatten, deft_node, medusa, query, strategy_from, strategy_names
from treegen.target.problem import Problem
from treegen.target.targets import Target, targets
from treegen.tuning import kernel_meter
from treegen.tuning.kernel_meter import Case, KernelMeter, checked_rows, prepare
from treegen.tuning.measurer import Measurer, Outcome

TREE = Tree.parse("40(20,9*3)")
SHAPE = Shape(4, 2, 64, dtype="fp16")
CPU = torch.device("cpu")


def measure(
    tree: Tree,
    candidates: Sequence[Strategy],
    shape: Shape,
    target: Target,
    on_candidate: Callable[[Outcome], None] | None = None,
    **options: Any,
) -> list[Outcome]:
    """The outcomes of a measurer for this tree alone."""
    with Measurer(**options) as measurer:
        return measurer.measure(Problem(tree, shape, target), candidates, on_candidate)


def performed(*names: str, noted: str = "", timeout_s: float = 30.0) -> list[Outcome]:
    deeds = [Deed(name, noted) for name in names]
    return measure(TREE, deeds, SHAPE, H200, meter=meters.perform, timeout_s=timeout_s)


def is_running(process: int) -> bool:
    """Whether a process runs; one that is dead and that its new parent has yet to collect does not."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def ended(processes: Sequence[int], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_running, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# The measuring process


def test_outcomes_are_in_the_order_given_and_reported_one_by_one() -> None:
    seen: list[Outcome] = []
    deeds = [Deed(name) for name in ("a", "raise", "b", "wrong", "c")]
    outcomes = measure(TREE, deeds, SHAPE, H200, meter=meters.perform, on_candidate=seen.append)
    assert outcomes == seen
    assert [outcome.strategy for outcome in outcomes] == ["a", "raise", "b", "wrong", "c"]
    a, raised, b, wrong, c = outcomes
    assert (a.problem, a.out_error) == (None, 1e-4)
    assert raised == Outcome("raise", None, "failed: ValueError: first line second line", None)
    assert wrong == Outcome("wrong", None, "wrong output: error 2.5e-01 exceeds 2.0e-03", 0.25)
    assert a.microseconds == b.microseconds  # an exception on the host leaves the process as it was
    assert c.microseconds not in (a.microseconds, None)  # a wrong output does not
    times = [outcome.microseconds for outcome in outcomes]
    assert ended([int(time) for time in times if time], within_s=0)


def test_a_process_that_crashes_hangs_or_loses_its_device_is_replaced(tmp_path: Path) -> None:
    note = tmp_path / "note"
    outcomes = performed("a", "exit", "b", "crash", "lose", "c", "hang", "d", noted=str(note), timeout_s=3.0)
    assert [outcome.problem for outcome in outcomes] == [
        None,
        "process died: exit status 3 (last words)",
        None,
        "process died: SIGSEGV",
        "failed: RuntimeError: illegal memory access",
        None,
        "timed out after 3 s",
        None,
    ]
    assert len({outcome.microseconds for outcome in outcomes if outcome.problem is None}) == 4
    assert all((outcome.microseconds is None) == (outcome.problem is not None) for outcome in outcomes)
    hung = [int(number) for number in note.read_text().split()]
    assert len(hung) == 2
    assert ended(hung)  # also what it had started


def test_errors_that_are_no_numbers_are_wrong_outputs() -> None:
    infinite, nothing = performed("infinite", "not a number")
    assert infinite == Outcome("infinite", None, "wrong output: error inf exceeds 2.0e-03", math.inf)
    assert nothing.problem == "wrong output: error nan exceeds 2.0e-03"
    assert nothing.microseconds is None


def test_tolerance_is_that_of_the_type() -> None:
    coarse = Shape(4, 2, 64, dtype="bf16")
    (outcome,) = measure(TREE, [Deed("a")], coarse, H200, meter=meters.perform)
    assert outcome.problem is None
    (outcome,) = measure(TREE, [Deed("a")], Shape(4, 2, 64, dtype="fp32"), H200, meter=meters.perform)
    assert outcome.problem == "wrong output: error 1.0e-04 exceeds 1.0e-05"


def test_the_process_gets_the_arguments_stays_light_and_may_print(capfd: pytest.CaptureFixture[str]) -> None:
    printed, imported, arguments, long = performed("print", "torch", "arguments", "raise at length")
    assert printed.problem is None
    assert imported.microseconds == 0
    assert arguments.microseconds == float(f"{TREE.num_rows}64{H200.sms}")
    assert long.problem is not None
    assert len(long.problem) < 330
    assert long.problem.startswith("failed: ValueError: aaa")
    assert long.problem.endswith("aaz")
    assert capfd.readouterr() == ("", "")


def test_candidates_that_cannot_be_sent_or_loaded_are_outcomes() -> None:
    deeds = [Unpicklable("here"), Deed("a")]
    sent, fine = measure(TREE, deeds, SHAPE, H200, meter=meters.perform)
    assert sent.problem == "cannot be sent to another process: TypeError: stays here"
    assert fine.problem is None


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]\n"
        "import treegen\n"
        "from support import meters\n"
        "from treegen.tuning.measurer import Measurer\n"
        "from treegen.target.problem import Problem\n"
        "from treegen.target.targets import target_from\n"
        "class Mine(meters.Deed): pass\n"
        "print('script')\n"
        "tree, shape = treegen.Tree.parse('9(3*2)'), treegen.Shape(4, 2, 64)\n"
        "deeds = [Mine('mine'), meters.Deed('a')]\n"
        "with Measurer(meter=meters.perform) as measurer:\n"
        "    for outcome in measurer.measure(Problem(tree, shape, target_from('h200')), deeds):\n"
        "        print(outcome.problem)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    marker, mine, fine = done.stdout.splitlines()
    assert marker == "script"
    assert mine.startswith("cannot be loaded in another process, where __main__ is another: AttributeError")
    assert fine == "None"


def test_a_meter_that_cannot_be_loaded_is_every_candidates_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("only_here")
    exec("def meter(*arguments): return 1.0, 0.0", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    outcomes = measure(TREE, [Deed("a"), Deed("b")], SHAPE, H200, meter=module.meter)
    problem = "no measuring process: the meter cannot be loaded in another process: ModuleNotFoundError"
    assert [outcome.problem is not None and outcome.problem.startswith(problem) for outcome in outcomes] == [True] * 2


@pytest.mark.parametrize(("program", "reason"), [("/bin/false", "exit status 1"), ("/no/such/python", "No such file")])
def test_an_interpreter_that_does_not_start_is_tried_once(
    program: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **o: started.append(a) or popen(*a, **o))  # type: ignore[func-returns-value]
    outcomes = performed("a", "b")
    assert len(started) == 1
    for outcome in outcomes:
        assert outcome.problem is not None
        assert outcome.problem.startswith("no measuring process: process died: ")
        assert reason in outcome.problem


def test_one_process_serves_trees_one_after_another() -> None:
    """Also behind one that it could not measure; and another takes over where the last was lost."""
    other = Tree.parse("9(3*4)")
    with Measurer(meter=meters.perform) as measurer:
        first = measurer.measure(Problem(TREE, SHAPE, H200), [Deed("a"), Deed("raise")])
        facts = measurer.measure(Problem(other, Shape(8, 2, 32), H200), [Deed("arguments")])
        second = measurer.measure(Problem(other, SHAPE, H200), [Deed("b"), Deed("lose")])
        third = measurer.measure(Problem(TREE, SHAPE, H200), [Deed("c")])
    assert facts[0].microseconds == float(f"4{32}{H200.sms}")
    assert second[0].microseconds == first[0].microseconds
    assert third[0].microseconds not in (first[0].microseconds, None)


INTERRUPTED = """
import sys, treegen
from support import meters
from treegen.tuning.measurer import Measurer
from treegen.target.problem import Problem
from treegen.target.targets import target_from
tree, shape = treegen.Tree.parse('9(3*2)'), treegen.Shape(4, 2, 64)
with Measurer(meter=meters.perform) as measurer:
    measurer.measure(Problem(tree, shape, target_from('h200')), [meters.Deed('hang', sys.argv[1])])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_caller_leaves_no_measuring_process(number: signal.Signals, tmp_path: Path) -> None:
    note = tmp_path / "note"
    with in_background():
        process = started(INTERRUPTED, str(note), stderr=subprocess.PIPE, text=True)
    with process as caller:
        deadline = time.monotonic() + 60
        while not note.exists():
            assert time.monotonic() < deadline
            assert caller.poll() is None
            time.sleep(0.02)
        hung, grandchild = map(int, note.read_text().split())
        assert is_running(hung)
        caller.send_signal(number)
        _, errors = caller.communicate(timeout=30)
    assert ended([hung])
    if number == signal.SIGINT:
        assert errors.splitlines()[-1] == "KeyboardInterrupt"
        assert ended([grandchild])
    else:
        os.kill(grandchild, signal.SIGKILL)


def test_an_error_in_the_callback_reaches_the_caller_and_ends_the_process() -> None:
    seen: list[Outcome] = []

    def stop(outcome: Outcome) -> None:
        seen.append(outcome)
        raise ArithmeticError("enough")

    with pytest.raises(ArithmeticError, match="enough"):
        measure(TREE, [Deed("a"), Deed("b")], SHAPE, H200, meter=meters.perform, on_candidate=stop)
    (outcome,) = seen
    assert outcome.microseconds is not None
    assert ended([int(outcome.microseconds)], within_s=0)


# Errors before any process


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes starting a process a failure of the test."""

    def start(*arguments: object, **options: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)


@pytest.mark.usefixtures("nothing_starts")
def test_no_cuda_device_is_an_error_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="has no CUDA device"):
        measure(TREE, [query()], SHAPE, H200)


@pytest.mark.usefixtures("nothing_starts")
def test_devices_that_cannot_be_measured_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in (2, -1):
        with pytest.raises(BackendError, match="is not one of 2 CUDA devices"):
            measure(TREE, [query()], SHAPE, H200, device=device)
    with pytest.raises(BackendError, match="TRITON_INTERPRET"):  # which is set in tests
        measure(TREE, [query()], SHAPE, H200, device=1)
    monkeypatch.setattr(kernel_meter, "KernelMeter", None)
    monkeypatch.setattr("treegen.backends.devices.interpreted", lambda: False)
    monkeypatch.setattr("treegen.backends.devices.backend_for", lambda *arguments: "triton")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(BackendError, match="was changed after CUDA started"):
        measure(TREE, [query()], SHAPE, H200, device=1)


@pytest.mark.parametrize(("visible", "expected"), [(None, "1"), ("4, 7", "7"), ("GPU-a,GPU-b", "GPU-b")])
def test_the_process_sees_the_chosen_device_alone(
    visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr("treegen.backends.devices.interpreted", lambda: False)
    monkeypatch.setattr("treegen.backends.devices.backend_for", lambda *arguments: "triton")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    given: list[str] = []

    def start(*arguments: object, env: dict[str, str], **options: object) -> None:
        given.append(env["CUDA_VISIBLE_DEVICES"])
        raise OSError("not today")

    monkeypatch.setattr(subprocess, "Popen", start)
    (outcome,) = measure(TREE, [query()], SHAPE, H200)
    assert outcome.problem == "no measuring process: process died: not today"
    assert given == [expected]


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"repeats": 0}, InputError),
        ({"timeout_s": 0}, InputError),
        ({"timeout_s": math.inf}, InputError),
        ({"meter": lambda *arguments: (1.0, 0.0)}, InputError),
    ],
    ids=["no repeats", "no time", "endless", "a meter that does not pickle"],
)
def test_impossible_arguments(options: dict[str, object], error: type[TreegenError]) -> None:
    with pytest.raises(error):
        measure(TREE, [Deed("a")], SHAPE, H200, **{"meter": meters.perform, **options})  # type: ignore[arg-type]


@pytest.mark.usefixtures("nothing_starts")
def test_a_tree_without_rows_and_no_candidates() -> None:
    with pytest.raises(TreeError, match="has no rows"):
        measure(Tree.from_parents([-1], [3], rows=[]), [Deed("a")], SHAPE, H200, meter=meters.perform)
    assert measure(TREE, [], SHAPE, H200, meter=meters.perform) == []


def test_measuring_is_imported_without_torch() -> None:
    program = "import sys, treegen.tuning.measurer, treegen.tuning.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=TESTS.parent, timeout=60).returncode == 0


# What travels


@examples(50)
@given(tree=forests(salt=900))
def test_trees_pickle_with_their_kv_and_stay_read_only(tree: Tree) -> None:
    again = pickle.loads(pickle.dumps(tree, pickle.HIGHEST_PROTOCOL))
    assert again.to_json() == tree.to_json()
    assert not any(array.flags.writeable for array in (again.parent, again.kv.start, again.topology.row_of_rank))
    plan = deft_node().plan(Problem(again, SHAPE, H200))
    assert str(plan) == str(deft_node().plan(Problem(tree, SHAPE, H200)))


@pytest.mark.parametrize("name", [*strategy_names(), "auto"])
def test_strategies_pickle(name: str) -> None:
    strategy = strategy_from(name)
    again = pickle.loads(pickle.dumps(strategy, pickle.HIGHEST_PROTOCOL))
    assert again == strategy
    assert str(again) == str(strategy)
    lowered = [lower(s.plan(Problem(TREE, SHAPE, H200)), Problem(TREE, SHAPE, H200)) for s in (again, strategy)]
    assert np.array_equal(*(schedule.pack().array for schedule in lowered))


def test_shapes_and_targets_pickle() -> None:
    for value in (SHAPE, Shape(8, 1, 128, page_size=16), *targets().values()):
        assert pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)) == value


# The meter of real kernels


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("strategy", [query(), deft_node(), deft_flatten(32), cohort(), medusa()], ids=str)
def test_right_outputs_are_timed(dtype: str, strategy: Strategy) -> None:
    tree = TREE.with_kv([np.arange(count) + 100 * node for node, count in enumerate(TREE.tokens)])
    shape = Shape(4, 2, 64, dtype=dtype, page_size=8 if dtype == "fp16" else 1)
    microseconds, error = KernelMeter(7, meters.cycles)(Problem(tree, shape, H200), strategy)
    assert microseconds == 7
    assert 0 < error <= oracle.TOLERANCE[dtype]


@pytest.mark.parametrize("place", [3, 4], ids=["out", "lse"])
def test_wrong_outputs_are_not_timed(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TritonProgram.__call__

    def scaled(self: TritonProgram, *arguments: object) -> None:
        run(self, *arguments)  # type: ignore[arg-type]
        arguments[place][-1] *= 1.5  # type: ignore[index]

    monkeypatch.setattr(TritonProgram, "__call__", scaled)
    microseconds, error = KernelMeter(7, meters.cycles)(Problem(TREE, SHAPE, H200), query())
    assert microseconds is None
    assert 0.05 < error < 1


@pytest.mark.parametrize("place", [3, 4], ids=["out", "lse"])
def test_a_row_left_unwritten_is_an_infinite_error_wherever_it_is(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_meter, "CHECKED_ROWS", 2)
    case = Case.of(TREE, SHAPE, CPU)
    assert case.rows.tolist() == [0, 3]
    program = prepare(Problem(TREE, SHAPE, H200), query(), CPU)

    def forget_row_1(*arguments: torch.Tensor) -> None:
        before = arguments[place][1].clone()
        program(*arguments)  # type: ignore[arg-type]
        arguments[place][1] = before

    assert case.check(program) < 2e-3
    assert case.check(forget_row_1) == math.inf  # type: ignore[arg-type]


def test_unproven_plans_are_verified() -> None:
    class Idle(Deed):
        def plan(self, problem: Problem, on_pass: object = None) -> treegen.ir.plan.Plan:
            shape = problem.shape
            return query().plan(Problem(Tree.parse("40(20,9)"), shape, H200))

    with pytest.raises(TreegenError, match="row"):
        KernelMeter(1, meters.cycles)(Problem(TREE, SHAPE, H200), Idle("idle"))


def test_checked_rows_are_spread_over_all_ranks() -> None:
    few = Tree.from_parents([-1, 0, 0], [5, 3, 3], rows=[(2, 3), (1, 3), (0, 5)])
    assert checked_rows(few).tolist() == [0, 1, 2]
    many = Tree.from_levels([1, 50, 1000], [10, 4, 2])
    rows = checked_rows(many)
    assert len(rows) == len(np.unique(rows)) == 64
    assert np.isin(many.topology.row_of_rank[[0, -1]], rows).all()
    assert np.diff(rows).max() <= 17


def test_inputs_that_take_more_than_half_of_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = TREE.with_kv([np.arange(count) + 100 * node for node, count in enumerate(TREE.tokens)])
    slots = -(-(tree.kv.last_slot + 1) // 16) * 16
    needed = 2 * 2 * (slots * 2 * 64 + tree.num_rows * 4 * 64)
    shape = Shape(4, 2, 64, dtype="fp16", page_size=16)
    monkeypatch.setattr(kernel_meter, "free_bytes", lambda device: 2 * needed - 1)
    with pytest.raises(InputError, match="more than half of the"):
        Case.of(tree, shape, CPU)
    monkeypatch.setattr(kernel_meter, "free_bytes", lambda device: 2 * needed)
    case = Case.of(tree, shape, CPU)
    assert case.k_cache.shape == case.v_cache.shape == (slots // 16, 16, 2, 64)
    assert Case.of(tree, shape, CPU).k_cache.equal(case.k_cache)
    assert abs(float(case.k_cache.float().std()) - 1) < 0.02


def test_the_meter_of_kernels_in_the_measuring_process() -> None:
    meter = KernelMeter(3, meters.cycles)
    outcomes = measure(TREE, [query(), Deed("raise"), cohort()], SHAPE, H200, meter=meter)
    assert [outcome.microseconds for outcome in outcomes] == [3, None, 3]
    assert outcomes[1].problem == "failed: NotImplementedError"
    assert all(o.out_error is not None and o.out_error < 2e-3 for o in (outcomes[0], outcomes[2]))


def test_the_oracle_on_some_rows() -> None:
    case = Case.of(TREE, SHAPE, CPU)
    inputs = case.q, case.k_cache, case.v_cache
    out, lse = oracle.reference(TREE, *inputs)
    some_out, some_lse = oracle.reference(TREE, *inputs, rows=[2, 0])
    assert torch.equal(some_out, out[[2, 0]])
    assert torch.equal(some_lse, lse[[2, 0]])
    for row in (4, -1):
        with pytest.raises(InputError, match=r"rows\[0\]"):
            oracle.reference(TREE, *inputs, rows=[row])
