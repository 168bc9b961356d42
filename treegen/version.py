"""Versions: of treegen, and of what decides which measured policies can be used."""

VERSION = "0.1.0"
"""Of treegen; the package's metadata takes it from here."""

KERNEL_VERSION = 1
"""Of the emitted kernels, as far as it decides which policy is the fastest.

Raise it when a change of kernels, tile classes, tables or merges makes some policies faster or slower than others by
more than measurements scatter, then measure the shipped policies again. Renamed variables, comments and formatting do
not count. tests/test_kernel_version.py fails when an emitted kernel changes, and asks this question.
"""

SPACE_VERSION = 3
"""Of the space that `auto` searches. Raise it when policies are added that may beat those measured so far, or when a
policy's options mean something else.
"""
