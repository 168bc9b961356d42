"""Names of all providers, and the providers that they name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from treegen.bench.fasttree_peer import FastTreeArtifact
from treegen.bench.flashinfer_peer import FlashInferCascade, FlashInferDecode, FlashInferPrefill
from treegen.bench.providers import Provider, Treegen
from treegen.bench.torch_peers import Flex, Sdpa
from treegen.ir.errors import InputError
from treegen.strategies import strategy_from

_LIBRARIES: dict[str, Callable[[], Provider]] = {
    "sdpa": Sdpa,
    "flex": Flex,
    "flashinfer-decode": FlashInferDecode,
    "flashinfer-cascade": FlashInferCascade,
    "flashinfer-cascade-fa2": lambda: FlashInferCascade("fa2"),
    "flashinfer-prefill": FlashInferPrefill,
}
_ARTIFACTS: dict[str, Callable[[Path], Provider]] = {
    "fasttree-artifact": FastTreeArtifact,
    "fasttree-artifact-planner-tiles": lambda folder: FastTreeArtifact(folder, planner_tiles=True),
}
PEERS = (*_LIBRARIES, *_ARTIFACTS)
"""Names of all peers. The name of a strategy is a provider as well."""


def providers_from(names: str, fasttree: Path | None) -> list[Provider]:
    """Returns the providers of a list of names with commas.

    Args:
        names: Names of peers and of strategies.
        fasttree: The folder of a checkout of FastTree-Artifact.

    Raises:
        InputError: A provider needs the checkout.
        StrategyError: A name is unknown.
    """
    return [_provider(name.strip(), fasttree) for name in names.split(",")]


def _provider(name: str, fasttree: Path | None) -> Provider:
    if name in _LIBRARIES:
        return _LIBRARIES[name]()
    if name not in _ARTIFACTS:
        return Treegen(strategy_from(name).name)
    if fasttree is None:
        raise InputError("providers", name, "needs a checkout of FastTree-Artifact", "name its folder with --fasttree")
    return _ARTIFACTS[name](fasttree)
