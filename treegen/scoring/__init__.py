"""Score options: changes of attention scores between the product and the softmax, from Python functions to kernels.

    score_mod, mask_mod ──tracing──▶ expressions (sympy) ──code──▶ lines of Triton that templates inline
                                                         ──values──▶ PyTorch, for the torch backend

Functions have FlexAttention's form and are traced on symbols. The built-in options (soft cap, ALiBi, windows) are such
functions as well.
"""
