"""Benchmarks of whatever computes attention over trees, side by side: providers, what they are run on, times, reports.

Imports go one way: providers and peers, then runs, then reports.
"""
