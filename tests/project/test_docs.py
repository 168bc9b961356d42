"""Pages: their code runs as written, their commands parse, and what they link to and name exists."""

from __future__ import annotations

import inspect
import pkgutil
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from textwrap import dedent
from typing import Any, NamedTuple

import pytest
import torch
import typer
from torch.distributed.run import get_args_parser

import treegen
import treegen.distributed
import treegen.engine
import treegen.integrations
from support.paths import ROOT
from treegen import cli
from treegen.environment import NAMES
from treegen.scoring.options import ScoreOptions
from treegen.strategies import strategy_names
from treegen.target.targets import targets

PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text("utf-8")
    for page in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")))
}
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`]+)`")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
VARIABLE = re.compile(r"[A-Z_]+=\S+")
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}
OTHERS_VARIABLES = {"TREEGEN_DATA"}  # typer reads it, as the default of an option


class Block(NamedTuple):
    """A fenced block of a page: the language and marks after the fence, its text, and where it begins and ends."""

    language: str
    code: str
    begin: int
    end: int


def blocks_of(text: str) -> Iterator[Block]:
    for fence in FENCE.finditer(text):
        yield Block(fence["language"], dedent(fence["code"]), fence.start(), fence.end())


def prose_of(text: str) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", text)


def having(language: str) -> list[str]:
    return [page for page, text in PAGES.items() if any(block.language == language for block in blocks_of(text))]


@pytest.mark.parametrize("page", having("python"))
def test_the_code_of_a_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In order, in one namespace. Blocks marked `cuda` need a GPU, and `torchrun` ranks: test_parallel_engine.py runs
    these. A `text` block right after code shows its output.
    """
    namespace: dict[str, object] = {}
    text, printed, end = PAGES[page], "", 0
    for block in blocks_of(text):
        if block.language == "text" and printed and not text[end : block.begin].strip():
            assert printed == block.code
        printed, end = "", block.end
        if block.language == "python" or (block.language == "python cuda" and torch.cuda.is_available()):
            lines_above = text.count("\n", 0, block.begin) + 1  # a traceback names the page's lines
            exec(compile("\n" * lines_above + block.code, page, "exec"), namespace)
            printed = capsys.readouterr().out
            assert printed.count("passed: out error") == block.code.count("print(kernel.verify(")


def test_blocks_are_marked_in_a_known_way() -> None:
    known = {"python", "python cuda", "sh", "text", "{toctree}", "{eval-rst}", "{include} ../CONTRIBUTING.md",
             "{include} ../CHANGELOG.md", "python torchrun"}  # fmt: skip
    assert {block.language for text in PAGES.values() for block in blocks_of(text)} <= known
    assert [page for page, text in PAGES.items() if text.count("```") != 2 * len(list(blocks_of(text)))] == []


@cache
def program() -> Any:
    return typer.main.get_command(cli.app)


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words of a command line name, and its arguments."""
    command, rest = program(), list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    return command, rest


def check_treegen(words: list[str]) -> None:
    """Parses a command line as `treegen` does, without running the command."""
    command, rest = command_of(words)
    assert not getattr(command, "commands", {}) or rest == ["--version"], f"no command in {words}"
    if rest != ["--version"]:
        command.make_context("treegen", rest)


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets_named = [word for word in words if not VARIABLE.fullmatch(word)]
    assert all(re.search(rf"^{word}:", makefile, re.MULTILINE) for word in targets_named), words


def check_python(words: list[str]) -> None:
    files = [word for word in words if "/" in word]
    assert files
    assert all((ROOT / file).exists() for file in files), words


def check_torchrun(words: list[str]) -> None:
    options = get_args_parser().parse_args(words)
    assert (options.module, options.training_script) == (True, "treegen"), words
    check_treegen(options.training_script_args)


CHECKS = {"treegen": check_treegen, "make": check_make, "python": check_python, "torchrun": check_torchrun}


@pytest.mark.parametrize("page", having("sh"))
def test_the_commands_of_a_page_parse(page: str) -> None:
    for block in blocks_of(PAGES[page]):
        for line in block.code.splitlines() if block.language == "sh" else ():
            words = shlex.split(line.partition(" < ")[0], comments=True)
            while words and VARIABLE.fullmatch(words[0]):
                words.pop(0)
            if words[:1] == ["pip"] or not words:
                continue
            try:
                CHECKS[words[0]](words[1:])
            except Exception as error:
                pytest.fail(f"{page}: {line}: {error!r}")


@pytest.mark.parametrize(
    "words",
    [["explain"], ["explain", "1", "--strategies", "all"], ["tunes", "1"], ["cache"], ["warm", "--stride", "x"]],
)
def test_a_wrong_command_does_not_parse(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"issing|o such|no command|a valid integer"):
        check_treegen(words)


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_exist(page: str) -> None:
    """Names of commands and options; arguments may be left out or stand for others."""
    for span in SPAN.findall(prose_of(PAGES[page])):
        words = span.split()
        if words[0] == "treegen" and len(words) > 1:
            command, rest = command_of(words[1:])
            known = {option for parameter in command.params for option in parameter.opts}
            unknown = [word for word in rest if word.startswith("--") and word not in known | {"--help"}]
            assert unknown == [], span
            assert command is not program() or rest[0] in ("--version", "COMMAND"), span


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in LINK.findall(prose_of(PAGES[page])):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in map(slug, HEADING.findall(prose_of(target.read_text("utf-8")))), link


@pytest.mark.parametrize("page", PAGES)
def test_names_in_backticks_exist(page: str) -> None:
    """Paths that begin with a folder of the repository, and dotted names of the package."""
    for name in SPAN.findall(prose_of(PAGES[page])):
        if re.fullmatch(r"treegen(\.\w+)+", name):
            pkgutil.resolve_name(name)
        elif re.fullmatch(r"[\w./]+/[\w./]*", name) and name.partition("/")[0] in FOLDERS - {"build"}:
            assert (ROOT / name).exists(), name


def test_the_reference_has_every_public_name() -> None:
    documented = set()
    for page, text in PAGES.items():
        if page.startswith("docs/reference/"):
            documented |= set(re.findall(r"^\.\. auto\w+:: (\w+)", text, re.MULTILINE))
    assert set(treegen.__all__) - {"__version__", "strategies"} <= documented
    assert {*treegen.engine.__all__, *treegen.integrations.__all__, *treegen.distributed.__all__} <= documented
    assert {name for name in treegen.strategies.__all__ if name != "register_strategy"} <= documented


def documented_arguments(public: object) -> list[str]:
    """The names in the section `Args` of a docstring, in its order."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(public) or "", re.MULTILINE | re.DOTALL)
    return [] if section is None else re.findall(r"\w+", " ".join(re.findall(r"^    (\w[\w, ]*):", section[1], re.M)))


def public_functions() -> Iterator[tuple[str, Any, Any]]:
    """The public functions, classes and methods that document arguments, and what these are arguments of."""
    modules = (treegen, treegen.engine, treegen.integrations, treegen.distributed)
    named = ((module, name) for module in modules for name in module.__all__)
    for name, public in (
        (f"distributed.{name}" if module is treegen.distributed else name, getattr(module, name))
        for module, name in named
    ):
        members = vars(public) if inspect.isclass(public) else {}
        for place, each in ((name, public), *((f"{name}.{own}", member) for own, member in members.items())):
            function = getattr(each, "__func__", each)
            if callable(function) and not place.rpartition(".")[2].startswith("_") and documented_arguments(function):
                yield place, function, function.__init__ if inspect.isclass(function) else function


FUNCTIONS = {name: each for name, *each in public_functions()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_document_each_argument(name: str) -> None:
    documented, function = FUNCTIONS[name]
    taken = [argument for argument in inspect.signature(function).parameters if argument not in ("self", "cls")]
    assert sorted(documented_arguments(documented)) == sorted(taken)


def test_the_first_functions_of_every_reader_document_arguments() -> None:
    first = {"compile", "compile_batch", "Kernel.update", "Tree.from_levels", "TreeAttentionWrapper.plan"}
    assert first <= set(FUNCTIONS)


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("README.md", (*strategy_names(), "auto")),
        ("docs/strategies.md", (*strategy_names(), "auto")),
        ("docs/scores.md", tuple(field.name for field in fields(ScoreOptions))),
        ("docs/command_line.md", NAMES),
    ],
)
def test_a_page_lists_all_that_there_is(page: str, names: tuple[str, ...]) -> None:
    spans = {span.partition("=")[0] for span in SPAN.findall(prose_of(PAGES[page]))}
    assert set(names) - spans == set()


def test_the_readme_names_every_target() -> None:
    (line,) = re.findall(r"^\| targets for plans \|.*$", PAGES["README.md"], re.MULTILINE)
    assert set(re.findall(r"[\w-]+", line)) >= set(targets())


def test_the_command_line_page_has_every_command() -> None:
    code = "".join(block.code for block in blocks_of(PAGES["docs/command_line.md"]))
    assert [name for name in program().commands if f"treegen {name}" not in code] == []


def test_variables_on_pages_are_read() -> None:
    named = {name for text in PAGES.values() for name in re.findall(r"TREEGEN_\w+", text)}
    assert named <= {*NAMES, *OTHERS_VARIABLES}
