"""`lax.dynamic_update_slice` of a low buffer by float32 values, in an autocast function's trace.

An autocast function is traced in the dtypes as written. There, a cache that is stored in bfloat16
meets keys that autocast makes bfloat16 only afterwards, and jax refuses to write them into it. Here
the values are cast to the buffer's dtype; where autocast makes them low, that cast is nothing.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives

# The float dtypes of a buffer that values in float32 follow.
_LOW = frozenset({"bfloat16", "float16"})


def follow_buffers(inside: Callable[[], bool]) -> None:
    """Let updates of low buffers by float32 values follow the buffer.

    `jax.extend.core.primitives` is public; that `lax.dynamic_update_slice` calls `bind` as an
    attribute of the primitive, which an object may have of its own, is not documented. Since 0.2.
    """
    primitive = primitives.dynamic_update_slice_p
    if "bind" in vars(primitive):
        return
    own = primitive.bind

    def bind(buffer: jax.Array, update: jax.Array, *start: jax.Array, **params: object) -> object:
        name = getattr(getattr(buffer, "dtype", None), "name", "")
        if name in _LOW and getattr(update, "dtype", None) == np.float32 and inside():
            update = lax.convert_element_type(update, name)
        return own(buffer, update, *start, **params)

    primitive.bind = bind
