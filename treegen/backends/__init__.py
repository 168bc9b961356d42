"""What runs schedules: programs of both backends, the tensors they take, and the oracle that checks them."""
