"""The dtypes that a traced program runs in, read from its jaxpr alone.

A jaxpr goes in; `equations` gives every equation at every depth with the dtypes of its operands
and results, and `violations` lists those that run in a dtype the policy "amp" does not allow.
The rules are written down here a second time, from torch's documentation of autocast on CUDA and
from what the backend documents; nothing is imported from the package that is being judged.

A contraction of the backend is one equation named `polymp_contraction`, whose `spec` says in `run`
what dtype it runs in and in `out` what dtype it returns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
OURS = "polymp_contraction"
OFF = "as_written"  # the scope of what a program wants as it is
LOW = ("bfloat16", "float16")

# torch's documentation, "CUDA Ops that can autocast to float32", as the primitives of JAX that do
# the work. Losses, norms, softmax and its relatives come as the sums and exponentials inside them.
FLOAT32 = frozenset(
    """acos asin cosh cumprod cumsum cumlogsumexp erf_inv exp exp2 expm1 integer_pow log log1p pow
    reduce_prod reduce_sum rsqrt sinh square tan""".split()
)

# Sums that differentiation makes: of the cotangents of a broadcast, of the ties of a maximum. torch
# documents that backward runs in the dtypes of forward, so what is low there is summed as it is.
LINEAR = ("reduce_sum", "cumsum")

# What runs as the program wrote it.
AS_WRITTEN = {
    "custom_linear_solve": "the solver's matrix and its transpose must stay one operator",
    "pallas_call": "a kernel is opaque",
    "tpu_custom_call": "a kernel is opaque",
}
# Jitted helpers of jax.numpy.linalg and jax.scipy.linalg: their products finish a factorisation
# that LAPACK has made in float32.
LINALG = frozenset(
    """cholesky cho_solve _cho_solve cho_factor det eig eigh eigvalsh expm _expm inv lstsq _lstsq
    lu lu_solve _lu_solve matrix_power matrix_rank pinv polar qr schur slogdet _slogdet_lu
    _slogdet_qr solve _solve solve_triangular _solve_triangular sqrtm svd tensorinv tensorsolve
    triangular_solve""".split()
)


@dataclass(frozen=True)
class Site:
    """One equation: its primitive, the dtypes of operands and results, and where it stands."""

    op: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    params: Mapping[str, Any]
    where: str  # the constructs around it, outermost first
    scope: str  # the name stack, transformations included
    as_written: bool  # left alone: inside a construct that is, or a product that sums nothing
    unsummed: tuple[tuple[int, ...], ...] = ()  # shapes of the operands of such a product
    shapes: tuple[tuple[int, ...], ...] = ()  # of all operands

    @property
    def transposed(self) -> bool:
        """Made by transposition, that is, part of a backward pass."""
        return "transpose(" in self.scope

    @property
    def differentiated(self) -> bool:
        """Made by differentiation, or what was differentiated: the trace does not tell."""
        return "jvp(" in self.scope

    def __str__(self) -> str:
        dtypes = f"({', '.join(self.operands)}) -> {', '.join(self.results)}"
        return f"{self.op} {dtypes} in {self.where or 'the program'} [{self.scope}]"


@dataclass(frozen=True)
class Violation:
    rule: str  # "float32", "shift", "low", "narrow" or "foreign"
    site: Site

    def __str__(self) -> str:
        return f"{self.rule}: {self.site}"


def equations(jaxpr: Any) -> Iterator[Site]:
    """Every equation at every depth; those under a named scope `OFF` count as left alone."""
    yield from _walk(_open(jaxpr), "", "", False)


def products(jaxpr: Any) -> list[str]:
    """The dtypes in which the contractions of a program run."""
    found = [site for site in equations(jaxpr) if site.op in (OURS, *CONTRACTIONS)]
    return [site.params["spec"].run if site.op == OURS else site.operands[0] for site in found]


def violations(jaxpr: Any, run: str, gradient: bool = False) -> list[Violation]:
    """The equations that a region of dtype `run` may not contain.

        float32  a function of torch's float32 list has a low operand
        shift    the difference that an exponential takes was rounded to a low dtype before
        low      a contraction runs in float32 where nothing asks for it
        foreign  a contraction runs in a low dtype that is not the region's
        narrow   float64 or complex became narrower

    A contraction with an operand in float64 or complex, and one whose precision the program has
    set, are the program's own. In the `gradient` of a program that was rewritten before, JAX's own
    derivative rules may sum and invert in the dtypes of forward, and narrow what forward widened.
    """
    sites = list(equations(jaxpr))
    unsummed = {shape for site in sites for shape in site.unsummed}
    judged = ((site, _judge(site, run)) for site in sites)
    found = [v for x, v in judged if v is not None and not (gradient and _derived(x, unsummed))]
    return found + [Violation("shift", site) for site in _shifts(_open(jaxpr))]


def _judge(site: Site, run: str) -> Violation | None:
    low = [fmt for fmt in site.operands if fmt in LOW]
    if site.op == OURS:
        return _judge_ours(site, run)
    if site.op == "convert_element_type" and _narrows(site.operands[0], site.results[0]):
        return Violation("narrow", site)
    if site.as_written:
        return None
    if site.op in FLOAT32 and low:
        return Violation("float32", site)
    if site.op in CONTRACTIONS and "float32" in site.operands and not _asked(site.params):
        # One float32 operand is enough: the low one was cast up for it.
        if set(site.operands) & {"float64", "complex64", "complex128"}:
            return None
        return Violation("low", site)
    return None


def _derived(site: Site, unsummed: Collection[tuple[int, ...]]) -> bool:
    if site.op == "convert_element_type":
        return site.transposed
    if site.op == "dot_general":  # by which a product that sums nothing is transposed
        return site.transposed and not {*site.shapes}.isdisjoint(unsummed)
    return site.differentiated and site.op in (*LINEAR, "integer_pow", "square")


def _judge_ours(site: Site, run: str) -> Violation | None:
    floats = [fmt for fmt in site.operands if "float" in fmt or "complex" in fmt]
    if any(fmt not in (*LOW, "float32") for fmt in floats):
        return Violation("narrow", site)
    if str(site.params["spec"].run) != run:
        return Violation("foreign", site)
    if str(site.params["spec"].out) not in (run, "float32"):
        return Violation("foreign", site)
    return None


def _asked(params: Mapping[str, Any]) -> bool:
    """The program asked for this precision itself."""
    return params.get("precision") is not None and "HIGH" in str(params["precision"])


def _narrows(before: str, after: str) -> bool:
    wide = {"float64": 3, "float32": 2, "float16": 1, "bfloat16": 1}
    if before.startswith("complex") and after.startswith("complex"):
        return before == "complex128" and after == "complex64"
    return before == "float64" and wide.get(after, 3) < 3


def _walk(jaxpr: Any, where: str, scope: str, as_written: bool) -> Iterator[Site]:
    for eqn in jaxpr.eqns:
        op = eqn.primitive.name
        here = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
        name = str(eqn.params.get("name", "")) if op in ("jit", "pjit") else ""
        left = as_written or op in AS_WRITTEN or name in LINALG or _off(here)
        shapes, alone = tuple(_shape(v) for v in eqn.invars), _sums_nothing(op, eqn)
        yield Site(
            op,
            tuple(_dtype(v) for v in eqn.invars),
            tuple(_dtype(v) for v in eqn.outvars),
            eqn.params,
            where,
            here,
            left or alone,
            shapes if alone else (),
            shapes,
        )
        if op == OURS or AS_WRITTEN.get(op) == "a kernel is opaque":
            continue
        inside = f"{where}/{op}" + (f"({name})" if name else "")
        for body in _bodies(eqn.params):
            yield from _walk(body, inside.lstrip("/"), here, left)


def _off(scope: str) -> bool:
    return any(OFF in part for part in scope.replace("(", "/").replace(")", "/").split("/"))


def _shifts(jaxpr: Any) -> Iterator[Site]:
    """Low differences whose only way on is up, into an exponential: a softmax in a low dtype."""
    for body, scope, left in _jaxprs(jaxpr, "", False):
        made = {id(v): eqn for eqn in body.eqns for v in eqn.outvars}
        for eqn in body.eqns:
            if eqn.primitive.name not in ("exp", "exp2") or left:
                continue
            up = made.get(id(eqn.invars[0]))
            if up is None or up.primitive.name != "convert_element_type":
                continue
            source = made.get(id(up.invars[0]))
            if source is None or source.primitive.name != "sub":
                continue
            operands = tuple(_dtype(v) for v in source.invars)
            results = tuple(_dtype(v) for v in source.outvars)
            here = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
            if results[0] in LOW and not _off(here):
                yield Site("sub", operands, results, source.params, "the shift", here, False)


def _sums_nothing(op: str, eqn: Any) -> bool:
    """True for a product of each with each, which the vocabulary takes for a `mul`."""
    if op != "dot_general":
        return False
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return all(eqn.invars[0].aval.shape[d] == 1 for d in contracted)


def _jaxprs(jaxpr: Any, scope: str, left: bool) -> Iterator[tuple[Any, str, bool]]:
    yield jaxpr, scope, left
    for eqn in jaxpr.eqns:
        op, name = eqn.primitive.name, str(eqn.params.get("name", ""))
        if op == OURS or op in AS_WRITTEN or (op in ("jit", "pjit") and name in LINALG):
            continue
        here = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
        for body in _bodies(eqn.params):
            yield from _jaxprs(body, here, left or _off(here))


def _bodies(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        yield from _found(value)


def _found(value: Any) -> Iterator[Any]:
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        yield _open(value)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _found(item)


def _open(jaxpr: Any) -> Any:
    """The jaxpr inside a closed one; since jax 0.11 the two are one class."""
    return jaxpr if hasattr(jaxpr, "eqns") and not hasattr(jaxpr, "jaxpr") else jaxpr.jaxpr


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(getattr(var.aval, "shape", ()))


def _dtype(var: Any) -> str:
    return str(getattr(var.aval, "dtype", "none"))
