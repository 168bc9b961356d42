"""Templates of the emitted kernels, by phase, and of report pages; and the Triton functions that kernels share.

Templates decide nothing: `treegen.codegen` passes those of kernels one frozen context, and `treegen.report.page` joins
those of pages.
"""
