"""Everything private of jax that polymp touches, in one place.

Each name says why it is needed and since when it has been there;
`tests/jax/compat/test_private_names.py` fails when one changes. Supported: jax 0.10.2 to 0.11.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import FunctionType, TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import mesh as _mesh
from jax._src import named_sharding as _named_sharding
from jax._src import pjit as _pjit
from jax._src import sharding_impls as _sharding
from jax._src import source_info_util as _source_info
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import partial_eval as _partial_eval
from jax.extend import core
from jax.interpreters import ad, mlir

# How remat splits an equation; without a rule it would ask policies about our primitive, which none
# of them knows. Since jax 0.2.
remat_rules = _partial_eval.partial_eval_jaxpr_custom_rules


def remat_case(answer: Any) -> Any:
    """What a rematerialisation policy wants: "save", "recompute", or (there, back) to offload.

    There and back are memory spaces. Since jax 0.4.
    """
    case = _partial_eval.ensure_enum(answer)
    if isinstance(case, _partial_eval.Offloadable):
        return _core.mem_kind_to_space(case.dst), _core.mem_kind_to_space(case.src)
    return "save" if isinstance(case, _partial_eval.SaveableType) else "recompute"


def varying_axes(x: Any) -> frozenset[str]:
    """The manual axes over which the devices of a shard_map may hold different x. Since jax 0.10.

    Empty outside of a shard_map, and in one with check_vma=False. `jax.typeof` is public, the
    fields of what it returns are not documented.
    """
    axes: frozenset[str] = jax.typeof(x).mat.varying
    return axes


def varying_alike(*operands: Any) -> Sequence[Any]:
    """The operands, each varying over the manual axes that any of them varies over.

    What functions of `jax.lax` do before they bind a primitive. Since jax 0.10.
    """
    operands_alike: Sequence[Any] = _core.auto_insert_reshard(*operands)
    return operands_alike


def trace_context() -> Any:
    """Everything of jax's configuration that a trace depends on, as a key. Since jax 0.4.

    The key that jit adds to the types of the arguments; there is no public one.
    """
    return _config.trace_context()


def default_precision() -> Any:
    """What `jax.default_matmul_precision` was set to, as an equation would hold it. Since 0.2."""
    name = _config.default_matmul_precision.value
    if name is None:
        return None
    try:
        precision = jax.lax.Precision(name)
    except ValueError:
        return jax.lax.DotAlgorithmPreset[name]
    return precision, precision


def equation_context() -> Any:
    """The context that an equation traced here would hold; one object for one context. Since 0.4.

    An equation's own context need not be entered where it is the current one.
    """
    return _core.JaxprEqnContext()


class Places:
    """Where what is traced meanwhile comes from: tracebacks and name stacks of equations, in turn.

    `source_info_util.user_context` without a context manager for each equation: of a large program,
    they were an eighth of the time. Since jax 0.4.
    """

    def __init__(self) -> None:
        self._here = _source_info._source_info_context

    def __enter__(self) -> "Places":
        self._before = self._here.context
        self._traceback: Any = None
        return self

    def at(self, info: Any, stack: Any) -> None:
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
Recorded = _core.JaxprEqn


class Recorder:
    """Puts equations into the program that is being traced, as jax's own `lower_jaxpr` does.

    An equation is the one that `bind` would put there, with types from the primitive's own shape
    rule, by way of jax's cache. What `bind` does before that is the same for all equations of a
    program: it finds the current trace, looks whether a value is one of that trace's own and
    whether its mesh is the current one. Since jax 0.10.

    Attributes:
        meshless: True if no mesh holds here, so that no value varies over manual axes.
    """

    def __init__(self, trace: Any, meshless: bool) -> None:
        self.meshless = meshless
        self._trace = trace
        self._frame = trace.frame
        self._context = equation_context()
        self._here = _source_info._source_info_context
        self._tracers: dict[Any, Any] = {}

    def put(self, primitive: Any, values: Sequence[Any], params: Any) -> Sequence[Any]:
        """The results of a primitive, at the current source information.

        Values and results are `Recorded`, or what `bind` takes and returns.
        """
        if not is_plain(primitive) or params.get("sharding") is not None:
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

    def bind(self, primitive: Any, values: Sequence[Any], params: Any) -> Sequence[Any]:
        """The same, by way of `bind`."""
        return put(primitive, [self.tracer(x) for x in values], params)

    def tracer(self, x: Any) -> Any:
        """What is known to `bind` and everybody else as the value."""
        if type(x) is not Recorded:
            return x
        (var,) = x.outvars
        if var not in self._tracers:
            self._tracers[var] = self._trace.var_to_tracer(var, x.source_info)
        return self._tracers[var]


def put(primitive: Any, values: Sequence[Any], params: Any) -> Sequence[Any]:
    """The results of a primitive, by way of `bind`."""
    out = primitive.bind(*values, **primitive.get_bind_params(params))
    return out if primitive.multiple_results else (out,)


def aval_of(x: Any) -> Any:
    """The type of a value, recorded or not."""
    return x.outvars[0].aval if type(x) is Recorded else jax.typeof(x)


def recorder(values: Sequence[Any]) -> Recorder | None:
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
    return None if _config.eager_constant_folding.value else Recorder(trace, mesh.empty)


@cache
def is_plain(primitive: Any) -> bool:
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


# By transformation, the module and the name of its table of rules.
_RULES = {
    "jet": ("jax.experimental.jet", "jet_rules"),
    "sparsify": ("jax.experimental.sparse.transform", "sparse_rules_bcoo"),
    "checkify": ("jax._src.checkify", "error_checks"),
    "roofline": ("jax.experimental.roofline.roofline", "_rooflines"),
}


def rules_of(name: str) -> Any:
    """The rules of a transformation, by primitive; None if nobody has loaded it. Since jax 0.4."""
    module, table = _RULES[name]
    return getattr(sys.modules.get(module), table, None)


def sparsified(fn: Callable[..., Any], env: Any, values: Sequence[Any]) -> Any:
    """A function of one result, as a rule of sparsify: its values in and out. Since jax 0.4."""
    from jax.experimental import sparse
    from jax.experimental.sparse import transform

    arrays = transform.spvalues_to_arrays(env, tuple(values))
    return transform.arrays_to_spvalues(env, [sparse.sparsify(fn)(*arrays)])


def nan_checked(primitive: Any, *given: Any, **params: Any) -> Any:
    """The rule of checkify that reports a NaN in what a primitive returns. Since jax 0.4."""
    from jax._src import checkify

    return checkify.nan_error_check(primitive, *given, **params)


def jvp(
    fn: Callable[..., Sequence[Any]], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Sequence[Any], list[Any]]:
    """Results and their tangents; None for a tangent that is a symbolic zero, there and here.

    `jax.jvp` makes arrays of zeros of them, and a rule that refuses a tangent then refuses it.
    Since jax 0.4.
    """
    jaxpr = jax.make_jaxpr(fn)(*primals)
    moving = [tangent is not None for tangent in tangents]
    paired, moves = _ad.jvp_jaxpr(jaxpr, moving, False)
    flat = core.jaxpr_as_fun(paired)(*primals, *(t for t in tangents if t is not None))
    left = iter(flat[len(moves) :])
    return flat[: len(moves)], [next(left) if nonzero else None for nonzero in moves]


def pulled(
    pull: Any, args: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any]
) -> list[Any]:
    """Call a function of `jax.vjp`; None stands for a symbolic zero, there and in its argument.

    Args:
        pull: of `jax.vjp`.
        args: types of what is differentiated.
        results: types of the results.
        cotangents: of the results.

    Since jax 0.8.
    """
    accums = [_ad.ValAccum(aval.to_ct_aval()) for aval in args]
    full = [
        ad.Zero(aval.to_ct_aval()) if ct is None else ct
        for ct, aval in zip(cotangents, results, strict=True)
    ]
    pull.with_refs(*accums)(jax.tree.unflatten(pull.out_tree, full))
    grads = [accum.freeze() for accum in accums]
    return [None if type(grad) is ad.Zero else grad for grad in grads]


def symbolic_zero(primal: Any) -> Any:
    """The tangent of a value that does not move, as a rule may return it. Since jax 0.4."""
    return jax.custom_derivatives.SymbolicZero(jax.typeof(primal).to_tangent_aval())


def opened(closed: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr and the constants of a closed jaxpr. Since jax 0.11 the two kinds are one class."""
    return closed.jaxpr, closed.consts


def close(jaxpr: Any) -> Any:
    """A jaxpr without constants, as a closed one: the same each time. Since jax 0.4."""
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else _partial_eval.close_jaxpr(jaxpr)


def binders(closed: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The variables of the constants and those of the arguments of a closed jaxpr."""
    jaxpr, consts = opened(closed)
    invars = getattr(jaxpr, "all_invars", None) or [*jaxpr.constvars, *jaxpr.invars]  # 0.11: one
    return invars[: len(consts)], invars[len(consts) :]


def lifted(closed: Any) -> tuple[Any, Sequence[Any]]:
    """The open jaxpr that takes the constants as leading arguments, and the constants."""
    jaxpr, consts = opened(closed)
    if not consts:
        return jaxpr, ()
    constvars, invars = binders(closed)

    def evaluate(*args: Any) -> Any:
        again = core.ClosedJaxpr(jaxpr, list(args[: len(consts)]))
        return core.jaxpr_as_fun(again)(*args[len(consts) :])

    traced = jax.make_jaxpr(evaluate)(*(var.aval for var in (*constvars, *invars)))
    return opened(traced)[0], consts


def scan_sizes(params: Any) -> tuple[int, int]:
    """How many constants and how many carries a scan has. Since jax 0.11 held by a flat tree."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def only_arrays(closed: Any) -> bool:
    """True if a jaxpr takes and returns arrays alone: no references, tokens or boxes."""
    jaxpr, _ = opened(closed)
    return all(type(v.aval) is _core.ShapedArray for v in (*binders(closed)[1], *jaxpr.outvars))


def has_program(params: Any) -> bool:
    """True if an equation's parameters hold a jaxpr or a function."""
    if any(True for _ in core.jaxprs_in_params(params)):
        return True
    return any(callable(value) and hasattr(value, "call_wrapped") for value in params.values())


def without_scopes(stack: Any, drop: Callable[[str], bool]) -> Any:
    """A name stack without the scopes whose names are to be dropped. Since jax 0.4."""
    kept = [part for part in stack.stack if not (hasattr(part, "name") and drop(part.name))]
    return type(stack)(tuple(kept))


def no_scopes() -> Any:
    """The empty name stack. Since jax 0.4."""
    return _source_info.NameStack()


def scope_names(stack: Any) -> list[str]:
    """The names of a stack's scopes, outermost first, without the transforms. Since jax 0.4."""
    return [part.name for part in stack.stack if type(part).__name__ == "Scope"]


def with_scope(stack: Any, name: str) -> Any:
    """A name stack with one scope more, inside the others. Since jax 0.4."""
    return stack.extend(name)


def transforms(stack: Any) -> frozenset[str]:
    """Names of the transforms in a name stack: "jvp", "transpose", "vmap". Since jax 0.4."""
    return frozenset(p.name for p in stack.stack if type(p).__name__ == "Transform")


def formats_out(eqn: Any, formats: Sequence[str | None]) -> tuple[str | None, ...]:
    """The formats of an equation's results if its operands had these; None: as declared.

    Asks the primitive's own shape rule, `abstract_eval`. Since jax 0.4.
    """
    avals = [
        var.aval if format is None else var.aval.update(dtype=np.dtype(format), weak_type=False)
        for var, format in zip(eqn.invars, formats, strict=True)
    ]
    out, _ = eqn.primitive.abstract_eval(*avals, **eqn.params)
    outs = out if eqn.primitive.multiple_results else [out]
    return tuple(aval.dtype.name if hasattr(aval, "dtype") else None for aval in outs)


class Frames(NamedTuple):
    """The Python frames of a traceback, innermost first.

    Attributes:
        codes: the code object of each.
        places: where in it the frame was: offsets of instructions.
    """

    codes: Sequence[Any]
    places: Sequence[int]


def frames(traceback: Any) -> Frames:
    """The frames of an equation's traceback, cheaply. `raw_frames` since jaxlib 0.4."""
    return Frames((), ()) if traceback is None else Frames(*traceback.raw_frames())


def function_name(closed: Any) -> str:
    """The name of the function that a jaxpr was traced from. Since jax 0.4."""
    name: str = opened(closed)[0].debug_info.func_name
    return name


def traced_from(closed: Any) -> tuple[str | None, int | None, str]:
    """File, first line and name of the function that a jaxpr was traced from. Since jax 0.5."""
    info = opened(closed)[0].debug_info
    return info.func_filename, info.func_lineno, info.func_name


def traced_as(fn: Any, closed: Any) -> Any:
    """A function that does the same; what is traced from it says it is of the function of a jaxpr.

    A jaxpr's debug information comes of the code object of a function. Since jax 0.5.
    """
    filename, line, name = traced_from(closed)
    if filename is None:
        return fn
    code = fn.__code__.replace(co_filename=filename, co_firstlineno=line or 1, co_name=name)
    return FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)


def is_ready(x: Any) -> bool:
    """True if an array's values are there, so that reading them does not wait. Since jax 0.3.

    A method of the arrays that there are, and not of `jax.Array`, which is what is documented.
    """
    return bool(x.is_ready())


def traces() -> list[Any]:
    """The traces that Python runs under, innermost first, without the last: that of no trace.

    Empty in code that is not traced. Since jax 0.4.36.
    """
    found = []
    trace = _core.trace_ctx.trace
    while trace is not None and trace is not _core.eval_trace:
        found.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return found


def tracers_of(trace: Any, among: Sequence[Any]) -> list[Any]:
    """Those of some objects that are values of a trace. Since jax 0.4.36."""
    return [x for x in among if isinstance(x, _core.Tracer) and x._trace is trace]


def operands_of(tracer: Any) -> Any:
    """The list of values that a value was computed from; None if there is none. Since jax 0.7."""
    eqn = getattr(tracer, "parent", None)
    return None if eqn is None else eqn.in_tracers


def where_made(tracer: Any) -> str:
    """Type of a traced value, and where it was computed. Since jax 0.4.36."""
    shown, place = tracer.aval.str_short(), _source_info.summarize(tracer._line_info)
    return f"{shown} from {place}" if place else str(shown)


def in_backward(stack: Any) -> bool:
    """True for the name stack of an equation that a transposition made. Since jax 0.4."""
    return "transpose" in transforms(stack)


def where_written(eqn: Any) -> str:
    """File, line and function of an equation, as its author would look for it. Since jax 0.3."""
    return _source_info.summarize(eqn.source_info)


def traced_jaxpr(traced: Any) -> Any:
    """The closed jaxpr of what `trace` of a jitted function returns.

    That of `flax.nnx.jit` holds jax's own. Since flax 0.12.
    """
    return getattr(traced, "traced", traced).jaxpr


def asks_for_low(error: BaseException) -> bool:
    """True for an error of jax's wrappers of cuDNN's kernels, that the dtypes are no low ones.

    `jax._src.cudnn` since 0.4.24. The error itself says nowhere who it is from.
    """
    at = error.__traceback__ if "fp16" in str(error) or "dtype" in str(error) else None
    while at is not None:
        if str(at.tb_frame.f_globals.get("__name__")).startswith("jax._src.cudnn."):
            return True
        at = at.tb_next
    return False


def readers(values: Iterable[Any]) -> list[Any]:
    """The ops of an MLIR program that read some of its values. Since jax 0.5.

    `jax.interpreters.mlir.ir` is public, what its classes can do is not documented.
    """
    return [use.owner.operation for value in values for use in value.uses]


def merge_repeated(op: Any) -> None:
    """Replace an op of an MLIR program by an earlier one that computes the same, if there is one.

    So are the ops that read its result, as long as they have one operand and one result each. The
    earlier ones are in the same block, which is where ops are put one after the other. Since 0.5.
    """
    todo = [op]
    while todo:
        op = todo.pop()
        if len(op.operands) != 1 or len(op.results) != 1:
            continue
        twins = (one for one in readers(op.operands) if one != op and _is_earlier_twin(one, op))
        if (twin := next(twins, None)) is not None:
            todo += readers(op.results)
            op.results[0].replace_all_uses_with(twin.results[0])
            op.erase()


def _is_earlier_twin(one: Any, other: Any) -> bool:
    def computed(op: Any) -> Any:
        types = [value.type for value in op.results]
        return op.name, types, {name: op.attributes[name] for name in op.attributes}

    if one.block != other.block or len(one.regions) or not one.is_before_in_block(other):
        return False
    return bool(computed(one) == computed(other))


def lower_in_place(belongs: Callable[[Any], bool]) -> None:
    """Lower some jitted functions into the program that calls them, in place of a call.

    On several devices alone, and none that asks for shardings or layouts of its own, or has
    effects. All others are lowered by jax's own rule, `_pjit_lowering`. Since jax 0.4.

    Args:
        belongs: says so of a function, given its closed jaxpr.
    """

    def rule(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
        jaxpr = params["jaxpr"]
        asked = {x for key in _ASKED for x in params[key]} - {_named_sharding.UNSPECIFIED, None}
        several = _devices(ctx.module_context.axis_context) > 1
        if not several or asked or jaxpr.effects or not belongs(jaxpr):
            return _pjit._pjit_lowering(ctx, *args, **params)
        stack = ctx.name_stack.extend(f"jit({params['name']})")
        return mlir.lower_fun(core.jaxpr_as_fun(jaxpr))(ctx.replace(name_stack=stack), *args)

    mlir.register_lowering(_pjit.jit_p, rule, cacheable=False)


_ASKED = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")


def _devices(context: Any) -> int:
    """How many devices a program is for, that is lowered in a context."""
    if isinstance(context, _sharding.ShardingContext):
        return context.num_devices
    return context.mesh.size if isinstance(context, _sharding.SPMDAxisContext) else 1
