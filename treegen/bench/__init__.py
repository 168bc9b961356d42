"""Benchmarks: treegen and other libraries side by side, on trees and on running batches.

Providers compute attention, cases hold their inputs, runs measure them, and tables report the results. Imports go one
way: providers and peers, then runs, then reports.
"""
