"""The public functions: compile, and the wrapper in the form of FlashInfer's."""
