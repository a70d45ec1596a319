"""`freeze`: what is stored low, what stays and why, and what is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polymp import PolicyError
from polymp.backends.torch.compat import modes
from polymp.backends.torch.weights import freeze_usage
from polymp.torch import autocast, freeze
from tests.support.torch.freezable_models import Mixed, Uses, bits, frozen_weights, held, plainly

pytestmark = pytest.mark.usefixtures("left_as_found")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def test_what_is_only_cast_is_stored_low_and_each_other_says_why_it_stays(x: torch.Tensor) -> None:
    model, other = Mixed(), Mixed()
    handle = freeze(model, (x,))
    assert handle.stored == ("first.weight", "first.bias", "last.weight")
    batch = "read in float32 by aten.native_batch_norm.default in batch"
    assert handle.kept == {
        "table.weight": "read in float32 by aten.add.Tensor",
        "norm.weight": "read in float32 by aten.native_layer_norm.default in norm",
        "norm.bias": "read in float32 by aten.native_layer_norm.default in norm",
        "asked.weight": "its dtype is read",
        "unused.weight": "not used in the examples",
        "trained.weight": "requires gradients",
        **{f"batch.{name}": batch for name in ("weight", "bias", "running_mean", "running_var")},
        "doubles": "is float64",
    }
    low = {name for name, t in freeze_usage.names(model).items() if t.dtype is BF16}
    assert low == set(handle.stored)
    got, expected = model(x), plainly(other, x)
    assert got.dtype is expected.dtype
    assert torch.equal(got, expected)
    assert torch.equal(model.batch.running_mean, other.batch.running_mean), "written as before"


def test_weights_of_products_in_8_bits_stay(x: torch.Tensor) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model, x = frozen_weights(net), torch.randn(32, 64)
    other = copy.deepcopy(model)
    handle = freeze(model, (x,), policy="fp8")
    assert handle.stored == ("0.bias", "2.bias")
    read = "read in float32 by aten.linalg_vector_norm.default in"
    assert handle.kept == {"0.weight": f"{read} 0", "2.weight": f"{read} 2"}
    with autocast("cpu", policy="fp8"):
        assert torch.equal(model(x), other(x))


def test_the_float32_weights_are_gone(x: torch.Tensor) -> None:
    model = frozen_weights(nn.Linear(8, 8))
    parameters = dict(model.named_parameters())
    originals = [modes.storage_reference(p) for p in parameters.values()]
    freeze(model, (x,))
    assert all(o.expired() for o in originals)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert model.weight.dtype is BF16


def test_what_it_returns_reads_well(x: torch.Tensor) -> None:
    handle = freeze(Mixed(), (x,))
    assert repr(handle) == "Frozen(Mixed, 3 stored in bfloat16, 11 kept)"
    lines = str(handle).splitlines()
    assert lines[:3] == [
        "Mixed: 3 tensors stored in bfloat16.",
        f"Bytes of the model: {handle.bytes_before:,} before, {handle.bytes_after:,} now.",
        "Kept:",
    ]
    batch = "    batch.weight, batch.bias, batch.running_mean and 1 more: read in float32 by "
    assert batch + "aten.native_batch_norm.default in batch" in lines


def in_a_block_without(m: Any, x: torch.Tensor) -> torch.Tensor:
    with autocast("cpu", enabled=False):
        return F.linear(x.float(), m.weight)


def in_another_dtype(m: Any, x: torch.Tensor) -> torch.Tensor:
    with autocast("cpu", FP16):
        return F.linear(x, m.weight)


def written(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, m.weight)
    m.weight.mul_(0.5)
    return y


LOW_USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "linear": lambda m, x: F.linear(x, m.weight),
    "view": lambda m, x: x @ m.weight.view(2, 4, 8).flatten(0, 1)[:, :].t(),
    "rows": lambda m, x: F.linear(x, m.weight[2:6]),
    "chunks": lambda m, x: F.linear(x, m.weight.chunk(2)[1]),
    "twice": lambda m, x: F.linear(F.linear(x, m.weight), m.weight),
    "detached": lambda m, x: F.linear(x, m.weight.detach()),
    "inference mode": torch.inference_mode()(lambda m, x: F.linear(x, m.weight[:])),
    "by hand": lambda m, x: x.to(BF16) @ m.weight.to(BF16),
    "a copy": lambda m, x: x.to(BF16) @ m.weight.to(BF16, copy=True).mul(2),
    "shape": lambda m, x: F.linear(x, m.weight) * m.weight.shape[0] * m.weight.is_floating_point(),
}


@pytest.mark.parametrize("use", LOW_USES)
def test_uses_that_are_casts(use: str, x: torch.Tensor) -> None:
    model, other = Uses(LOW_USES[use]), Uses(LOW_USES[use])
    handle = freeze(model, (x,))
    assert handle.stored == ("weight", "other.weight", "other.bias")
    assert bits(model(x)) == bits(plainly(other, x))


# What asks for the dtype of a weight, beside a product of it.
DTYPE_USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "dtype": lambda m, x: F.linear(x, m.weight) if m.weight.dtype is FP32 else x,
    "dtype of a view": lambda m, x: F.linear(x, m.weight) if m.weight[0].data.dtype is FP32 else x,
    "size in bytes": lambda m, x: F.linear(x, m.weight) + m.weight.data.element_size(),
    "type_as": lambda m, x: F.linear(x.type_as(m.weight), m.weight),
    "to another": lambda m, x: F.linear(x.to(m.weight), m.weight),
    "to float32": lambda m, x: F.linear(x, m.weight.float()),
    "numpy": lambda m, x: F.linear(x, m.weight) * float(m.weight.numpy()[0, 0]),
}
READ, MM = "read in float32 by aten.{}", "read in float32 by aten.mm.default"
HIGH_USES: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    **{name: (use, "its dtype is read") for name, use in DTYPE_USES.items()},
    "read": (lambda m, x: x + m.weight[0], READ.format("add.Tensor")),
    "both": (lambda m, x: F.linear(x, m.weight) + m.weight[0], READ.format("add.Tensor")),
    "a block without": (in_a_block_without, MM),
    "inference mode": (torch.inference_mode()(in_a_block_without), MM),
    "float16": (in_another_dtype, READ.format("_to_copy.default")),
    "columns": (lambda m, x: F.linear(x[:, :4], m.weight[:, :4]),
        "cast into another layout by aten._to_copy.default"),
    "bits": (lambda m, x: F.linear(x, m.weight) + m.weight.view(torch.int32)[0],
        READ.format("view.dtype")),
    "written": (written, "written by aten.mul_.Tensor"),
    "its cast is written": (lambda m, x: F.linear(x, m.weight.to(BF16).mul_(2)),
        "its cast is written by aten.mul_.Tensor"),
    "its cast is returned": (lambda m, x: (x, m.weight.to(BF16)), "its cast is returned"),  # type: ignore[dict-item,return-value]
    "new": (lambda m, x: F.linear(x, m.weight) + torch.zeros_like(m.weight)[0],
        READ.format("zeros_like.default")),
}  # fmt: skip


@pytest.mark.parametrize("use", HIGH_USES)
def test_uses_for_which_a_weight_stays(use: str, x: torch.Tensor) -> None:
    function, why = HIGH_USES[use]
    model, other = Uses(function), Uses(function)
    handle = freeze(model, (x,))
    assert handle.stored == ("other.weight", "other.bias")
    assert handle.kept == {"weight": why}
    assert model.weight.dtype is FP32
    assert bits(model.weight) == bits(other.weight), "the examples wrote it"
    assert freeze_usage.same(model(x), plainly(other, x))


def test_a_tensor_on_the_memory_of_a_weight_that_is_neither_keeps_it(x: torch.Tensor) -> None:
    model, other = Uses(lambda m, x: x @ m.alias), Uses(lambda m, x: x @ m.alias)
    model.alias, other.alias = model.weight.t(), other.weight.t()
    handle = freeze(model, (x,))
    assert handle.stored == ("other.weight", "other.bias")
    why = "shares memory with 'alias', which is no parameter or buffer"
    assert handle.kept == {"weight": why}
    assert bits(model(x)) == bits(plainly(other, x))
    model.weight.zero_()
    assert not model(x).any(), "the alias is one no more"


def test_a_tensor_on_the_memory_of_a_weight_in_a_list_is_refused(x: torch.Tensor) -> None:
    model = Uses(lambda m, x: x @ m.aliases[0])
    model.aliases = [model.weight.t()]
    before = held(model)
    with pytest.raises(PolicyError, match="does not run with weights") as raised:
        freeze(model, (x,))
    assert "The first op that differs is aten._to_copy.default(float32)" in str(raised.value)
    assert held(model) == before


def test_branches_that_other_examples_reach(x: torch.Tensor) -> None:
    def branch(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, m.weight) if x.shape[0] > 2 else x * m.weight[0]

    one, two = Uses(branch), Uses(branch)
    assert "weight" in freeze(one, (x,)).stored
    assert "weight" in freeze(two, [(x,), (x[:2],)]).kept


class Tied(nn.Module):
    """A table and a head on one weight; as a lookup, or as a product with one-hot rows."""

    def __init__(self, product: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(6, 8)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.table.weight
        self.product = product
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.product:
            return self.head(F.one_hot(ids, 6).float() @ self.table.weight)
        return self.head(self.table(ids))


def test_tied_weights_stay_tied() -> None:
    ids = torch.tensor([[1, 2, 5]])
    model, other = Tied(product=True), Tied(product=True)
    handle = freeze(model, (ids,))
    assert handle.stored == ("table.weight", "head.weight")
    assert model.table.weight is model.head.weight
    assert bits(model(ids)) == bits(plainly(other, ids))
    for policy in (None, "lean"):  # a lookup reads the table as it is
        with pytest.raises(PolicyError, match=r"table.weight, head.weight: read in float32"):
            freeze(Tied(product=False), (ids,), policy=policy)


class Sharing(nn.Module):
    """Parameters that are views of one buffer, overlapping or not."""

    def __init__(self, read: bool = False, trained: bool = False) -> None:
        super().__init__()
        flat = torch.randn(200, generator=torch.Generator().manual_seed(3))
        self.a = nn.Parameter(flat[8:72].view(8, 8), requires_grad=False)
        self.b = nn.Parameter(flat[64:128].view(8, 8).t(), requires_grad=False)
        self.c = nn.Parameter(flat[128:136], requires_grad=trained)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(F.linear(x, self.a, self.c), self.b)
        return y + self.a[0] if self.read else y


def test_parameters_on_one_memory_are_stored_together(x: torch.Tensor) -> None:
    model, other = Sharing(), Sharing()
    handle = freeze(model, (x,))
    assert handle.stored == ("a", "b", "c")
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    assert model.a.untyped_storage().nbytes() == 2 * 128
    assert [p.stride() for p in model.parameters()] == [p.stride() for p in other.parameters()]
    assert bits(model(x)) == bits(plainly(other, x))
    with torch.no_grad():
        model.a.view(-1)[-1] = 7.0
    assert model.b[7, 0] == 7.0, "they overlap no more"


def test_one_that_stays_keeps_all_that_share_its_memory(x: torch.Tensor) -> None:
    read, trained = Sharing(read=True), Sharing(trained=True)
    with pytest.raises(PolicyError, match=r"can be stored low. a, b, c: read in float32"):
        freeze(read, (x,))
    with pytest.raises(PolicyError, match=r"requires_grad_\(False\)"):
        freeze(trained, (x,))


def test_what_is_no_model_or_no_example_is_refused(x: torch.Tensor) -> None:
    model = frozen_weights(nn.Linear(8, 8))
    before = held(model)
    shown = "tensor(", "[].", "[tensor(", "{'input': tensor("
    for inputs, start in zip((x, [], [x], {"input": x}), shown, strict=True):
        with pytest.raises(TypeError) as raised:
            freeze(model, inputs)  # type: ignore[arg-type]
        takes, _, given = str(raised.value).partition(", got ")
        assert takes == (
            "freeze() takes the inputs of Linear as a tuple, such as (x,), or a list of tuples"
        )
        assert given.startswith(start)
        assert given.endswith(" For inputs by keyword write freeze(model, (), kwargs=...).")
    with pytest.raises(TypeError, match=r"kwargs as a dict, not as list"):
        freeze(model, (x,), [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module and its inputs, not <function"):
        freeze(plainly, (x,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"and its inputs, not \(tensor\(\[\[.{60,80}\.$"):
        freeze((torch.ones(8, 8),), model)  # type: ignore[arg-type]
    assert held(model) == before


def test_trained_weights_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(PolicyError) as raised:
        freeze(nn.Linear(8, 8), (x,))
    assert str(raised.value) == (
        "freeze(): no weight of Linear can be stored low. weight, bias: requires gradients. For "
        "weights that are not trained call requires_grad_(False) first."
    )


def test_models_that_cannot_be_followed_are_refused(x: torch.Tensor) -> None:
    twice = frozen_weights(nn.Sequential(nn.Linear(8, 8)))
    freeze(twice[0], (x,))
    with pytest.raises(PolicyError, match=r"Linear at '0' is frozen already, for autocast\('cpu'"):
        freeze(twice, (x,))
    with torch.inference_mode():
        inference = frozen_weights(nn.Linear(8, 8))
    with pytest.raises(TypeError, match=r"Linear has 'weight', an inference tensor"):
        freeze(inference, (x,))
    quantized = frozen_weights(nn.Linear(8, 8))
    with warnings.catch_warnings(action="ignore"):  # torch will have no such tensors one day
        quantized.register_buffer("q", torch.quantize_per_tensor(x, 0.1, 0, torch.qint8))
    with pytest.raises(TypeError, match=r"Linear has 'q', which is quantized"):
        freeze(quantized, (x,))
    compiled = frozen_weights(nn.Linear(8, 8))
    compiled.compile(backend="eager")
    with pytest.raises(TypeError, match=r"compiled by its own compile\(\). Freeze it before that"):
        freeze(compiled, (x,))
    lazy = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(TypeError, match=r"LazyLinear at '0' is lazy"):
        freeze(lazy, (x,))
    with pytest.raises(PolicyError, match=r"ReLU can be stored low. it has no float tensors"):
        freeze(nn.ReLU(), (x,))
    with pytest.raises(TypeError, match="Linear has 'weight', which is on meta, without values"):
        freeze(frozen_weights(nn.Linear(8, 8, device="meta")), (x,))


@pytest.mark.filterwarnings("ignore:.* prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_compared(x: torch.Tensor, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([x, x[:2]], layout=layout)
    net = frozen_weights(nn.Linear(8, 8))
    if layout is torch.strided:
        net.register_buffer("nested", nested)
    with autocast("cpu", torch.bfloat16):
        expected = net(nested).unbind()
    freeze(net, (nested,))
    assert all(map(torch.equal, net(nested).unbind(), expected))


def test_tensors_with_a_class_of_their_own_are_refused(x: torch.Tensor) -> None:
    class Odd(torch.Tensor):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    class Named(nn.Parameter):
        pass

    model = frozen_weights(nn.Linear(8, 8))
    model.register_buffer("odd", torch.ones(2).as_subclass(Odd))
    with pytest.raises(TypeError, match=r"'odd', whose class, Odd, changes what ops do"):
        freeze(model, (x,))
    del model.odd
    model.weight = Named(model.weight.data, False)
    assert "weight" in freeze(model, (x,)).stored
    assert type(model.weight) is Named


def test_a_disabled_region_is_refused(x: torch.Tensor) -> None:
    model = frozen_weights(nn.Linear(8, 8))
    before = held(model)
    with pytest.raises(PolicyError, match=r"\('cpu', torch.float32\) is disabled: .*not supported"):
        freeze(model, (x,), dtype=FP32)
    assert held(model) == before


def test_a_model_that_returns_nothing_to_compare_is_refused(x: torch.Tensor) -> None:
    def nothing(m: Any, x: torch.Tensor) -> Any:
        F.linear(x, m.weight)
        return []

    with pytest.raises(PolicyError, match="returns no tensor or number for the examples"):
        freeze(Uses(nothing), (x,))
