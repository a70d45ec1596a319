"""Everything private of jax that polymp touches, in one place.

Each name says why it is needed and since when it has been there;
`tests/jax/compat/test_private_names.py` fails when one changes. Supported: jax 0.10.2 to 0.11.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import repeat
from types import CodeType, FunctionType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import jax._src.config as _config
import jax._src.core as _core
import jax._src.dispatch as _dispatch
import jax._src.interpreters.ad as _ad
import jax._src.interpreters.partial_eval as _partial_eval
import jax._src.mesh as _mesh
import jax._src.sharding_impls as _sharding
import jax._src.source_info_util as _source_info
import jax.extend.core as core
import jax.interpreters.mlir as mlir
import numpy as np
from jax.core import AbstractValue
from jax.interpreters import ad
from jax.sharding import AbstractMesh

T = TypeVar("T")

# Traced programs: their types, as polymp reads them, and their parts. Not all of these are objects
# of jax's own: a call of a known function that is taken as one op has the same attributes as an
# equation, and as the program inside it.

# Under what an equation was traced; a call makes that of one traced here, one object for a context:
# an equation's own need not be entered where it is the current one. Since jax 0.4.
JaxprEqnContext: TypeAlias = _core.JaxprEqnContext
NameStack: TypeAlias = _source_info.NameStack
SourceInfo: TypeAlias = _source_info.SourceInfo


class Atom(Protocol):
    """A variable of a program, or a number in it."""

    @property
    def aval(self) -> Any:
        """Its type: that of an array, a token or a reference."""


class Equation(Protocol):
    """An equation: a primitive, what it reads and what it writes. As `jax.extend.core.JaxprEqn`."""

    primitive: core.Primitive
    params: jax.core.ParamDict
    effects: core.Effects
    source_info: SourceInfo
    ctx: JaxprEqnContext

    @property
    def invars(self) -> Sequence[Atom]: ...
    @property
    def outvars(self) -> Sequence[Atom]: ...


class OpenProgram(Protocol):
    """A program without the values of its constants. As `jax.extend.core.Jaxpr`."""

    @property
    def invars(self) -> Sequence[Atom]: ...
    @property
    def constvars(self) -> Sequence[Atom]: ...
    @property
    def outvars(self) -> Sequence[Atom]: ...
    @property
    def eqns(self) -> Sequence[Equation]: ...
    @property
    def debug_info(self) -> core.DebugInfo: ...


class ClosedProgram(Protocol):
    """A program with the values of its constants. As `jax.extend.core.ClosedJaxpr`."""

    @property
    def jaxpr(self) -> OpenProgram: ...
    @property
    def consts(self) -> Sequence[Any]: ...


def opened(closed: ClosedProgram) -> tuple[OpenProgram, Sequence[Any]]:
    """The jaxpr and the constants of a closed jaxpr. Since jax 0.11 the two kinds are one class."""
    return closed.jaxpr, closed.consts


def close(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A jaxpr without constants, as a closed one: the same each time. Since jax 0.4."""
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else _partial_eval.close_jaxpr(jaxpr)


def static_leaves(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[bool]:
    """Whether each leaf of a call of a jitted function belongs to a static argument."""
    # JAX shows what is traced (`fn.trace(...).args_info`), but not which arguments it has left out.
    # Since jax 0.4.
    info = fn._jit_info
    if not info.static_argnums and not info.static_argnames:
        return repeat(False)
    at = {n + len(args) if n < 0 else n for n in info.static_argnums}
    given = [(x, i in at) for i, x in enumerate(args)]
    given += [(kwargs[name], name in info.static_argnames) for name in sorted(kwargs)]
    return (static for x, static in given for _ in jax.tree.leaves(x))


def binders(closed: ClosedProgram) -> tuple[Sequence[Atom], Sequence[Atom]]:
    """The variables of the constants and those of the arguments of a closed jaxpr."""
    jaxpr, consts = opened(closed)
    invars = getattr(jaxpr, "all_invars", None) or [*jaxpr.constvars, *jaxpr.invars]  # 0.11: one
    return invars[: len(consts)], invars[len(consts) :]


def lifted(closed: ClosedProgram) -> tuple[OpenProgram, Sequence[Any]]:
    """The open jaxpr that takes the constants as leading arguments, and the constants."""
    jaxpr, consts = opened(closed)
    if not consts:
        return jaxpr, ()
    constvars, invars = binders(closed)
    whole: Any = jaxpr

    def evaluate(*args: jax.Array) -> Sequence[jax.Array]:
        again = core.ClosedJaxpr(whole, list(args[: len(consts)]))
        outs: Sequence[jax.Array] = core.jaxpr_as_fun(again)(*args[len(consts) :])
        return outs

    traced = jax.make_jaxpr(evaluate)(*(var.aval for var in (*constvars, *invars)))
    return opened(traced)[0], consts


def scan_sizes(params: jax.core.ParamDict) -> tuple[int, int]:
    """How many constants and how many carries a scan has. Since jax 0.11 held by a flat tree."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def only_arrays(closed: ClosedProgram) -> bool:
    """True if a jaxpr takes and returns arrays alone: no references, tokens or boxes."""
    jaxpr, _ = opened(closed)
    return all(type(v.aval) is _core.ShapedArray for v in (*binders(closed)[1], *jaxpr.outvars))


def dtypes_out(eqn: Equation, dtypes: Sequence[str | None]) -> tuple[str | None, ...]:
    """The dtypes of an equation's results if its operands had these; None: as declared."""
    # Asks the primitive's own shape rule, `abstract_eval`. Since jax 0.4.
    avals = [
        var.aval if dtype is None else var.aval.update(dtype=np.dtype(dtype), weak_type=False)
        for var, dtype in zip(eqn.invars, dtypes, strict=True)
    ]
    out, _ = eqn.primitive.abstract_eval(*avals, **eqn.params)
    outs = out if eqn.primitive.multiple_results else [out]
    return tuple(aval.dtype.name if hasattr(aval, "dtype") else None for aval in outs)


def traced_from(closed: ClosedProgram) -> tuple[str | None, int | None, str]:
    """File, first line and name of the function that a jaxpr was traced from. Since jax 0.5."""
    info = opened(closed)[0].debug_info
    return info.func_filename, info.func_lineno, info.func_name


def traced_as(fn: Any, closed: ClosedProgram) -> Any:
    """A function that does the same; what is traced of it says it is of a jaxpr's function."""
    # A jaxpr's debug information comes of the code object of a function. Since jax 0.5.
    filename, line, name = traced_from(closed)
    code = fn.__code__
    if filename is not None:
        code = code.replace(co_filename=filename, co_firstlineno=line or 1, co_name=name)
    return FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)


# Rematerialisation, settings and derivatives.

# How remat splits an equation; without a rule it would ask policies about our primitive, which they
# do not know. Since jax 0.2.
remat_rules = _partial_eval.partial_eval_jaxpr_custom_rules


class Context(Protocol[T]):
    """A setting that is part of the key of every trace, as `jax.make_user_context` makes it."""

    @property
    def value(self) -> T: ...
    def __call__(self, value: T) -> AbstractContextManager[object]: ...


def remat_case(
    answer: Any,
) -> Literal["save", "recompute"] | tuple[_core.MemorySpace, _core.MemorySpace]:
    """The answer of a remat policy: "save", "recompute", or (there, back) to offload."""
    # There and back are memory spaces. Since jax 0.4.
    case = _partial_eval.ensure_enum(answer)
    if isinstance(case, _partial_eval.Offloadable):
        return _core.mem_kind_to_space(case.dst), _core.mem_kind_to_space(case.src)
    return "save" if isinstance(case, _partial_eval.SaveableType) else "recompute"


def varying_axes(x: object) -> frozenset[str]:
    """The manual axes over which devices of a shard_map may hold different x. Since jax 0.10."""
    # Empty outside of a shard_map, and in one with check_vma=False. `jax.typeof` is public, the
    # fields of what it returns are not documented.
    axes: frozenset[str] = jax.typeof(x).mat.varying
    return axes


def varying_alike(*operands: T) -> Sequence[T]:
    """The operands, each varying over the manual axes that any of them varies over."""
    # What functions of `jax.lax` do before they bind a primitive. Since jax 0.10.
    operands_alike: Sequence[T] = _core.auto_insert_reshard(*operands)
    return operands_alike


def trace_context() -> Hashable:
    """Everything of jax's configuration that a trace depends on, as a key. Since jax 0.4."""
    # The key that jit adds to the types of the arguments; there is no public one.
    key: Hashable = _config.trace_context()
    return key


def default_precision() -> (
    jax.lax.DotAlgorithmPreset | tuple[jax.lax.Precision, jax.lax.Precision] | None
):
    """The setting of `jax.default_matmul_precision`, as an equation would hold it. Since 0.2."""
    name = _config.default_matmul_precision.value
    if name is None:
        return None
    try:
        precision = jax.lax.Precision(name)
    except ValueError:
        return jax.lax.DotAlgorithmPreset[name]
    return precision, precision


def device_type() -> tuple[str, tuple[int, int] | None]:
    """The type of the device that programs are for, and of an NVIDIA GPU its compute capability."""
    # "cpu", "cuda", "rocm" or "tpu". `jax.default_backend` says "gpu" for two of them, and a
    # default device is a thread's own. The attributes `client` and `compute_capability` of a device
    # are not documented. Since jax 0.4.
    chosen: object = _config.default_device.value
    device = (
        chosen
        if isinstance(chosen, jax.Device)
        else jax.devices(chosen if isinstance(chosen, str) else None)[0]
    )
    if device.platform != "gpu":
        return device.platform, None
    if "rocm" in device.client.platform_version:
        return "rocm", None
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return "cuda", (int(major), int(minor)) if major and minor else None


def check_nans(*primitives: core.Primitive) -> None:
    """Have checkify report a NaN in what primitives return, if it is loaded. Since jax 0.4."""
    checkify: Any = sys.modules.get("jax._src.checkify")
    for primitive in primitives if checkify else ():
        checkify.error_checks.setdefault(primitive, partial(checkify.nan_error_check, primitive))


def jvp(
    fn: Callable[..., object], primals: Sequence[object], tangents: Sequence[jax.Array | None]
) -> tuple[Sequence[jax.Array], list[jax.Array | None]]:
    """Results and their tangents; None for a tangent that is a symbolic zero, there and here."""
    # `jax.jvp` makes arrays of zeros of them, and a rule that refuses a tangent then refuses it.
    # Since jax 0.4.
    jaxpr = jax.make_jaxpr(fn)(*primals)
    moving = [tangent is not None for tangent in tangents]
    paired, moves = _ad.jvp_jaxpr(jaxpr, moving, False)
    flat = core.jaxpr_as_fun(paired)(*primals, *(t for t in tangents if t is not None))
    left = iter(flat[len(moves) :])
    return flat[: len(moves)], [next(left) if nonzero else None for nonzero in moves]


def pulled(
    pull: Any,
    args: Sequence[AbstractValue],
    results: Sequence[AbstractValue],
    cotangents: Sequence[jax.Array | None],
) -> list[jax.Array | None]:
    """Call a function of `jax.vjp`; None is a symbolic zero, here and there. Since jax 0.8."""
    accums = [_ad.ValAccum(aval.to_ct_aval()) for aval in args]
    full = [
        ad.Zero(aval.to_ct_aval()) if ct is None else ct
        for ct, aval in zip(cotangents, results, strict=True)
    ]
    pull.with_refs(*accums)(jax.tree.unflatten(pull.out_tree, full))
    grads = [accum.freeze() for accum in accums]
    return [None if type(grad) is ad.Zero else grad for grad in grads]


def is_ready(x: Any) -> bool:
    """True if an array's values are there, so that reading them does not wait. Since jax 0.3."""
    # A method of the arrays that there are, not of `jax.Array`, which is what is documented.
    return bool(x.is_ready())


def run_eagerly(primitive: core.Primitive) -> None:
    """Run a primitive as one kernel where nothing is traced, as jax runs its own. Since jax 0.2."""
    primitive.def_impl(partial(_dispatch.apply_primitive, primitive))


def put(
    primitive: core.Primitive, values: Sequence[object], params: jax.core.ParamDict
) -> Sequence[Any]:
    """The results of a primitive."""
    out = primitive.bind(*values, **primitive.get_bind_params(params))
    return out if primitive.multiple_results else (out,)


def other_mesh(aval: object) -> AbstractMesh | None:
    """The mesh of a value where another one holds, that of a `reshard` it goes into; or None."""
    # A primitive refuses values of other meshes. `get_abstract_mesh` is public since jax 0.8.
    mesh = _mesh.get_abstract_mesh()
    of = getattr(getattr(aval, "sharding", None), "mesh", mesh)
    return None if of is mesh or of.empty or of == mesh else of


# Where equations and values come from: name stacks and tracebacks.


def without_scopes(stack: NameStack, drop: Callable[[str], bool]) -> NameStack:
    """A name stack without the scopes whose names are to be dropped. Since jax 0.4."""
    kept = [part for part in stack.stack if not (hasattr(part, "name") and drop(part.name))]
    return type(stack)(tuple(kept))


def is_reference(x: Any) -> bool:
    """True for a mutable array, as of `jax.new_ref`, or its type, which no public class names."""
    # `AbstractRef.inner_aval` since jax 0.4.
    return hasattr(getattr(x, "aval", x), "inner_aval")


def scope_names(stack: NameStack) -> list[str]:
    """The names of a stack's scopes, outermost first, without the transforms. Since jax 0.4."""
    # A recomputation in the backward pass has its path twice, as "transpose(jvp(a))/b/jvp(a)/b".
    names, backward, forwards = list[str](), False, list[int]()
    for part in stack.stack:
        if type(part).__name__ == "Scope":
            names.append(part.name)
        elif part.name == "transpose":
            backward = True
        elif part.name == "jvp" and backward:
            forwards.append(len(names))
    for half in range(len(names) // 2, 0, -1) if len(forwards) > 1 else ():
        if names[:half] == names[half : 2 * half] and half <= forwards[-1] <= 2 * half:
            return names[half:]
    return names


def with_scope(stack: NameStack, name: str) -> NameStack:
    """A name stack with one scope more, inside the others. Since jax 0.4."""
    return stack.extend(name)


def transforms(stack: NameStack) -> frozenset[str]:
    """Names of the transforms in a name stack: "jvp", "transpose", "vmap". Since jax 0.4."""
    return frozenset(p.name for p in stack.stack if type(p).__name__ == "Transform")


def in_backward(stack: NameStack) -> bool:
    """True for the name stack of an equation that a transposition made. Since jax 0.4."""
    return "transpose" in transforms(stack)


class Frames(NamedTuple):
    """The Python frames of a traceback, innermost first."""

    codes: Sequence[CodeType]  # the code object of each
    places: Sequence[int]  # where in it the frame was: offsets of instructions


def frames(traceback: Any) -> Frames:
    """The frames of an equation's traceback, cheaply. `raw_frames` since jaxlib 0.4."""
    return Frames((), ()) if traceback is None else Frames(*traceback.raw_frames())


# Programs as MLIR, while they are lowered.


def readers(values: "Iterable[mlir.ir.Value[Any]]") -> list[mlir.ir.Operation]:
    """The ops of an MLIR program that read some of its values. Since jax 0.5."""
    # `jax.interpreters.mlir.ir` is public, what its classes can do is not documented.
    return [use.owner.operation for value in values for use in value.uses]


def is_for_one_device(ctx: mlir.LoweringRuleContext) -> bool:
    """True if a program is for one device of this machine: not several, nor for `jax.export`."""
    # `LoweringParameters.for_export` since jax 0.4.27.
    module = ctx.module_context
    axes, devices = module.axis_context, 1
    if isinstance(axes, _sharding.ShardingContext):
        devices = axes.num_devices
    elif isinstance(axes, _sharding.SPMDAxisContext):
        devices = axes.mesh.size
    return not module.lowering_parameters.for_export and devices == 1


def merge_repeated(op: mlir.ir.Operation) -> None:
    """Replace an op of an MLIR program by an earlier one that computes the same, if there is."""
    # So are the ops that read its result, as long as they have one operand and one result each. The
    # earlier ones are in the same block, which is where ops are put one after the other. Since 0.5.
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


def _is_earlier_twin(one: mlir.ir.Operation, other: mlir.ir.Operation) -> bool:
    def computed(op: mlir.ir.Operation) -> tuple[object, ...]:
        types = [value.type for value in op.results]
        return op.name, types, {name: op.attributes[name] for name in op.attributes}

    if one.block != other.block or len(one.regions) or not one.is_before_in_block(other):
        return False
    return bool(computed(one) == computed(other))
