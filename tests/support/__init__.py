"""What tests have in common: makers of trees, servers and tensors, oracles, and checks."""
