"""What is told of plans: explanations, differences, and the IO of whole decodings."""
