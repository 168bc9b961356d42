"""What a plan costs: counts of its launches, models of their time, and the account of both."""
