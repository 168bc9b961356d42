"""Scoring: what is done to attention scores between the product and the softmax, from Python functions to kernels.

    score_mod, mask_mod ──tracing──▶ expressions (sympy) ──code──▶ lines of Triton that templates inline
                                                         ──values──▶ PyTorch, for the torch backend

FlexAttention's functions, traced on symbols; what is built in (soft-cap, ALiBi, windows) are such functions.
"""
