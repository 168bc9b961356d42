"""Policies that were measured as the fastest before a release, one `<digest>.json` per key."""
