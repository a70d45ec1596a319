"""Everything private of jax that polymp touches, in one place.

Each name says why it is needed and since when it has been there;
`tests/jax/compat/test_private_names.py` fails when one changes. Supported: jax 0.10.2 to 0.11.
"""

import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

import jax
import jax._src.config as _config
import jax._src.core as _core
import jax._src.interpreters.ad as _ad
import jax._src.interpreters.partial_eval as _partial_eval
import jax.extend.core as core
from jax.core import AbstractValue
from jax.interpreters import ad

from polymp.backends.jax.compat.programs import binders as binders
from polymp.backends.jax.compat.programs import close as close
from polymp.backends.jax.compat.programs import dtypes_out as dtypes_out
from polymp.backends.jax.compat.programs import function_name as function_name
from polymp.backends.jax.compat.programs import has_program as has_program
from polymp.backends.jax.compat.programs import lifted as lifted
from polymp.backends.jax.compat.programs import only_arrays as only_arrays
from polymp.backends.jax.compat.programs import opened as opened
from polymp.backends.jax.compat.programs import scan_sizes as scan_sizes
from polymp.backends.jax.compat.programs import traced_as as traced_as
from polymp.backends.jax.compat.programs import traced_from as traced_from
from polymp.backends.jax.compat.programs import traced_jaxpr as traced_jaxpr
from polymp.backends.jax.compat.recording import EquationSource as EquationSource
from polymp.backends.jax.compat.recording import Frames as Frames
from polymp.backends.jax.compat.recording import Recorded as Recorded
from polymp.backends.jax.compat.recording import Recorder as Recorder
from polymp.backends.jax.compat.recording import aval_of as aval_of
from polymp.backends.jax.compat.recording import equation_context as equation_context
from polymp.backends.jax.compat.recording import follow_buffers as follow_buffers
from polymp.backends.jax.compat.recording import frames as frames
from polymp.backends.jax.compat.recording import in_backward as in_backward
from polymp.backends.jax.compat.recording import is_plain as is_plain
from polymp.backends.jax.compat.recording import lower_in_place as lower_in_place
from polymp.backends.jax.compat.recording import merge_repeated as merge_repeated
from polymp.backends.jax.compat.recording import no_scopes as no_scopes
from polymp.backends.jax.compat.recording import operands_of as operands_of
from polymp.backends.jax.compat.recording import other_mesh as other_mesh
from polymp.backends.jax.compat.recording import put as put
from polymp.backends.jax.compat.recording import readers as readers
from polymp.backends.jax.compat.recording import recorder as recorder
from polymp.backends.jax.compat.recording import scope_names as scope_names
from polymp.backends.jax.compat.recording import tracers_of as tracers_of
from polymp.backends.jax.compat.recording import traces as traces
from polymp.backends.jax.compat.recording import transforms as transforms
from polymp.backends.jax.compat.recording import where_made as where_made
from polymp.backends.jax.compat.recording import where_written as where_written
from polymp.backends.jax.compat.recording import with_scope as with_scope
from polymp.backends.jax.compat.recording import without_scopes as without_scopes

P = ParamSpec("P")
T = TypeVar("T")

# How remat splits an equation; without a rule it would ask policies about our primitive, which they
# do not know. Since jax 0.2.
remat_rules = _partial_eval.partial_eval_jaxpr_custom_rules


class Context(Protocol[T]):
    """A setting that is part of the key of every trace, as `jax.make_user_context` makes it."""

    @property
    def value(self) -> T: ...
    def __call__(self, value: T) -> AbstractContextManager[object]: ...


# What a rematerialisation policy may answer.
RematAnswer: TypeAlias = _partial_eval.RematCases_


def remat_case(
    answer: RematAnswer,
) -> Literal["save", "recompute"] | tuple[_core.MemorySpace, _core.MemorySpace]:
    """The answer of a rematerialisation policy: "save", "recompute", or (there, back) to offload.

    There and back are memory spaces. Since jax 0.4.
    """
    case = _partial_eval.ensure_enum(answer)
    if isinstance(case, _partial_eval.Offloadable):
        return _core.mem_kind_to_space(case.dst), _core.mem_kind_to_space(case.src)
    return "save" if isinstance(case, _partial_eval.SaveableType) else "recompute"


def varying_axes(x: object) -> frozenset[str]:
    """The manual axes over which the devices of a shard_map may hold different x. Since jax 0.10.

    Empty outside of a shard_map, and in one with check_vma=False. `jax.typeof` is public, the
    fields of what it returns are not documented.
    """
    axes: frozenset[str] = jax.typeof(x).mat.varying
    return axes


def varying_alike(*operands: T) -> Sequence[T]:
    """The operands, each varying over the manual axes that any of them varies over.

    What functions of `jax.lax` do before they bind a primitive. Since jax 0.10.
    """
    operands_alike: Sequence[T] = _core.auto_insert_reshard(*operands)
    return operands_alike


def trace_context() -> Hashable:
    """Everything of jax's configuration that a trace depends on, as a key. Since jax 0.4.

    The key that jit adds to the types of the arguments; there is no public one.
    """
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
    """The type of the device that programs are for, and of an NVIDIA GPU its compute capability.

    "cpu", "cuda", "rocm" or "tpu". `jax.default_backend` says "gpu" for two of them, and a default
    device is a thread's own. The attributes `client` and `compute_capability` of a device are not
    documented. Since jax 0.4.
    """
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


# By transformation, the module and the name of its table of rules.
_RULES = {
    "jet": ("jax.experimental.jet", "jet_rules"),
    "sparsify": ("jax.experimental.sparse.transform", "sparse_rules_bcoo"),
    "checkify": ("jax._src.checkify", "error_checks"),
    "roofline": ("jax.experimental.roofline.roofline", "_rooflines"),
}


def rules_of(name: str) -> dict[core.Primitive, Callable[..., object]] | None:
    """The rules of a transformation, by primitive; None if it is not loaded. Since jax 0.4."""
    module, table = _RULES[name]
    return getattr(sys.modules.get(module), table, None)


def sparsified(fn: Callable[..., object], env: Any, values: Sequence[object]) -> Sequence[object]:
    """A function of one result, as a rule of sparsify: its values in and out. Since jax 0.4."""
    from jax.experimental import sparse
    from jax.experimental.sparse import transform

    arrays = transform.spvalues_to_arrays(env, tuple(values))
    made: Sequence[object] = transform.arrays_to_spvalues(env, [sparse.sparsify(fn)(*arrays)])
    return made


def densified(
    fn: Callable[..., Sequence[jax.Array]], env: Any, values: Sequence[object]
) -> Sequence[object]:
    """A function of dense arrays, as a rule of sparsify: its values in and out. Since jax 0.4."""
    from jax.experimental import sparse
    from jax.experimental.sparse import transform

    given = transform.spvalues_to_arrays(env, tuple(values))
    arrays = [x.todense() if isinstance(x, sparse.JAXSparse) else x for x in given]
    made: Sequence[object] = transform.arrays_to_spvalues(env, list(fn(*arrays)))
    return made


def nan_checked(primitive: core.Primitive, *given: object, **params: object) -> object:
    """The rule of checkify that reports a NaN in what a primitive returns. Since jax 0.4."""
    from jax._src import checkify

    return checkify.nan_error_check(primitive, *given, **params)


def jvp(
    fn: Callable[..., object], primals: Sequence[object], tangents: Sequence[jax.Array | None]
) -> tuple[Sequence[jax.Array], list[jax.Array | None]]:
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
    pull: Any,
    args: Sequence[AbstractValue],
    results: Sequence[AbstractValue],
    cotangents: Sequence[jax.Array | None],
) -> list[jax.Array | None]:
    """Call a function of `jax.vjp`; None stands for a symbolic zero, there and in its argument.

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


def symbolic_zero(primal: object) -> jax.custom_derivatives.SymbolicZero:
    """The tangent of a value that does not move, as a rule may return it. Since jax 0.4."""
    return jax.custom_derivatives.SymbolicZero(jax.typeof(primal).to_tangent_aval())


def is_ready(x: Any) -> bool:
    """True if an array's values are there, so that reading them does not wait. Since jax 0.3.

    A method of the arrays that there are, and not of `jax.Array`, which is what is documented.
    """
    return bool(x.is_ready())


def asks_for_low(error: BaseException) -> bool:
    """True for an error of jax's wrappers of cuDNN's kernels, that the dtypes are no low ones.

    `jax._src.cudnn` since 0.4.24. The error itself does not say where it is from.
    """
    at = error.__traceback__ if "fp16" in str(error) or "dtype" in str(error) else None
    while at is not None:
        if str(at.tb_frame.f_globals.get("__name__")).startswith("jax._src.cudnn."):
            return True
        at = at.tb_next
    return False
