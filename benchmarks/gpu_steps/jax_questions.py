"""Questions that only a GPU answers, for the JAX backend: each step is one table of facts."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from pairing import machine, measure, timed

from gpu_steps.worker import Here
from polymp.jax import GradScaler, autocast

Fact = dict[str, Any]


def told(here: Here, lists: dict[str, list[Fact]], **more: Any) -> dict[str, Any]:
    """A step's result."""
    return {"machine": machine("jax", "jaxlib", device=here.device), "lists": lists, **more}


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:110]}"


# --- convolutions --------------------------------------------------------------------------------

CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    # NHWC or NWC, HWIO or WIO, and what lax.conv_general_dilated takes besides.
    "3 x 3": ((64, 56, 56, 64), (3, 3, 64, 64), {"window_strides": (1, 1)}),
    "3 x 3, stride 2": ((64, 56, 56, 128), (3, 3, 128, 128), {"window_strides": (2, 2)}),
    "1 x 1": ((64, 28, 28, 512), (1, 1, 512, 128), {"window_strides": (1, 1)}),
    "3 x 3, 32 groups": (
        (64, 56, 56, 128),
        (3, 3, 4, 128),
        {"window_strides": (1, 1), "feature_group_count": 32},
    ),
    "1-d, 3": ((64, 1024, 128), (3, 128, 128), {"window_strides": (1,)}),
}


def convolutions(here: Here) -> dict[str, Any]:
    """A convolution and both gradients with a float32 result, and with a low one cast up."""
    rows = []
    for name, (x_shape, w_shape, options) in CONVOLUTIONS.items():
        if here.small:
            x_shape = (1, *(min(n, 8) for n in x_shape[1:-1]), x_shape[-1])
        for low in ("bfloat16", "float16"):
            for part in ("forward", "gradient of the input", "gradient of the weight"):
                if not here.small or (name, low) == ("3 x 3", "bfloat16"):
                    rows.append(
                        _convolution(name, x_shape, w_shape, options, low, part, here.small)
                    )
    return told(
        here, {"Convolutions of low operands: a float32 result, or a low one cast up": rows}
    )


def _convolution(
    name: str, x_shape: Any, w_shape: Any, options: Any, low: str, part: str, small: bool
) -> Fact:
    spatial = "HW"[-(len(x_shape) - 2) :]
    numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")

    def conv(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, padding="SAME", dimension_numbers=numbers, **options)

    x, w = (
        jax.random.normal(jax.random.key(i), s).astype(low)
        for i, s in enumerate((x_shape, w_shape))
    )
    ct = jnp.ones(jax.eval_shape(conv, x, w).shape, low)
    programs: dict[str, Callable[..., Any]] = {
        "forward": lambda x, w, ct: conv(x, w),
        "gradient of the input": lambda x, w, ct: jax.linear_transpose(lambda x: conv(x, w), x)(ct)[
            0
        ],
        "gradient of the weight": lambda x, w, ct: jax.linear_transpose(lambda w: conv(x, w), w)(
            ct
        )[0],
    }
    row: Fact = {"convolution": name, "dtype": low, "part": part}
    forms = {
        "float32 result": with_float32_result(programs[part], x, w, ct),
        "low result": programs[part],
    }
    once = {}
    for form, program in forms.items():
        try:
            made = (
                jax.jit(lambda *args, program=program: program(*args).astype(jnp.float32))
                .lower(x, w, ct)
                .compile()
            )
            row[f"{form}: runs as"] = ran_as(made.as_text() or "")
            once[form] = timed(
                lambda made=made: jax.block_until_ready(made(x, w, ct)), 1 if small else 20
            )
        except Exception as error:
            row[f"{form}: runs as"] = first_line(error)
    for form, times in (measure(once, 2 if small else 7) if once else {}).items():
        row[f"{form}, ms"] = round(statistics.median(times), 4)
    return row


def with_float32_result(program: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """The same program, with `preferred_element_type=float32` in each of its convolutions."""
    closed = jax.make_jaxpr(program)(*args)

    def run(*args: Any) -> Any:
        known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known |= dict(zip(closed.jaxpr.invars, args, strict=True))
        for eqn in closed.jaxpr.eqns:
            params = dict(eqn.params)
            if eqn.primitive.name == "conv_general_dilated":
                params["preferred_element_type"] = np.dtype("float32")
            values = [known[v] if v in known else v.val for v in eqn.invars]
            out = eqn.primitive.bind(*values, **params)
            known[eqn.outvars[0]] = out
        return known[closed.jaxpr.outvars[0]]

    return run


def ran_as(text: str) -> str:
    """The dtypes and the target of each convolution in optimised HLO."""
    found = []
    for line in text.splitlines():
        target = re.search(r'custom_call_target="(__cudnn\$conv\w*)"', line)
        if target or " convolution(" in line:
            dtypes = re.findall(r"\b(f16|bf16|f32|f64)\[", line)
            found.append(f"{target[1] if target else 'convolution'} {' '.join(dtypes[:3])}")
    return "; ".join(sorted(set(found))) or "no convolution is left"


# --- the scaler ----------------------------------------------------------------------------------


def host_reads(here: Here) -> dict[str, Any]:
    """Whether a step with the scaler waits for the GPU: how soon a call of it returns.

    A long product is on its way when the step is called. A program that reads a number from the
    GPU in its middle returns only when that product is done; others return at once.
    """
    side, count = (64, 2) if here.small else (4096, 8)
    params = [jax.random.normal(jax.random.key(i), (side, side)) for i in range(count)]
    adam = optax.adam(1e-3)
    busy = jax.random.normal(jax.random.key(9), (side, side))

    @jax.jit
    def long(x: Any) -> Any:
        return lax.fori_loop(0, 2 if here.small else 200, lambda _, x: x @ x * 1e-4, x)

    def update(grads: Any, params: Any, opt: Any) -> Any:
        updates, opt = adam.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    def graded(params: Any, scale: Callable[[Any], Any]) -> Any:
        return jax.grad(lambda p: scale(sum((x**2).sum() for x in p)))(params)

    def without(params: Any, opt: Any, scaler: Any) -> Any:
        return *update(graded(params, lambda x: x), params, opt), scaler

    def scaled(params: Any, opt: Any, scaler: Any) -> Any:
        (params, opt), scaler, _ = scaler.step(graded(params, scaler.scale), update, params, opt)
        return params, opt, scaler

    def cond(params: Any, opt: Any, scaler: Any) -> Any:
        grads = graded(params, lambda x: x)
        finite = jnp.isfinite(grads[0]).all()
        made = lax.cond(finite, lambda: update(grads, params, opt), lambda: (params, opt))
        return *made, scaler

    rows = []
    for name, step in {
        "without a scaler": without,
        "lax.cond": cond,
        "scaler.step": scaled,
    }.items():
        state = (jax.tree.map(jnp.copy, params), adam.init(params), GradScaler())
        made = jax.jit(step, donate_argnums=(0, 1)).lower(*state).compile()
        state = jax.block_until_ready(made(*state))
        jax.block_until_ready(long(busy))
        returned, done = [], []
        for _ in range(3):
            start = time.perf_counter()
            ahead = long(busy)
            state = made(*state)
            returned.append(time.perf_counter() - start)
            jax.block_until_ready((ahead, state))
            done.append(time.perf_counter() - start)
        text, memory = made.as_text() or "", made.memory_analysis()
        rows.append({
            "step": name,
            "returns after, ms": round(1e3 * statistics.median(returned), 3),
            "done after, ms": round(1e3 * statistics.median(done), 3),
            "conditionals in the HLO": len(re.findall(r"\bconditional\(", text)),
            "copies in the HLO": len(re.findall(r" copy(?:-start)?\(", text)),
            "donated, MB": round(getattr(memory, "alias_size_in_bytes", 0) / 1e6, 2),
            "temporary, MB": round(getattr(memory, "temp_size_in_bytes", 0) / 1e6, 2),
        })  # fmt: skip
    title = "JAX: does the call of a step wait until the GPU has finished earlier work?"
    return told(here, {title: rows})


# --- sums ----------------------------------------------------------------------------------------


def long_sums(here: Here) -> dict[str, Any]:
    """Errors of products with very long sums, with Triton's kernels and without."""
    k = 2**10 if here.small else 2**18
    x, y = (np.random.default_rng(i).standard_normal((64, k)).astype("float32") for i in range(2))
    rows = []
    flags = [{}, {"xla_gpu_enable_triton_gemm": False}] if here.device == "cuda" else [{}]
    for low in ("bfloat16", "float16"):
        a, b = jnp.asarray(x, low), jnp.asarray(y, low)
        exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
        programs = {
            "autocast": autocast(lambda a, b: a @ b.T, dtype=low),
            "by hand, low result": lambda a, b: a @ b.T,
            "by hand, float32 result": lambda a, b: jnp.matmul(
                a, b.T, preferred_element_type=jnp.float32
            ),
        }
        for name, program in programs.items():
            for options in flags:
                made = jax.jit(program).lower(a, b).compile(compiler_options=options or None)
                got = np.asarray(made(a, b), np.float64)
                error = 100 * np.linalg.norm(got - exact) / np.linalg.norm(exact)
                rows.append({
                    "product": name, "dtype": low, "K": k,
                    "Triton": "off" if options else "as it comes", "result": made(a, b).dtype.name,
                    "error, %": f"{error:.3g}",
                })  # fmt: skip
    return told(here, {"Long sums: distance from float64": rows})


def sharded_sums(here: Here) -> dict[str, Any]:
    """The dtype in which two devices add up their parts of a product."""
    if jax.device_count() < 2:
        return told(here, {}, missing={"sums over devices": "there is one device"})
    mesh = jax.make_mesh((2,), ("t",))
    put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))  # noqa: E731
    a, b = put(jnp.ones((64, 128)), None, "t"), put(jnp.ones((128, 64)), "t", None)
    text = jax.jit(autocast(jnp.matmul)).lower(a, b).compile().as_text() or ""
    found = re.findall(r"= (\w+)\[[^=]* all-reduce", text)
    row = {"product": "64 x 128 . 128 x 64, K over two devices", "all-reduce in": ", ".join(found)}
    return told(here, {"A product whose sum is over devices": [row]})
