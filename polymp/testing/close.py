"""`assert_close`: two functions of one framework compared at the same inputs.

fn in a region, reference in float32 -> `parity.compare_programs` -> the first op that differs
"""

from collections.abc import Callable
from typing import Any

from polymp._api import framework_in, framework_of
from polymp.diagnostics import rounding
from polymp.rules.policy_files import Source, load
from polymp.testing import parity
from polymp.testing.parity import Parity


def assert_close(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    *args: object,
    dtype: object = None,
    policy: Source | None = None,
    grads: bool = True,
    probes: int = 16,
    framework: str | None = None,
) -> Parity:
    """Assert that two functions of one framework compute the same, up to rounding.

        assert_close(fused_softmax, torch.softmax, x, -1)
        assert_close(mlp, mlp, params, x, dtype="bfloat16")

    `fn` runs in a region of the dtype, `reference` in float32 and outside of any; both get the same
    inputs. Values and gradients are compared as by `assert_parity`, dtypes are not.

    Both functions have to be deterministic; torch's random numbers begin alike in every run, so
    that dropout has one mask; `rand_like` of tensors of other dtypes draws other numbers.

    Args:
        fn: takes and returns arrays, in any nesting of tuples, lists and dicts.
        reference: the same.
        args: the positional arguments of both: torch tensors, JAX arrays, numpy arrays, numbers,
            and nestings of them. float64 becomes float32; `reference` gets low arrays in float32.
        dtype: the low dtype of the region that `fn` runs in, bfloat16 or float16, by name, alias
            or as a dtype object; None or float32 for no region.
        policy: of that region; None for that of a region without one: torch's own table for the
            device, and "amp" in JAX.
        grads: False to compare no gradients.
        probes: runs of each function that measure the tolerance; 2 or more.
        framework: "torch" or "jax"; None to find it from the functions and the arguments.

    Returns:
        The arrays that were compared, with errors and tolerances.

    Warns:
        UserWarning: there are no gradients to compare, because no input has floats.

    Raises:
        ParityError: they differ; its text has the first op that differs, if one can be named.
        TypeError: `fn` or `reference` is not callable, an argument or a result is something else,
            or nothing says which framework this is for.
        ValueError: `dtype` is another dtype, an input is empty or not finite, `probes` is too
            small, or there is no such framework.
        BackendMissingError: the framework is not installed.
    """
    low = parity.checked("assert_close", dtype, probes, fn=fn, reference=reference)
    backend = framework_of((fn, reference, args), framework, "assert_close()")
    if (other := framework_in((reference, fn))) not in (None, backend):
        raise TypeError(
            f"assert_close compares two functions of one framework, got one of {backend} and one "
            f"of {other}. assert_parity compares torch and JAX."
        )
    if policy is not None:
        load(policy)  # one that cannot be read fails before anything runs
    elif backend == "jax":
        policy = "amp"
    given, cotangent = parity.arguments(_in_numpy(args)), parity.cotangent if grads else None
    programs = (
        parity.program(backend, fn, *given, low, policy, cotangent),
        parity.program(backend, reference, *parity.widened(given), None, policy, cotangent),
    )
    with parity.found_in(low or "float32", f"in {low}: " if low else ""):
        found = parity.compare_programs(programs, ("fn", "reference"), probes, same_dtypes=False)
    if grads:
        parity.warn_without_floats(given, "assert_close")
    return found


def _in_numpy(tree: Any) -> Any:
    """A tree with numpy arrays in place of torch's and JAX's."""
    import numpy as np

    def converted(x: Any) -> Any:
        if str(x.dtype) == "torch.bfloat16":  # numpy has none of its own
            import ml_dtypes

            return x.detach().float().cpu().numpy().astype(ml_dtypes.bfloat16)
        return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)

    return rounding.rebuilt(tree, map(converted, rounding.arrays(tree).values()))
