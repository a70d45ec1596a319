"""Machines that `polymp doctor` could find."""

from polymp.cli.doctor import Engine, Facts, Framework

TORCH, JAX = Framework("torch", "2.13.0+cpu", "", "cpu"), Framework("jax", "0.10.2", "", "cpu")
XEON = frozenset("avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16".split())
FULL = Engine("cpu", 127, {"default": 0, "amp": 182, "lean": 211})
NONE: dict[str, str] = {}


def facts(*devices, frameworks=(TORCH, JAX), engines=(FULL,), nvidia=False, libraries=NONE):
    """Return the facts of a machine with these devices."""
    return Facts("Linux x86_64", "3.11.7", frameworks, devices, engines, nvidia, libraries)
