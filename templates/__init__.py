"""Jinja templates of the emitted kernels. They decide nothing: `treegen.codegen.emit` passes one frozen context."""
