"""The cache on disk: where it lives and how files get into it."""
