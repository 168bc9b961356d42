"""The command line: what it prints and writes, one line per error, and that it stays light."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import treegen
from support.paths import ROOT
from treegen import Shape, Tree, cli
from treegen.codegen.emit import emit_merge, emit_partial
from treegen.codegen.merge_forms import merge_key_of
from treegen.codegen.partial_keys import kernel_key
from treegen.cost.known_links import link_named
from treegen.cost.ranks import Division
from treegen.report.explain import explain
from treegen.schedule.passes.single_loop import in_single_loop
from treegen.strategies import strategy_names
from treegen.target.targets import targets
from treegen.version import VERSION
from treegen.workloads.generate import few_shot, reasoning, speculative

FEW_SHOT = "1,4/100,10"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that succeeds prints."""
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def process(*arguments: str, stdin: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=120, **options)


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    tree = Tree.parse(FEW_SHOT)
    assert run(capsys, "explain", FEW_SHOT) == f"{explain(tree)}\n"
    everything = explain(tree, (*strategy_names(), "auto"))
    assert run(capsys, "explain", FEW_SHOT, "--strategy", "all", "--groups", "1") == f"{everything.text(1)}\n"
    formulas = run(capsys, "explain", FEW_SHOT, "--formulas", "--groups", "3")
    assert formulas == f"{explain(tree).text(3, formulas=True)}\n"


def test_explain_begins_with_the_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "explain", FEW_SHOT, "--strategy", "all").splitlines()
    assert lines[0].split()[:2] == ["strategy", "time"]
    assert lines[1].startswith(" 1. ")
    assert lines.index("auto takes query") < lines.index("target h200: 132 SMs")


def test_groups_and_formulas_are_told_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    short = run(capsys, "explain", FEW_SHOT)
    assert "group 0" not in short
    assert "more groups" not in short
    assert "lone_tile" not in short
    assert "group 0" in run(capsys, "explain", FEW_SHOT, "--groups", "1")
    assert "lone_tile = " in run(capsys, "explain", FEW_SHOT, "--formulas")


DEEP = "".join(f"{10 + level}(1," for level in range(60)) + "5" + ")" * 60


@pytest.mark.parametrize("tree", [FEW_SHOT, DEEP, "1,4,16,64,256/256,8,256,64,32", "4000+9000+7(3*5,2(8*9))"])
@pytest.mark.parametrize(
    "options",
    [["--strategy", "all"], ["--groups", "5", "--formulas", "--trace"], ["--cost", "profiled", "--page-size", "16"],
     ["--diff", "deft-node", "fasttree"], ["--ranks", "24", "--tensor", "2", "--link", "400g", "--interleave", "3"]],
)  # fmt: skip
def test_lines_of_80_columns(capsys: pytest.CaptureFixture[str], tree: str, options: list[str]) -> None:
    for line in run(capsys, "explain", tree, *options).splitlines():
        assert len(line) <= 80, line


@pytest.mark.parametrize("text", ["10(5*3)\n", Tree.parse("10(5*3)").to_json(), "2\n-1 0 7 1\n0 1 3 0\n"])
def test_a_tree_from_standard_input(text: str) -> None:
    done = process("-m", "treegen", "explain", "-", stdin=text)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(("tree 1,3/10,5 |", "tree 1,1/7,3 |"))


def test_standard_input_is_refused_by_name() -> None:
    for text in ("", "10(5*", '{"format":1'):
        done = process("-m", "treegen", "emit", "-", stdin=text)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("treegen: error: ")
        assert "standard input" in done.stderr
        assert done.stderr.count("\n") == 1


def test_explain_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--heads", "16/2", "--head-dim", "64", "--dtype", "fp16", "--page-size", "16", "--target", "a100"]
    expected = explain(Tree.parse(FEW_SHOT), ["deft-node"], Shape(16, 2, 64, dtype="fp16", page_size=16), "a100")
    assert run(capsys, "explain", FEW_SHOT, "--strategy", "deft-node", *options) == f"{expected}\n"
    printed = run(capsys, "explain", FEW_SHOT, "--strategy", "deft-node", *options, "--json")
    assert printed == f"{expected.to_json()}\n"
    shape = json.loads(run(capsys, "explain", FEW_SHOT, "--heads", "6:3", "--json"))["shape"]
    assert (shape["num_qo_heads"], shape["num_kv_heads"], shape["head_dim"], shape["dtype"]) == (6, 3, 128, "bf16")


def test_explain_of_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    one = run(capsys, "explain", FEW_SHOT)
    assert run(capsys, "explain", FEW_SHOT, "--ranks", "1") == one
    division = Division(8, link_named("400g"), tensor=2, interleave=4)
    expected = explain(Tree.parse(FEW_SHOT), division=division)
    options = ["--ranks", "8", "--link", "400g", "--tensor", "2", "--interleave", "4"]
    printed = run(capsys, "explain", FEW_SHOT, *options)
    assert printed == f"{expected}\n"
    assert printed.startswith(one)
    assert "8 ranks over 400g" in printed.removeprefix(one)
    value = json.loads(run(capsys, "explain", FEW_SHOT, *options, "--json"))
    assert "ranks" not in json.loads(run(capsys, "explain", FEW_SHOT, "--json"))
    assert (value["format"], value["ranks"]) == (1, json.loads(expected.to_json())["ranks"])


def test_explain_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tree.txt"
    path.write_text("2\n-1 0 7 1\n0 1 3 0\n")
    assert "tree 1,1/7,3 |" in run(capsys, "explain", str(path))


@pytest.mark.parametrize("page_size", [1, 16])
def test_emit(capsys: pytest.CaptureFixture[str], tmp_path: Path, page_size: int) -> None:
    shape = Shape(32, 8, 64, page_size=page_size)
    schedule = explain(Tree.parse(FEW_SHOT), ["deft-node"], shape).entries[0].schedule
    expected = [emit_partial(kernel_key(config, shape, page_size)) for config in in_single_loop(schedule).configs]
    expected.append(emit_merge(merge_key_of(schedule, shape, 0)))
    options = ["--strategy", "deft-node", "--head-dim", "64", "--page-size", str(page_size)]
    printed = run(capsys, "emit", FEW_SHOT, *options)
    assert printed == "".join(f"# {source.digest}.py\n{source.text}\n" for source in expected)
    ast.parse(printed)

    paths = run(capsys, "emit", FEW_SHOT, *options, "-o", str(tmp_path / "made" / "here")).split()
    assert paths == [str(tmp_path / "made" / "here" / f"{source.digest}.py") for source in expected]
    assert [Path(path).read_text() for path in paths] == [source.text for source in expected]


def test_emit_lists_a_module_once(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, "emit", FEW_SHOT, "--strategy", "all")
    digests = [line for line in printed.splitlines() if line.startswith("# ") and line.endswith(".py")]
    assert len(digests) == len(set(digests)) >= 3


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "strategies").splitlines()
    assert [line.split()[0].partition("(")[0] for line in lines] == [*strategy_names(), "auto"]
    assert all(len(line.split()) > 3 for line in lines)  # every strategy says what it is
    assert [line.split()[0] for line in run(capsys, "targets").splitlines()] == ["name", *targets()]


def test_generate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, tree in {
        ("few-shot",): few_shot(),
        ("few-shot", "--prompt", "9", "--width", "3", "--step", "2"): few_shot(9, 3, 2),
        ("reasoning", "--seed", "4"): reasoning(4),
        ("reasoning", "--depth", "2", "--width", "3", "--prompt", "9", "--thought", "20", "--step", "5"): reasoning(
            0, 2, 3, 9, 20, 5
        ),
        ("speculative", "--seed", "2", "--tokens", "8", "--prefix", "50"): speculative(2, 8, 50),
    }.items():
        assert run(capsys, "generate", *arguments) == f"{tree.to_json()}\n"
    path = tmp_path / "tree.json"
    assert run(capsys, "generate", "reasoning", "-o", str(path)) == ""
    assert Tree.load(path).to_json() == reasoning().to_json()
    assert f"signature {reasoning().signature()}" in run(capsys, "explain", str(path))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["explain", "1,4/100"], "tokens_per_node = "),
        (["explain", "100(10*"], "tree = 100(10*: expected"),
        (["explain", "absent.json"], "path = absent.json: does not exist"),
        (["explain", "."], "path = .: is a folder; name a file in it"),
        (["emit", "tests"], "path = tests: is a folder; name a file in it"),
        (["explain", FEW_SHOT, "--strategy", "deft"], "strategy = deft: is not registered; use one of query,"),
        (["explain", FEW_SHOT, "--heads", "32"], "heads = 32: is not a pair"),
        (["bench", "--table", "batches", "--heads", "32:8, 8:1,16", "--heads", "4:1"], "heads = 16: is not a pair"),
        (["warm", FEW_SHOT, "--heads", "32:8,16"], "heads = 16: is not a pair"),
        (["explain", FEW_SHOT, "--heads", "6:4"], "num_qo_heads = 6"),
        (["explain", FEW_SHOT, "--head-dim", "1000"], "head_dim = 1000"),
        (["explain", FEW_SHOT, "--head-dim", "big"], "--head-dim"),
        (["explain", FEW_SHOT, "--dtype", "fp8"], "dtype = fp8"),
        (["explain", FEW_SHOT, "--page-size", "0"], "page_size = 0"),
        (["explain", FEW_SHOT, "--target", "h2000"], "target = h2000: is not known"),
        (["explain", FEW_SHOT, "--groups", "-1"], "--groups"),
        (["explain", FEW_SHOT, "--ranks", "0"], "ranks = 0: is no number of ranks; give 1..1024"),
        (["explain", FEW_SHOT, "--ranks", "8", "--tensor", "3"], "tensor = 3: does not divide 8 ranks"),
        (["explain", FEW_SHOT, "--ranks", "12", "--tensor", "12"], "num_qo_heads = 32: are no multiple of 12 ranks"),
        (["explain", FEW_SHOT, "--ranks", "2", "--interleave", "0"], "interleave = 0: is not a positive integer"),
        (["explain", FEW_SHOT, "--ranks", "2", "--link", "ib"], "link = ib: is unknown; use one of nvlink, 400g"),
        (["explain", FEW_SHOT, "--link", "400g"], "link = 400g: is about several ranks; give --ranks as well"),
        (["explain", FEW_SHOT, "--ranks", "2", "--diff", "query", "cascade"], "diff = query cascade: excludes --ranks"),
        (["explain", FEW_SHOT, "--colour"], "No such option: --colour"),
        (["explain", FEW_SHOT, "more"], "unexpected extra argument"),
        (["explain"], "Missing argument 'TREE'"),
        (["emit", FEW_SHOT, "-o", "README.md/folder"], "output = README.md/folder: cannot be made"),
        (["generate", "few-shot", "--width", "0"], "width = 0"),
        (["generate", "few-shot", "--seed", "1"], "No such option: --seed"),
        (["generate", "speculative", "-o", "absent/tree.json"], "path = absent/tree.json: cannot be written"),
        (["bench", FEW_SHOT, "--family", "agents"], "family = agents: is about batches; give --table batches as well"),
        (["bench", FEW_SHOT, "--steps", "5"], "steps = 5: is about batches"),
        (["tune", FEW_SHOT, "--json", "file"], "json = file: is about batches; give --suite as well"),
        (["tune", "--suite", "--kv-dtype", "int8"], "kv_dtype = int8: is not a supported type"),
        (["tune", FEW_SHOT, "--kv-dtype", "e4m3"], "kv_dtype = e4m3: is about batches; give --suite"),
        (["tune", FEW_SHOT, "--window-left", "127"], "window_left = 127: is about batches; give --suite"),
        (["tune", "--suite", "--timeout", "5"], "suite = --suite: excludes TREE, --page-size, --timeout and --again"),
        (["warm", "--serving", "--dry-run", "--page-size", "3"], "shape.page_size = 3: is not a power of two"),
        (["run", FEW_SHOT, "--compare", "auto,foo"], "strategy = foo: is not registered"),
        (["absent"], "No such command 'absent'"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("treegen: error: ")
    assert printed.err.count("\n") == 1
    assert expected in printed.err


def test_traceback_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--traceback", "explain", "1,4/100"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("treegen: error: tokens_per_node")


@pytest.mark.parametrize("arguments", [[], ["explain"], ["generate"], ["generate", "speculative"], ["cache", "why"]])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str], option: str) -> None:
    assert "--help" in run(capsys, *arguments, option)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == f"treegen {treegen.__version__}\n"
    assert treegen.__version__ == VERSION


def test_no_command_gives_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    printed = capsys.readouterr()
    assert "explain" in printed.out + printed.err
    assert "treegen: error" not in printed.out + printed.err


def test_module_and_exit_code() -> None:
    done = process("-m", "treegen", "explain", FEW_SHOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{explain(Tree.parse(FEW_SHOT))}\n"
    failed = process("-m", "treegen", "explain", "?")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("treegen: error: tree = ?")


HEAVY = {"explain": {"torch", "triton", "networkx"}, "emit": {"torch", "triton", "networkx", "sympy"}}


@pytest.mark.parametrize("command", HEAVY)
def test_the_command_line_imports_neither_torch_nor_triton(command: str) -> None:
    program = (
        "import sys\n"
        "from treegen.cli import main\n"
        f"code = main([{command!r}, {FEW_SHOT!r}, '--strategy', 'all'])\n"
        f"heavy = {HEAVY[command]} & set(sys.modules)\n"
        "sys.exit(code or ', '.join(heavy) or 0)\n"
    )
    done = process("-c", program)
    assert (done.returncode, done.stderr) == (0, "")


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from treegen.cli import main\n"
        f"sys.exit(main({arguments!r}))\n"
    )
    return process("-c", program)


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune", FEW_SHOT],
        ["warm", FEW_SHOT],
        ["bench", FEW_SHOT],
        ["profile"],
        ["explain", FEW_SHOT, "--target", "current"],
    ],
    ids=lambda each: each[0],
)
def test_commands_that_need_torch_say_so(arguments: list[str]) -> None:
    done = without_torch(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "treegen: error: torch = not installed: this command needs it; install torch\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "--from", "benchmarks/results/h200_apart.json"],
        ["io", "few-shot:width=3,steps=4"],
        ["cache", "why", FEW_SHOT],
        ["explain", FEW_SHOT, "--ranks", "8"],
    ],
    ids=lambda each: each[0],
)
def test_commands_that_do_without_torch(arguments: list[str]) -> None:
    done = without_torch(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_a_reader_that_leaves_early() -> None:
    pytest.importorskip("resource")  # pipes of this kind are POSIX
    command = [sys.executable, "-W", "error", "-m", "treegen", "explain", "10(1*5000)", "--json", "--strategy", "query"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(9) == '{"format"'
        running.stdout.close()
        assert running.stderr.read() == ""
        assert running.wait(timeout=120) == 1


def test_output_that_cannot_be_written() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    with full.open("w") as device:
        command = [sys.executable, "-m", "treegen", "explain", FEW_SHOT]
        done = subprocess.run(command, cwd=ROOT, stdout=device, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "treegen: error: output cannot be written: No space left on device\n"


def test_a_terminal_without_line_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = process("-m", "treegen", "explain", FEW_SHOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "?? 10 tokens x4, 1 row" in done.stdout
