"""Facts about JAX's primitives: with which float dtypes they can do what. No rules.

A primitive that no set here names runs in the dtypes that the program was written in. That is
always right, at worst slower: linear algebra, Fourier transforms, bit casts, callbacks, kernels.
Names, not objects: a name is the same in every supported version, or simply never turns up.
"""

# Sums of products of two operands: the ones that units for low dtypes are built for.
CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})

# polymp's own primitives for them, which say in `of` which of them each stands for.
OURS = frozenset({"polymp_contraction", "polymp_fp8_contraction"})

# Compute in any float dtype, and return the dtype of their float operands, which must agree.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg
    one_minus_square polygamma pow regularized_incomplete_beta rem round rsqrt select_n sign sin
    sinh sqrt square sub tan tanh zeta
    """.split()
)
REDUCTIONS = frozenset(
    """
    argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce_max reduce_min reduce_prod
    reduce_sum reduce_window_max reduce_window_min reduce_window_sum
    select_and_scatter_add
    """.split()
)
# Move numbers and change none of them.
LAYOUT = frozenset(
    """
    broadcast_in_dim copy dynamic_slice name
    reshape reshard rev sharding_constraint slice squeeze stop_gradient tile transpose
    """.split()
)
MOVES = frozenset(
    """
    concatenate dynamic_update_slice gather pad scatter scatter-add scatter-max scatter-min
    scatter-mul scatter-sub split stack top_k unstack
    """.split()
)
# Each result has the dtype of the operand in its place; the operands need not agree.
# The casts around these stay where the program's values are: the transpose of a pvary is a psum,
# and moving a cast through it would sum gradients in the low dtype.
INDEPENDENT = frozenset(
    """
    all_gather all_gather_invariant all_to_all device_put optimization_barrier pbroadcast pcast
    pmax pmin ppermute psum psum2 psum_invariant pvary reduce_scatter sort
    unreduced_psum
    """.split()
)
FREE = CONTRACTIONS | ELEMENTWISE | REDUCTIONS | LAYOUT | MOVES | INDEPENDENT

# Hold a program of their own that is not the user's to rewrite: run as written, without a word.
OPAQUE = frozenset(
    """
    composite core_map custom_linear_solve custom_partitioning custom_vmap_call debug_callback
    debug_print ffi_call io_callback linear_call linear_solve mpmd_map pallas_call pure_callback
    reduce reduce_window run_state select_and_scatter tpu_custom_call triton_kernel_call
    """.split()
)

# Classes of ops that JAX has no low kernels for: their functions run as written, unless a policy
# says otherwise, and the products inside them are not the user's to lower.
AS_WRITTEN = frozenset({"linear_algebra", "fft"})
