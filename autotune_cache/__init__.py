"""The cache on disk: emitted modules, and the policies that were measured as the fastest.

Modules, in the order of the flow: folders (which are used), store (how files get in and out), lock, key, entry,
policies.
"""
