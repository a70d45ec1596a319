"""Rules by module path: what holds in which module, and that it goes wherever the model goes."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import polymp
from polymp import PolicyError
from polymp.backends.torch.autocast import region_casts, regions
from polymp.errors import PolicyWarning
from polymp.torch import autocast, bake, scoped
from tests.support import forks
from tests.support.processes import in_threads
from tests.support.torch.compiled import Count
from tests.support.torch.each_op import at_every_line, inside, interrupted
from tests.support.torch.models import same
from tests.torch.conftest import state

HEAD = polymp.policy("torch-cpu").override(name="head", scopes={"*.lm_head": {"linear": "fp32"}})


def seeded(made: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return made()


class Model(nn.Module):
    """A body in the region's dtype, and a head; by hand, the head is outside of it."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.lm_head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        if not self.by_hand:
            return self.lm_head(h)
        with torch.autocast("cpu", enabled=False):
            return self.lm_head(h.float())


pytestmark = pytest.mark.usefixtures("left_as_found")

# The policy has paths that a part of its model, or another model, does not have.
A_PART = pytest.mark.filterwarnings("ignore::polymp.errors.PolicyWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAST = polymp.policy("torch-cpu").override(name="last", scopes={"blocks.1": {"linear": "fp32"}})


def run(model: nn.Module, x: torch.Tensor, region: Any) -> list[torch.Tensor]:
    with region:
        y = model(x)
    gradients = torch.autograd.grad(y.float().square().sum(), list(model.parameters()))
    return [y.detach(), *gradients]


REGIONS = {"polymp": autocast, "torch": torch.autocast}


@pytest.mark.parametrize("kind", REGIONS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_head_in_float32_is_the_head_by_hand(x: torch.Tensor, kind: str, dtype: Any) -> None:
    by_hand = run(seeded(lambda: Model(by_hand=True)), x, torch.autocast("cpu", dtype))
    model = seeded(Model)
    low = run(model, x, REGIONS[kind]("cpu", dtype))
    assert not same(low, by_hand), "the oracle cannot tell"
    assert low[0].dtype is dtype
    with scoped(model, HEAD):
        assert same(run(model, x, REGIONS[kind]("cpu", dtype)), by_hand)
    assert same(run(model, x, REGIONS[kind]("cpu", dtype)), low)


class Probe(nn.Module):
    """Notes which policy holds where it runs, before and after it calls what it holds."""

    def __init__(self, notes: list[Any], **children: nn.Module) -> None:
        super().__init__()
        self.notes = notes
        for name, child in children.items():
            self.add_module(name, child)

    def note(self) -> None:
        found = regions.in_force("cpu")
        self.notes.append((found.policy, found.enabled, found.dtype, found.cache))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note()
        for child in self.children():
            for one in child if isinstance(child, nn.ModuleList) else [child]:
                x = one(x)
                self.note()
        return x


def tree(notes: list[Any]) -> nn.Module:
    leaf = partial(Probe, notes)
    blocks = nn.ModuleList(Probe(notes, attn=leaf(), mlp=leaf()) for _ in range(2))
    return Probe(notes, embed=leaf(), blocks=blocks, head=leaf())


PATHS = ["", "embed", "", "blocks.0", "blocks.0.attn", "blocks.0", "blocks.0.mlp", "blocks.0", ""]
PATHS += [path.replace("0", "1") for path in PATHS[3:]] + ["head", ""]
PATTERNS = ("embed", "*.attn", "blocks.1", "blocks", "bl*.0.mlp", "*", "head")
AROUND = {
    "polymp": lambda: autocast("cpu", FP16, cache_enabled=False),
    "policy": lambda: autocast("cpu", FP16, policy="lean"),
    "torch": lambda: torch.autocast("cpu", BF16),
    "disabled": lambda: autocast("cpu", enabled=False),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    "patterns", [*itertools.combinations(PATTERNS, 1), *itertools.combinations(PATTERNS, 2)]
)
def test_what_holds_in_a_module_is_the_policy_at_its_path(x, around, patterns) -> None:
    rules = ("keep", "fp32")
    rows = {pattern: {"exp": rule} for pattern, rule in zip(patterns, rules, strict=False)}
    policy = polymp.policy("amp").override(scopes=rows)
    notes: list[Any] = []
    model = tree(notes)
    with AROUND[around]():
        here = regions.in_force("cpu")
        with scoped(model, policy):
            model(x)
        expected = (here.enabled, here.dtype, here.cache)
        assert notes == [(policy.at(path), *expected) for path in PATHS]
        assert len({note[0] for note in notes}) > 1 or "*" in patterns, "all the same"
        del notes[:]
        model(x)
        assert {note[0] for note in notes} == {here.policy}, "removed"


def test_outside_of_regions_nothing_changes(x: torch.Tensor) -> None:
    model = seeded(Model)
    plain = run(model, x, torch.autocast("cpu", enabled=False))
    scoped(model, HEAD.override(lower=["class:activation"]))
    assert same(run(model, x, torch.autocast("cpu", enabled=False)), plain)
    assert same(run(model, x, torch.enable_grad()), plain)


class Regional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> list[torch.dtype]:
        own = {"rules": {"linear": "keep", "addmm": "keep", "exp": "lower"}}
        seen = []
        for region in (autocast("cpu", BF16), torch.autocast("cpu", BF16)):
            with region:
                seen += [self.lm_head(x).dtype, self.other(x).dtype, x.to(BF16).exp().dtype]
        with autocast("cpu", FP16, policy=own):
            seen += [x.exp().dtype, self.lm_head(x).dtype, x.exp().dtype]
            with autocast("cpu", BF16):
                seen += [x.to(BF16).exp().dtype]
        return seen


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_regions_inside_of_a_scoped_module(x: torch.Tensor, compiled: bool, count: Count) -> None:
    """One without a policy has the module's; one with a policy has its own up to the next call."""
    model = Regional()
    lean = {"linear": "fp32", "exp": "fp32"}
    scoped(model, {"rules": {"linear": "lower", "exp": "fp32"}, "scopes": {"lm_head": lean}})

    def call(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.dtype]]:
        return x + 1, model(x)

    run = torch.compile(call, backend=count, fullgraph=True) if compiled else call
    expected = [FP32, BF16, FP32] * 2 + [FP16, FP32, FP16] + [FP32]
    assert run(x)[1] == expected
    with torch.autocast("cpu", FP16):
        assert run(x)[1] == expected


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.wide = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, depth: int) -> list[torch.dtype]:
        seen = [self.wide(x).dtype, self.linear(x).dtype]
        return seen + (self(x, depth - 1) if depth else []) + [self.linear(x).dtype]


def test_a_module_that_calls_itself_keeps_its_scopes(x: torch.Tensor) -> None:
    model = Recursive()
    scoped(model, {"rules": {"linear": "lower"}, "scopes": {"wide": {"linear": "fp32"}}})
    with autocast("cpu", BF16):
        assert model(x, 2) == [FP32, BF16] * 3 + [BF16] * 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("kind", REGIONS)
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_an_error_leaves_the_scopes(x: torch.Tensor, kind: str, error: Any, hook: str) -> None:
    def fail(*_: object) -> None:
        raise error("stop")

    model, bystander = Model(), nn.Linear(8, 8)
    scoped(model, HEAD.override(fp32=["class:matmul", "linear"]))
    getattr(model.lm_head, hook)(fail)
    with REGIONS[kind]("cpu", BF16):
        before = regions.code_in_force()
        with pytest.raises(error, match="stop"):
            model(x)
        assert regions.code_in_force() == before
        assert bystander(x).dtype is BF16


def test_casts_kept_by_our_kernels_go_with_a_region_of_torchs_own(x: torch.Tensor) -> None:
    norm, kept = nn.LayerNorm(8), []
    norm.register_forward_hook(lambda *_: kept.append(len(region_casts.local.thread.casts)))
    scoped(norm, {"rules": {"layer_norm": "lower"}})
    with torch.autocast("cpu", BF16):
        norm(x)
    assert kept == [2], "weight and bias"
    assert region_casts.local.thread.casts == {}


def test_the_classes_are_their_own_again() -> None:
    model = Model()
    classes = [type(m) for m in model.modules()]
    attributes = [set(m.__dict__) for m in model.modules()]
    keys = list(model.state_dict())
    handle = scoped(model, HEAD)
    assert repr(handle) == "Scoping('head', 6 modules)"
    assert list(model.state_dict()) == keys
    for module, cls in zip(model.modules(), classes, strict=True):
        assert isinstance(module, cls)
        assert repr(type(module)) == repr(cls)
        assert type(module) is not cls
    handle.remove()
    handle.remove()
    assert [type(m) for m in model.modules()] == classes
    assert [set(m.__dict__) for m in model.modules()] == attributes


def test_patterns_that_match_nothing_are_named() -> None:
    scopes = {name: {"linear": "keep"} for name in ("*.lm_haed", "bdoy.2", "xyz")}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        handle = scoped(Model(), HEAD.override(scopes=scopes))
    assert handle.unmatched == ("*.lm_haed", "bdoy.2", "xyz")
    (warning,) = seen
    assert warning.category is PolicyWarning
    assert warning.filename == __file__
    assert str(warning.message) == (
        "scoped(): policy 'head*' has rules for paths that no module of Model has. "
        "'*.lm_haed': did you mean '*.lm_head'? "
        "'bdoy.2': did you mean 'body.2' or 'body.1' or 'body.0'? "
        "'xyz': paths are, for example, 'body', 'lm_head', 'body.0'."
    )


def test_a_warning_that_is_an_error_leaves_no_scopes() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(PolicyWarning, match="has rules for paths that no module"):
        scoped(model, polymp.policy("amp").override(scopes={"heda": {"linear": "fp32"}}))
    assert type(model) is nn.Linear
    scoped(model, polymp.policy("amp"))  # not refused as scoped already


@pytest.mark.parametrize("bound_before", [True, False])
def test_a_call_that_was_bound_before_goes_along(x: torch.Tensor, bound_before: bool) -> None:
    linear = nn.Linear(8, 8)
    call = linear.__call__
    handle = scoped(linear, {"rules": {"linear": "fp32"}})
    call = call if bound_before else linear.__call__
    inner = linear._call_impl
    with autocast("cpu", BF16):
        assert call(x).dtype is FP32
        handle.remove()
        assert call(x).dtype is BF16
        assert inner(x).dtype is BF16


def test_a_module_with_two_paths_has_the_first(x: torch.Tensor) -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.GELU(), shared)
    for path, expected in (("0", FP32), ("2", BF16)):
        rows = {path: {"linear": "fp32"}}
        warned = pytest.warns(PolicyWarning, match="'2' is also '0', and a module's first path")
        with nullcontext() if path == "0" else warned:
            handle = scoped(model, {"rules": {"linear": "lower"}, "scopes": rows})
        with handle:
            assert handle.unmatched == (() if path == "0" else ("2",))
            with autocast("cpu", BF16):
                assert model(x).dtype is expected


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "not a module": (lambda: scoped(len, HEAD), TypeError,
        "scoped() takes a torch.nn.Module and a policy, not <built-in function len>."),
    "no policy": (lambda: scoped(nn.Linear(2, 2), None), PolicyError,
        "a policy is a Policy, a name, the path of a TOML file or a dict, not None."),
    "the handle called": (lambda: scoped(nn.Linear(2, 2), HEAD)(torch.ones(2)), TypeError,
        "scoped() changes the model in place and returns a handle with remove(). "
        "Write scoped(model, policy), and call the model itself."),
    "lazy": (lambda: scoped(nn.Sequential(nn.LazyLinear(2)), HEAD), TypeError,
        "scoped(): LazyLinear at '0' is lazy, and changes its class in its first call. "
        "Call the model once before scoped()."),
    "traced": (lambda: scoped(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())), HEAD), TypeError,
        "scoped(): Sequential is traced, and makes itself a class of its own. "
        "Call scoped() on the model that it was traced from."),
    "a region with scopes": (lambda: autocast("cpu", policy=HEAD), PolicyError,
        "policy 'head' has rules for modules (*.lm_head), whose paths a region does not see. "
        "Give it to polymp.torch.scoped(model, policy), and to the region, for what runs outside "
        "of the model, policy.at('') or none."),
}  # fmt: skip


@A_PART
@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str) -> None:
    function, kind, text = WRONG[case]
    with pytest.raises(kind) as error:
        function()
    assert str(error.value) == text


@A_PART
@pytest.mark.parametrize("part", ["", "body", "lm_head"])
def test_a_part_of_a_model_is_scoped_once(part: str) -> None:
    model = Model()
    scoped(model.get_submodule(part), HEAD)
    classes = [type(m) for m in model.modules()]
    for target in (model, model.get_submodule(part)):
        with pytest.raises(PolicyError, match=r"is scoped already, by policy 'head'"):
            scoped(target, "lean")
    assert [type(m) for m in model.modules()] == classes


def test_a_module_that_compiles_itself_is_refused() -> None:
    model = Model()
    model.lm_head.compile(backend="eager")
    with pytest.raises(TypeError, match=r"Linear at 'lm_head' is compiled by its own compile\(\)"):
        scoped(model, HEAD)
    assert type(model) is Model


class ByHand(Model):
    """Its copies are made by its class."""

    def __deepcopy__(self, memo: object) -> Model:
        made = type(self)()
        made.load_state_dict(self.state_dict())
        return made


@pytest.mark.parametrize(
    ("copied", "kind"),
    [
        (copy.deepcopy, Model),
        (copy.deepcopy, ByHand),
        (lambda pair: pickle.loads(pickle.dumps(pair)), Model),
    ],
)
def test_copies_are_scoped(x: torch.Tensor, copied: Callable[[Any], Any], kind: Any) -> None:
    model = seeded(kind)
    handle = scoped(model, HEAD)
    expected = run(model, x, autocast("cpu", BF16))
    twin, of_twin = copied((model, handle))
    handle.remove()
    assert run(model, x, autocast("cpu", BF16))[0].dtype is BF16
    assert same(run(twin, x, autocast("cpu", BF16)), expected)
    of_twin.remove()
    assert run(twin, x, autocast("cpu", BF16))[0].dtype is BF16
    assert type(twin.lm_head) is nn.Linear


def test_a_pickle_in_a_fresh_process(x: torch.Tensor, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    scoped(model, {"rules": {"linear": "lower"}, "scopes": {"1": {"linear": "fp32"}}})
    torch.save((model, x), tmp_path / "model")
    code = (
        "import sys, torch\n"
        "model, x = torch.load(sys.argv[1], weights_only=False)\n"
        "with torch.autocast('cpu', torch.bfloat16): y = model(x)\n"
        "assert y.dtype is torch.float32, y.dtype\n"
    )
    forks.program(code, tmp_path / "model")


def test_a_class_on_top_is_left_in_place(x: torch.Tensor) -> None:
    """torch's parametrizations change the class, too."""
    linear = nn.Linear(8, 8)
    handle = scoped(linear, {"rules": {"linear": "fp32"}})
    parametrizations.weight_norm(linear)
    with autocast("cpu", BF16):
        assert linear(x).dtype is FP32
        handle.remove()
        assert linear(x).dtype is BF16
    parametrize.remove_parametrizations(linear, "weight")
    with autocast("cpu", BF16):
        assert linear(x).dtype is BF16
        with scoped(linear, {"rules": {"linear": "fp32"}}):
            assert linear(x).dtype is FP32


@A_PART
def test_a_class_that_counts_its_subclasses_does_not_hear_of_ours() -> None:
    heard = []

    class Counts(nn.Linear):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            heard.append(cls)

    model = Counts(2, 2)
    with scoped(model, HEAD):
        assert type(model) is not Counts
        assert isinstance(model, Counts)
    assert heard == []


def test_threads_have_scopes_of_their_own(x: torch.Tensor) -> None:
    model = seeded(Model)
    regions_of = [autocast("cpu", BF16), autocast("cpu", FP16), autocast("cpu", enabled=False)]
    scoped(model, HEAD)
    expected = [run(model, x, region) for region in regions_of]
    work = [lambda r=region: [run(model, x, r) for _ in range(8)] for region in regions_of]
    for runs, right in zip(in_threads(work), expected, strict=True):
        assert all(same(one, right) for one in runs)


def test_replicas_of_data_parallel(x: torch.Tensor) -> None:
    """As torch.nn.parallel.replicate makes them, which needs GPUs."""
    model = seeded(Model)
    scoped(model, HEAD)
    twin = model._replicate_for_data_parallel()
    for name, child in model._modules.items():
        twin._modules[name] = child._replicate_for_data_parallel()
    twin.lm_head.weight = nn.Parameter(torch.zeros(5, 8))
    twin.lm_head.bias = model.lm_head.bias
    with torch.autocast("cpu", BF16):
        assert in_threads([lambda: nn.DataParallel(twin)(x).dtype])[0] is FP32
    with autocast("cpu", BF16):
        assert torch.equal(twin(x), model.lm_head.bias.expand(4, 5))


def test_on_another_device() -> None:
    on_cuda = polymp.policy("torch-cuda").override(scopes={"1": {"linear": "fp32"}})
    with FakeTensorMode():
        model = nn.Sequential(*(nn.Linear(8, 8, device="meta") for _ in range(2)))
        for linear in model:
            linear.weight = nn.Parameter(torch.ones(8, 8, device="cuda"), requires_grad=False)
            linear.bias = None
        x = torch.ones(4, 8, device="cuda")
        scoped(model, on_cuda)
        with inside("cuda", "float16"):
            assert (model[:1](x).dtype, model(x).dtype) == (FP16, FP32)


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again, or not."""

    def __init__(self, how: Callable[..., torch.Tensor] | None) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.how is None else self.how(block, x)
        return x


@pytest.mark.parametrize("around", ["polymp", "torch"])
@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "compiled"])
def test_recomputation_runs_under_the_same_policies(x, around, how, count) -> None:
    """A module carries its policy into torch's checkpoint."""
    x = x.requires_grad_(how != "compiled")
    again = partial(checkpoint, use_reentrant=how == "reentrant")
    plain, recomputed = (seeded(lambda h=h: Checkpointed(h)) for h in (None, again))
    without = run(plain, x, REGIONS[around]("cpu", FP16))
    for model in (plain, recomputed):
        scoped(model, LAST.override(fp32=["gelu"]))
    expected = run(plain, x, REGIONS[around]("cpu", FP16))
    assert not same(expected, without), "the oracle cannot tell"
    call = torch.compile(recomputed, backend=count, fullgraph=True)
    with REGIONS[around]("cpu", FP16):
        y = call(x) if how == "compiled" else recomputed(x)
    y.float().square().sum().backward()
    assert same([y.detach(), *(p.grad for p in recomputed.parameters())], expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_function_is_recomputed_in_its_scope(x: torch.Tensor, reentrant: bool) -> None:
    seen = []

    class Outer(nn.Module):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.ones(1, dtype=BF16).exp().dtype)
            return x.square()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    scoped(model := Outer(), {"rules": {"exp": "fp32"}})
    with torch.autocast("cpu", BF16):
        y = model(x.requires_grad_())
    y.sum().backward()
    assert seen == [FP32, FP32]


@pytest.mark.parametrize("kind", REGIONS)
def test_with_the_tools_of_torch_func(x: torch.Tensor, kind: str) -> None:
    model = seeded(Model)
    scoped(model, HEAD)
    parameters = dict(model.named_parameters())

    def call(one: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (one,))

    with REGIONS[kind]("cpu", BF16):
        assert torch.equal(call(x), model(x))
        batched = torch.vmap(call)(x)
        assert batched.dtype is FP32
        torch.testing.assert_close(batched, model(x), rtol=2e-2, atol=2e-2)


@A_PART
@pytest.mark.parametrize("kind", REGIONS)
def test_compiled_it_is_eager(x: torch.Tensor, count: Count, kind: str) -> None:
    model = seeded(Model)
    compiled = torch.compile(model, backend=count, fullgraph=True)
    plain = run(model, x, REGIONS[kind]("cpu", BF16))
    assert same(run(compiled, x, REGIONS[kind]("cpu", BF16)), plain)
    for times, policy in enumerate((HEAD, LAST.override(fp32=["linear"]), HEAD), start=1):
        with scoped(model, policy):  # after it was compiled without, and with another
            eager = run(model, x, REGIONS[kind]("cpu", BF16))
            assert not same(eager, plain)
            for _ in range(2):
                assert same(run(compiled, x, REGIONS[kind]("cpu", BF16)), eager)
            assert count.graphs == 1 + min(times, 2), "one graph for each policy"
    assert same(run(compiled, x, REGIONS[kind]("cpu", BF16)), plain)
    assert count.graphs == 3


def test_compiled_from_outside(x: torch.Tensor, count: Count) -> None:
    """The graph holds the region as well; each policy its own, whatever came first."""
    model = seeded(Model)

    @torch.compile(backend=count, fullgraph=True)
    def compiled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with autocast("cpu", FP16):
            y = model(x)
        return y, model(x)

    head = scoped(model, HEAD)
    assert [y.dtype for y in compiled(x)] == [FP32, FP32]
    head.remove()
    assert [y.dtype for y in compiled(x)] == [FP16, FP32]
    with scoped(model, HEAD):
        assert [y.dtype for y in compiled(x)] == [FP32, FP32]
    assert count.graphs == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_with_a_break_in_the_graph(x: torch.Tensor, count: Count) -> None:
    class Breaks(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.body(x)
            torch._dynamo.graph_break()
            return self.lm_head(h)

    model = seeded(Breaks)
    scoped(model, HEAD)
    compiled = torch.compile(model, backend=count)
    outer = torch.compile(lambda x: model(x) * 2, backend=count)
    for kind in REGIONS.values():
        with kind("cpu", BF16):
            eager = model(x)
            assert eager.dtype is FP32
            assert torch.equal(compiled(x), eager)
            assert torch.equal(outer(x), eager * 2)
    assert count.graphs > 2


def test_a_trace_that_fails_leaves_the_scopes(x: torch.Tensor, count: Count) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with autocast("cpu", BF16):
                y = x.exp()
                torch._dynamo.graph_break()
            return y

    model = nn.Sequential(Fails())
    scoped(model, {"rules": {"exp": "lower"}})
    before = regions.code_in_force()
    compiled = torch.compile(lambda x: model(x), backend=count, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(x)
    assert regions.code_in_force() == before


def test_export_is_refused_and_the_refusal_names_the_way_out(x: torch.Tensor) -> None:
    model = Model()
    handle = scoped(model, HEAD)
    text = (
        r"torch.export cannot record the scopes of policy 'head'\. Export with "
        r"polymp\.torch\.bake\(model, inputs\), which writes the casts out; or without the scopes"
    )
    for strict in (False, True):
        with pytest.raises(Exception, match=text):
            torch.export.export(model, (x,), strict=strict)
    with autocast("cpu", FP16):
        expected, baked = model(x), bake(model, (x,))
    assert same(baked.module()(x), expected)
    handle.remove()
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))


def test_distributed_data_parallel(alone: Any) -> None:
    """Scoped before it is wrapped, and after."""

    def trained(by_hand: bool = False, before: bool = False, after: bool = False) -> Any:
        model = seeded(lambda: Model(by_hand))
        if before:
            scoped(model, HEAD)
        wrapped = nn.parallel.DistributedDataParallel(model)
        if after:
            scoped(wrapped.module, HEAD)
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            made = torch.Generator().manual_seed(step)
            with autocast("cpu", BF16):
                seen.append(wrapped(torch.randn(6, 8, generator=made)))
            seen[-1].float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, *model.parameters()]

    by_hand = trained(by_hand=True)
    assert same(trained(before=True), by_hand)
    assert same(trained(after=True), by_hand)
    assert not same(trained(), by_hand), "the oracle cannot tell"


def two_linears() -> tuple[nn.Module, polymp.Policy]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    policy = polymp.policy("amp").override(scopes={"1": {"linear": "fp32"}})
    with scoped(model, policy), autocast("cpu", dtype=BF16):
        model(torch.ones(2, 4))  # kernels are registered and rows are found
    return model, policy


def test_an_interrupt_leaves_a_model_scoped_with_a_handle_or_not_at_all() -> None:
    model, policy = two_linears()
    classes, data = [type(m) for m in model.modules()], [dict(vars(m)) for m in model.modules()]
    lines = set()
    for line in at_every_line(lambda at: interrupted(lambda: scoped(model, policy), at)):
        lines.add(line)
        assert [type(m) for m in model.modules()] == classes, line
        assert [dict(vars(m)) for m in model.modules()] == data, line
    assert len(lines) > 40


def test_an_interrupt_in_a_scoped_call_restores_the_policies_around() -> None:
    model, policy = two_linears()
    x, found, lines = torch.ones(2, 4), state(), set()

    def run(at: int) -> None:
        with autocast("cpu", dtype=BF16):
            interrupted(lambda: model(x), at)

    with scoped(model, policy):
        for line in at_every_line(run):
            lines.add(line)
            assert state() == found, line
    assert len(lines) > 20
