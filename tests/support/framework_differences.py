"""Why the frameworks differ under a shipped policy, where the policy itself does not say it.

An op that one framework composes of others runs as the policy says of those; such rows explain
themselves. What is here is about kernels, and about what a trace can know. Every entry must be
needed by some row of the test that reads it.
"""

from __future__ import annotations

# Ops that only move numbers, or choose among them, run in whatever comes in.
NEUTRAL = frozenset({"layout", "indexing", "comparison", "sorting", "random"})

# One op in both frameworks, which JAX takes apart where its rule is "lower": products round a
# softmax, each by its own rule, as in torch's kernel, whose softmax is float32 inside.
TAKEN_APART = frozenset({"attention"})

# By reason, the shared ops of `cases` whose frameworks differ for it.
REASONS: dict[str, frozenset[str]] = {
    "torch has no low kernel of it": frozenset(
        {"det", "lu_solve", "pdist", "slogdet", "solve_triangular", "zeta"}
    ),
    "JAX has no kernel for the cell: a state in float32 meets low gates and stays float32":
        frozenset({"gru_cell", "lstm_cell"}),
    "made of ops in JAX, of which one meets a parameter in float32": frozenset(
        {"layer_norm", "rms_norm"}
    ),
    "made of ops in JAX, of which one computes in float32 with a number that is an array there":
        frozenset({"var"}),
    "torch.where makes a float32 tensor of two numbers; in JAX they follow what they meet":
        frozenset({"x * chosen numbers"}),
    "its order is an array in JAX, and one of ones is float32 as written": frozenset({"polygamma"}),
    "a number that float16 cannot hold takes float32 in JAX": frozenset({"x - tiny number"}),
    "a gather in JAX, where only libraries' modules are an embedding": frozenset({"embedding"}),
    "JAX's scatter-add, which gradients of reading are made of, rounds once": frozenset(
        {"scatter_add"}
    ),
    "torch adds its products up in the dtype of the arguments": frozenset({"bilinear"}),
}  # fmt: skip
