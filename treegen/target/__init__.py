"""Devices as data: the facts about a GPU that plans and costs need, and the kernel configs that suit it."""
