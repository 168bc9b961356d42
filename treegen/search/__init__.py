"""The choice of a policy: a measured one for the tree's bucket, or the best of a fixed list by estimates."""
