"""Versions of treegen, and of the kernels and the search space that measured policies depend on."""

VERSION = "0.1.0"
"""The version of treegen; the package's metadata reads it here."""

KERNEL_VERSION = 1
"""The version of the emitted kernels, where they decide which policy is the fastest.

Raise it when a change of kernels, kernel configs, tables or merges makes some policies faster or slower than others by
more than the scatter of measurements; then measure the shipped policies again. Renamed variables, comments and
formatting do not count. tests/codegen/test_kernel_version.py fails when an emitted kernel changes, and asks this
question.
"""

SPACE_VERSION = 3
"""The version of the space that `auto` searches.

Raise it when new policies may beat those measured so far, or when a policy's options change their meaning.
"""
