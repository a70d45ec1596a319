"""`assert_fits`: a call in a low dtype, audited: nothing overflows, becomes NaN or vanishes."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from polymp._api import framework_of
from polymp.diagnostics.audit import Audit, is_broken
from polymp.dtypes import name as dtype_name
from polymp.errors import brief
from polymp.rules.policy_files import Source, load
from polymp.rules.row import LOW
from polymp.testing.parity import refuse_own_region

_LINES = 40  # of the audit in the text of an error


def assert_fits(
    fn: Callable[..., Any],
    *args: object,
    dtype: object = "bfloat16",
    policy: Source | None = None,
    framework: str | None = None,
    **kwargs: object,
) -> Audit:
    """Assert that a call fits a low dtype: nothing overflows or vanishes.

        assert_fits(model, x, dtype="float16")
        assert_fits(jax.grad(loss), params, x, dtype="float16")

    The call runs once in a region, and `audit` measures it, with the gradients that it takes;
    arguments and, in torch, what a training step changes are put back. It does not fit if a value
    becomes Inf or NaN, if an op or a constant loses most of its values, or if the audit suggests a
    row, another dtype or a loss scale.

    Args:
        fn: a module or a function.
        args: positional arguments of the call, with values as in real use.
        dtype: the low dtype of the region, bfloat16 or float16, by name, alias or as a dtype
            object.
        policy: of the region; None for that of a region without one: torch's own table for the
            device, and "amp" in JAX.
        framework: "torch" or "jax"; None to find it from the function and the arguments.
        kwargs: keyword arguments of the call.

    Returns:
        The audit.

    Raises:
        AssertionError: it does not fit; its text has the suggestion and the table's first rows.
        TypeError: `fn` is not callable, nothing says which framework this is for, or `dtype` is
            neither a string nor a dtype.
        ValueError: `dtype` is another, `fn` has a region in another, no op on floats ran, or there
            is no such framework.
        BackendMissingError: the framework is not installed.
    """
    low = dtype_name(dtype, LOW, "assert_fits(): dtype")
    if not callable(fn):
        raise TypeError(f"assert_fits needs a function or a module, got {brief(fn)}.")
    in_torch = framework_of((fn, args, kwargs), framework, "assert_fits()") == "torch"
    audit, policy = (_in_torch if in_torch else _in_jax)(fn, args, kwargs, low, policy)
    if not audit.results:
        raise ValueError(
            "assert_fits measured nothing: no op on floats ran in the call. Give a function that "
            "computes the values, in this thread."
        )
    refuse_own_region(audit.results, low)
    suggestion = audit.suggest(policy)
    if suggestion or is_broken(audit):
        called = getattr(fn, "__name__", type(fn).__name__)
        lines = str(audit).splitlines()
        table = "\n".join([*lines[:_LINES], *(["..."] if lines[_LINES:] else [])])
        under = f"{low} under policy {load(policy).name}"
        raise AssertionError(f"{called} does not fit {under}:\n\n{suggestion}\n\n{table}")
    return audit


_Audited = tuple[Audit, Source]  # and the policy of the region


def _in_torch(
    fn: Callable[..., Any], args: Any, kwargs: Any, low: str, policy: Source | None
) -> _Audited:
    import torch

    from polymp.backends.torch.autocast import torch_table
    from polymp.backends.torch.diagnostics.explain import open_region
    from polymp.backends.torch.diagnostics.perturb import put_back
    from polymp.torch import audit

    model = fn if isinstance(fn, torch.nn.Module) else None
    with put_back(fn, args, kwargs), audit(model) as measured, ExitStack() as region:
        device = open_region((fn, args, kwargs), getattr(torch, low), policy, region)
        fn(*args, **kwargs)
    return measured, torch_table.policy(device) if policy is None else policy


def _in_jax(
    fn: Callable[..., Any], args: Any, kwargs: Any, low: str, policy: Source | None
) -> _Audited:
    import jax

    from polymp.backends.jax.diagnostics.catch import copied
    from polymp.backends.jax.modules import nnx
    from polymp.jax import audit, autocast

    policy = "amp" if policy is None else policy
    fn, args = nnx.owned(fn, args)
    leaves, tree = jax.tree.flatten(nnx.copied((args, kwargs)), is_leaf=nnx.is_leaf)
    args, kwargs = jax.tree.unflatten(tree, copied(leaves))  # which it may donate
    audited = audit(autocast(fn, dtype=low, policy=policy))
    audited(*args, **kwargs)
    return audited.audit, policy
