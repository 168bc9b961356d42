"""Reports on plans: explanations, differences between strategies, and the IO of whole decodings."""
