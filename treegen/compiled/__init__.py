"""Plans of running batches in C, for machines with a C compiler; elsewhere NumPy code makes the same ones."""
