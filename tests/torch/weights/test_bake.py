"""`bake`: the program runs as the model runs in the region, and has nothing of a region in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import polymp
from polymp.errors import ForbiddenOpError, PolicyError
from polymp.torch import autocast, bake, scoped
from tests.support import forks
from tests.support.sizes import size
from tests.support.torch import models
from tests.support.torch.compiled import product

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

OWN = {
    "name": "own",
    "extends": "amp",
    "rules": {"softmax": "fp32", "layer_norm": "lower", "log_softmax": "fp32_keep"},
}
REGIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch": lambda: autocast("cpu", BF16),
    "own": lambda: autocast("cpu", BF16, policy=OWN),
    "lean": lambda: autocast("cpu", FP16, policy="lean"),
}
TITLES = ("language model", "convnet", "LSTM", "GRU", "attention", "spectral", "solver")

pytestmark = [
    pytest.mark.usefixtures("left_as_found"),
    # torch.export, of every recurrent module
    pytest.mark.filterwarnings("ignore:The tensor attributes? self.*_flat_weights"),
]


class Baked(NamedTuple):
    """A model of the zoo, its inputs, what it gives in a region, and its program."""

    module: nn.Module
    inputs: tuple[Any, ...]
    outputs: list[torch.Tensor]
    program: torch.export.ExportedProgram


@cache
def baked(title: str, region: str) -> Baked:
    torch.manual_seed(0)
    module, inputs = models.MODELS[title]()
    with REGIONS[region]():
        program = bake(module, inputs)
        # On a CPU, torch runs an LSTM by mkldnn, which torch.export turns off.
        torch.backends.mkldnn.enabled = title != "LSTM"
        try:
            outputs = tree_leaves(module(*inputs))
        finally:
            torch.backends.mkldnn.enabled = True
    return Baked(module, inputs, outputs, program)


def nodes(program: torch.export.ExportedProgram) -> Iterator[torch.fx.Node]:
    """The nodes of a program and of the graphs inside it."""
    for graph in program.graph_module.modules():
        yield from graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else ()


def calls(program: torch.export.ExportedProgram) -> list[str]:
    """Return the functions that a program calls, in order, without torch.export's assertions."""
    found = [str(node.target) for node in nodes(program) if node.op == "call_function"]
    return [name.removesuffix(".default") for name in found if "assert" not in name]


def of_regions(program: torch.export.ExportedProgram) -> list[str]:
    return [name for name in calls(program) if "autocast" in name]


def same(ours: Any, theirs: Any) -> bool:
    return models.same(tree_leaves(ours), tree_leaves(theirs))


def gradients(outputs: Any, module: nn.Module, like: nn.Module | None = None) -> list[Any]:
    """Gradients of the parameters, in the order in which `like` names them."""
    own = dict(module.named_parameters())
    asked = [own[name] for name, _ in (like or module).named_parameters()]
    loss = sum(t.float().square().mean() for t in tree_leaves(outputs))
    return list(torch.autograd.grad(loss, asked, materialize_grads=True))


def check(
    model: nn.Module,
    *inputs: torch.Tensor,
    region: Callable[[], AbstractContextManager[Any]] = REGIONS["torch"],
    graded: bool = True,
    **more: Any,
) -> torch.export.ExportedProgram:
    """Bake a model, and hold the program to the model in the region."""
    with region():
        program = bake(model, inputs, **more)
        outputs = model(*inputs)
    module = program.module()
    found = module(*inputs)
    assert same(found, outputs)
    assert of_regions(program) == []
    if graded:
        assert same(gradients(found, module, model), gradients(outputs, model))
    return program


@pytest.mark.one_in(4)
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("title", TITLES)
def test_a_program_gives_the_bits_of_the_region(title, region):
    module, inputs, outputs, program = baked(title, region)
    copy = program.module()
    found = copy(*inputs)
    assert same(found, outputs)
    assert of_regions(program) == []
    if (title, region) != ("solver", "torch"):  # bilinear is taken apart, and so is its gradient
        assert same(gradients(found, copy, module), gradients(outputs, module))


def test_the_comparisons_see_another_region():
    module, inputs, outputs, program = baked("convnet", "torch")
    assert not same(baked("convnet", "own").outputs, outputs)
    assert not same(torch.export.export(module, inputs).module()(*inputs), outputs)
    assert not same([t.float() for t in outputs], outputs)
    found = program.module()
    other = baked("convnet", "own").program.module()
    ours = gradients(found(*inputs), found, module)
    assert not same(gradients(other(*inputs), other, module), ours)


def test_the_finder_of_regions_sees_those_that_torch_export_leaves(x):
    class Inside(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu"):
                y = x @ x.t()
            return y + 1

    assert of_regions(torch.export.export(Inside(), (x,))) == ["wrap_with_autocast"]


def test_without_gradients_too(x):
    for switch in (torch.no_grad, torch.inference_mode):
        with switch():
            check(net(), x, region=REGIONS["own"], graded=False)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.LogSoftmax(-1), nn.Linear(8, 8))


def test_casts_are_plain_ops_and_ops_with_rules_stay_whole(x):
    cast = "aten.to.dtype"
    model = nn.Sequential(*net(), nn.Softmax(-1))
    program = check(model, x, region=REGIONS["own"])
    assert calls(program) == [
        *(cast, cast, cast, "aten.linear"),
        *(cast, cast, "aten.layer_norm"),  # gain and bias
        *(cast, "aten.log_softmax.int", cast),  # back in the dtype that came in
        *(cast, cast, "aten.linear"),
        *(cast, "aten.softmax.int"),
    ]
    assert {node.args[1] for node in nodes(program) if cast in str(node.target)} == {BF16, FP32}


def test_an_op_without_a_rule_is_taken_apart_only_if_its_parts_have_rules(x):
    class Loss(nn.Module):
        def forward(self, x):
            return F.cross_entropy(x.reshape(2, 16), x.flatten()[:2].long().abs())

    parts = {"name": "parts", "rules": {"log_softmax": "lower"}}
    torn = calls(check(Loss(), x, region=lambda: autocast("cpu", policy=parts), graded=False))
    whole = calls(check(Loss(), x, region=lambda: autocast("cpu", policy="matmul"), graded=False))
    assert "aten.cross_entropy_loss" not in torn
    assert "aten.log_softmax.int" in torn
    assert "aten.cross_entropy_loss" in whole
    assert {"aten.reshape", "aten.flatten.using_ints"} <= {*torn} & {*whole}


class Thrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(self.layer(x)))


@pytest.mark.parametrize("engine", ["compiled", "python"])
def test_a_parameter_is_cast_once_if_the_region_keeps_casts(x, engine):
    policy = None if engine == "compiled" else {"rules": {"linear": "lower", "relu": "fp32"}}
    kept = check(Thrice(), x, region=lambda: autocast("cpu", policy=policy))
    anew = check(Thrice(), x, region=lambda: autocast("cpu", cache_enabled=False, policy=policy))
    assert Counter(calls(kept))["aten.to.dtype"] == 3
    assert Counter(calls(anew))["aten.to.dtype"] == 7


def test_a_parameter_that_is_written_is_cast_again(x):
    class Written(Thrice):
        def forward(self, x):
            y = self.layer(x)
            with torch.no_grad():
                self.layer.bias.add_(1)
            return self.layer(y)

    ours, theirs = Written(), Written()
    with autocast("cpu"):
        expected = theirs(x)
        program = bake(ours, (x,))
    assert same(program.module()(x), expected)


def test_names_and_dtypes_of_parameters_are_kept(x):
    model = net()
    with autocast("cpu"):
        program = bake(model, (x,))
    state = program.state_dict
    assert {n: t.dtype for n, t in state.items()} == dict.fromkeys(model.state_dict(), FP32)
    assert set(program.graph_signature.parameters) == {n for n, _ in model.named_parameters()}
    assert isinstance(program.module().get_parameter("0.weight"), nn.Parameter)


def test_buffers_are_updated_as_in_training():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    ours, theirs = build(), build()
    with autocast("cpu", policy="amp"):
        program = bake(ours, (images,))
        expected = theirs(images)
    module = program.module()
    assert same(module(images), expected)
    assert same([*dict(module.named_buffers()).values()], [*dict(theirs.named_buffers()).values()])
    assert theirs[1].num_batches_tracked == 1


def test_shapes_may_be_dynamic(x):
    model = net()
    with REGIONS["own"]():
        program = bake(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    for rows in (2, 7):
        more = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
        with REGIONS["own"]():
            expected = model(more)
        assert same(program.module()(more), expected)


def test_dynamic_shapes_stay_so_where_a_kernel_reads_sizes(x):
    model, rows = Uses(lambda layer, x: layer(x).repeat(2, 1, 1)), torch.export.Dim("rows")
    with autocast("cpu"):
        program = bake(model, (x[None],), dynamic_shapes=({1: rows},))
        expected = model(torch.cat([x, x])[None])
    assert same(program.module()(torch.cat([x, x])[None]), expected)


class Nested(nn.Module):
    """Regions inside the model: off, torch.amp's own in another dtype, and one with a policy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        with autocast("cpu", enabled=False):
            h = self.layers[1](h.float())
        with torch.autocast("cpu", FP16):
            h = h + self.layers[2](h)
        with autocast("cpu", policy=OWN):
            return F.layer_norm(self.layers[3](h), (8,)).softmax(-1)


@pytest.mark.parametrize("around", [*REGIONS, "none", "torch.amp"])
def test_regions_inside_the_model_count(around, x):
    more = {"none": nullcontext, "torch.amp": lambda: torch.autocast("cpu", BF16)}
    check(Nested(), x, region=(REGIONS | more)[around])


def test_scopes_count(x):
    model = net()
    policy = polymp.policy("amp").override(scopes={"3": {"linear": "fp32"}})
    with scoped(model, policy):
        program = check(model, x)
    assert program.module()(x).dtype is FP32
    assert check(model, x).module()(x).dtype is BF16


class Uses(Thrice):
    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        return self.use(self.layer, x, **more)


def without_gradients_first(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The cast that is made there is not used with gradients."""
    with torch.no_grad():
        h = layer(x)
    return layer(h)


def checkpointed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: layer(F.gelu(layer(x))), x, use_reentrant=False)


NUMBERS = {"rules": {"linear": "lower", "mul": "fp32", "add": "lower", "div": "keep"}}
USES: dict[str, tuple[Callable[..., torch.Tensor], Any]] = {
    "a cast without gradients": (without_gradients_first, REGIONS["torch"]),
    "numbers": (lambda layer, x: (layer(x) * 3 + 1) / 2, lambda: autocast("cpu", policy=NUMBERS)),
    "checkpointed parts": (checkpointed, REGIONS["own"]),
    # Without autocast, its parts would get two dtypes.
    "einsum": (lambda layer, x: torch.einsum("ij,kj->ik", layer(x), x), REGIONS["torch"]),
    # Its kernel reads a tensor that it makes.
    "repeat": (lambda layer, x: layer(x).repeat(1, 2), REGIONS["torch"]),
}


def test_a_custom_op_may_read_values_in_its_kernel(x):
    """A try of its parts leaves no symbols behind, for sizes that no op in the program has."""

    @torch.library.custom_op("baketest::groups", mutates_args=())
    def groups(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows * 2 for rows in x.split(sizes.tolist())])

    groups.register_fake(lambda x, sizes: torch.empty_like(x))
    check(Uses(lambda layer, x: groups(layer(x), torch.tensor([1, len(x) - 1]))), x, graded=False)


@pytest.mark.parametrize("use", USES)
def test_uses_of_a_layer(use, x, capfd):
    function, region = USES[use]
    check(Uses(function), x, region=region)
    assert capfd.readouterr().err == ""


def test_inputs_by_keyword(x):
    model, by = Uses(lambda layer, x, by: layer(x) * by), torch.tensor(3.0)
    with autocast("cpu"):
        program = bake(model, (x,), {"by": by})
        expected = model(x, by=by)
    assert same(program.module()(x, by=by), expected)


def test_custom_functions_count(x):
    exact = product(cast_inputs=FP32)
    model = Uses(lambda layer, x: layer(exact(layer(x), layer.weight)))
    assert "aten.mm" in calls(check(model, x, graded=False))


def test_registered_ops_count(x):
    @torch.library.custom_op("baketest::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    polymp.register_op("bake_twice", "fp32", torch="baketest::twice")

    program = check(Uses(lambda layer, x: twice(layer(x))), x, graded=False)
    assert calls(program)[-2:] == ["aten.to.dtype", "baketest.twice"]


def test_branches_have_their_own_casts(x):
    def branches(layer, x):
        return torch.cond(x.sum() > 0, layer, lambda x: layer(x) * 2, (x,))

    program = check(Uses(branches), x)
    assert Counter(calls(program))["aten.to.dtype"] == 6
    with autocast("cpu"):
        assert same(program.module()(-x), Uses(branches)(-x))


def test_a_region_in_a_branch_is_refused(x):
    def branches(layer, x):
        def off(x):
            with torch.autocast("cpu", enabled=False):
                return layer(x).bfloat16()

        return torch.cond(x.sum() > 0, off, layer, (x,))

    with autocast("cpu"), pytest.raises(PolicyError) as error:
        bake(Uses(branches), (x,))
    assert str(error.value) == (
        "bake(): Uses enters a region in a branch of control flow, where it cannot be written "
        "out. Enter it around the control flow."
    )


ELSEWHERE = """
import sys, warnings
warnings.simplefilter("ignore")  # torch.export.load warns of itself
sys.modules["polymp"] = None  # so that nothing can import it
from pathlib import Path
import torch
folder = Path(sys.argv[1])
found = {}
for path in sorted(folder.glob("*.pt2")):
    program = torch.export.load(path)
    inputs = torch.load(path.with_suffix(".inputs"))
    found[path.stem] = {
        "run": program.module()(*inputs),
        "compiled": torch.compile(program.module(), backend="aot_eager", fullgraph=True)(*inputs),
        "decomposed": program.run_decompositions().module()(*inputs),
    }
torch.save(found, folder / "found")
assert not [name for name in sys.modules if name.startswith("polymp.")]
"""


@pytest.mark.sized
def test_a_saved_program_runs_without_polymp(tmp_path: Path):
    """In a process where polymp cannot be imported: as loaded, compiled, and decomposed."""
    asked = [("convnet", "own"), ("GRU", "torch"), ("spectral", "lean")][: size(1, 3)]
    for at, (title, region) in enumerate(asked):
        _, inputs, _, program = baked(title, region)
        torch.export.save(program, tmp_path / f"{at}.pt2")
        torch.save(inputs, tmp_path / f"{at}.inputs")
    forks.program(ELSEWHERE, tmp_path)
    found = torch.load(tmp_path / "found")
    for at, case in enumerate(asked):
        for way in ("run", "compiled", "decomposed"):
            assert same(found[f"{at}"][way], baked(*case).outputs), (case, way)


def test_the_model_is_left_as_it_was(x):
    model = net()
    kinds, state, names = list(map(type, model.modules())), model.state_dict(), {*vars(model)}
    with autocast("cpu"):
        bake(model, (x,))
        before = model(x)
    assert list(map(type, model.modules())) == kinds
    assert {*vars(model)} == names
    assert same([*model.state_dict().values()], [*state.values()])
    with autocast("cpu"):
        assert same(model(x), before)


def test_an_op_that_is_forbidden_stops_it(x):
    model = Uses(lambda layer, x: F.binary_cross_entropy(layer(x).sigmoid(), x.sigmoid()))
    with autocast("cpu", policy="amp"), pytest.raises(ForbiddenOpError, match="policy 'amp' forbi"):
        bake(model, (x,))
    assert type(model) is Uses
    with autocast("cpu", policy="matmul"):
        assert of_regions(bake(model, (x,))) == []


def test_no_region(x):
    message = (
        "bake(): no region was enabled for the tensors of Thrice, so there is nothing to write "
        "out. Write: with autocast(device_type, dtype): bake(model, inputs)."
    )
    model = Thrice()
    around = nullcontext(), autocast("cpu", enabled=False), autocast("xpu")
    for region in around:
        with region, pytest.raises(PolicyError) as error:
            bake(model, (x,))
        assert str(error.value) == message
        assert type(model) is Thrice


def test_what_is_no_model_and_what_are_no_inputs(x):
    graph = torch.fx.symbolic_trace(Thrice())
    for model, inputs, message in (
        (torch.relu, (x,), f"bake() takes a torch.nn.Module and its inputs, not {torch.relu!r}."),
        (Thrice(), x, "bake() takes the inputs of Thrice as a tuple, such as (x,), not as Tensor."),
        (
            graph,
            (x,),
            "bake(): Thrice is traced, and makes itself a class of its own. Call bake() on the "
            "model that it was traced from.",
        ),
    ):
        with autocast("cpu"), pytest.raises(TypeError) as error:
            bake(model, inputs)
        assert str(error.value) == message


@pytest.mark.xfail(strict=True, reason="a rule acts inside a compiled kernel: relu's clamp_min")
def test_rules_inside_compiled_kernels(x):
    rules = {"rules": {"linear": "lower", "clamp_min": "fp32"}}
    check(nn.Sequential(net(), nn.ReLU()), x, region=lambda: autocast("cpu", policy=rules))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.xfail(
    strict=True,
    raises=RuntimeError,
    reason="torch.export records torch.func's transforms through the mode that records regions",
)
def test_transforms_inside_the_model(x):
    check(Uses(lambda layer, x: torch.func.vmap(layer)(x)), x)
