"""The cost of polymp's scaler beside the others': ratios of paired medians.

torch: host time of `unscale_`, `step` and `update` for 1,000 parameters, beside torch.amp's scaler
with the same optimizer. JAX: a jitted Adam step of 25 M parameters beside the same step with flax's
DynamicScale, and without a scaler. Programs are measured in turn, many times, in one run; the ratio
of the medians is what counts, and the middle half of the paired ratios stands beside it.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from flax.training.dynamic_scale import DynamicScale
from jax import lax
from pairing import Row, machine, measure, missed, row, save, show

import polymp.jax
import polymp.torch

PARTS = ("torch", "jax")
TORCH_BAR, JAX_BAR = 0.8, 0.6


# --- torch ---------------------------------------------------------------------------------------


class Add(torch.optim.Optimizer):
    """The least that an optimizer does: one call for all parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        with torch.no_grad():
            torch._foreach_add_(params, [p.grad for p in params], alpha=-1e-3)


class Nothing(Add):
    """A step that does nothing, which leaves the scaler alone."""

    def step(self, closure: Any = None) -> None:
        return None


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, fused": partial(torch.optim.SGD, lr=1e-3, fused=True),
    "SGD, foreach": partial(torch.optim.SGD, lr=1e-3, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "AdamW, one by one": partial(torch.optim.AdamW, lr=1e-3, foreach=False, fused=False),
    "one foreach add": Add,
    "an empty step": Nothing,
}


class Stepping:
    """Steps of one optimizer under one scaler; fresh gradients for each, which no time counts.

    Args:
        scaler: the class.
        optimizer: makes one of parameters.
        device: "cpu" or "cuda".
        count: how many parameters, of `size` numbers each.
        size: see `count`.
        scaling: whether the time of `scale` counts, too.
    """

    def __init__(
        self,
        scaler: Any,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        device: str,
        count: int,
        size: int = 16,
        scaling: bool = False,
    ) -> None:
        numbers = torch.Generator().manual_seed(0)

        def some() -> list[torch.Tensor]:
            return [torch.randn(size, generator=numbers).to(device) for _ in range(count)]

        self.params = [p.requires_grad_() for p in some()]
        self.grads = some()
        self.loss = torch.ones((), device=device)
        self.optimizer, self.scaler = optimizer(self.params), scaler(device)
        self.scaling, self.cuda = scaling, device == "cuda"

    def __call__(self) -> float:
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad.clone()
        if not self.scaling:
            self.scaler.scale(self.loss)
        if self.cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        if self.scaling:
            self.scaler.scale(self.loss)
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return time.perf_counter() - start


SCALERS = {"torch.amp": torch.amp.GradScaler, "polymp": polymp.torch.GradScaler}


def steppings(optimizer: str, *rest: Any, **options: Any) -> dict[str, Stepping]:
    make = OPTIMIZERS[optimizer]
    return {name: Stepping(kind, make, *rest, **options) for name, kind in SCALERS.items()}


def on_torch(device: str, count: int, rounds: int) -> Iterator[Row]:
    """Rows of all optimizers; `count` parameters each."""
    torch.set_num_threads(1)
    for name in OPTIMIZERS:
        times = measure(steppings(name, device, count), rounds)  # type: ignore[arg-type]
        yield row(f"{name} / torch.amp", times["torch.amp"], times["polymp"], TORCH_BAR)
    times = measure(steppings("an empty step", device, count, scaling=True), rounds)  # type: ignore[arg-type]
    what = "an empty step, and scale / torch.amp"
    yield row(what, times["torch.amp"], times["polymp"], None)


def torch_title(count: int) -> str:
    return f"unscale_, step and update of {count:,} parameters in torch"


# --- jax -----------------------------------------------------------------------------------------

ADAM = optax.adam(1e-3)
Step = Callable[..., tuple[Any, Any, Any, Any]]  # (params, opt, scaler, data) -> the same, loss


def loss_fn(params: Any, data: Any) -> Any:
    """A loss whose gradients are the data, at the price of one product."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(data), strict=True)
    return sum(jnp.vdot(p, d) for p, d in pairs)


def _updated(grads: Any, params: Any, opt: Any) -> Any:
    updates, opt = ADAM.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt


def plain(params: Any, opt: Any, scaler: Any, data: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(params, data)
    return *_updated(grads, params, opt), scaler, loss


def with_step(params: Any, opt: Any, scaler: Any, data: Any) -> Any:
    def scaled_loss(params: Any) -> Any:
        loss = loss_fn(params, data)
        return scaler.scale(loss), loss

    grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
    (params, opt), scaler, _ = scaler.step(grads, _updated, params, opt, loss=loss)
    return params, opt, scaler, loss


def with_value_and_grad(params: Any, opt: Any, scaler: Any, data: Any) -> Any:
    (loss, grads), scaler, finite = scaler.value_and_grad(loss_fn)(params, data)
    params, opt = lax.cond(finite, lambda: _updated(grads, params, opt), lambda: (params, opt))
    return params, opt, scaler, loss


def with_flax(params: Any, opt: Any, scaler: Any, data: Any) -> Any:
    """As flax's own examples have it: the new state or the old one, leaf by leaf."""
    scaler, finite, loss, grads = scaler.value_and_grad(loss_fn)(params, data)
    new = _updated(grads, params, opt)
    params, opt = jax.tree.map(partial(jnp.where, finite), new, (params, opt))
    return params, opt, scaler, loss


class Training:
    """Steps of a program, jitted, that reuse the memory of what they are given."""

    def __init__(self, step: Step, scaler: Any, leaves: int, size: int) -> None:
        params = tree(0, leaves, size)
        self.data = tree(1, leaves, size)
        self.state = (params, ADAM.init(params), scaler)
        self.step = jax.jit(step, donate_argnums=(0, 1, 2))
        jax.block_until_ready((self.state, self.data))

    def __call__(self) -> float:
        start = time.perf_counter()
        *state, _ = self.step(*self.state, self.data)
        self.state = jax.block_until_ready(tuple(state))
        return time.perf_counter() - start


def tree(seed: int, leaves: int, size: int) -> list[jax.Array]:
    """Matrices of about `size` numbers each."""
    side = round(size**0.5)
    keys = jax.random.split(jax.random.key(seed), leaves)
    return [jax.random.normal(key, (side, side)) for key in keys]


def _flax() -> Any:
    return DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(65536))  # type: ignore[arg-type]


PROGRAMS: dict[str, tuple[Step, Callable[[], Any]]] = {
    "without a scaler": (plain, lambda: ()),
    "flax": (with_flax, _flax),
    "step": (with_step, polymp.jax.GradScaler),
    "value_and_grad": (with_value_and_grad, polymp.jax.GradScaler),
}
BARS = {"step": JAX_BAR}


def trainings(leaves: int, size: int) -> dict[str, Training]:
    return {name: Training(f, make(), leaves, size) for name, (f, make) in PROGRAMS.items()}


def on_jax(millions: float, rounds: int) -> Iterator[Row]:
    leaves = 25
    times = measure(trainings(leaves, round(millions * 1e6 / leaves)), rounds)  # type: ignore[arg-type]
    for name in ("step", "value_and_grad"):
        for base in ("flax", "without a scaler"):
            bar = BARS.get(name) if base == "flax" else None
            yield row(f"{name} / {base}", times[base], times[name], bar)
    yield row("flax / without a scaler", times["without a scaler"], times["flax"], None)


# --- all of it -----------------------------------------------------------------------------------


def main() -> int:
    """Run what was asked for, print the tables, save them as JSON; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--device", default="cpu", help="of the torch part: cpu or cuda")
    parser.add_argument("--rounds", type=int, default=300, help="paired rounds, torch")
    parser.add_argument("--jax-rounds", type=int, default=40, help="paired rounds, JAX")
    parser.add_argument("--parameters", type=int, default=1000, help="in the torch part")
    parser.add_argument("--millions", type=float, default=25.0, help="of numbers in the JAX part")
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date and device")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    tables: dict[str, list[Row]] = {}
    if "torch" in parts:
        title = torch_title(args.parameters)
        tables[title] = list(on_torch(args.device, args.parameters, args.rounds))
    if "jax" in parts:
        title = f"an Adam step of {args.millions:g} M parameters in JAX"
        tables[title] = list(on_jax(args.millions, args.jax_rounds))
    for title, rows in tables.items():
        show(title, rows)
    lost = missed(r for rows in tables.values() for r in rows)
    print(f"Bars missed: {'; '.join(lost) or 'none'}.")
    record = {
        "machine": machine("torch", "jax", "flax", "optax", device=args.device),
        "rounds": {"torch": args.rounds, "jax": args.jax_rounds},
        "tables": tables,
    }
    save("scaler", args.device, record, args.out)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
