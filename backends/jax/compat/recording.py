"""Putting equations into the program that is being traced, without a `bind` for each."""

from collections.abc import Sequence
from functools import cache
from types import TracebackType
from typing import Any, TypeAlias

import jax
import jax._src.config as _config
import jax._src.core as _core
import jax._src.dtypes as _dtypes
import jax._src.interpreters.partial_eval as _partial_eval
import jax._src.mesh as _mesh
import jax._src.source_info_util as _source_info
import jax.extend.core as core
from jax.sharding import AbstractMesh

from polymp.backends.jax.compat.programs import Atom, JaxprEqnContext, NameStack, SourceInfo


def equation_context() -> JaxprEqnContext:
    """The context that an equation traced here would hold; one object for one context. Since 0.4.

    An equation's own context need not be entered where it is the current one.
    """
    return _core.JaxprEqnContext()


class EquationSource:
    """The source of what is traced in a block: tracebacks and name stacks of equations, in turn.

    `source_info_util.user_context` without a context manager for each equation: of a large program,
    they were an eighth of the time. Since jax 0.4.
    """

    def __init__(self) -> None:
        self._here = _source_info._source_info_context

    def __enter__(self) -> "EquationSource":
        self._before = self._here.context
        self._traceback: object = None
        return self

    def at(self, info: SourceInfo, stack: NameStack) -> None:
        """From here on: the traceback of an equation's source information, and a name stack."""
        self._traceback = info.traceback
        if info.name_stack is not stack or info.traceback is None:
            info = self._before.replace(traceback=info.traceback, name_stack=stack)
        self._here.context = info

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._here.context = self._before
        if error is not None:  # it gets the place of the equation at hand
            manager = _source_info.user_context(self._traceback)
            manager.__enter__()
            manager.__exit__(kind, error, traceback)


# A value that is an equation's only result, as long as no tracer of it is asked for.
Recorded: TypeAlias = _core.JaxprEqn


class Recorder:
    """Puts equations into the program that is being traced, as jax's own `lower_jaxpr` does.

    An equation is the one that `bind` would put there, with types from the primitive's own shape
    rule, by way of jax's cache. What `bind` does before that is the same for all equations of a
    program: it finds the current trace, looks whether a value is one of that trace's own and
    whether its mesh is the current one. Since jax 0.10.

    Attributes:
        meshless: True if no mesh holds here, so that no value varies over manual axes.

    Args:
        trace: that records.
        mesh: that holds here.
    """

    def __init__(
        self, trace: _partial_eval.DynamicJaxprTrace, mesh: jax.sharding.AbstractMesh
    ) -> None:
        self.meshless: bool = mesh.empty
        self._mesh = mesh
        self._trace = trace
        self._frame: Any = trace.frame
        self._context = equation_context()
        self._here = _source_info._source_info_context
        self._tracers: dict[Atom, jax.Array] = {}

    def put(
        self, primitive: core.Primitive, values: Sequence[Any], params: jax.core.ParamDict
    ) -> Sequence[Any]:
        """The results of a primitive, at the current source information.

        Values and results are `Recorded`, or what `bind` takes and returns.
        """
        if not is_plain(primitive) or params.get("sharding") is not None:
            return self.bind(primitive, values, params)
        if _mesh.get_abstract_mesh() is not self._mesh:  # a cast under another one
            return self.bind(primitive, values, params)
        frame, trace = self._frame, self._trace
        constants = frame.constvar_to_val
        source = self._here.context
        if not source.traceback:
            source = _source_info.current()
        atoms, avals = [], []
        for x in values:
            if type(x) is Recorded:
                (atom,) = x.outvars
            else:
                if not isinstance(x, _core.Tracer):
                    x = trace.to_jaxpr_tracer(_dtypes.canonicalize_value(x), source)
                elif x._trace is not trace:
                    return self.bind(primitive, values, params)
                atom = x.val
                if type(atom) is core.Literal:
                    if primitive in _partial_eval.const_fold_rules:
                        return self.bind(primitive, values, params)
                elif atom in constants:  # it lives as long as its tracers, which `bind` keeps
                    return self.bind(primitive, values, params)
            atoms.append(atom)
            avals.append(atom.aval)
        made, effects = _partial_eval._cached_abstract_eval(primitive, *avals, **params)
        if effects:
            return self.bind(primitive, values, params)
        several = primitive.multiple_results
        variables = [frame.gensym(aval) for aval in (made if several else (made,))]
        eqn = Recorded(atoms, variables, primitive, params, effects, source, self._context)
        if primitive in _partial_eval.forwarding_rules:
            (same,), _ = _partial_eval.forwarding_rules[primitive](eqn)
            if same is not None:
                return (values[same],)
        frame.tracing_eqns.append(eqn)
        if several:
            return [trace.var_to_tracer(var, source) for var in variables]
        return (eqn,)

    def bind(
        self, primitive: core.Primitive, values: Sequence[Any], params: jax.core.ParamDict
    ) -> Sequence[Any]:
        """The same, by way of `bind`."""
        return put(primitive, [self.tracer(x) for x in values], params)

    def tracer(self, x: object) -> Any:
        """The tracer of a recorded value; any other value as it is."""
        if type(x) is not Recorded:
            return x
        (var,) = x.outvars
        if var not in self._tracers:
            self._tracers[var] = self._trace.var_to_tracer(var, x.source_info)
        return self._tracers[var]


def put(
    primitive: core.Primitive, values: Sequence[object], params: jax.core.ParamDict
) -> Sequence[Any]:
    """The results of a primitive, by way of `bind`."""
    out = primitive.bind(*values, **primitive.get_bind_params(params))
    return out if primitive.multiple_results else (out,)


def aval_of(x: object) -> Any:
    """The type of a value, recorded or not."""
    return x.outvars[0].aval if type(x) is Recorded else jax.typeof(x)


def recorder(values: Sequence[object]) -> Recorder | None:
    """For the program that is being traced, of which these values will be part.

    None where `bind` decides what becomes of an equation: where nothing is traced, under a
    derivative or vmap, and where a value has another mesh than the one that holds here.
    """
    trace = _core.trace_ctx.trace
    if type(trace) is not _partial_eval.DynamicJaxprTrace or trace.frame.auto_dce:
        return None
    mesh = _mesh.get_abstract_mesh()
    for x in values:
        of = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", mesh)
        if not of.empty and of != mesh:
            return None
    return None if _config.eager_constant_folding.value else Recorder(trace, mesh)


def other_mesh(aval: object) -> AbstractMesh | None:
    """The mesh of a value where another one holds, that of a `reshard` it goes into; or None.

    A primitive refuses values of other meshes. `get_abstract_mesh` is public since jax 0.8.
    """
    mesh = _mesh.get_abstract_mesh()
    of = getattr(getattr(aval, "sharding", None), "mesh", mesh)
    return None if of is mesh or of.empty or of == mesh else of


@cache
def is_plain(primitive: core.Primitive) -> bool:
    """True if `bind` of a primitive, under a trace that records, does nothing of its own.

    Told by the attributes of `Primitive` that others override, and by jax's rules for recording.
    Since jax 0.10.
    """
    own = vars(primitive)
    if type(primitive) is not _core.Primitive or "bind" in own or "get_bind_params" in own:
        return False
    if "is_high" in own or primitive.ref_primitive or primitive.ref_allocating:
        return False
    if primitive.name == "custom_lin":  # its parameters cannot be told apart
        return False
    if "bind_with_trace" in own and primitive is not jax.lax.convert_element_type_p:
        return False  # that one's puts a sharding constraint after a cast that has a sharding
    # These rules put their parameters in order, nothing else.
    ordered = jax.lax.broadcast_in_dim_p, jax.lax.reshape_p, jax.lax.dynamic_slice_p
    return primitive not in _partial_eval.custom_staging_rules or primitive in ordered
