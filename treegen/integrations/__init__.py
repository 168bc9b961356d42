"""Integrations: models of other libraries, for the decoding system."""

from treegen.integrations.hf import HFModel, register
from treegen.integrations.hf_generate import generate
from treegen.integrations.hf_parallel import divide_heads

__all__ = ["HFModel", "divide_heads", "generate", "register"]
