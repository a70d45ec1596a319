"""The rows of an audit's picture: a module each, with all that was measured in it.

    AuditRecord -> results and gradients by module -> Layers, equal ones added up

Nothing here draws.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from polymp.diagnostics.audit_records import AuditRecord, Measured, split
from polymp.diagnostics.call_record import BACKWARD, FORWARD
from polymp.diagnostics.equal_layers import folded
from polymp.diagnostics.magnitudes import Magnitudes, joined


class Layer(NamedTuple):
    """A row: a module with the magnitudes of its results and of its gradients, if it has any.

    Attributes:
        module: its path; of equal layers, as in tables: "layers.*.attn".
        forward: magnitudes of the results of its ops; None if it has none.
        gradient: magnitudes of its gradients; None if it has none.
        modules: how many modules these are.
        ops: names of its ops and parameters; equal layers have the same.
    """

    module: str
    forward: Magnitudes | None
    gradient: Magnitudes | None
    modules: int = 1
    ops: tuple[str, ...] = ()


def layers(audit: AuditRecord, fold: bool = True) -> list[Layer]:
    """A row for every module, in the order in which they were first reached; equal layers as one.

    The gradients of a module are those of its parameters and those that its ops made.
    """
    forward: dict[str, list[Magnitudes]] = {}
    gradient: dict[str, list[Magnitudes]] = {}
    ops: dict[str, list[str]] = {}
    for measured in audit.results:
        side = {FORWARD: forward, BACKWARD: gradient}.get(measured.direction)
        if side is not None:
            side.setdefault(measured.module, []).append(measured.magnitudes)
            ops.setdefault(measured.module, []).append(f"{measured.direction} {measured.op}")
    known = {*forward, *gradient}
    for measured in audit.gradients:
        owner = _module(measured, known)
        gradient.setdefault(owner, []).append(measured.magnitudes)
        ops.setdefault(owner, []).append(split(measured.module)[1])
    names = {**forward, **gradient}
    rows = [
        Layer(m, _union(forward.get(m, ())), _union(gradient.get(m, ())), 1, tuple(sorted(ops[m])))
        for m in names
    ]
    modules = folded(rows, lambda row: ("", row.module), _alike, _together, fold)
    return [
        row._replace(module=one.module, modules=one.layers) for one in modules for row in one.rows
    ]


def _union(found: Iterable[Magnitudes | None]) -> Magnitudes | None:
    listed = [m for m in found if m is not None]
    return joined(listed) if listed else None


def _alike(row: Layer) -> Hashable:
    broken = tuple(m and (m.inf, m.nan) for m in (row.forward, row.gradient))
    return row.forward is None, row.gradient is None, row.ops, broken


def _together(rows: Sequence[Layer]) -> Layer:
    return rows[0]._replace(
        forward=_union(row.forward for row in rows), gradient=_union(row.gradient for row in rows)
    )


def _module(gradient: Measured, known: set[str]) -> str:
    """The module of a parameter: the innermost that its name begins with and that is known."""
    owner, _ = split(gradient.module)
    path = owner
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path or owner
