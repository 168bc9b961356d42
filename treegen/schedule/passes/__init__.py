"""Passes over schedules, one module for each."""
