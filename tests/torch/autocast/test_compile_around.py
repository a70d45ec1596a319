"""Regions around compiled functions, the guards between, graph breaks, and torch.export."""

from __future__ import annotations

import contextlib
import io
import itertools
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.utils._pytree import tree_leaves

import polymp.torch
from polymp import PolicyError, policy
from polymp.torch import autocast
from tests.support import forks
from tests.support.processes import in_thread
from tests.support.sizes import LONG
from tests.support.torch.compiled import (
    AS_OBJECT,
    KEEPS_LINEAR,
    KEEPS_RELU,
    Count,
    Decorated,
    Net,
    assert_same,
    dtypes,
    one_region,
)
from tests.support.torch.graph_breaks import KINDS
from tests.support.torch.version_changes import VERSION

pytestmark = pytest.mark.usefixtures("left_as_found")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = (FP16, BF16)


Ambient = dict[str, Any] | None
F16, B16, OFF = {"dtype": FP16}, {"dtype": BF16}, {"enabled": False}
RELU32, LINEAR32 = {**F16, "policy": KEEPS_RELU}, {**F16, "policy": KEEPS_LINEAR}
NAMED = {**F16, "policy": "torch-cpu"}
ORDERS: dict[str, tuple[Ambient, ...]] = {
    "dtypes": (F16, B16, F16, B16),
    "dtypes, the other way": (B16, F16, B16, F16),
    "on and off": (F16, None, F16, OFF),
    "off and on": (None, F16, OFF, F16),
    "policies": (RELU32, LINEAR32, RELU32, LINEAR32),
    "policies, the other way": (LINEAR32, RELU32, LINEAR32, RELU32),
    "none, then a policy": (F16, RELU32, F16, RELU32),
    "a policy, then none": (RELU32, F16, RELU32, None),
    "a policy of torch's rules": (F16, NAMED, RELU32, NAMED),
    "one policy in two dtypes": ({**B16, "policy": AS_OBJECT}, {**F16, "policy": AS_OBJECT}),
    "cache": ({**F16, "cache_enabled": False}, F16, {**F16, "cache_enabled": False}),
}


def around(function: Callable[[], Any], region: Ambient) -> Any:
    if region is None:
        return function()
    with autocast("cpu", **region):
        return function()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("order", ORDERS)
def test_no_graph_is_used_in_another_region(order, count, net, x) -> None:
    def function() -> Any:
        return torch.relu(net.first(x)), net.second(x)

    compiled = torch.compile(function, fullgraph=True, backend=count)
    with torch.no_grad():
        for region in ORDERS[order]:
            assert_same(around(compiled, region), around(function, region))
    states: list[Ambient] = []
    for region in ORDERS[order]:
        if (region or OFF) not in states:
            states.append(region or OFF)
    assert count.graphs == len(states)


def test_equal_policies_made_anew_share_a_graph(count: Count, net: Net, x: torch.Tensor) -> None:
    compiled = torch.compile(lambda: torch.relu(net.first(x)), fullgraph=True, backend=count)
    for _ in range(3):
        with torch.no_grad(), autocast("cpu", dtype=FP16, policy=policy(KEEPS_RELU)):
            assert compiled().dtype is FP32
    assert count.graphs == 1


def test_a_region_around_a_compiled_region(count: Count, net: Net, x: torch.Tensor) -> None:
    compiled = torch.compile(one_region, fullgraph=True, backend=count)
    with torch.no_grad():
        for region in (None, B16, RELU32, OFF):
            result = around(lambda: compiled(net, x), region)
            assert_same(result, around(lambda: one_region(net, x), region))


def test_the_weights_of_a_compiled_model_may_change(count, net, x) -> None:
    compiled = torch.compile(net, fullgraph=True, backend=count)
    with autocast("cpu", dtype=FP16):
        first = compiled(x)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(2)
        second = compiled(x)
        assert torch.equal(second, net(x))
    assert not torch.equal(first, second)
    assert count.graphs == 1


class Head(nn.Module):
    """A module whose gradient is beyond float16's range: the region may not reach it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x @ torch.full((8, 8), 3e-4))


class Disabled(Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", enabled=False):
            return super().forward(x.float())


class OwnPolicy(Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", dtype=FP16, policy=WIDE):
            return super().forward(x)


WIDE = {"name": "wide", "rules": {"all": "fp32"}}
HEADS = {"disabled": Disabled, "scoped": Head, "own policy": OwnPolicy}
SIDES = ("around", "decorator", "inside")


# The low dtypes in turn. Inductor compiles C++ for most of its time.
CELLS = [
    *zip(
        itertools.product(("aot_eager", "inductor"), HEADS, SIDES),
        itertools.cycle(LOW),
        strict=False,
    )
]
# In `make test` aot_eager has each head and each side once.
SHORT = {
    ("inductor", "scoped", "around"),
    *(("aot_eager", *pair) for pair in zip(HEADS, SIDES, strict=True)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize(
    ("backend", "head", "side", "dtype"),
    [
        pytest.param(*case, low, marks=() if case in SHORT else pytest.mark.long)
        for case, low in CELLS
    ],
)
def test_a_compiled_backward_pass_keeps_what_is_wide(
    backend: str, head: str, side: str, dtype: torch.dtype, count: Count, net: Net
) -> None:
    """The region is around, and another thread compiles: torch would trace the backward in it."""
    model = nn.Sequential(net, HEADS[head]())
    if head == "scoped":
        polymp.torch.scoped(model[1], WIDE)
    x = torch.linspace(-1, 1, 24).reshape(3, 8)

    options = {"emulate_precision_casts": True} if backend == "inductor" else None
    compiler = backend if options else count
    region = autocast("cpu", dtype=dtype)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", dtype=dtype):
            return model(x)

    def gradients(compiled: Callable[[Any], Any]) -> tuple[torch.Tensor, ...]:
        if side == "around":
            with region:
                y = compiled(model)(x)
        else:
            y = compiled(inside)(x) if side == "inside" else region(compiled(model))(x)
        return torch.autograd.grad(y.sum() * 1e5, list(net.parameters()))

    expected = gradients(lambda f: f)
    assert all(g.isfinite().all() for g in expected)
    ours = in_thread(lambda: gradients(partial(torch.compile, backend=compiler, options=options)))
    for found, eager in zip(ours, expected, strict=True):
        if backend == "inductor":
            torch.testing.assert_close(found, eager)
        else:
            assert torch.equal(found, eager)


def test_graphs_on_disk_are_found_under_their_own_policy_alone(tmp_path: Path) -> None:
    """torch keys them by the autocast state, in which a policy is a code of one process."""
    program = """
        import os, sys
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1]
        import torch
        import torch._dynamo
        from torch._dynamo.utils import counters
        from torch._functorch import config
        from polymp.torch import autocast

        config.force_autograd_cache = config.bundled_autograd_cache = True
        net = torch.nn.Linear(4, 4)
        compiled = torch.compile(net, backend="aot_eager")

        def run(rule):
            policy = {"name": "mine", "rules": {"linear": rule}}
            with torch.no_grad(), autocast("cpu", dtype=torch.float16, policy=policy):
                dtype = compiled(torch.ones(1, 4)).dtype
            print(dtype, counters["aot_autograd"]["autograd_cache_hit"], flush=True)

        if child := os.fork():  # a process for each policy
            assert os.waitpid(child, 0)[1] == 0
            run("fp32")
        else:
            run("lower")
            os._exit(0)
    """
    printed = forks.program(textwrap.dedent(program), tmp_path)
    assert printed == "torch.float16 0\ntorch.float32 0\n"


def test_a_tag_that_the_user_sets_later_stays_and_so_does_ours() -> None:
    policy = {"name": "mine", "rules": {"tanh": "fp32"}}

    def tag() -> str:
        with autocast("cpu", dtype=torch.float16, policy=policy):
            return torch.compiler.config.cache_key_tag

    ours = tag()
    assert ours
    for theirs in ("theirs", ""):
        with torch.compiler.config.patch(cache_key_tag=theirs):
            assert tag() == tag() == theirs + ours
    assert tag() == ours


PLACES = ("before", "at its start", "in the middle", "at its end", "after")


@pytest.mark.parametrize("at", PLACES)
def test_a_graph_break_keeps_the_region(at: str, count: Count, net: Net, x: torch.Tensor) -> None:
    def broken(x: torch.Tensor) -> Any:
        if at == "before":
            torch._dynamo.graph_break()
        with autocast("cpu", dtype=FP16):
            if at == "at its start":
                torch._dynamo.graph_break()
            a = net(x)
            if at == "in the middle":
                torch._dynamo.graph_break()
            b = net(x)
            if at == "at its end":
                torch._dynamo.graph_break()
        if at == "after":
            torch._dynamo.graph_break()
        return a, b, net(x)

    compiled = torch.compile(broken, backend=count)
    with torch.no_grad():
        result, eager = compiled(x), broken(x)
    assert torch.get_autocast_dtype("cpu") is BF16
    assert dtypes(result) == [FP16, FP16, FP32]
    assert_same(result, eager)


# What aot_eager and inductor cannot compile, as they cannot compile nonzero; and other kinds.
BREAKS = (
    "rows_by_mask",
    "rows_of_a_mask",
    "rows_not_zero",
    "a_number_read",
    "a_branch_on_data",
    "a_disabled_region_with_a_mask",
)


BROKEN = [
    *(
        pytest.param(name, ruled, marks=pytest.mark.long if (at + ruled) % 2 else ())
        for at, name in enumerate(BREAKS)
        for ruled in (False, True)
    ),
    *(
        pytest.param(name, bool(len(name) % 2), marks=pytest.mark.long if at % 2 else ())
        for at, name in enumerate(name for name in KINDS if name not in BREAKS)
    ),
]


@pytest.mark.sized
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(("name", "ruled"), BROKEN)
def test_breaks_of_all_kinds_keep_the_region(name, ruled, count, net) -> None:
    x, given = torch.ones(3, 8), RELU32 if ruled else F16

    def inside() -> torch.Tensor:
        with autocast("cpu", **given):
            return KINDS[name](net, net.first(x))

    decorated = autocast("cpu", **given)(lambda: KINDS[name](net, net.first(x)))
    functions = (inside,)
    if name in BREAKS:
        functions = (inside, decorated) if LONG else (decorated if ruled else inside,)
    for function in functions:
        compiled = torch.compile(function, backend=count)
        assert_same([compiled()], [function()], net)
        assert not torch.is_autocast_enabled("cpu")


MADE_OUTSIDE = {
    "float16": lambda: autocast("cpu", dtype=FP16),
    "disabled": lambda: autocast("cpu", enabled=False),
    "policy": lambda: autocast("cpu", policy={"rules": {"linear": "fp32"}}),
}


@pytest.mark.parametrize("make", MADE_OUTSIDE.values(), ids=MADE_OUTSIDE)
def test_a_region_made_outside(make, count, net, x) -> None:
    """Before torch 2.14, dynamo enters only what it sees made, and torch's own class."""
    region = make()

    def function(x: torch.Tensor) -> Any:
        with region:
            y = net(x)
        return y, net(x)

    if VERSION < (2, 14):
        with pytest.raises(Unsupported, match="does not know how to enter a `autocast`"):
            torch.compile(function, fullgraph=True, backend=count)(x)
        torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(function, fullgraph=VERSION >= (2, 14), backend=count)
        for _ in range(2):
            assert_same(compiled(x), function(x))


@pytest.mark.skipif(VERSION < (2, 14), reason="before torch 2.14 there is a graph break")
def test_a_region_from_outside_is_guarded(count: Count, net: Net, x: torch.Tensor) -> None:
    """Another object with another dtype or policy is compiled anew, and the old graph kept."""

    def function(x: torch.Tensor, region: Any) -> Any:
        with region:
            return net(x)

    compiled = torch.compile(function, fullgraph=True, backend=count)
    with torch.no_grad():
        regions = [make() for make in MADE_OUTSIDE.values()]
        for region in regions + regions:
            assert_same([compiled(x, region)], [function(x, region)])
    assert count.graphs == len(regions)


class Exported(Net):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        with autocast("cpu", dtype=FP16):
            a = super().forward(x)
            with autocast("cpu", enabled=False):
                b = super().forward(x)
        return a, b, super().forward(x)


def called(module: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Arguments of the regions in an exported program, at any depth."""
    wrap = torch.ops.higher_order.wrap_with_autocast
    return [
        tuple(node.args[:3])
        for part in module.modules()
        if isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
        if node.op == "call_function" and node.target is wrap
    ]


class Ruled(Net):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        with autocast("cpu", policy="torch-cuda"):
            return super().forward(x)


@pytest.mark.parametrize("strict", [False, True])
def test_export_refuses_a_policy_that_it_would_lose(strict: bool, x: torch.Tensor) -> None:
    said = r"cannot record policy 'torch-cuda': .* or with polymp\.torch\.bake\(model, inputs\),"
    with pytest.raises(PolicyError, match=said):
        torch.export.export(Ruled(), (x,), strict=strict)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("model", [Exported, Decorated])
def test_tracing_before_autocast_keeps_the_region(model: type[nn.Module], x: torch.Tensor) -> None:
    net = model()
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):  # the backend prints
        result = torch.compile(net, backend="pre_dispatch_eager", fullgraph=True)(x)
        assert_same(tree_leaves(result), tree_leaves(net(x)))
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("model", [Exported, Decorated])
def test_export_keeps_the_region(model: type[nn.Module], strict: bool, x: torch.Tensor) -> None:
    net = model()
    program = torch.export.export(net, (x,), strict=strict)
    assert ("cpu", FP16, True) in called(program.graph_module)
    assert_same(tree_leaves(program.module()(x)), tree_leaves(net(x)))
    if model is Decorated or not strict:  # else torch.autocast's program of it fails there, too
        with autocast("cpu", dtype=BF16):  # the program brings its own region
            assert_same(tree_leaves(program.module()(x)), tree_leaves(net(x)))
