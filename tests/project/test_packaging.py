"""What gets installed: types in editable installs, metadata, and a README that shows whole outside of a checkout."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from support.paths import ROOT

PACKAGED = ("treegen", "ir", "templates", "autotune_cache")
TYPED = """
import treegen
from treegen.ir.errors import TreeError
reveal_type(treegen.Tree.parse("1"))
treegen.Tree.parse(1)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that finds what is installed and nothing of this checkout."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, installed editable into the virtual environment `venv` beside it."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("editable")
    copy = folder / "checkout"
    for name in PACKAGED:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    built = run(
        sys.executable, "-c", "from setuptools import build_meta; build_meta.build_editable('../wheel')", cwd=copy
    )
    assert built.returncode == 0, built.stderr
    venv.create(folder / "venv", symlinks=os.name == "posix")
    (site,) = (folder / "venv").rglob("site-packages")
    (wheel,) = (folder / "wheel").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return copy


def test_an_editable_install_has_types(checkout: Path) -> None:
    pytest.importorskip("mypy")
    folder = checkout.parent
    scripts = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    python = next(path for path in scripts.iterdir() if path.stem == "python")
    found = run(
        sys.executable, "-m", "mypy", "--python-executable", python, "--cache-dir", "types", "-c", TYPED, cwd=folder
    )
    notes = [line.partition(" ")[2] for line in found.stdout.splitlines()]
    assert notes[0] == 'note: Revealed type is "treegen.ir.tree.tree.Tree"', found.stdout
    assert notes[1].startswith('error: Argument 1 to "parse" of "Tree" has incompatible type "int"')
    assert len(notes) == 3


def test_an_editable_install_runs_the_checkouts_files(checkout: Path) -> None:
    (links,) = (checkout / "build").glob("__editable__*")
    for package in ("treegen", "ir"):
        (checkout / package / "written_later.py").write_text("HERE = __file__\n")
    program = (
        "import treegen, treegen.codegen.emit\n"
        "from treegen import ir, written_later\n"
        "from treegen.ir import written_later as below\n"
        "from treegen.autotune_cache.policy_cache import POLICY_CACHE\n"
        "assert POLICY_CACHE.entries()\n"
        "from treegen.codegen.merge_forms import invariant_merge_key\n"
        "assert 'def merge(' in treegen.codegen.emit.emit_merge(invariant_merge_key(treegen.Shape(8, 8, 64))).text\n"
        "print(treegen.__version__, written_later.HERE, below.HERE, treegen.codegen.emit.__file__, sep='\\n')\n"
    )
    done = run(sys.executable, "-c", program, cwd=checkout.parent, PYTHONPATH=str(links))
    assert done.returncode == 0, done.stderr
    files = [checkout / "treegen" / "written_later.py", checkout / "ir" / "written_later.py"]
    assert list(map(Path, done.stdout.splitlines()[1:])) == [*files, checkout / "treegen" / "codegen" / "emit.py"]


def test_a_wheel_has_every_template(checkout: Path) -> None:
    built = run(
        sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('../dist')", cwd=checkout
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = (checkout.parent / "dist").glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("treegen/templates/")}
    there = {path for path in (ROOT / "templates").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert packed == {f"treegen/templates/{path.relative_to(ROOT / 'templates').as_posix()}" for path in there}


def test_pictures_of_the_readme_exist_and_are_described() -> None:
    """Where the README stands alone, as in a package index, the description is read in place of the picture."""
    images = re.findall(r"!\[([^\]]*)\]\(([^)\s]+)", (ROOT / "README.md").read_text("utf-8"))
    for description, image in images:
        assert image.startswith("https://") or (ROOT / image).is_file()
        assert len(description.split()) > 5


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_says_what_it_installs(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "setup.cfg", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    failed = run("make", "--no-print-directory", "demo", "PYTHON=false", "VENV=1", cwd=tmp_path)
    assert failed.stdout.startswith("installing treegen and what it needs")
    assert failed.returncode != 0
