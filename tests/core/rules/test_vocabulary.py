"""The vocabulary is true: its names exist, none is missing, none is there twice.

A check yields what is wrong with the vocabulary as its file holds it, a line for each.
"""

import importlib
import inspect
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from typing import Any

import pytest

from polymp.backends.jax.autocast import known_functions
from polymp.rules import vocabulary as rules
from tests.conftest import need
from tests.support import cases, forks, frameworks

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

# Cases whose op has another name, and not only words behind it or a prefix.
CASES = {
    "depthwise conv1d": "conv1d",
    "attention": "scaled_dot_product_attention",
    "number ** x": "pow",
    "x ** 1.5": "pow",
    "x ** 2": "pow",
    "x ** y": "pow",
    "nll_loss2d": "nll_loss",
    "x + number": "add",
    "x * number": "mul",
    "x * integers": "mul",
    "x * bools": "mul",
    "x * chosen numbers": "mul",
    "number / x": "reciprocal",
    "x - tiny number": "sub",
    "x + 0-d array": "add",
    "gammainc": "igamma",
    "masked to the lowest": "where",
    "lu_solve": "linalg_lu_solve",
}


@cache
def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((resources.files("polymp.policies") / f"{name}.toml").read_text("utf-8"))


VOCABULARY = _table("vocabulary")
OPS: dict[str, dict[str, Any]] = {
    name: op for kind in VOCABULARY.values() for name, op in kind["ops"].items()
}


def _names(key: str) -> list[str]:
    """All names under a key, as often as they are there."""
    ops = [op for kind in VOCABULARY.values() for op in kind["ops"].values()]
    return [name for op in ops for name in op.get(key, ())]


def _in_jax(op: dict[str, Any]) -> bool:
    return bool(op.get("jax") or op.get("functions"))


# --- what needs no framework ----------------------------------------------------------------------


def malformed() -> Iterator[str]:
    for kind, entry in VOCABULARY.items():
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


def unsorted() -> Iterator[str]:
    for kind, entry in VOCABULARY.items():
        if list(entry["ops"]) != sorted(entry["ops"]):
            yield f"class {kind} is not sorted"


def twice() -> Iterator[str]:
    everything = {key: _names(key) for key in ("aten", "kernels", "jax", "functions")}
    everything["op"] = [name for entry in VOCABULARY.values() for name in entry["ops"]]
    for key, names in everything.items():
        yield from (f"{key} {name}" for name, count in Counter(names).items() if count > 1)


def unexplained() -> Iterator[str]:
    for name, op in OPS.items():
        if not (op.get("aten") and _in_jax(op)) and not op.get("note"):
            yield f"{name} lacks a side and says not why"
        if not op.get("note", ".").endswith("."):
            yield f"{name}: the note is no sentence"


def traces_of_nothing() -> Iterator[str]:
    """`traces` lead to ops of the vocabulary, and in the end to ops that JAX has."""
    for name, op in OPS.items():
        for part in op.get("traces", ()):
            if part not in OPS:
                yield f"{name} traces to {part}, which is no op"
            elif not _in_jax(OPS[part]) and not OPS[part].get("traces"):
                yield f"{name} traces to {part}, which JAX lacks"


def unknown_variants() -> Iterator[str]:
    return (name for name in _names("jax") if ":" in name and name not in VARIANTS)


def not_for_policies() -> Iterator[str]:
    """Listed primitives that run as written whatever a policy says."""
    for name in _names("jax"):
        if name.partition(":")[0] not in RULED | {"while"}:
            yield name


def without_case() -> Iterator[str]:
    yield from (case.name for case in cases.OPS if _of_case(case.name) not in OPS)


def _of_case(case: str) -> str:
    names = (case, case.partition(" ")[0], f"linalg_{case}", f"special_{case}")
    return CASES.get(case) or next((name for name in names if name in OPS), case)


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


def unknown_overloads() -> Iterator[str]:
    import torch

    from tests.support.torch.version_changes import LACKS

    for name in sorted({*_names("aten")} - LACKS):
        base, _, variant = name.partition(".")
        overload = getattr(getattr(torch.ops.aten, base, None), variant or "default", None)
        if overload is None or variant == "default":
            yield f"{name} is not registered"
        elif overload._schema.is_mutable:
            yield f"{name} writes in place"


def unknown_kernels() -> Iterator[str]:
    import torch

    for name in sorted(_names("kernels")):
        if not hasattr(torch.ops.aten, name):
            yield f"{name} is no op of aten"


def missing_overloads() -> Iterator[str]:
    from tests.support.torch.version_changes import NAMED

    listed = {*_names("aten"), *NAMED}
    for device, overloads in _on_autocast_keys().items():
        assert len(overloads) > 90, "torch has lists"
        yield from (f"{name} of {device}" for name in sorted(overloads - listed))


def mixed() -> Iterator[str]:
    """Ops of whose overloads torch rules some and not others on a device."""
    from tests.support.torch.version_changes import LACKS

    for name, op in OPS.items():
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


def other_calls() -> Iterator[str]:
    """Cases whose function in torch does not call their op."""
    for case, called in _torch_calls().items():
        names = {name.partition(".")[0] for name in OPS[_of_case(case)].get("aten", ())}
        if names and called.isdisjoint(names):
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


def unknown_primitives() -> Iterator[str]:
    import jax

    for name in _names("jax"):
        plain = name.partition(":")[0]
        if plain not in _primitives() and jax.__version_info__ >= SINCE.get(plain, (0,)):
            yield name


def missing_primitives() -> Iterator[str]:
    listed = {name for name in _names("jax") if ":" not in name}
    yield from sorted((RULED & _primitives()) - listed)


def unresolved(package: str) -> Iterator[str]:
    """Dotted names that lead to no Python function of that name."""
    for dotted in _names("functions"):
        if dotted.partition(".")[0] == package:
            try:
                name = _python(_resolved(dotted)).__name__
            except AttributeError as error:
                yield f"{dotted}: {error}"
            else:
                if name != dotted.rpartition(".")[2]:
                    yield f"{dotted} is {name}"


def not_public() -> Iterator[str]:
    for dotted in _names("functions"):
        package, *path = dotted.split(".")
        if package not in PACKAGES or any(p[0] == "_" and p != "__call__" for p in path):
            yield dotted


def inlined() -> Iterator[str]:
    """Functions that `jax.jit(inline=True)` wraps: their frames are in no equation's traceback.

    jax 0.11 says `inline=Inline.JAX_EARLY` of its own.
    """
    for dotted in _names("functions"):
        function = _python(_resolved(dotted))
        if hasattr(function, "__code__"):
            decorators, _, _ = inspect.getsource(function).partition("def ")
            if "inline=True" in decorators or "Inline.JAX_EARLY" in decorators:
                yield dotted


def shared_code() -> Iterator[str]:
    """Functions of different ops with one code, which cannot be told apart."""
    owners: dict[Any, set[str]] = {}
    for name, op in OPS.items():
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


def other_traces() -> Iterator[str]:
    """Cases whose function in JAX becomes other primitives than their op says.

    An op with a primitive is in the trace; of an op that says what it traces to, the trace has
    some of these and no other contraction.
    """
    owner = {spelled: name for name, op in OPS.items() for spelled in op.get("jax", ())}
    for case, spellings in _jax_traces().items():
        traced = {owner[spelled] for spelled in spellings if spelled in owner}
        heavy = {name for name in traced if _kind(name) in ("matmul", "convolution")}
        op = _of_case(case)
        if op == "matmul":
            op = "linear"  # the case has no batch dimensions
        if op == "log2" and "log2" not in _primitives():
            op = "log"
        parts = {*OPS[op].get("traces", ())}
        if parts and all(OPS[part].get("jax") for part in parts):
            wrong = heavy - parts or not parts & traced
        else:
            wrong = OPS[op].get("jax") and op not in traced and not OPS[op].get("functions")
        if wrong:
            yield f"{case} becomes {', '.join(sorted(heavy or traced)) or 'nothing'}"


def _kind(name: str) -> str:
    return next(kind for kind, entry in VOCABULARY.items() if name in entry["ops"])


# --- the checks -----------------------------------------------------------------------------------

CHECKS: dict[str, tuple[Callable[[], Iterator[str]], ...]] = {  # by the package they need
    "": (
        *(malformed, unsorted, twice, unexplained, traces_of_nothing, unknown_variants),
        *(not_for_policies, without_case, not_public),
    ),
    "torch": (unknown_overloads, unknown_kernels, missing_overloads, mixed, other_calls),
    "jax": (unknown_primitives, missing_primitives, other_traces),
}


@pytest.mark.parametrize(
    ("package", "wrong"),
    [(package, check) for package, checks in CHECKS.items() for check in checks],
    ids=lambda it: getattr(it, "__name__", it),
)
def test_the_vocabulary_is_right(package: str, wrong: Callable[..., Iterator[str]]) -> None:
    if package:
        need(package)
    assert list(wrong()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_functions_of_a_package_are_there(package: str) -> None:
    need(package)
    assert list(unresolved(package)) == []


@pytest.mark.parametrize("wrong", [inlined, shared_code], ids=lambda it: it.__name__)
def test_the_functions_can_be_told_apart(wrong: Callable[..., Iterator[str]]) -> None:
    need(*PACKAGES)
    assert list(wrong()) == []


def test_ops_that_pick_and_ops_that_choose() -> None:
    """The former are of one class; the latter return a number of one of their operands."""
    words = rules.vocabulary()
    picking = {name for name, op in words.ops.items() if op.picks}
    assert {"embedding", "gather", "index"} <= picking
    assert {words.ops[name].kind for name in picking} == {"indexing"}
    assert words.op("take").picks
    assert all(words.op(name).chooses for name in ("clamp", "where", "cat", "pad"))
    assert not any(words.op(name).picks for name in ("linear", ""))
    assert not any(words.op(name).chooses for name in ("add", ""))
