"""Choices by measurement: candidates timed in processes of their own, policies stored, caches warmed."""
