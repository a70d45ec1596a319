"""The vocabulary is true: its names exist, none is missing, none is there twice.

A check takes a vocabulary as the file holds it and returns what is wrong with it, a line for each.
Every check runs twice: on the shipped vocabulary, where it finds nothing, and on one that was
spoilt, where it finds just that.
"""

import importlib
import inspect
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, partial
from importlib import resources
from typing import Any, NamedTuple

import pytest

from polymp.backends.jax.autocast import known_functions
from polymp.rules import vocabulary as rules
from tests.conftest import need
from tests.support import cases, forks, frameworks

Vocabulary = dict[str, Any]

KEYS = {
    "aten": list,
    "kernels": list,
    "jax": list,
    "functions": list,
    "traces": list,
    "fp32": str,
    "note": str,
    "picks": bool,
    "chooses": bool,
}
VARIANTS = (
    "while:tolerance",
    *(f"{product}:unsummed" for product in sorted(known_functions.CONTRACTIONS)),
    "dot_general:unbatched",
    *(f"conv_general_dilated:{kind}{n}d" for kind in ("", "transpose") for n in (1, 2, 3)),
    "integer_pow:negative",
    "div:of_number",
)
DEVICES = ("cpu", "cuda", "xpu", "mps")
PACKAGES = ("jax", "flax", "optax", "equinox", "haiku", "diffrax", "jaxopt", "lineax", "optimistix")
# The primitives that a policy may rule; some names are there for other versions of jax.
RULED = known_functions.FREE - known_functions.INDEPENDENT
SINCE = {"log2": (0, 11), "one_minus_square": (0, 11)}
# Ops of whose overloads torch's tables have some and lack others.
PARTLY = {"conv1d", "conv2d", "conv3d", "convolution"}

# Cases that are not named as their op is.
CASES = {
    "linear without bias": "linear",
    "conv1d with bias": "conv1d",
    "depthwise conv1d": "conv1d",
    "attention": "scaled_dot_product_attention",
    "number ** x": "pow",
    "x ** 1.5": "pow",
    "x ** 2": "pow",
    "x ** y": "pow",
    "norm of rows": "norm",
    "linalg_matrix_norm of order 1": "linalg_matrix_norm",
    "nll_loss2d": "nll_loss",
    "sum of rows": "sum",
    "prod of rows": "prod",
    "x + number": "add",
    "x * number": "mul",
    "x * integers": "mul",
    "x * bools": "mul",
    "x * chosen numbers": "mul",
    "number / x": "reciprocal",
    "x - tiny number": "sub",
    "x + 0-d array": "add",
    "gelu by tanh": "gelu",
    "i0e": "special_i0e",
    "i1e": "special_i1e",
    "zeta": "special_zeta",
    "gammainc": "igamma",
    "amax of rows": "amax",
    "masked to the lowest": "where",
    "inv": "linalg_inv",
    "slogdet": "linalg_slogdet",
    "eigvalsh": "linalg_eigvalsh",
    "cond": "linalg_cond",
    "matrix_exp": "linalg_matrix_exp",
    "solve": "linalg_solve",
    "lu_solve": "linalg_lu_solve",
    "solve_triangular": "linalg_solve_triangular",
    "det": "linalg_det",
    "pinv": "linalg_pinv",
}


@cache
def _table(name: str) -> Vocabulary:
    return tomllib.loads((resources.files("polymp.policies") / f"{name}.toml").read_text("utf-8"))


def _ops(vocabulary: Vocabulary) -> dict[str, dict[str, Any]]:
    return {name: op for kind in vocabulary.values() for name, op in kind["ops"].items()}


def _names(vocabulary: Vocabulary, key: str) -> list[str]:
    """All names under a key, as often as they are there."""
    return [
        name
        for kind in vocabulary.values()
        for op in kind["ops"].values()
        for name in op.get(key, ())
    ]


def _in_jax(op: dict[str, Any]) -> bool:
    return bool(op.get("jax") or op.get("functions"))


# --- what needs no framework ----------------------------------------------------------------------


def malformed(vocabulary: Vocabulary) -> Iterator[str]:
    for kind, entry in vocabulary.items():
        if entry.keys() - {*rules.CLASS_TRAITS} != {"summary", "ops"} or not entry["ops"]:
            yield f"class {kind} needs a summary and ops, and has {', '.join(entry)}"
        elif not entry["summary"].endswith("."):
            yield f"class {kind}: the summary is no sentence"
        for name, op in entry.get("ops", {}).items():
            for key, value in op.items():
                if not isinstance(value, KEYS.get(key, ())) or not value:
                    yield f"{name}: {key} = {value!r}"
            if not (op.get("aten") or _in_jax(op) or op.get("traces")):
                yield f"{name} is nothing in either framework"
            if op.get("traces") and _in_jax(op):
                yield f"{name} is an op in JAX and has traces"


def unsorted(vocabulary: Vocabulary) -> Iterator[str]:
    for kind, entry in vocabulary.items():
        if list(entry["ops"]) != sorted(entry["ops"]):
            yield f"class {kind} is not sorted"


def twice(vocabulary: Vocabulary) -> Iterator[str]:
    everything = {key: _names(vocabulary, key) for key in ("aten", "kernels", "jax", "functions")}
    everything["op"] = [name for entry in vocabulary.values() for name in entry["ops"]]
    for key, names in everything.items():
        yield from (f"{key} {name}" for name, count in Counter(names).items() if count > 1)


def unexplained(vocabulary: Vocabulary) -> Iterator[str]:
    for name, op in _ops(vocabulary).items():
        if not (op.get("aten") and _in_jax(op)) and not op.get("note"):
            yield f"{name} lacks a side and says not why"
        if not op.get("note", ".").endswith("."):
            yield f"{name}: the note is no sentence"


def traces_of_nothing(vocabulary: Vocabulary) -> Iterator[str]:
    """`traces` lead to ops of the vocabulary, and in the end to ops that JAX has."""
    ops = _ops(vocabulary)
    for name, op in ops.items():
        for part in op.get("traces", ()):
            if part not in ops:
                yield f"{name} traces to {part}, which is no op"
            elif not _in_jax(ops[part]) and not ops[part].get("traces"):
                yield f"{name} traces to {part}, which JAX lacks"


def unknown_variants(vocabulary: Vocabulary) -> Iterator[str]:
    return (name for name in _names(vocabulary, "jax") if ":" in name and name not in VARIANTS)


def not_for_policies(vocabulary: Vocabulary) -> Iterator[str]:
    """Listed primitives that run as written whatever a policy says."""
    for name in _names(vocabulary, "jax"):
        if name.partition(":")[0] not in RULED | {"while"}:
            yield name


def without_case(vocabulary: Vocabulary) -> Iterator[str]:
    ops = _ops(vocabulary)
    for case in cases.OPS:
        yield from (f"{case.name}: {name}" for name in _of_case(case.name) if name not in ops)


def _of_case(case: str) -> list[str]:
    return CASES.get(case, case).split(" ")


def ways_of_float32(vocabulary: Vocabulary) -> Iterator[str]:
    """`fp32` is there just where all of torch's tables with the op apply the rule in that way."""
    tables = [_table(f"torch-{device}")["rules"] for device in DEVICES]
    for name, op in _ops(vocabulary).items():
        rows = [
            table[row]
            for table in tables
            for row in (name, *(f"aten:{overload}" for overload in op.get("aten", ())))
            if row in table
        ]
        ways = {row.get("apply", "") if isinstance(row, dict) else "" for row in rows}
        agreed = ways.pop() if len(ways) == 1 else ""
        if op.get("fp32", "") != agreed:
            yield f"{name}: {op.get('fp32', '')!r}, in the tables {agreed!r}"


# --- torch ----------------------------------------------------------------------------------------


@cache
def _on_autocast_keys() -> dict[str, frozenset[str]]:
    """For each device, the overloads with an autocast kernel of torch's own.

    Asked of a fresh process, as in this one polymp may have registered kernels.
    """
    program = (
        "import sys, torch\n"
        "for device in sys.argv[1:]:\n"
        "    key = 'Autocast' + device.upper()\n"
        "    print(*torch._C._dispatch_get_registrations_for_dispatch_key(key))"
    )
    lines = forks.program(program, *DEVICES).splitlines()
    return {
        device: frozenset(n.removeprefix("aten::") for n in line.split() if n.startswith("aten::"))
        for device, line in zip(DEVICES, lines, strict=True)
    }


def unknown_overloads(vocabulary: Vocabulary) -> Iterator[str]:
    import torch

    from tests.support.torch.version_changes import LACKS

    for name in sorted({*_names(vocabulary, "aten")} - LACKS):
        base, _, variant = name.partition(".")
        overload = getattr(getattr(torch.ops.aten, base, None), variant or "default", None)
        if overload is None or variant == "default":
            yield f"{name} is not registered"
        elif overload._schema.is_mutable:
            yield f"{name} writes in place"


def unknown_kernels(vocabulary: Vocabulary) -> Iterator[str]:
    import torch

    for name in sorted(_names(vocabulary, "kernels")):
        if not hasattr(torch.ops.aten, name):
            yield f"{name} is no op of aten"


def missing_overloads(vocabulary: Vocabulary) -> Iterator[str]:
    from tests.support.torch.version_changes import NAMED

    listed = {*_names(vocabulary, "aten"), *NAMED}
    for device, overloads in _on_autocast_keys().items():
        assert len(overloads) > 90, "torch has lists"
        yield from (f"{name} of {device}" for name in sorted(overloads - listed))


def mixed(vocabulary: Vocabulary) -> Iterator[str]:
    """Ops of whose overloads torch rules some and not others on a device."""
    from tests.support.torch.version_changes import LACKS

    for name, op in _ops(vocabulary).items():
        overloads = set(op.get("aten", ())) - LACKS
        split = [d for d, own in _on_autocast_keys().items() if 0 < len(overloads & own)]
        split = [d for d in split if not overloads <= _on_autocast_keys()[d]]
        if bool(split) != (name in PARTLY):
            yield f"{name}: {', '.join(split) or 'none'}"


@cache
def _torch_calls() -> dict[str, frozenset[str]]:
    """For each case, the aten ops that torch's function calls, without overloads."""
    from torch.profiler import ProfilerActivity, profile, record_function

    fw = frameworks.load("torch")
    arguments = [_arguments(fw, case) for case in cases.OPS]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for case, given in zip(cases.OPS, arguments, strict=True):
            with record_function(f"case {case.name}"):
                fw.ops[case.name](*given)
    calls: dict[str, set[str]] = {case.name: set() for case in cases.OPS}
    for event in recorded.events():
        outer = event
        while outer.cpu_parent is not None:
            outer = outer.cpu_parent
        if outer.name.startswith("case ") and event.name.startswith("aten::"):
            calls[outer.name.removeprefix("case ")].add(event.name.removeprefix("aten::"))
    return {case: frozenset(names) for case, names in calls.items()}


def other_calls(vocabulary: Vocabulary) -> Iterator[str]:
    """Cases whose function in torch does not call their op."""
    ops = _ops(vocabulary)
    for case, called in _torch_calls().items():
        names = [a for name in _of_case(case) for a in ops[name].get("aten", ())]
        if names and called.isdisjoint(name.partition(".")[0] for name in names):
            yield f"{case} calls {', '.join(sorted(called))}"


def _arguments(fw: Any, case: Any) -> list[Any]:
    pairs = zip(cases.values(case.name), case.args, strict=True)
    return [
        fw.array(x, "bool" if arg.kind == "mask" else "float32" if arg.is_float else "int")
        for x, arg in pairs
    ]


# --- JAX ------------------------------------------------------------------------------------------


@cache
def _primitives() -> frozenset[str]:
    """The names of JAX's primitives: those that stand in a module of JAX's that is loaded."""
    import jax.extend.core.primitives

    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "jax"]
    return frozenset(
        value.name
        for module in modules
        for value in vars(module).values()
        if isinstance(value, jax.extend.core.Primitive)
    )


def unknown_primitives(vocabulary: Vocabulary) -> Iterator[str]:
    import jax

    for name in _names(vocabulary, "jax"):
        plain = name.partition(":")[0]
        if plain not in _primitives() and jax.__version_info__ >= SINCE.get(plain, (0,)):
            yield name


def missing_primitives(vocabulary: Vocabulary) -> Iterator[str]:
    listed = {name for name in _names(vocabulary, "jax") if ":" not in name}
    yield from sorted((RULED & _primitives()) - listed)


def unresolved(vocabulary: Vocabulary, package: str) -> Iterator[str]:
    """Dotted names that lead to no Python function of that name."""
    for dotted in _names(vocabulary, "functions"):
        if dotted.partition(".")[0] == package:
            try:
                name = _python(_resolved(dotted)).__name__
            except AttributeError as error:
                yield f"{dotted}: {error}"
            else:
                if name != dotted.rpartition(".")[2]:
                    yield f"{dotted} is {name}"


def not_public(vocabulary: Vocabulary) -> Iterator[str]:
    for dotted in _names(vocabulary, "functions"):
        package, *path = dotted.split(".")
        if package not in PACKAGES or any(p[0] == "_" and p != "__call__" for p in path):
            yield dotted


def inlined(vocabulary: Vocabulary) -> Iterator[str]:
    """Functions that `jax.jit(inline=True)` wraps: their frames are in no equation's traceback.

    jax 0.11 says `inline=Inline.JAX_EARLY` of its own.
    """
    for dotted in _names(vocabulary, "functions"):
        function = _python(_resolved(dotted))
        if hasattr(function, "__code__"):
            decorators, _, _ = inspect.getsource(function).partition("def ")
            if "inline=True" in decorators or "Inline.JAX_EARLY" in decorators:
                yield dotted


def shared_code(vocabulary: Vocabulary) -> Iterator[str]:
    """Functions of different ops with one code, which cannot be told apart."""
    owners: dict[Any, set[str]] = {}
    for name, op in _ops(vocabulary).items():
        for dotted in op.get("functions", ()):
            function = _python(_resolved(dotted))
            names = owners.setdefault(getattr(function, "__code__", function), set())
            names.add(name)
            if len(names) > 1:
                yield f"{dotted} is {' and '.join(sorted(names))}"


def _resolved(dotted: str) -> Any:
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise AttributeError("no such module")


def _python(function: Any) -> Any:
    """The function under what is wrapped round it; a jax.numpy.ufunc hides its own."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _spellings(jaxpr: Any) -> Iterator[str]:
    """The primitives of a program and of all programs in it, with their variants."""
    from jax.extend import core

    for eqn in jaxpr.eqns:
        name, variant = eqn.primitive.name, ""
        if name == "dot_general":
            (_, (batch, _)) = eqn.params["dimension_numbers"]
            vectors = all(atom.aval.ndim == 1 for atom in eqn.invars)
            variant = "" if batch or vectors else ":unbatched"
        elif name == "conv_general_dilated":
            transposed = any(d != 1 for d in eqn.params["lhs_dilation"])
            dims = len(eqn.params["window_strides"])
            variant = f":{'transpose' if transposed else ''}{dims}d"
        elif name == "integer_pow" and eqn.params["y"] < 0:
            variant = ":negative"
        elif name == "div" and isinstance(eqn.invars[0], core.Literal):
            variant = ":of_number"
        yield name + variant
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _spellings(inner)


@cache
def _jax_traces() -> dict[str, frozenset[str]]:
    """For each case, the primitives that JAX's function becomes."""
    import jax

    fw = frameworks.load("jax")
    return {
        case.name: frozenset(
            _spellings(jax.make_jaxpr(fw.ops[case.name])(*_arguments(fw, case)).jaxpr)
        )
        for case in cases.OPS
    }


def other_traces(vocabulary: Vocabulary) -> Iterator[str]:
    """Cases whose function in JAX becomes other primitives than their op says.

    An op with a primitive is in the trace; of an op that says what it traces to, the trace has
    some of these and no other contraction.
    """
    ops = _ops(vocabulary)
    owner = {spelled: name for name, op in ops.items() for spelled in op.get("jax", ())}
    for case, spellings in _jax_traces().items():
        traced = {owner[spelled] for spelled in spellings if spelled in owner}
        heavy = {name for name in traced if _kind(vocabulary, name) in ("matmul", "convolution")}
        names = _of_case(case)
        parts = {part for name in names for part in ops[name].get("traces", ())}
        own = {name for name in names if ops[name].get("jax")}
        if own == {"matmul"}:
            own = {"linear"}  # the case has no batch dimensions
        if own == {"log2"} and "log2" not in _primitives():
            own = {"log"}
        if parts and all(ops[part].get("jax") for part in parts):
            if heavy - parts or not parts & traced:
                yield f"{case} becomes {', '.join(sorted(heavy or traced))}"
        elif own and not own & traced and not any(ops[name].get("functions") for name in own):
            yield f"{case} becomes {', '.join(sorted(heavy or traced)) or 'nothing'}"


def _kind(vocabulary: Vocabulary, name: str) -> str:
    return next(kind for kind, entry in vocabulary.items() if name in entry["ops"])


# --- the checks, and that they can fail -----------------------------------------------------------


class Check(NamedTuple):
    """One property of a vocabulary."""

    wrong: Callable[[Vocabulary], Iterator[str]]  # what is wrong with a vocabulary
    spoil: Callable[[Vocabulary], object]  # makes a vocabulary lack the property
    found: str  # what the check says then
    needs: tuple[str, ...] = ()  # packages


def _put(kind: str, op: str, **keys: Any) -> Callable[[Vocabulary], object]:
    """Give an op these keys, or make it."""
    return lambda v: v[kind]["ops"].setdefault(op, {}).update(keys)


def _drop(kind: str, op: str, key: str = "") -> Callable[[Vocabulary], object]:
    return lambda v: v[kind]["ops"][op].pop(key) if key else v[kind]["ops"].pop(op)


CHECKS = {
    "well formed": Check(
        malformed, _put("fft", "fft_fft", jaxx=["fft"]), "fft_fft: jaxx = ['fft']"
    ),
    "something somewhere": Check(
        malformed, _drop("fft", "fft_hfft2", "aten"), "fft_hfft2 is nothing in either framework"
    ),
    "sorted": Check(unsorted, _put("loss", "a_loss", aten=["exp"]), "class loss is not sorted"),
    "each op once": Check(twice, _put("loss", "exp", note="Here, too."), "op exp"),
    "each function once": Check(
        twice, _put("loss", "z", functions=["jax.nn.softmax"]), "functions jax.nn.softmax"
    ),
    "gaps have notes": Check(
        unexplained,
        _drop("layout", "reshard", "note"),
        "reshard lacks a side and says not why",
    ),
    "traces are in JAX": Check(
        traces_of_nothing,
        _put("matmul", "mm", traces=["special_bessel_j0"]),
        "mm traces to special_bessel_j0, which JAX lacks",
    ),
    "variants are known": Check(unknown_variants, _put("power", "exp", jax=["exp:x"]), "exp:x"),
    "policies may rule": Check(not_for_policies, _put("fft", "fft_fft", jax=["fft"]), "fft"),
    "cases have rows": Check(without_case, _drop("norm", "cdist"), "cdist: cdist"),
    "ways to float32": Check(
        ways_of_float32, _drop("norm", "norm", "fp32"), "norm: '', in the tables 'append_dtype'"
    ),
    "overloads exist": Check(
        unknown_overloads,
        _put("power", "exp", aten=["exp.no_such"]),
        "exp.no_such is not registered",
        ("torch",),
    ),
    "kernels exist": Check(
        unknown_kernels,
        _put("softmax", "softmax", kernels=["_soft"]),
        "_soft is no op of aten",
        ("torch",),
    ),
    "torch's lists": Check(
        missing_overloads,
        _drop("interpolation", "grid_sampler_3d"),
        "grid_sampler_3d of cpu",
        ("torch",),
    ),
    "overloads go together": Check(
        mixed, _put("special", "i0", aten=["i0", "lstm_cell"]), "i0: cuda, xpu, mps", ("torch",)
    ),
    "cases in torch": Check(
        other_calls, _put("elementwise", "neg", aten=["negative"]), "neg calls neg", ("torch",)
    ),
    "primitives exist": Check(
        unknown_primitives, _put("power", "exp", jax=["expp"]), "expp", ("jax",)
    ),
    "JAX's primitives": Check(missing_primitives, _drop("power", "rsqrt"), "rsqrt", ("jax",)),
    "cases in JAX": Check(
        other_traces, _put("elementwise", "neg", jax=["negate"]), "neg becomes nothing", ("jax",)
    ),
    "functions are public": Check(
        not_public, _put("power", "exp", functions=["jax._src.exp"]), "jax._src.exp"
    ),
    **{
        f"functions of {package}": Check(
            partial(unresolved, package=package),
            _put("power", "exp", functions=[f"{package}.no_such.exp"]),
            f"{package}.no_such.exp: module {package!r} has no attribute 'no_such'",
            (package,),
        )
        for package in PACKAGES
    },
    "functions by their names": Check(
        partial(unresolved, package="jax"),
        _put("power", "exp", functions=["jax.nn.swish"]),
        "jax.nn.swish is silu",
        ("jax",),
    ),
    "functions are not inlined": Check(
        inlined,
        _put("power", "log10", functions=["jax.numpy.log10"]),
        "jax.numpy.log10",
        PACKAGES,
    ),
    "functions apart": Check(
        shared_code,
        _put("special", "z", functions=["jax.nn.silu"]),
        "jax.nn.silu is silu and z",
        PACKAGES,
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_vocabulary_is_right(name: str) -> None:
    check = CHECKS[name]
    for package in check.needs:
        need(package)
    assert list(check.wrong(_table("vocabulary"))) == []


@pytest.mark.parametrize("name", CHECKS)
def test_the_check_can_fail(name: str) -> None:
    check = CHECKS[name]
    for package in check.needs:
        need(package)
    vocabulary = deepcopy(_table("vocabulary"))
    check.spoil(vocabulary)
    assert check.found in list(check.wrong(vocabulary))


def test_ops_that_pick_are_of_the_class_that_does() -> None:
    words = rules.vocabulary()
    picking = {name for name, op in words.ops.items() if op.picks}
    assert {"embedding", "gather", "index"} <= picking
    assert {words.ops[name].kind for name in picking} == {"indexing"}
    assert words.picks("take")
    assert not words.picks("linear")
    assert not words.picks("")


def test_ops_that_choose_return_one_of_their_operands_numbers() -> None:
    words = rules.vocabulary()
    assert all(map(words.chooses, ("clamp", "where", "cat", "pad")))
    assert not words.chooses("add")
    assert not words.chooses("")
