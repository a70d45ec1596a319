"""One set of verbs for both frameworks, so that a test is written once.

`load("torch")` and `load("jax")` give namespaces with the same names in them; each is imported only
when it is asked for, so that either works where the other is missing.

    name        "torch" or "jax"
    xp          `torch` or `jax.numpy`, for the functions that both have
    array       (numbers, dtype) -> an array; "int" is the framework's own integer, "bool" its bool
    cast        (array, dtype) -> the same
    dtype      array -> "float32", "bfloat16", ...; "int" for integers of any width
    numbers     array -> numpy float64 array
    region      opens or makes one region
    run         (function, arrays, regions, made, region) -> its result, computed in nested regions
    dtype_of   the same arguments -> the dtype of the result, or "raises"
    together    (functions, arrays) -> the results of all of them
    wide        a context in which float64 exists
    ops         name -> function of arrays; the same names and arguments in both
    grad        (function, array) -> value and gradient

A region is a dtype, in which an enabled region runs, or "off"; several are nested, the outermost
first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any


def load(name: str) -> ModuleType:
    return importlib.import_module(f"tests.support.frameworks.in_{name}")


def named(home: Any, names: str) -> dict[str, Callable[..., Any]]:
    """Functions of a module, by their own names."""
    return {name: getattr(home, name) for name in names.split()}


def alike(xp: Any) -> dict[str, Callable[..., Any]]:
    """Ops that are written with the same words in both; `xp` is `torch` or `jax.numpy`."""
    return {
        "number ** x": lambda x: 3.0**x,
        "x ** 1.5": lambda x: x**1.5,
        "x ** 2": lambda x: x**2,
        "x + number": lambda x: x + 0.1,
        "x * number": lambda x: x * 0.5,
        "number / x": lambda x: 3.0 / x,
        "x - tiny number": lambda x: x - 1e-12,
        "x + 0-d array": xp.add,
        "reshape": lambda x: x.reshape(-1),
        "x * integers": lambda x, i: x * i,
        "x * bools": lambda x, m: x * m,
        "x * chosen numbers": lambda x, m: x * xp.where(m, 1.0, 0.0),
        "where": lambda x, y, m: xp.where(m, x, y),
        "stack": lambda *x: xp.stack(x),
        "einsum": lambda a, b: xp.einsum("ij,jk->ik", a, b),
        "linalg_multi_dot": lambda *m: xp.linalg.multi_dot(m),
        "linalg_vecdot": xp.linalg.vecdot,
        "linalg_vector_norm": xp.linalg.vector_norm,
        "slogdet": lambda x: xp.linalg.slogdet(x)[1],
        "cumsum": lambda x: xp.cumsum(x, 1),
        "cumprod": lambda x: xp.cumprod(x, 1),
        "argmax": lambda x: xp.argmax(x, -1),
        "sum of rows": lambda x: x.sum(1),
        "prod of rows": lambda x: x.prod(1),
    }
