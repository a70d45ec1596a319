"""FLOPs of products and convolutions, from their shapes; a multiply-add is two."""

from polymp.backends.jax.arrays import count_of
from polymp.backends.jax.autocast.op_facts import OURS
from polymp.backends.jax.compat.programs import Equation


def flops(eqn: Equation) -> int:
    """FLOPs of an equation; 0 of any but a product or a convolution."""
    name, params = eqn.primitive.name, eqn.params
    if name in OURS:
        name, params = params["of"].name, dict(params["params"])
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * count_of(eqn.outvars[0].aval.shape) * count_of([shape[d] for d in contracted])
    if name == "conv_general_dilated":
        numbers, kernel = params["dimension_numbers"], eqn.invars[1].aval.shape
        window = count_of(kernel) // kernel[numbers.rhs_spec[0]]
        if any(d != 1 for d in params["lhs_dilation"]):
            # A transposed one, as for the gradient of the input: each number of the input meets
            # one weight for each channel it goes to and place of the window.
            places = count_of(kernel) // count_of([kernel[d] for d in numbers.rhs_spec[:2]])
            channels = kernel[numbers.rhs_spec[0]] // params["feature_group_count"]
            return int(2 * count_of(eqn.invars[0].aval.shape) * places * channels)
        # Each result is made of one weight for each input channel and place of the window.
        return int(2 * count_of(eqn.outvars[0].aval.shape) * window)
    return 0
