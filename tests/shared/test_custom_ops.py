"""Ops of the user's own: in each way to make one, each rule, each transformation, each error.

One body, x * x + x, is made an op in every way that a framework has, and registered. What it does
in a region is held to the same op called outside of regions on arrays cast by hand, as
`Policy.decide` says. Registering is for the life of a process: every test has names of its own, and
the vocabulary is put back when the file is done.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest

import polymp
from polymp.dtypes import FORMATS
from polymp.errors import ForbiddenOpError, PolicyError
from polymp.rules.policy import Region
from polymp.rules.row import LOW, Rule
from polymp.rules.vocabulary import Op, vocabulary
from tests.conftest import need
from tests.support import forks, frameworks, processes
from tests.support.decisions import recording
from tests.support.random_policies import vocabulary_put_back

X = np.linspace(-1.7, 1.9, 12).reshape(3, 4)


@pytest.fixture(scope="module", autouse=True)
def put_back() -> Iterator[None]:
    with vocabulary_put_back():
        vocabulary().register(Op(fresh(), "custom", rule=Rule.FP32))  # else there is no such class
        yield


_numbers = itertools.count()


def fresh() -> str:
    """A name that no other test has."""
    return f"registering_{next(_numbers)}"


def own(function: Any, name: str) -> Any:
    """The function with code of its own: functions of one `def` are one op to JAX."""
    code = function.__code__
    function.__code__ = code.replace(co_name=name, co_qualname=name)
    function.__qualname__ = name
    return function


class Made(NamedTuple):
    name: str  # it is registered by
    call: Callable[[Any], Any]  # the op
    seen: list[Any]  # dtypes that forward saw, and those that backward did; of torch's only


# --- the ways to make one -------------------------------------------------------------------------


def _custom_op(rule: str, kind: str) -> Made:
    import torch

    name, seen = fresh(), []

    @torch.library.custom_op(f"{name}::op", mutates_args=(), schema="(Tensor x) -> Tensor")
    def op(x: Any) -> Any:
        return _noted(seen, x) * x + x

    _differentiable(f"{name}::op", op, seen)
    polymp.register_op(name, rule, torch=op, kind=kind)
    return Made(name, op, seen)


def _noted(seen: list[Any], x: Any) -> Any:
    seen.append(x.dtype)
    return x


def _defined(name: str, seen: list[Any]) -> Any:
    """Define an op by its name, and return it."""
    import torch

    torch.library.define(f"{name}::op", "(Tensor x) -> Tensor")
    torch.library.impl(f"{name}::op", "cpu")(lambda x: _noted(seen, x) * x + x)
    return getattr(torch.ops, name).op


def _library(rule: str, kind: str) -> Made:
    name, seen = fresh(), []
    op = _defined(name, seen)
    _differentiable(f"{name}::op", op, seen)
    polymp.register_op(name, rule, torch=f"{name}::op", kind=kind)
    return Made(name, op, seen)


def _differentiable(name: str, op: Any, seen: list[Any]) -> None:
    """Give an op a shape, a gradient and a rule of vmap."""
    import torch

    torch.library.register_fake(name, torch.empty_like)
    torch.library.register_autograd(
        name,
        lambda ctx, g: _noted(seen, g) * (2 * ctx.saved_tensors[0] + 1),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    torch.library.register_vmap(name, lambda info, dims, x: (op(x), dims[0]))


def _primitive(rule: str, kind: str) -> Made:
    import jax
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    name = fresh()
    it = Primitive(name)

    def body(x: Any) -> Any:
        return x * x + x

    it.def_impl(jax.jit(body))
    it.def_abstract_eval(lambda x: x.update(weak_type=False))
    mlir.register_lowering(it, mlir.lower_fun(body, multiple_results=False))
    ad.defjvp(it, lambda t, x: t * (2 * x + 1))
    batching.defvectorized(it)
    polymp.register_op(name, rule, jax=it, kind=kind)
    return Made(name, it.bind, [])


def _in_jax(how: str) -> Callable[[str, str], Made]:
    def make(rule: str, kind: str) -> Made:
        import jax

        name = fresh()

        def body(x: Any) -> Any:
            return x * x + x

        wrap = {"function": lambda f: f, "jitted": jax.jit}.get(how) or getattr(jax, how)
        op = polymp.register_op(name, rule, jax=wrap(own(body, name)), kind=kind)
        if how == "custom_vjp":
            op.defvjp(lambda x: (op(x), x), lambda x, g: (g * (2 * x + 1),))
        elif how == "custom_jvp":
            op.defjvps(lambda t, out, x: t * (2 * x + 1))
        return Made(name, op, [])

    return make


WAYS: dict[str, Callable[[str, str], Made]] = {
    "torch custom_op": _custom_op,
    "torch library": _library,
    "jax primitive": _primitive,
    **{f"jax {how}": _in_jax(how) for how in ("function", "jitted", "custom_vjp", "custom_jvp")},
}
in_every_way = pytest.mark.parametrize("way", WAYS)


def made(way: str, rule: str = "fp32", kind: str = "custom") -> tuple[Any, Made]:
    """A framework's verbs, and an op of one's own in it."""
    name = way.partition(" ")[0]
    need(name)
    return frameworks.load(name), WAYS[way](rule, kind)


@cache
def shared(way: str, rule: str, kind: str) -> tuple[Any, Made]:
    """The same, one for all policies: compiling it is most of the work."""
    return made(way, rule, kind)


# --- what it does in a region ---------------------------------------------------------------------

# By name: the rule it is registered with, its kind, and what the policy says of it.
SAID: dict[str, tuple[str, str, Any]] = {
    "nothing, lower": ("lower", "custom", None),
    "nothing, fp32": ("fp32", "custom", None),
    "nothing, fp32_keep": ("fp32_keep", "custom", None),
    "nothing, widest": ("widest", "custom", None),
    "nothing, keep": ("keep", "custom", None),
    "its name": ("fp32", "custom", {"OP": "lower"}),
    "keep": ("fp32", "custom", {"OP": "keep"}),
    "fp32_keep": ("lower", "custom", {"OP": "fp32_keep"}),
    "its class": ("lower", "softmax", {"class:softmax": "fp32"}),
    "another class": ("lower", "softmax", {"class:custom": "fp32"}),
    "name over class": ("keep", "custom", {"OP": "lower", "class:custom": "fp32"}),
    "one dtype": ("fp32", "custom", {"OP": {"float16": "lower"}}),
    "the dtypes": ("keep", "custom", {"OP": {"float16": "lower", "bfloat16": "fp32"}}),
}
PRODUCTS = {"mm": "lower", "matmul": "lower", "linear": "lower"}


def policy_of(said: Any, name: str) -> polymp.Policy:
    rows = {key.replace("OP", name): rule for key, rule in (said or {}).items()}
    return polymp.policy({"name": "own", "rules": PRODUCTS | rows})


def region_of(fw: Any, policy: Any) -> Callable[..., Any]:
    """Regions of a policy, as the frameworks' `region`."""
    autocast = import_module(f"polymp.{fw.name}").autocast
    if fw.name == "torch":
        return lambda low: autocast("cpu", low, policy=policy)
    return lambda low, fn=None: autocast(fn, dtype=low, policy=policy)


def in_region(fw: Any, op: Any, x: Any, low: str, policy: Any) -> Any:
    """Call an op in a region, on an array that a product there has made low."""
    return fw.run(op, [x], (low,), (True,), region_of(fw, policy))


def by_hand(fw: Any, op: Any, x: Any, low: str, decided: Any) -> Any:
    x = fw.cast(x, low)
    y = op(fw.cast(x, decided.run or low))
    return fw.cast(y, decided.out) if decided.out else y


def decision(policy: polymp.Policy, name: str, low: str) -> Any:
    return policy.decide(name, (low,), Region("any", "cpu", True, low, True))


# Where nothing is said of a dtype, one of the two is enough.
RUNS = [
    (said, low)
    for at, said in enumerate(SAID)
    for low in LOW
    if "dtype" in said or low == LOW[at % 2]
]


@pytest.mark.one_in(4)
@in_every_way
@pytest.mark.parametrize(("said", "low"), RUNS)
def test_it_runs_as_the_policy_says(way: str, said: str, low: str) -> None:
    rule, kind, rows = SAID[said]
    fw, op = shared(way, rule, kind)
    policy = policy_of(rows, op.name)
    decided = decision(policy, op.name, low)
    assert decided.rule is not Rule.PARTS
    x = fw.array(X, "float32")
    inside, hand = in_region(fw, op.call, x, low, policy), by_hand(fw, op.call, x, low, decided)
    assert fw.dtype(inside) == fw.dtype(hand)
    assert np.array_equal(fw.numbers(inside), fw.numbers(hand))
    assert fw.dtype(op.call(x)) == "float32", "outside of regions nothing is cast"


@pytest.mark.one_in(2)
@in_every_way
@pytest.mark.parametrize("said", ["nothing, lower", "nothing, fp32", "nothing, fp32_keep"])
def test_gradients_come_in_the_dtypes_of_the_forward_pass(way: str, said: str) -> None:
    rule, kind, rows = SAID[said]
    fw, op = made(way, rule, kind)
    policy = policy_of(rows, op.name)
    decided, x = decision(policy, op.name, "bfloat16"), fw.array(X, "float32")

    def total(run: Any) -> Callable[[Any], Any]:
        return lambda x: fw.cast(run(x), "float32").sum()

    value, grad = fw.grad(total(lambda x: in_region(fw, op.call, x, "bfloat16", policy)), x)
    dtypes = list(op.seen)
    hand, wanted = fw.grad(total(lambda x: by_hand(fw, op.call, x, "bfloat16", decided)), x)
    assert fw.dtype(grad) == fw.dtype(wanted) == "float32"
    error = np.abs(fw.numbers(grad) - fw.numbers(wanted)).max()
    assert error <= 2 * FORMATS["bfloat16"].eps * np.abs(fw.numbers(wanted)).max()
    assert fw.numbers(value) == pytest.approx(fw.numbers(hand), rel=FORMATS["bfloat16"].eps)
    assert dtypes == list(op.seen)[len(dtypes) :], "forward and backward saw other dtypes"


@in_every_way
def test_forbidden(way: str) -> None:
    fw, op = made(way)
    policy = policy_of({"OP": "forbid"}, op.name)
    with pytest.raises(ForbiddenOpError, match=r"^policy 'own' forbids '.*', called here with \(b"):
        in_region(fw, op.call, fw.array(X, "float32"), "bfloat16", policy)


@in_every_way
def test_parts(way: str) -> None:
    """The ops inside follow their own rows; a primitive has none inside and runs as written."""
    fw, op = made(way)
    policy = policy_of({"OP": "parts", "add": "fp32"}, op.name)
    inside = in_region(fw, op.call, fw.array(X, "float32"), "bfloat16", policy)
    assert fw.dtype(inside) == "float32"
    low = policy_of({"OP": "parts", "add": "lower", "mul": "lower"}, op.name)
    inside = in_region(fw, op.call, fw.array(X, "float32"), "bfloat16", low)
    assert fw.dtype(inside) == ("float32" if way == "jax primitive" else "bfloat16")


@in_every_way
def test_recorded(way: str) -> None:
    fw, op = made(way)
    policy = policy_of({"OP": {"float16": "lower"}}, op.name)
    for low in LOW:
        with recording() as report:
            in_region(fw, op.call, fw.array(X, "float32"), low, policy)
        entry = report.of(op.name)[0]  # JAX plans a jitted function once more with wider inputs
        assert entry.decision == decision(policy, op.name, low)
        assert entry.dtypes == (low,)
        assert (entry.backend, entry.low) == (fw.name, low)


def test_one_name_for_both_frameworks() -> None:
    """Registered at once, and in one framework after the other."""
    need("torch", "jax")
    once, two = fresh(), fresh()
    calls = {name: (_defined(name, []), own(lambda x: x * x + x, name)) for name in (once, two)}
    polymp.register_op(once, "fp32_keep", torch=f"{once}::op", jax=calls[once][1])
    polymp.register_op(two, "fp32_keep", torch=f"{two}::op")
    polymp.register_op(two, "fp32_keep", jax=calls[two][1])
    for which, pair in calls.items():
        for rows in (None, {"OP": "lower"}, {"class:custom": {"float16": "fp32"}}):
            policy = policy_of(rows, which)
            for low in LOW:
                found = []
                for framework, call in zip(("torch", "jax"), pair, strict=True):
                    fw = frameworks.load(framework)
                    y = in_region(fw, call, fw.array(X, "float32"), low, policy)
                    found.append((fw.dtype(y), fw.numbers(y).tolist()))
                assert found[0] == found[1]


def _in_torch(way: str) -> tuple[Any, Any, Any, Any]:
    fw, op = made(way)
    import torch

    opened = region_of(fw, policy_of({"OP": {"float16": "lower"}}, op.name))

    def run(x: Any, low: str = "bfloat16") -> Any:
        with opened(low):
            return op.call(torch.mm(x, torch.eye(4)))

    return fw, op, run, torch.tensor(X, dtype=torch.float32)


TORCH = [way for way in WAYS if way.startswith("torch")]
JAX = [way for way in WAYS if way.startswith("jax")]


# Dynamo makes an instance of the class for itself.
@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("way", TORCH)
def test_torch_compile(way: str) -> None:
    fw, _, run, x = _in_torch(way)
    import torch

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for low in (*LOW, *LOW):
        got, wanted = compiled(x, low), run(x, low)
        assert got.dtype is wanted.dtype
        assert torch.equal(got, wanted)
        assert fw.dtype(got) == ("float16" if low == "float16" else "float32")
    w = x.clone().requires_grad_()
    grads = [torch.autograd.grad(call(w).float().sum(), w)[0] for call in (compiled, run)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("way", TORCH)
def test_torch_func(way: str) -> None:
    _, _, run, x = _in_torch(way)
    import torch

    xs = torch.stack([x, x + 1])
    for low in LOW:
        mapped = torch.func.vmap(lambda x, low=low: run(x, low))(xs)
        wanted = torch.stack([run(x, low) for x in xs])
        assert mapped.dtype is wanted.dtype
        assert torch.equal(mapped, wanted)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", JAX)
def test_jax_transformations(way: str) -> None:
    _, op = made(way)
    import jax
    import jax.numpy as jnp

    from polymp.jax import autocast

    policy = policy_of({"OP": {"float16": "lower"}}, op.name)
    x = jnp.asarray(X, "float32")

    def of(x: Any) -> Any:
        return op.call(x @ jnp.eye(4))

    def row(x: Any) -> Any:
        return of(x[None])[0]

    def scanned(x: Any) -> Any:
        return jax.lax.scan(lambda c, x: (c, of(x[None])), 0.0, x)[1]

    for low in LOW:
        run = autocast(of, dtype=low, policy=policy)
        wanted = run(x)
        assert wanted.dtype.name == ("float16" if low == "float16" else "float32")
        mapped = {
            "jit": jax.jit(run)(x),
            "jit inside": autocast(jax.jit(of), dtype=low, policy=policy)(x),
            "vmap": jax.vmap(run)(x[:, None])[:, 0],
            "vmap inside": autocast(jax.vmap(lambda x: of(x[None])[0]), dtype=low, policy=policy)(
                x
            ),
            "scan": autocast(scanned, dtype=low, policy=policy)(x)[:, 0],
            "remat": autocast(jax.checkpoint(of), dtype=low, policy=policy)(x),
        }
        for how, got in mapped.items():
            assert got.dtype == wanted.dtype, how
            assert np.allclose(got, wanted, rtol=4 * FORMATS[low].eps), how
        grads = [
            jax.grad(lambda x, call=call: call(x).astype("float32").sum())(x)
            for call in (run, jax.jit(run), autocast(jax.checkpoint(of), dtype=low, policy=policy),
                         autocast(scanned, dtype=low, policy=policy))
        ]  # fmt: skip
        for grad in grads:
            assert grad.dtype == "float32"
            assert np.allclose(grad, 2 * x + 1, atol=8 * FORMATS[low].eps)


def state() -> Any:
    words = vocabulary()
    found: list[Any] = [dict(words.ops), dict(words.kinds), list(words.registered)]
    found += [dict(index) for index in words._names.values()]
    if "polymp.backends.torch.autocast.kernel_registry" in sys.modules:
        found.append(sys.modules["polymp.backends.torch.autocast.kernel_registry"].installed("cpu"))
    if "polymp.backends.jax.autocast.known_functions" in sys.modules:
        functions = sys.modules["polymp.backends.jax.autocast.known_functions"]
        functions.FUNCTIONS.refresh()
        found.append(dict(functions.FUNCTIONS.ops))
    return found


def refused(error: type[Exception], message: str, call: Callable[[], object]) -> None:
    """It raises these words, and has changed nothing."""
    before = state()
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message
    assert state() == before, "half registered"


def all_refused(said: str, *rows: tuple[type[Exception], dict[str, Any], str]) -> None:
    """Each row is an error, what `register_op` is called with, and the words after `said`."""
    for error, given, message in rows:
        how = {"name": "own", "rule": "fp32"} | given
        refused(error, said + message, lambda how=how: polymp.register_op(**how))


NO_OP = """\
is no op. Give a primitive, or a function written with def: plain, jitted, jax.custom_jvp or \
jax.custom_vjp."""


def test_what_is_wrong_in_any_framework_is_refused() -> None:
    need("jax")
    import polymp.jax  # whose functions are looked up once

    def function(x: Any) -> Any:
        return x

    def other(x: Any) -> Any:
        return x

    for name in ("my op", "", "my::op", 3):
        message = f"register_op({name!r}): the name must be an identifier, such as 'my_op'"
        all_refused("", (TypeError, {"name": name, "jax": function}, message))
    rules = "lower, fp8, fp32, fp32_keep, widest, first, keep, forbid, parts"
    classes = ", ".join(sorted(vocabulary().kinds))
    known, name = {"jax": function}, fresh()
    all_refused(
        "register_op('own'): ",
        (TypeError, {}, "no op was given. Write torch=..., jax=..., or both."),
        (PolicyError, {"rule": "fp23"} | known,
         f"rule 'fp23' for op 'own' is not one of {rules}."),
        (PolicyError, {"kind": "sofmax"} | known,
         f"no class 'sofmax'. Did you mean softmax? Classes: {classes}."),
        (TypeError, {"jax": 3}, f"jax=3 {NO_OP}"),
    )  # fmt: skip
    taken = (
        "the vocabulary has an op {!r} already. Register yours by another name, or give that op a "
        "rule in a policy."
    )
    all_refused("", (PolicyError, {"name": "softmax"} | known, taken.format("softmax")))
    polymp.register_op(name, "fp32", **known)
    message = f"{function!r} is known already, as {name!r}."
    all_refused("register_op('own'): ", (PolicyError, known, message))
    for rule in ("fp32", "lower"):
        arguments = {"name": name, "rule": rule, "jax": other}
        all_refused("", (PolicyError, arguments, taken.format(name)))


def test_what_is_wrong_in_jax_is_refused() -> None:
    need("jax")
    import jax
    from jax.extend.core import Primitive, primitives

    import polymp.jax

    name = fresh()
    polymp.register_op(name, "fp32", jax=Primitive(name))
    own = "is jax's own. Give it a rule in a policy instead."
    known = f"{jax.nn.softmax!r} is known already, as 'softmax'."
    all_refused(
        "register_op('own'): ",
        (PolicyError, {"jax": primitives.exp_p}, f"'exp' {own}"),
        (PolicyError, {"jax": jax.nn.softmax}, known),
        (PolicyError, {"jax": Primitive(name)}, f"{name!r} {own}"),
    )
    polymp.register_op(named := fresh(), "fp32", jax=lambda x: x * 2)
    dotted = f"{__name__}.test_what_is_wrong_in_jax_is_refused.<locals>.<lambda>"
    message = (
        f"another function {dotted!r} is registered, as {named!r}. Give this one a name of its "
        "own, by `def`."
    )
    all_refused("register_op('own'): ", (PolicyError, {"jax": lambda x: x * 3}, message))


def test_what_is_wrong_in_torch_is_refused() -> None:
    need("torch")
    import torch

    import polymp.torch

    name = fresh()
    torch.library.define(f"{name}::op", "(Tensor x) -> Tensor")
    torch.library.define(f"{name}::op_", "(Tensor(a!) x) -> Tensor(a!)")
    torch.library.define("zqxj::kvw", "(int x) -> int")  # not like any name that could be meant

    @torch.library.custom_op(f"{name}::cast", mutates_args=(), schema="(Tensor x) -> Tensor")
    def cast(x: Any) -> Any:
        return x + 1

    cast.register_autocast("cpu", torch.bfloat16)
    no_op = f"torch has no op '{name}::nix'. Define it first."
    rows: tuple[tuple[Any, str], ...] = (
        (name, f"{name!r} has no namespace. Write it as 'mylib::my_op'."),
        (f"{name}::nix", no_op),
        *((op, f"{op!r} is torch's own. Give it a rule in a policy instead.")
          for op in ("aten::exp", "aten::softmax")),
        (f"{name}::op_", f"'{name}::op_' is an op which writes into an argument: the dtype of its "
         "result is given. Give the rule to the op without '_' or out=."),
        ("zqxj::kvw", "'zqxj::kvw' is an op which takes no tensor."),
        (cast, f"'{name}::cast' has an autocast kernel already, on cpu. Leave out its "
         "torch.library.register_autocast."),
        ([f"{name}::op", f"{name}::nix"], no_op),
    )  # fmt: skip
    for given, message in rows:
        all_refused("register_op('own'): ", (PolicyError, {"torch": given}, message))
    message = (
        "is no op. Give its name, such as 'mylib::my_op', or what torch.library.custom_op "
        "returned. To an autograd.Function, give its dtype by "
        "polymp.torch.custom_fwd(cast_inputs=...)."
    )
    for given in (3, print, torch.autograd.Function):
        all_refused(
            "register_op('own'): ", (TypeError, {"torch": given}, f"torch={given!r} {message}")
        )
    polymp.register_op(name, "fp32", torch=f"{name}::op")
    message = (
        f"aten op '{name}::op' is in the vocabulary already, as {name!r}: it cannot be registered "
        "as 'own'. Give it a rule in a policy instead."
    )
    all_refused("", (PolicyError, {"torch": f"{name}::op"}, message))


def test_one_wrong_side_leaves_nothing_of_the_other() -> None:
    need("torch", "jax")
    import torch

    import polymp.jax
    import polymp.torch

    name = fresh()
    torch.library.define(f"{name}::op", "(Tensor x) -> Tensor")
    refused(
        TypeError,
        f"register_op({name!r}): jax=3 {NO_OP}",
        lambda: polymp.register_op(name, "fp32", torch=f"{name}::op", jax=3),
    )
    refused(
        PolicyError,
        f"register_op({name!r}): torch has no op '{name}::nix'. Define it first.",
        lambda: polymp.register_op(name, "fp32", torch=f"{name}::nix", jax=lambda x: x),
    )


# What was compiled or traced before it was registered stays as it is.
LATE = {
    "torch": (
        """
import torch, polymp
from polymp.torch import autocast

@torch.library.custom_op("late::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    return x + 1

op.register_fake(torch.empty_like)
x = torch.ones(3, dtype=torch.bfloat16)

def run(policy, call=op):
    with autocast("cpu", policy=policy):
        print(call(x).dtype)

compiled = torch.compile(lambda x: op(x), backend="aot_eager", fullgraph=True)
run(None)
run("amp")
run("amp", compiled)
polymp.register_op("late_op", "fp32", torch=op)
run(None)
run("amp")
run({"rules": {"class:custom": "keep"}})
torch._dynamo.reset()
run("amp", compiled)
""",
        ["torch.bfloat16"] * 3 + ["torch.float32"] * 2 + ["torch.bfloat16", "torch.float32"],
    ),
    "jax": (
        """
import jax, jax.numpy as jnp, polymp
from polymp.jax import autocast

def op(x):
    return x + 1

def run(x):
    return op(x @ jnp.eye(3))

x = jnp.ones((3, 3))
for call in (autocast(run), jax.jit(autocast(run))):
    print(call(x).dtype)
polymp.register_op("late_op", "fp32", jax=op)
for call in (autocast(run), jax.jit(autocast(run))):
    print(call(x).dtype)
print(autocast(run, policy={"rules": {"linear": "lower", "class:custom": "keep"}})(x).dtype)
""",
        ["bfloat16"] * 2 + ["float32"] * 2 + ["bfloat16"],
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_registered_when_policies_were_used_already(name: str) -> None:
    need(name)
    code, wanted = LATE[name]
    run = forks.program if name == "torch" else processes.run
    assert run(code).split() == wanted
