"""Integrations: models of other libraries, for the decoding system."""

from treegen.integrations.hf import HFModel
from treegen.integrations.hf_generate import generate

__all__ = ["HFModel", "generate"]
