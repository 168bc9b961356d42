"""Commands for plans: explain, emit, io, strategies."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer

from treegen.cli.arguments import (
    DtypeOption,
    HeadDimOption,
    HeadsOption,
    HtmlOption,
    PageSizeOption,
    StrategyOption,
    SvgOption,
    TargetOption,
    TreeArgument,
    print_table,
    shape_from,
    target_of,
)
from treegen.cli.explain_options import (
    ChromeTraceOption,
    CostOption,
    DiffOption,
    ExplainedOption,
    FormulasOption,
    GroupsOption,
    JsonOption,
    MeasureOption,
    TraceOption,
)
from treegen.cli.progress_bars import activity_bar, progress_bar
from treegen.cli.rank_options import InterleaveOption, LinkOption, RanksOption, TensorOption, division_from
from treegen.codegen import emit as emission
from treegen.codegen.emit import Source
from treegen.cost.account import CostModel
from treegen.ir.errors import BackendError, FormatError, StrategyError
from treegen.ir.schedule import Schedule
from treegen.ir.shape import DEFAULT_SHAPE, Shape
from treegen.ir.tree import Tree
from treegen.progress import now
from treegen.report.chrome_trace import chrome_trace as trace_of
from treegen.report.decode_course import course_object, decode_html
from treegen.report.decode_io import DEFAULT_LAYERS, DEFAULT_STRIDE, decode_io
from treegen.report.estimate_text import fitted
from treegen.report.explain import Explanation
from treegen.report.explain import explain as explained
from treegen.report.strategy_diff import DEFAULT_GROUPS, Difference, difference
from treegen.report.timelines import Recorder
from treegen.report.verified_plans import planned
from treegen.schedule.pipeline import Lowering, device_schedule
from treegen.search.weigh import candidates
from treegen.strategies import strategy_names
from treegen.strategies.registry import spec_of
from treegen.target.problem import Problem
from treegen.target.targets import DEFAULT_TARGET, Target
from treegen.text_files import save_text
from treegen.workloads.traces import workload_from
from treegen.workloads.tree_files import tree_from_argument

_MOST_WEIGHED = 12
"""The most policies that --trace lists."""
_LONGEST_TITLE = 120
"""The most characters of a TREE that is the heading of its page."""


def explain(
    tree: TreeArgument,
    strategy: ExplainedOption = None,
    diff: DiffOption = None,
    heads: HeadsOption = None,
    head_dim: HeadDimOption = None,
    dtype: DtypeOption = None,
    page_size: PageSizeOption = None,
    target: TargetOption = DEFAULT_TARGET,
    cost: CostOption = "analytic",
    trace: TraceOption = False,
    groups: GroupsOption = None,
    formulas: FormulasOption = False,
    json: JsonOption = False,
    html: HtmlOption = None,
    svg: SvgOption = None,
    measure: MeasureOption = False,
    chrome_trace: ChromeTraceOption = None,
    ranks: RanksOption = 1,
    link: LinkOption = None,
    tensor: TensorOption = None,
    interleave: InterleaveOption = None,
) -> None:
    """Draw a tree, show which rows read which KV together, and account for bytes, padding, launches and time."""
    if diff is not None and (strategy, svg) != (None, None):
        name, value = ("strategy", strategy) if strategy is not None else ("svg", str(svg))
        reason = "excludes --diff, which names two strategies itself"
        raise StrategyError(name, value, reason, f"leave out --{name} or --diff")
    if diff is not None and (measure or chrome_trace is not None):
        fix = "use --strategy, or leave out --measure and --chrome-trace"
        raise StrategyError("diff", " ".join(diff), "excludes --measure and --chrome-trace", fix)
    division = division_from(ranks, link, tensor, interleave)
    if diff is not None and division is not None:
        raise StrategyError("diff", " ".join(diff), "excludes --ranks", "use --strategy, or leave out --ranks")
    recorder = _recorder() if measure else None
    shape, model = shape_from(heads, head_dim, dtype, page_size), _cost_model(cost)
    on_target = target_of(target)
    with activity_bar():
        now("reading the tree")
        planned_tree = tree_from_argument(tree)
        told: Explanation | Difference
        if diff is not None:
            told = difference(planned_tree, *diff, shape, on_target)
        else:
            names = _strategies(("auto" if html is None else "all") if strategy is None else strategy)
            told = explained(planned_tree, names, shape, on_target, model, recorder, division)
        written = _write_drawings(told, tree, html, svg)
        if chrome_trace is not None and isinstance(told, Explanation):
            save_text(chrome_trace, trace_of(told.entries))
            written.append(str(chrome_trace))
        if json:
            text = told.to_json()
        elif isinstance(told, Difference):
            text = told.text(DEFAULT_GROUPS if groups is None else groups)
        else:
            text = told.text(groups or 0, formulas)
        weighed = _weighed(planned_tree, shape, on_target) if trace else []
    print("\n".join([*written, *([text] if json or not written else []), *weighed]))


def _write_drawings(told: Explanation | Difference, tree: str, html: Path | None, svg: Path | None) -> list[str]:
    """Writes the page and the drawing that are asked for, and returns the names of their files."""
    if html is not None:
        title = "" if tree == "-" or len(tree) > _LONGEST_TITLE else tree
        save_text(html, told.to_html(title))
    if svg is not None and isinstance(told, Explanation):
        save_text(svg, told.to_svg())
    return [str(path) for path in (html, svg) if path is not None]


def _recorder() -> Recorder:
    """Returns the function that measures timelines. Raises BackendError where nothing can be measured."""
    from treegen.tuning import measured_timeline

    measured_timeline.check_measurable()
    return measured_timeline.record


def _weighed(tree: Tree, shape: Shape | None, target: Target) -> list[str]:
    """Lists the policies with the least estimated times among those that `auto` weighs, a line for each."""
    found = candidates(Problem(tree, shape or DEFAULT_SHAPE, target), _MOST_WEIGHED)
    return ["", f"weighed on {target.name}:", *fitted(f"  {time_us:.2f} us: {policy}" for policy, time_us in found)]


def emit(
    tree: TreeArgument,
    strategy: StrategyOption = "auto",
    heads: HeadsOption = None,
    head_dim: HeadDimOption = None,
    dtype: DtypeOption = None,
    page_size: PageSizeOption = None,
    target: TargetOption = DEFAULT_TARGET,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="Write <digest>.py files to this folder.", show_default="print"
        ),
    ] = None,
) -> None:
    """Print the Triton modules that a tree's kernel launches.

    With a page size other than 1 these are the modules for pages with gaps in between. A cache without gaps is
    addressed by KV slot.
    """
    shape = shape_from(heads, head_dim, dtype, page_size) or DEFAULT_SHAPE
    with activity_bar():
        problem = Problem(tree_from_argument(tree), shape, target_of(target))
        made = planned(problem, _strategies(strategy))
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            reason = f"cannot be made ({cause.strerror})"
            raise FormatError("output", str(output), reason, "name another folder") from cause
    schedules = [device_schedule(Lowering(entry.plan, entry.schedule), problem) for entry in made]
    sources = _sources(schedules, shape)
    if not sources:
        print("nothing to emit: the plan launches no kernel, or runs unfused in PyTorch", file=sys.stderr)
    for source in sources:
        if output is None:
            print(f"# {source.digest}.py\n{source.text}")
        else:
            save_text(output / f"{source.digest}.py", source.text)
            print(output / f"{source.digest}.py")


def account_workload(
    workload: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD",
            help="few-shot, reasoning or speculative, with options as in few-shot:width=30,steps=100; or a .json file "
            "of reasoning templates (FILE or FILE#INDEX) or of a speculative decoding (FILE or FILE:prompt=500).",
            show_default=False,
        ),
    ],
    strategy: StrategyOption = "all",
    heads: HeadsOption = None,
    head_dim: HeadDimOption = None,
    dtype: DtypeOption = None,
    layers: Annotated[int, typer.Option(help="Attention layers of the model.")] = DEFAULT_LAYERS,
    stride: Annotated[
        int, typer.Option(help="Steps between plans, for counts that need a plan; they are interpolated in between.")
    ] = DEFAULT_STRIDE,
    target: TargetOption = DEFAULT_TARGET,
    json: Annotated[bool, typer.Option("--json", help="Print exact bytes as JSON.")] = False,
    html: HtmlOption = None,
) -> None:
    """Account for the bytes that strategies read and write over whole decodings."""
    named_workload = workload_from(workload)
    names = _strategies(strategy)
    shape = shape_from(heads, head_dim, dtype, None) or DEFAULT_SHAPE
    on_target = target_of(target)
    with progress_bar(len(named_workload.decodes), "counting") as on_progress:
        found = decode_io(
            named_workload, names, shape, on_target, layers=layers, stride=stride, on_progress=on_progress
        )
    if html is not None:
        with progress_bar(1, "drawing") as on_progress:
            course = course_object(named_workload, names, shape, on_target, layers=layers, on_progress=on_progress)
        save_text(html, decode_html(found, course))
        print(html)
        if not json:
            return
    print(found.to_json() if json else found.text())


def strategies() -> None:
    """List the strategies with their default options."""
    specs = [spec_of(name) for name in (*strategy_names(), "auto")]
    print_table([(str(spec.make()), spec.summary) for spec in specs])


def _cost_model(text: str) -> CostModel:
    if text not in get_args(CostModel):
        raise BackendError("cost", text, "is unknown", f"use one of {', '.join(get_args(CostModel))}")
    return "profiled" if text == "profiled" else "analytic"


def _sources(schedules: Sequence[Schedule], shape: Shape) -> Collection[Source]:
    """Emits the modules of all schedules, each once."""
    found: dict[str, Source] = {}
    for schedule in schedules:
        found.update((source.digest, source) for source in emission.emit(schedule, shape, shape.page_size))
    return found.values()


def _strategies(text: str) -> tuple[str, ...]:
    return (*strategy_names(), "auto") if text == "all" else (text,)
