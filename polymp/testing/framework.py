"""One set of functions for torch and JAX, so that one test runs in both: the fixture `fw`.

A framework is imported when its `Framework` is made.
"""

import importlib
from collections.abc import Callable
from typing import Any

from polymp import backends
from polymp.diagnostics.report import Report
from polymp.dtypes import name as dtype_name
from polymp.rules.policy_files import Source


class Framework:
    """One set of functions for torch and JAX, so that one test runs in both.

    Args:
        name: "torch" or "jax".

    Attributes:
        name: "torch" or "jax".
        np: `torch` or `jax.numpy`, for the functions that both have: `fw.np.exp`.

    Raises:
        BackendMissingError: the framework is not installed.
        ValueError: there is no such framework.
    """

    def __init__(self, name: str) -> None:
        backends.get(name)
        self.name: str = name
        self.np: Any = importlib.import_module("torch" if name == "torch" else "jax.numpy")

    def array(self, values: object, dtype: object = "float32") -> Any:
        """Make an array.

        Args:
            values: a numpy array, a number or a nested list.
            dtype: its name, such as "float32", "bfloat16", "int32" or "bool"; for a float dtype,
                an alias or a dtype object will do as well.

        Returns:
            A tensor on the CPU, or a JAX array.
        """
        import numpy

        try:
            name = dtype_name(dtype)
        except ValueError:  # no float dtype
            name = str(dtype)
        of = getattr(self.np, "bool_" if name == "bool" and self.name == "jax" else name)
        if self.name == "torch":
            return self.np.tensor(numpy.asarray(values)).to(of)
        return self.np.asarray(values, of)

    def numpy(self, x: Any) -> Any:
        """Return an array as a numpy array.

        Args:
            x: an array of the framework.

        Returns:
            Floats in float64, others in their own dtype.
        """
        import numpy

        if self.name == "torch":
            x = x.detach()
            return (x.double() if x.is_floating_point() else x).cpu().numpy()
        floats = self.np.issubdtype(x.dtype, self.np.floating)
        return numpy.asarray(x).astype(numpy.float64) if floats else numpy.asarray(x)

    def dtype(self, x: Any) -> str:
        """Return the name of an array's dtype: "bfloat16".

        Args:
            x: an array of the framework.

        Returns:
            The full name.
        """
        return str(x.dtype).removeprefix("torch.")

    def autocast(
        self, fn: Callable[..., Any], dtype: object = "bfloat16", policy: Source | None = "amp"
    ) -> Callable[..., Any]:
        """Wrap a function so that it runs in a region; in torch, in one for the CPU.

        Args:
            fn: of arrays.
            dtype: the low dtype of the region, by name, alias or as a dtype object.
            policy: of the region.

        Returns:
            The wrapped function.
        """
        name = dtype_name(dtype, what="fw.autocast(): dtype")
        if self.name == "torch":
            from polymp.torch import autocast

            region = autocast("cpu", getattr(self.np, name), policy=policy)
            wrapped: Callable[..., Any] = region(fn)
            return wrapped
        from polymp.jax import autocast as transformed

        return transformed(fn, dtype=name, policy=policy)

    def grad(self, fn: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        """Make a function that returns the value and the gradients with respect to all arguments.

        Args:
            fn: of float arrays; returns an array with one number.

        Returns:
            A function of the same arguments: (value, tuple of gradients).
        """

        def graded(*args: Any) -> tuple[Any, Any]:
            if self.name == "jax":
                import jax

                found: tuple[Any, Any] = jax.value_and_grad(fn, tuple(range(len(args))))(*args)
                return found
            leaves = [x.detach().clone().requires_grad_() for x in args]
            value = fn(*leaves)
            grads = self.np.autograd.grad(value, leaves, allow_unused=True)
            pairs = zip(grads, leaves, strict=True)
            return value.detach(), tuple(
                self.np.zeros_like(x) if g is None else g for g, x in pairs
            )

        return graded

    def explain(self, fn: Callable[..., Any], *args: object, **kwargs: Any) -> Report:
        """Explain a call by `polymp.torch.explain` or `polymp.jax.explain`.

        Args:
            fn: that is called.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call, and `dtype` and `policy` of a region around it.

        Returns:
            The report.
        """
        if kwargs.get("dtype") is not None:
            kwargs["dtype"] = dtype_name(kwargs["dtype"], what="fw.explain(): dtype")
        if self.name == "torch":
            from polymp.torch import explain

            report: Report = explain(fn, *args, **kwargs)
            return report
        from polymp.jax import explain as in_jax

        return in_jax(fn, *args, **kwargs)

    def __repr__(self) -> str:
        return f"Framework({self.name!r})"
