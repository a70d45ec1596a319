"""The products of 8-bit operands that work here, in torch and in JAX, as a table.

Nothing of polymp runs in it. An error is the distance from the product of the rounded operands in
float32, relative, in the l2 norm.
"""

from __future__ import annotations

import re
from typing import Any

from pairing import machine

from gpu_steps.worker import Here

Fact = dict[str, Any]
FP8 = ("float8_e4m3fn", "float8_e5m2")


def in_torch(here: Here) -> dict[str, Any]:
    """Try torch._scaled_mm: dtypes, scales, layouts of the operands, dimensions."""
    rows = []
    for a, b in ((x, y) for x in FP8 for y in FP8):
        for scales in ("tensorwise", "rowwise"):
            for out in ("bfloat16", "float16", "float32"):
                row: Fact = {"left": a, "right": b, "scales": scales, "result": out}
                rows.append(row | {"says": scaled_mm(here.device, a, b, scales, out)})
    layouts = []
    for left in ("row", "column"):
        for right in ("row", "column"):
            said = scaled_mm(
                here.device, *FP8[:1] * 2, "tensorwise", "bfloat16", (64, 64, 64), left, right
            )
            layouts.append({"left stored by": left, "right stored by": right, "says": said})
    sizes = []
    for shape in ((16, 16, 16), (1, 64, 64), (8, 64, 64), (17, 64, 64), (64, 8, 64), (64, 24, 64),
                  (64, 64, 8), (64, 64, 24), (64, 64, 17), (4096, 4096, 4096)):  # fmt: skip
        if not (here.small and max(shape) > 64):
            sizes.append({"m": shape[0], "k": shape[1], "n": shape[2], "says": scaled_mm(
                here.device, *FP8[:1] * 2, "tensorwise", "bfloat16", shape)})  # fmt: skip
    lists = {
        "torch._scaled_mm, 64 x 64 x 64": rows,
        "torch._scaled_mm: layouts": layouts,
        "torch._scaled_mm: dimensions": sizes,
    }
    return {"machine": machine("torch", device=here.device), "lists": lists}


def scaled_mm(
    device: str, a: str, b: str, scales: str, out: str,
    shape: tuple[int, int, int] = (64, 64, 64), left: str = "row", right: str = "column",
) -> str:  # fmt: skip
    """The error of a product, or what was raised."""
    import torch

    m, k, n = shape
    torch.manual_seed(0)
    x, y = torch.randn(m, k, device=device), torch.randn(k, n, device=device)

    def quantised(value: Any, dtype: str, dim: int, by: str) -> tuple[Any, Any]:
        kind = getattr(torch, dtype)
        amax = value.abs().amax() if scales == "tensorwise" else value.abs().amax(dim, keepdim=True)
        scale = (torch.finfo(kind).max / amax).float()
        low = (value * scale).to(kind)
        return low.contiguous() if by == "row" else low.t().contiguous().t(), scale.reciprocal()

    try:
        lx, sx = quantised(x, a, 1, left)
        ly, sy = quantised(y, b, 0, right)
        got = torch._scaled_mm(lx, ly, sx, sy, out_dtype=getattr(torch, out))
        right_one = (lx.float() * sx) @ (ly.float() * sy)
        error = (got.float() - right_one).norm() / right_one.norm()
        return f"ok, error {100 * error.item():.2g} %"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:110]}"


def in_jax(here: Here) -> dict[str, Any]:
    """Whether XLA runs a product of 8-bit operands in 8 bits, by form, dtypes and dimensions."""
    title = "XLA: products of 8-bit operands"
    forms = ("scaled", "plain")
    pairs = [(a, b) for a in FP8 for b in FP8][: 1 if here.small else 4]
    rows = [
        {"operands are": form, "left": a, "right": b, "result": out,
         "says": dot(form, a, b, out), "without Triton": dot(form, a, b, out, triton=False)}
        for form in forms for a, b in pairs for out in ("bfloat16", "float32")
    ]  # fmt: skip
    shapes = ((16, 16, 16), (1, 64, 64), (17, 64, 64), (64, 24, 64), (64, 64, 17), (256, 256, 256),
              (2048, 2048, 2048))[: 1 if here.small else None]  # fmt: skip
    sizes = [
        {"operands are": form, "m": m, "k": k, "n": n,
         "says": dot(form, FP8[0], FP8[0], "bfloat16", (m, k, n)),
         "without Triton": dot(form, FP8[0], FP8[0], "bfloat16", (m, k, n), triton=False)}
        for m, k, n in shapes for form in forms
    ]  # fmt: skip
    return {
        "machine": machine("jax", "jaxlib", device=here.device),
        "lists": {f"{title}, 64 x 64 x 64": rows, f"{title}: dimensions": sizes},
    }


def dot(
    form: str, a: str, b: str, out: str,
    shape: tuple[int, int, int] = (64, 64, 64), triton: bool = True,
) -> str:  # fmt: skip
    """Who computes a product of 8-bit x and y, and its error in percent.

    Args:
        form: "scaled": `(x * scale) @ (y * scale)` in 16 bits; "plain": `x @ y`, scaled after it.
        a: dtype of x.
        b: dtype of y.
        out: dtype of the result.
        shape: m, k, n.
        triton: whether XLA may choose a kernel of Triton's, which is what it asks first.
    """
    import jax
    import jax.numpy as jnp

    m, k, n = shape
    x, y = (
        jax.random.normal(jax.random.key(i), s).astype(kind)
        for i, (s, kind) in enumerate((((m, k), a), ((k, n), b)))
    )
    wide = jnp.bfloat16 if out == "float32" else jnp.dtype(out)

    def product(x: Any, y: Any, sx: Any, sy: Any) -> Any:
        if form == "plain":
            made = jax.lax.dot(x, y, preferred_element_type=jnp.dtype("float32"))
            return (made * (sx * sy)).astype(out)
        left, right = x.astype(wide) * sx.astype(wide), y.astype(wide) * sy.astype(wide)
        return jax.lax.dot(left, right, preferred_element_type=jnp.dtype(out))

    one = jnp.float32(1)
    options = {} if triton else {"xla_gpu_enable_triton_gemm": False}
    try:
        made = jax.jit(product).lower(x, y, one, one).compile(compiler_options=options)
        text, got = made.as_text() or "", made(x, y, one, one)
        right_one = x.astype(jnp.float32) @ y.astype(jnp.float32)
        error = jnp.linalg.norm(got.astype(jnp.float32) - right_one) / jnp.linalg.norm(right_one)
        return f"{_who(text)}, error {100 * float(error):.2g} %"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:110]}"


def _who(text: str) -> str:
    """The kernel that optimised HLO has for a product, and in how many bits it multiplies."""
    if "__cublas$lt$matmul$f8" in text:
        return "cuBLASLt, in 8 bits"
    dtypes = dict(re.findall(r"(%?[\w.-]+) = (\w+)\[", text))
    dots = re.findall(r"\bdot\(([^)]*)\)", text)
    eight = any(dtypes.get(name, name).startswith("f8e") for of in dots for name in of.split(", "))
    other = re.findall(r'custom_call_target="([^"]*(?:matmul|gemm)[^"]*)"', text)
    who = "Triton" if "__triton" in text else other[0] if other else "XLA's own"
    return f"{who}, in {'8 bits' if eight else '16 bits or more'}"
