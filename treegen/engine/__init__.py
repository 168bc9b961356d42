"""The decoding system: pages of KV, trees of sequences, and the loop that grows them; models come from elsewhere."""

from treegen.engine.accounting import Accounting
from treegen.engine.attention_kernels import AttentionKind, KernelMaker, StepKernel, tree_kernels
from treegen.engine.beam import Beam
from treegen.engine.branch import Branch
from treegen.engine.control import (
    Continuation,
    Controller,
    Drafting,
    Frontier,
    Growth,
    Next,
    Selecting,
    SelectingDrafts,
    SelectingForks,
    Selection,
    WarmsUp,
)
from treegen.engine.draft_trees import DraftTree
from treegen.engine.drafters import DeviceDrafter, Drafter, DraftModel, NGrams
from treegen.engine.engine import Engine
from treegen.engine.forced import Forced
from treegen.engine.forced_drafts import ForcedDrafts
from treegen.engine.forward import Model
from treegen.engine.pool import KVPool
from treegen.engine.prefix import PrefixCache
from treegen.engine.sample import Sample
from treegen.engine.sampling import Sampling
from treegen.engine.sequences import SequenceTree
from treegen.engine.speculate import Speculate
from treegen.engine.step import Step
from treegen.engine.thoughts import Search

__all__ = [
    "Accounting",
    "AttentionKind",
    "Beam",
    "Branch",
    "Continuation",
    "Controller",
    "DeviceDrafter",
    "DraftModel",
    "DraftTree",
    "Drafter",
    "Drafting",
    "Engine",
    "Forced",
    "ForcedDrafts",
    "Frontier",
    "Growth",
    "KVPool",
    "KernelMaker",
    "Model",
    "NGrams",
    "Next",
    "PrefixCache",
    "Sample",
    "Sampling",
    "Search",
    "Selecting",
    "SelectingDrafts",
    "SelectingForks",
    "Selection",
    "SequenceTree",
    "Speculate",
    "Step",
    "StepKernel",
    "WarmsUp",
    "tree_kernels",
]
