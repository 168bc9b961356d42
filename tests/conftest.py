"""What every test runs in: Triton's interpreter, one thread, a temporary cache; and golden files."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from support.browsers import Visits
    from treegen.autotune_cache.policy_cache import PolicyCache

# Read when Triton and torch are first imported, which is after this file. Each worker has a core to itself.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
# Triton's interpreter multiplies with NumPy. OpenBLAS's kernels for some CPUs (Haswell, Zen) give a row other bits in
# another place of the same matrix, which GPUs do not; those for this one do not, and run on every x86.
os.environ["OPENBLAS_CORETYPE"] = "Prescott"
os.umask(0o022)  # cache folders that a group may write are refused

# Interpreted kernels are too slow for deadlines. "ci" is Hypothesis's own: no deadline, the same examples every run.
settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

_ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--update-golden`."""
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files of the tests that run")


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Points the kernel and policy cache at a folder of this worker's session, and leaves shipped policies out, so that
    tests see what the model chooses.
    """
    from treegen.autotune_cache.policy_cache import POLICY_CACHE
    from treegen.autotune_cache.shipped_policies import ShippedPolicies

    os.environ["TREEGEN_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    POLICY_CACHE.shipped = ShippedPolicies(tmp_path_factory.mktemp("shipped"))


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    from support.quick_interpreter import quicken

    quicken()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of recorded trees: `TREEGEN_DATA`, else the one beside the checkout; skips where there is neither."""
    if chosen := os.environ.get("TREEGEN_DATA"):
        return Path(chosen)
    beside = _ROOT.parent / "shared" / "data"
    if not beside.is_dir():
        pytest.skip("no recorded trees: set TREEGEN_DATA to their folder")
    return beside


@pytest.fixture
def policies_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The policies' folder of an empty cache of this test alone; the folder does not exist yet."""
    monkeypatch.setenv("TREEGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "policies"


@pytest.fixture
def policy_cache(policies_folder: Path, tmp_path: Path) -> PolicyCache:
    """A policy cache in `policies_folder`, with nothing in memory and `tmp_path / "shipped"` for shipped entries."""
    from treegen.autotune_cache.policy_cache import PolicyCache

    (tmp_path / "shipped").mkdir()
    return PolicyCache(tmp_path / "shipped")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium for all tests of pages; skips where there is none."""
    from support.browsers import chromium

    with chromium() as started:
        yield started


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Visits]:
    """Opens the text of pages in a browser; afterwards there was no error, no message and no request."""
    from support.browsers import Visits

    visits = Visits(browser, tmp_path)
    yield visits
    for context in browser.contexts:
        context.close()
    assert visits.wrong == []


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compares a text with `tests/golden/<module>/<test>.txt`; under `--update-golden` writes it there instead."""
    module, _, test = request.node.nodeid.partition("::")
    name = re.sub(r"[^\w.-]+", "-", test).strip("-")
    path = _ROOT / "tests" / "golden" / Path(module).stem.removeprefix("test_") / f"{name}.txt"
    shown = path.relative_to(_ROOT)

    def compare(text: str) -> None:
        actual = text if text.endswith("\n") else f"{text}\n"
        if request.config.getoption("update_golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(actual, encoding="utf-8", newline="\n")
            return
        if not path.is_file():
            pytest.fail(f"no golden file {shown}: run this test with --update-golden to make it", pytrace=False)
        expected = path.read_text(encoding="utf-8")
        if actual != expected:
            difference = difflib.unified_diff(
                expected.splitlines(), actual.splitlines(), str(shown), "this run", lineterm=""
            )
            pytest.fail("\n".join([*difference, "if meant, run with --update-golden"]), pytrace=False)

    return compare
