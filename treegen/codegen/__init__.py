"""Kernels as text and as code: emission, loading, and compilation ahead of time."""
