"""Which products of 8-bit operands work here, in torch and in JAX: a table of what each says.

Nothing of polymp runs in it. An error is the distance from the product of the rounded operands in
float32, relative, in the l2 norm.
"""

from __future__ import annotations

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
    """Whether XLA runs a product of scaled 8-bit operands in 8 bits, by dtypes and dimensions."""
    rows = []
    for a in FP8:
        for b in FP8:
            for out in ("bfloat16", "float16", "float32"):
                rows.append({"left": a, "right": b, "result": out, "says": scaled_dot(a, b, out)})
    sizes = [
        {"m": m, "k": k, "n": n, "says": scaled_dot(FP8[0], FP8[0], "bfloat16", (m, k, n))}
        for m, k, n in ((16, 16, 16), (1, 64, 64), (17, 64, 64), (64, 24, 64), (64, 64, 17))
    ]
    title = "XLA: products of scaled 8-bit operands"
    return {
        "machine": machine("jax", "jaxlib", device=here.device),
        "lists": {f"{title}, 64 x 64 x 64": rows, f"{title}: dimensions": sizes},
    }


def scaled_dot(a: str, b: str, out: str, shape: tuple[int, int, int] = (64, 64, 64)) -> str:
    """Who computes `(x * scale) @ (y * scale)` of 8-bit x and y, and its error in percent."""
    import jax
    import jax.numpy as jnp

    m, k, n = shape
    x, y = (
        jax.random.normal(jax.random.key(i), s).astype(kind)
        for i, (s, kind) in enumerate((((m, k), a), ((k, n), b)))
    )
    wide = jnp.bfloat16 if out == "float32" else jnp.dtype(out)

    def product(x: Any, y: Any, sx: Any, sy: Any) -> Any:
        left, right = x.astype(wide) * sx.astype(wide), y.astype(wide) * sy.astype(wide)
        return jax.lax.dot(left, right, preferred_element_type=jnp.dtype(out))

    one = jnp.float32(1)
    try:
        made = jax.jit(product).lower(x, y, one, one).compile()
        text, got = made.as_text() or "", made(x, y, one, one)
        right_one = x.astype(jnp.float32) @ y.astype(jnp.float32)
        error = jnp.linalg.norm(got.astype(jnp.float32) - right_one) / jnp.linalg.norm(right_one)
        found = [line for line in text.splitlines() if " dot(" in line or "custom-call" in line]
        eight = any("$f8" in line or "f8e" in line.partition("(")[2] for line in found)
        return f"{'in 8 bits' if eight else 'in 16 bits or more'}, error {100 * float(error):.2g} %"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:110]}"
