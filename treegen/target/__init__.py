"""Devices as data: what plans and costs need to know of a GPU, and the tile classes that suit it."""
