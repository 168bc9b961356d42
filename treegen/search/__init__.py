"""What `auto` takes: a measured policy, or the best of a list by estimates; buckets of trees."""
