"""Integrations: models of other libraries, for the decoding system."""

from treegen.integrations.hf import HFModel

__all__ = ["HFModel"]
