"""What plans read, write and cost, in words: explanations, differences, and the IO of whole decodings."""
