"""The cost of a plan: counts of its launches, models of their time, and the account of both."""
