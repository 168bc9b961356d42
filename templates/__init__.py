"""Templates of the emitted kernels: Jinja files by phase, and the Triton functions that kernels share.

Templates decide nothing: `treegen.codegen` passes them one frozen context.
"""
