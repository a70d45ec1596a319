"""Records of a model in torch beside records of its port to JAX: BERT, a ResNet, and equinox.

The port has its framework's layouts, of which `compare` is not told. Either record is the first.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import numpy as np
import pytest

import polymp
from polymp.diagnostics.call_record import FORWARD
from polymp.diagnostics.compare import Comparison
from polymp.diagnostics.run_record import RESULT, UPDATE, RunRecord
from tests.conftest import need
from tests.shared.test_record_faults import _one_thread  # noqa: F401
from tests.support.ports import FAULTS, IN_JAX, Bert, Block, Config, ResNet
from tests.support.sizes import size

SEEDS = range(size(2, 3))
RIGHT: dict[str, Config] = {
    "bert": Bert(),
    "resnet": ResNet(),
    "block": Block(),
    "scoped block": Block(scoped=True),
}


def in_torch(config: Config, seed: int = 0) -> RunRecord:
    """The record of a step in torch."""
    import polymp.torch
    from tests.support.torch.ports import Training

    training = Training(config, seed)
    recorder = polymp.torch.record(None, training.model)
    with recorder:
        training.step()
    return recorder.record


@functools.cache
def in_jax(config: Config) -> tuple[RunRecord, ...]:
    """The records of a step for each seed, in JAX."""
    need("equinox")
    import polymp.jax
    from tests.support.jax.ports import Training
    from tests.support.torch.ports import weights

    trainings = [Training(config, weights(config, seed), seed) for seed in SEEDS]
    step = polymp.jax.record(None, trainings[0].step)
    for training in trainings:
        step(training.state, training.batch)
    return tuple(step.record._replace(steps=(s._replace(number=0),)) for s in step.record.steps)


def both_ways(one: RunRecord, other: RunRecord) -> list[Comparison]:
    """Either is the first."""
    return [polymp.compare(one, other), polymp.compare(other, one)]


def marked(key: str, config: Config) -> Any:
    """A case; JAX compiles what it records for the first time, so one model alone is quick."""
    quick = config == Block() or config in [c for c, _ in FAULTS.values() if c.name == "block"]
    return pytest.param(key, marks=[] if quick else pytest.mark.long)


@pytest.mark.sized
@pytest.mark.parametrize("name", [marked(*item) for item in RIGHT.items()])
def test_a_right_port_raises_no_alarm(name: str) -> None:
    config = RIGHT[name]
    for seed, record in zip(SEEDS, in_jax(config), strict=True):
        for comparison in both_ways(in_torch(config, seed), record):
            assert comparison.explained, str(comparison)
            pairs = [r for r in comparison.rows if r.one is not None and r.other is not None]
            assert {RESULT, UPDATE} <= {row.array.kind for row in pairs}
            assert max(row.share for row in pairs) > 0, "the two are one"


def names(comparison: Comparison) -> str:
    """The ops and modules that the verdict shows, the modules as torch writes them."""
    first = comparison.first
    arrays = [] if first is None else [a for a in (first.one, first.other) if a is not None]
    return re.sub(r"_(\d+)", r".\1", " ".join(f"{a.name} {a.module}" for a in arrays))


@pytest.mark.parametrize("fault", [marked(f, config) for f, (config, _) in FAULTS.items()])
def test_a_fault_is_named(fault: str) -> None:
    config, where = FAULTS[fault]
    for comparison in both_ways(in_torch(config), in_jax(type(config)())[0]):
        assert where in names(comparison), str(comparison)


@pytest.mark.long
@pytest.mark.parametrize("fault", IN_JAX)
def test_a_fault_of_the_port_is_named(fault: str) -> None:
    config, where = IN_JAX[fault]
    for comparison in both_ways(in_torch(type(config)()), in_jax(config)[0]):
        assert where in names(comparison), str(comparison)


def test_of_packed_weights_the_gradient_alone_is_not_compared() -> None:
    """torch has the three weights of an attention in one matrix."""
    comparison = polymp.compare(in_torch(Block()), in_jax(Block())[0])
    alone = [r.array.name for r in comparison.rows if r.other is None and r.array.kind != RESULT]
    assert alone.count("attention.in_proj_weight") == 3  # itself, its gradient and its update
    (mixed,) = (
        r
        for r in comparison.rows
        if r.array.name == "scaled_dot_product_attention" and r.array.direction == FORWARD
    )
    assert mixed.other is not None, "what is computed with it was not compared"
    assert any("attention.in_proj_weight" in note for note in comparison.notes)


def ported(model: Any, step: Any, port: Any, *given: Any, probes: int = 8) -> list[Comparison]:
    """A step in torch and its port, a function of the parameters by name and of the same arrays.

    Running means come between these, if the model has some.
    """
    import jax.numpy as jnp

    import polymp.jax
    import polymp.torch

    params, buffers = (
        {name: jnp.array(x.detach().numpy()) for name, x in named}
        for named in (model.named_parameters(), model.named_buffers())
    )
    recorder = polymp.torch.record(None, model, probes=probes)
    with recorder:
        step(*given)
    recorded = polymp.jax.record(None, port, probes=probes)
    recorded(params, *filter(None, [buffers]), *(jnp.asarray(x.numpy()) for x in given))
    return both_ways(recorder.record, recorded.record)


VOCABULARY, WIDTH, HEADS, BATCH, LENGTH = 32, 32, 4, 4, 12


@pytest.mark.parametrize("shifted", [True, False])
def test_a_fault_is_named_though_the_loss_or_its_gradient_agree(shifted: bool) -> None:
    """In torch the gradient of the loss reads the scores, and has none of their values.

    Where targets are not shifted, both losses are the same by chance, to five digits.
    """
    need("jax")
    import jax
    import jax.numpy as jnp
    import torch
    from torch import nn

    torch.manual_seed(0)
    parts = {"e": nn.Embedding(VOCABULARY, WIDTH)}
    parts |= {name: nn.Linear(WIDTH, WIDTH) for name in "qkv"}
    model = nn.ModuleDict({**parts, "h": nn.Linear(WIDTH, VOCABULARY)})
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    ends = (slice(-1), slice(1, None)) if shifted else (slice(None), slice(None))
    split = BATCH, LENGTH, HEADS, WIDTH // HEADS

    def step(tokens: Any) -> None:
        x = model["e"](tokens)
        q, k, v = (model[name](x).view(split).transpose(1, 2) for name in "qkv")
        weights = (q @ k.mT / (WIDTH // HEADS) ** 0.5).softmax(-1)
        scores = model["h"](x + (weights @ v).transpose(1, 2).reshape(x.shape))
        targets = tokens[:, ends[1]].reshape(-1)
        nn.functional.cross_entropy(scores[:, ends[0]].reshape(-1, VOCABULARY), targets).backward()

    def loss(p: Any, tokens: Any) -> Any:
        def linear(name: str, x: Any) -> Any:
            return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

        x = p["e.weight"][tokens]
        q, k, v = (linear(name, x).reshape(split).transpose(0, 2, 1, 3) for name in "qkv")
        weights = jax.nn.softmax(q @ k.mT / WIDTH**0.5, -1)  # the fault
        scores = linear("h", x + (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape))
        logs, targets = jax.nn.log_softmax(scores[:, ends[0]], -1), tokens[:, ends[1], None]
        return -jnp.take_along_axis(logs, targets, -1).mean()

    for found in ported(model, step, jax.value_and_grad(loss), tokens, probes=4):
        assert found.first is not None
        assert (found.first.array.name, found.first.array.direction) == ("div", FORWARD)


@pytest.mark.parametrize("last", ["Identity", pytest.param("LayerNorm", marks=pytest.mark.long)])
def test_a_gelu_by_tanh_is_named_though_the_loss_or_a_norm_hardly_differs(last: str) -> None:
    """Of one block of 16 numbers: what comes after it may pass for the same."""
    need("jax")
    import jax
    import jax.numpy as jnp
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), getattr(nn, last)(16)
    )
    net.append(nn.Linear(16, 16))
    step = lambda x: net[5](net[4](x + net[:4](x))).square().mean().backward()  # noqa: E731

    def loss(p: Any, given: Any) -> Any:
        def linear(at: int, x: Any) -> Any:
            return x @ p[f"{at}.weight"].T + p[f"{at}.bias"]

        def norm(at: int, x: Any) -> Any:
            x = x - x.mean(-1, keepdims=True)
            x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
            return x * p[f"{at}.weight"] + p[f"{at}.bias"]

        x = given + linear(3, jax.nn.gelu(linear(1, norm(0, given))))
        return (linear(5, norm(4, x) if last == "LayerNorm" else x) ** 2).mean()

    here, there = ported(net, step, jax.value_and_grad(loss), torch.randn(16, 16))
    assert here.first is not None
    assert there.first is not None
    assert here.first.array.name == "gelu", str(here)
    assert there.first.other is not None
    assert there.first.other.name == "gelu", str(there)


def test_another_mask_is_named_though_no_result_tells() -> None:
    """All values are alike, so that any mixture of them is the same."""
    need("jax")
    import jax
    import jax.numpy as jnp
    import torch

    def step(q: Any, k: Any, v: Any, *seen: Any) -> None:
        ((q @ k.mT).masked_fill(~seen[0], -torch.inf).softmax(-1) @ v).mean()

    def mixed(_: Any, q: Any, k: Any, v: Any, *seen: Any) -> Any:
        return (jax.nn.softmax(jnp.where(seen[-1], q @ k.mT, -jnp.inf), -1) @ v).mean()

    q, k = torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(0))
    for shift in (0, 1):  # the right mask, and one that shows one token more
        seen = [torch.tensor(np.tri(16, k=k, dtype=bool)) for k in (0, shift)]
        for found in ported(torch.nn.Identity(), step, mixed, q, k, torch.ones(4, 16, 8), *seen):
            first = found.first and found.first.array.name
            assert first in (("masked_fill", "where") if shift else (None,)), str(found)


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_what_a_port_returns_is_compared_and_what_jax_grad_leaves_out_is_not(factor: float) -> None:
    need("jax")
    import jax
    import jax.numpy as jnp
    import torch

    net = torch.nn.Linear(16, 4)
    x, y = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    port = lambda p, x: jnp.tanh(x @ p["weight"].T + p["bias"]) * factor  # noqa: E731
    for found in ported(net, lambda x: net(x).tanh(), port, x):
        assert found.explained == (factor == 1), str(found)

    def loss(p: Any, x: Any, y: Any) -> Any:
        return factor * ((x @ p["weight"].T + p["bias"] - y) ** 2).mean()

    step = lambda x, y, _: ((net(x) - y) ** 2).mean().backward()  # noqa: E731
    port = lambda p, x, y, n: (jax.grad(loss)(p, x, y), n + 1)  # noqa: E731
    for found in ported(net, step, port, x, y[:, :4], torch.zeros(())):
        assert found.explained == (factor == 1), str(found)

    def detached(p: Any, x: Any, y: Any, n: Any) -> Any:
        return jax.grad(lambda p: loss(p | {"bias": jax.lax.stop_gradient(p["bias"])}, x, y))(p)

    net.zero_grad()
    found = ported(net, step, detached, x, y[:, :4], torch.zeros(()))[0]
    assert factor != 1 or "the gradient of bias is in one" in str(found)

    def average(p: Any, x: Any, y: Any) -> Any:
        own = jax.grad(lambda p: ((x @ p["weight"].T + p["bias"] - y) ** 2).mean())(p)
        return {name: gradient * factor for name, gradient in own.items()}

    net.zero_grad()
    for found in ported(net, lambda x, y: step(x, y, 0), average, x, y[:, :4]):
        assert found.explained == (factor == 1), str(found)


@pytest.mark.parametrize("fill", ["zeros_", "normal_"])
def test_weights_that_one_run_packs_into_one_raise_no_alarm(fill: str) -> None:
    """Nothing tells biases of zeros apart, which other layers have, too."""
    need("jax")
    import jax
    import torch
    from torch import nn

    import polymp.jax
    import polymp.torch

    torch.manual_seed(0)
    packed = nn.ModuleDict({"qv": nn.Linear(8, 16), "o": nn.Linear(8, 16)})
    for layer in packed.values():
        getattr(nn.init, fill)(layer.bias)
    split = nn.ModuleDict({"q": nn.Linear(8, 8), "v": nn.Linear(8, 8), "o": packed["o"]})
    for name, rows in (("q", slice(8)), ("v", slice(8, None))):
        split[name].load_state_dict({k: t[rows] for k, t in packed["qv"].state_dict().items()})
    x = torch.randn(5, 8)

    def end(x: Any) -> Any:
        for _ in range(5):  # most calls are the same
            x = x - x.mean(-1, keepdims=True) ** 2
        return (x**2).mean()

    def loss(p: Any, x: Any) -> Any:
        y = x @ p["qv.weight"].T + p["qv.bias"]
        return end((y[:, :8] * y[:, 8:]) @ p["o.weight"].T + p["o.bias"])

    recorded = polymp.jax.record(None, jax.grad(loss, (0, 1)))  # of x, too, unlike torch
    recorded({k: t.numpy() for k, t in packed.state_dict().items()}, x.numpy())
    records = [recorded.record]
    for model in (packed, split):
        packed.zero_grad()
        with (recorder := polymp.torch.record(None, model)):
            q, v = (
                packed["qv"](x).chunk(2, -1) if model is packed else (split["q"](x), split["v"](x))
            )
            end(model["o"](q * v)).backward()
        records.append(recorder.record)
    for one, other in itertools.combinations(records, 2):
        here, there = both_ways(one, other)
        assert here.explained, str(here)
        assert there.explained, str(there)
    assert any("q.bias" in note for note in polymp.compare(records[2], records[0]).notes)


def test_what_a_loss_is_multiplied_by_raises_no_alarm() -> None:
    """In torch the gradient of a loss is made of constants; a port has their product at once."""
    need("jax")
    import jax
    import jax.numpy as jnp
    import torch

    net = torch.nn.Linear(6, 6)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))

    def step(x: Any) -> None:
        y = net(x)
        ((y**2).sum() / 4 - 0.5 * (y - y.exp()).sum() / 4).backward()

    def loss(p: Any, x: Any) -> Any:
        y = x @ p["weight"].T + p["bias"]
        return (y**2).sum() / 4 + (-0.5 * (y - jnp.exp(y))).sum() / 4

    for found in ported(net, step, jax.value_and_grad(loss), x):
        assert found.explained, str(found)


@pytest.mark.parametrize("eps", [1e-5, 1e-3])
def test_a_fault_behind_a_loop_is_named_and_not_the_loop(eps: float) -> None:
    """An LSTM is one op in torch; in JAX two scans, whose outputs are stacked."""
    need("jax")
    import jax
    import jax.numpy as jnp
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.ModuleDict({"rnn": nn.LSTM(6, 8, bidirectional=True), "norm": nn.LayerNorm(16)})
    step = lambda x: net["norm"](net["rnn"](x)[0]).square().mean().backward()  # noqa: E731

    def loss(p: Any, x: Any) -> Any:
        def outputs(end: str) -> Any:
            def cell(state: Any, x: Any) -> Any:
                gates = x @ p[f"rnn.weight_ih_l0{end}"].T + p[f"rnn.bias_ih_l0{end}"]
                gates += state[0] @ p[f"rnn.weight_hh_l0{end}"].T + p[f"rnn.bias_hh_l0{end}"]
                i, f, g, o = jnp.split(gates, 4, -1)
                c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
                return (h := jax.nn.sigmoid(o) * jnp.tanh(c), c), h

            return jax.lax.scan(cell, (jnp.zeros((4, 8)),) * 2, x, reverse=bool(end))[1]

        x = jnp.concatenate([outputs(""), outputs("_reverse")], -1)
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + eps)
        return ((x * p["norm.weight"] + p["norm.bias"]) ** 2).mean()

    for found in ported(net, step, jax.value_and_grad(loss), torch.randn(5, 4, 6)):
        assert found.explained == (eps == 1e-5), str(found)
        assert found.explained or not {"rnn", "stack"} & {*names(found).split()}, str(found)


@pytest.mark.parametrize("fault", ["", "0.running_var", "silu"])
def test_batch_statistics_may_be_an_argument_of_their_own(fault: str) -> None:
    """An update is named, and not what it is made of, as of the variance that flax keeps."""
    need("jax")
    import jax
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 4), nn.SiLU())
    nn.init.uniform_(net.get_buffer("0.running_var"), 0.5, 1.5)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: Any) -> None:
        net(x).square().mean().backward()
        optimizer.step()

    def loss(p: Any, stats: Any, x: Any) -> Any:
        mean, var = x.mean(0), (x**2).mean(0) - x.mean(0) ** 2  # as flax computes it
        kept = var if fault else var * (len(x) / (len(x) - 1))
        new = {"0.running_mean": mean, "0.running_var": kept}
        new = {name: 0.9 * stats[name] + 0.1 * x for name, x in new.items()}
        x = (x - mean) * jax.lax.rsqrt(var + 1e-5) * p["0.weight"] + p["0.bias"]
        x = x @ p["1.weight"].T + p["1.bias"]
        x = jax.nn.relu(x) if fault == "silu" else jax.nn.silu(x)
        return (x**2).mean(), new | {"0.num_batches_tracked": stats["0.num_batches_tracked"] + 1}

    def port(p: Any, stats: Any, x: Any) -> Any:
        gradients, new = jax.grad(loss, has_aux=True)(p, stats, x)
        return {name: p[name] - 0.1 * gradients[name] for name in p}, new

    for found in ported(net, step, port, torch.randn(32, 16) + 1):
        first = found.first
        arrays = [a for a in (first and first.one, first and first.other) if a is not None]
        assert any(fault in a.name for a in arrays) if fault else found.explained, str(found)
