"""The public functions compile and compile_batch, and the wrapper with FlashInfer's interface."""
