"""`treegen doctor`: a report on this machine and on treegen's choices for it, to paste into a bug report."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import treegen
import treegen.compiled.c_library as c_library
from treegen.autotune_cache.entry import differing_versions
from treegen.autotune_cache.folders import OWN_FOLDER, refusal
from treegen.autotune_cache.key import target_text
from treegen.autotune_cache.policy_cache import POLICY_CACHE
from treegen.cli.cache_commands import differing_parts
from treegen.compiled.c_library import c_compiler
from treegen.environment import NAMES, SWITCHES, cache_root, is_changed
from treegen.ir.errors import CacheWarning, InputError
from treegen.target.targets import DEFAULT_TARGET, target_from
from treegen.version import VERSION

FORMAT = 1
"""The version of the JSON form. Raise it when a field changes its meaning."""
_PACKAGES = ("torch", "triton", "numpy", "jinja2", "typer")
_OPTIONAL = {"flashinfer": "flashinfer-python", "matplotlib": "matplotlib"}
_PREFIXES = ("TREEGEN_", "TRITON_", "CUDA_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_")
_VARIABLES = ("CC", "XDG_CACHE_HOME")
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_NONE = "not installed"


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report versions, GPUs, caches, policies and variables of this machine, treegen's choices for it, and problems.

    Paste the report into bug reports.
    """
    found = examined()
    print(json.dumps(found) if as_json else "\n".join(_lines(found)))


def examined() -> dict[str, Any]:
    """Returns the whole report as a JSON object."""
    torch, problem = _torch()
    devices = _devices(torch)
    backend = _backend(torch, problem)
    target = devices[0]["target"] if devices else DEFAULT_TARGET
    caches = _caches()
    policies, other_versions = _policies(devices[0]["key"] if devices else target_text(target_from(None)))
    return {
        "format": FORMAT,
        "versions": {
            "treegen": f"{VERSION} in {treegen.__path__[0]}",
            "python": f"{platform.python_version()} on {platform.platform()}",
            **{name: _version(name) for name in _PACKAGES},
            "CUDA of torch": None if torch is None else torch.version.cuda,
            "NVIDIA driver": _driver(torch),
            "C compiler": c_compiler(),
        },
        "optional packages": {name: _version(name, package) for name, package in _OPTIONAL.items()},
        "GPUs": [{name: value for name, value in device.items() if name != "key"} for device in devices],
        "target": target,
        "backend": backend,
        "caches": caches,
        "policies": policies,
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) or name in _VARIABLES
        },
        "notes": [*_notes(problem, devices, caches, policies), *other_versions],
    }


def _torch() -> tuple[Any, str]:
    """Imports torch; returns None and the reason where that fails."""
    if not _installed("torch"):
        return None, "torch is not installed"
    try:
        return importlib.import_module("torch"), ""
    except Exception as error:  # reports are also made of broken installations
        return None, f"torch cannot be imported ({type(error).__name__}: {error})"


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # hidden on purpose, or installed in part
        return False


def _version(name: str, package: str | None = None) -> str | None:
    """Returns the installed version of a module without importing it; None where it is not installed."""
    if not _installed(name):
        return None
    try:
        return importlib.metadata.version(package or name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _driver(torch: Any) -> str | None:
    """Describes the NVIDIA driver: the kernel module's version, and the latest CUDA version that it supports."""
    parts = []
    if _KERNEL_MODULE.is_file():
        version = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", _KERNEL_MODULE.read_text("utf-8", "replace"))
        parts += [version[1]] if version else []
    asked = getattr(getattr(torch, "_C", None), "_cuda_getDriverVersion", None)  # not in every version of torch
    if asked is not None and torch.cuda.is_available():
        number = asked()
        parts.append(f"CUDA up to {number // 1000}.{number % 1000 // 10}")
    return ", ".join(parts) or None


def _devices(torch: Any) -> list[dict[str, Any]]:
    """Describes all CUDA devices, the current one first."""
    if torch is None:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old drivers: no GPU is listed then
        if not torch.cuda.is_available():
            return []
    from treegen.backends.devices import target_of_device

    current, devices = torch.cuda.current_device(), []
    for index in sorted(range(torch.cuda.device_count()), key=lambda index: (index != current, index)):
        properties, target = torch.cuda.get_device_properties(index), target_of_device(index)
        devices.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "SMs": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
                "target": target.name,
                "constants_of": target.constants_of,
                "key": target_text(target),
            }
        )
    return devices


def _backend(torch: Any, problem: str) -> dict[str, str | None]:
    """Returns the default backend of kernels, and the reason."""
    if torch is None:
        return {"name": None, "why": f"{problem}: plans can be made and explained, kernels cannot run"}
    from treegen.backends.devices import backend_for, default_device, obstacle_to_triton

    device = default_device()
    reason = obstacle_to_triton(device)
    if reason is None:
        reason = "a CUDA device of compute capability 8.0 or higher, or TRITON_INTERPRET"
        if device.type != "cuda":
            reason = "no CUDA device; with TRITON_INTERPRET set, backend='triton' runs in Triton's interpreter"
    return {"name": backend_for(device, None), "why": reason}


def _caches() -> list[dict[str, Any]]:
    """Describes the cache folders of treegen and of Triton."""
    home = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~"))
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    own = {name: cache_root() / name for name in ("compiled", "kernels", "policies")}
    return [
        {"what": what, "path": str(path), **_contents(path), **_access(path), "refused": refused}
        for what, path, refused in (
            *((name, path, refusal(path)) for name, path in own.items()),
            ("Triton", triton, ""),
        )
    ]


def _contents(folder: Path) -> dict[str, int]:
    """Counts the files below a folder and their bytes. Files that vanish or cannot be read are not counted."""
    sizes = []
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append((Path(place) / name).lstat().st_size)
            except OSError:
                continue
    return {"files": len(sizes), "bytes": sum(sizes)}


def _access(folder: Path) -> dict[str, bool]:
    """Returns whether a folder exists, and whether it is writable or can be made."""
    existing = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    return {"exists": existing == folder, "writable": existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)}


def _policies(target: str) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Counts policies by state, of the user's folder and shipped ones.

    Also returns notes on usable policies that were measured with other versions of packages.
    """
    counts: dict[str, Counter[str]] = {"user": Counter(), "shipped": Counter()}
    versions: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)  # the notes say why a folder is not used
        entries = POLICY_CACHE.entries()
    for listed in entries:
        if listed.entry is None:
            state = "damaged"
        elif differing := differing_parts(listed.entry.key):
            state = f"stale: other {', '.join(differing)}"
        else:
            state = "usable" if listed.entry.key.target == target else "of another target"
        if state == "usable" and listed.entry is not None and (texts := differing_versions(listed.entry)):
            versions["; ".join(texts)] += 1
        counts[listed.where][state] += 1
    notes = [
        f"{count} policies were measured with {texts}: used nevertheless; `treegen warm --again` measures them again"
        for texts, count in versions.most_common()
    ]
    return {where: dict(counter.most_common()) for where, counter in counts.items()}, notes


def _notes(
    problem: str, devices: list[dict[str, Any]], caches: list[dict[str, Any]], policies: dict[str, dict[str, int]]
) -> Iterator[str]:
    """Yields notes on problems and on important facts, each with its remedy."""
    if problem:
        yield f"{problem}: install it to run kernels"
    elif not devices:
        yield f"no CUDA device: kernels run on the torch backend, plans are made for {DEFAULT_TARGET}"
    elif c_compiler() is None:
        yield "no C compiler: Triton needs one at the first launch; install gcc or set CC"
    if c_compiler() is not None and c_library.library() is None:
        yield "the C compiler fails: NumPy makes plans of running batches, in two to four times as long"
    for device in devices:
        if float(device["capability"]) < 8:
            yield f"GPU {device['index']} is below compute capability 8.0: the torch backend serves it"
    for cache in caches:
        if cache["refused"]:
            yield f"{cache['path']} {cache['refused']}: {OWN_FOLDER}"
        elif not cache["writable"]:
            variable = "TRITON_CACHE_DIR" if cache["what"] == "Triton" else "TREEGEN_CACHE_DIR"
            yield f"{cache['path']} cannot be written: set {variable} to a writable folder"
    if devices and not any(states.get("usable") for states in policies.values()):
        yield "no policy was measured for this GPU and these versions: auto uses the cost model until `treegen tune`"
    if damaged := policies["user"].get("damaged"):
        yield f"damaged policies in the user's folder: {damaged}; `treegen cache ls` names them"
    for name in sorted(os.environ):
        if name.startswith("TREEGEN_") and name not in NAMES:
            yield f"{name} is not a variable of treegen: use {', '.join(NAMES)}"
    for switch in SWITCHES:
        try:
            is_changed(switch)
        except InputError as error:
            yield str(error)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield from _pairs("versions", {name: value or _NONE for name, value in found["versions"].items()})
    yield from _pairs("optional packages", {name: value or _NONE for name, value in found["optional packages"].items()})
    yield f"GPUs: {len(found['GPUs']) or 'none'}"
    for gpu in found["GPUs"]:
        constants = "" if gpu["constants_of"] == gpu["target"] else f", cost model scaled from {gpu['constants_of']}"
        yield (
            f"  {gpu['index']}: {gpu['name']}, compute capability {gpu['capability']}, {gpu['SMs']} SMs, "
            f"{gpu['memory_bytes'] / 2**30:.1f} GiB; target {gpu['target']}{constants}"
        )
    yield f"target: {found['target']}"
    yield f"backend: {found['backend']['name'] or 'none'} ({found['backend']['why']})"
    yield from _pairs("caches", {cache["what"]: _cache_text(cache) for cache in found["caches"]})
    states = {
        where: ", ".join(f"{count} {state}" for state, count in counts.items()) or "none"
        for where, counts in found["policies"].items()
    }
    yield from _pairs("policies", states)
    yield from _pairs("environment", found["environment"] or {"none set": ""})
    yield f"notes:{'' if found['notes'] else ' none'}"
    yield from (f"  {note}" for note in found["notes"])


def _pairs(title: str, values: dict[str, str]) -> Iterator[str]:
    yield f"{title}:"
    yield from (f"  {name}: {value}" if value else f"  {name}" for name, value in values.items())


def _cache_text(cache: dict[str, Any]) -> str:
    contents = f"{cache['files']} files, {cache['bytes'] / 2**20:.1f} MiB" if cache["exists"] else "does not exist yet"
    access = "NOT USED" if cache["refused"] else "writable" if cache["writable"] else "NOT WRITABLE"
    return f"{cache['path']}, {contents}, {access}"
