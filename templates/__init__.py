"""Jinja templates of the emitted kernels. They decide nothing: `treegen.emit` passes one frozen context."""
