"""Commands for cached policies: ls, why, clear, export, import."""

from __future__ import annotations

import warnings
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from treegen.autotune_cache.entry import Entry, differing_versions, policy_text
from treegen.autotune_cache.key import PolicyKey, key_for
from treegen.autotune_cache.listed_entries import Listed
from treegen.autotune_cache.policy_cache import POLICY_CACHE, policies_folder
from treegen.cli.arguments import (
    DtypeOption,
    HeadDimOption,
    HeadsOption,
    PageSizeOption,
    TargetOption,
    TreeArgument,
    print_table,
    shape_from,
    target_of,
)
from treegen.ir.errors import CacheWarning
from treegen.ir.shape import DEFAULT_SHAPE
from treegen.search.bucket import policy_bucket
from treegen.search.policies import accepts
from treegen.target.targets import DEFAULT_TARGET
from treegen.version import KERNEL_VERSION, SPACE_VERSION
from treegen.workloads.tree_files import tree_from_argument

app = typer.Typer(no_args_is_help=True, help="Show and move cached policies, which were measured as the fastest.")


@app.command("ls")
def list_entries() -> None:
    """List the entries of the user's folder and those shipped with treegen."""
    listed = POLICY_CACHE.entries()
    if not listed:
        print(f"no entries in {policies_folder()}, and none are shipped")
        return
    titles = ("entry", "where", "bucket", "shape", "target", "time", "policy", "state")
    print_table([titles, *map(_cells, listed)])


@app.command()
def why(
    tree: TreeArgument,
    heads: HeadsOption = None,
    head_dim: HeadDimOption = None,
    dtype: DtypeOption = None,
    page_size: PageSizeOption = None,
    target: TargetOption = DEFAULT_TARGET,
) -> None:
    """Show a tree's key, its entry in the cache, or how the nearest entries differ."""
    shape = shape_from(heads, head_dim, dtype, page_size) or DEFAULT_SHAPE
    key = key_for(policy_bucket(tree_from_argument(tree)), shape, target_of(target))
    policies_folder()  # warns where the user's own folder is not used
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)  # the reason is printed
        found = POLICY_CACHE.lookup(key, accepts)
    print(f"key {key.digest}")
    for field in fields(PolicyKey):
        print(f"  {field.name}: {getattr(key, field.name)}")
    if found.entry is not None:
        print(f"hit ({found.where}): {policy_text(found.entry.policy)}, {_time(found.entry)}")
        print(f"  source: {found.entry.source}")
        for text in differing_versions(found.entry):
            print(f"  measured with {text}: used nevertheless; `treegen tune --again` measures it again")
    else:
        print(f"miss: {found.reason}")
        print("\n".join(POLICY_CACHE.why(key)))


@app.command()
def clear(yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False) -> None:
    """Remove the entries of the user's folder. Shipped entries stay."""
    if not yes:
        try:
            yes = typer.confirm(f"remove all entries in {policies_folder()}?", err=True)
        except typer.Abort:
            print("")  # ends the line of the question
    if not yes:
        print("nothing removed")
        raise typer.Exit(1)
    print(f"removed {POLICY_CACHE.clear()} entries from {policies_folder()}")


@app.command("export")
def export_entries(file: Annotated[Path, typer.Argument(metavar="FILE", help="The JSON file to write.")]) -> None:
    """Write all valid entries of the user's folder to a file, for `import` on another machine."""
    print(f"exported {POLICY_CACHE.export_to(file)} entries")


@app.command("import")
def import_entries(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `export` wrote.")],
) -> None:
    """Add the entries of a file to the user's folder. Existing entries stay."""
    imported = POLICY_CACHE.import_from(file)
    print(f"imported {imported.taken} entries into {policies_folder()}")
    for reason in imported.refused:
        print(f"refused {reason}")


def _cells(listed: Listed) -> tuple[str, ...]:
    entry = listed.entry
    if entry is None:
        return ascii(listed.name)[1:-1][:12], listed.where, "", "", "", "", "", listed.reason
    key = entry.key
    differing = differing_parts(key)
    state = f"not used: other {', '.join(differing)}" if differing else "valid"
    target = key.target.partition(" (")[0]
    cells = (key.bucket, key.shape, target, _time(entry), policy_text(entry.policy), state)
    return listed.name[:12], listed.where, *cells


def differing_parts(key: PolicyKey) -> list[str]:
    """Names the versions of a key that differ from this treegen's. An entry with such a key is not used."""
    current = {"kernels": KERNEL_VERSION, "space": SPACE_VERSION}
    return [name for name, value in current.items() if getattr(key, name) != value]


def _time(entry: Entry) -> str:
    return "not measured" if entry.measured_us is None else f"{entry.measured_us:.4g} us"
