"""The decoding system: pages of KV, trees of sequences, and the loop that grows them; models come from elsewhere."""

from treegen.engine.accounting import Accounting
from treegen.engine.attention_kernels import AttentionKind, KernelMaker, StepKernel, tree_kernels
from treegen.engine.beam import Beam
from treegen.engine.control import Continuation, Controller, Frontier, Growth, Next, Sample
from treegen.engine.engine import Engine, Model
from treegen.engine.forced import Forced
from treegen.engine.pool import KVPool
from treegen.engine.prefix import PrefixCache
from treegen.engine.sampling import Sampling
from treegen.engine.sequences import Branch, SequenceTree
from treegen.engine.step import Step

__all__ = [
    "Accounting",
    "AttentionKind",
    "Beam",
    "Branch",
    "Continuation",
    "Controller",
    "Engine",
    "Forced",
    "Frontier",
    "Growth",
    "KVPool",
    "KernelMaker",
    "Model",
    "Next",
    "PrefixCache",
    "Sample",
    "Sampling",
    "SequenceTree",
    "Step",
    "StepKernel",
    "tree_kernels",
]
