"""The cache on disk: emitted modules, and the policies that were measured as the fastest.

Modules, in the order of the flow: folders, store, lock, key, entry, policy_file, listed_entries, shipped_policies,
nearest_keys, policy_cache.
"""
