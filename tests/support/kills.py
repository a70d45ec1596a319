"""Programs in which a loss scaler can lose a run, and the scalers that are compared in them.

Each program trains the same small regression: good steps, then steps that overflow or have a NaN,
then good steps. `SUBJECTS` are the scalers, each used as its own documentation shows. `python -m
tests.support.kills` prints the tables of docs/rivals.md.

Nothing here imports a framework before it is asked for one of its scalers.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from polymp.errors import ScalerWarning

GOOD, OVERFLOW, LOST = "good", "overflow", "lost"
BEFORE, AFTER, INTERVAL = 20, 600, 4


class Kill(NamedTuple):
    what: str
    kind: str
    steps: int


KILLS = {
    "overflows": Kill("500 steps with Inf gradients", OVERFLOW, 500),
    "lost losses": Kill("60 steps with NaN in the forward pass", LOST, 60),
}


def batch(step: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [8, 4] and targets [8] of a step; a lost one has NaN among its inputs."""
    x = np.random.default_rng(step).normal(size=(8, 4)).astype(np.float32)
    y = x @ np.float32([1, -2, 3, 0.5]) + np.float32(0.25)
    if kind == LOST:
        x[3, 1] = np.nan
    return x, y


class Torch:
    """A linear model, SGD and a scaler, in torch."""

    def __init__(self, scaler: Any) -> None:
        import torch

        self.torch = torch
        self.model = torch.nn.Linear(4, 1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.optimizer = torch.optim.SGD(self.model.named_parameters(), lr=0.05, momentum=0.5)
        self.scaler = scaler

    def step(self, kind: str, x: np.ndarray, y: np.ndarray) -> None:
        torch = self.torch
        self.optimizer.zero_grad()
        prediction = self.model(torch.from_numpy(x))[:, 0]
        loss = ((prediction - torch.from_numpy(y)) ** 2).mean()
        if kind == OVERFLOW:  # a root at 0: it adds 0 to the loss, and Inf to the gradients
            total = self.model.weight.sum() + self.model.bias.sum()
            loss = loss + (total - total.detach()).sqrt()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def weights(self) -> np.ndarray:
        return np.concatenate([p.detach().numpy().ravel() for p in self.model.parameters()])

    def scale(self) -> float:
        return float(self.scaler.get_scale())


def polymp_torch() -> Torch:
    from polymp.torch import GradScaler

    return Torch(GradScaler("cpu", growth_interval=INTERVAL))


def torch_amp() -> Torch:
    import torch

    return Torch(torch.amp.GradScaler("cpu", growth_interval=INTERVAL))


def _loss(params: Any, x: Any, y: Any, kind: str) -> Any:
    import jax.numpy as jnp
    from jax import lax

    loss = jnp.mean((x @ params["weight"] + params["bias"] - y) ** 2)
    if kind == OVERFLOW:
        total = params["weight"].sum() + params["bias"]
        loss += jnp.sqrt(total - lax.stop_gradient(total))
    return loss


class Jax:
    """A linear model, SGD and a scaler, in JAX; the step is jitted."""

    def __init__(self, scaler: Any, train_step: Callable[..., Any]) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        params = {"bias": jnp.float32(0), "weight": jnp.zeros(4)}
        self.state = [params, optax.sgd(0.05, 0.5).init(params), scaler]
        self._step = jax.jit(train_step, static_argnames="kind")

    def step(self, kind: str, x: np.ndarray, y: np.ndarray) -> None:
        *self.state, grads = self._step(*self.state, x, y, kind=kind)
        self.stepped(grads)

    def stepped(self, grads: Any) -> None:
        pass

    def weights(self) -> np.ndarray:
        params = self.state[0]
        return np.concatenate([np.ravel(params["weight"]), np.ravel(params["bias"])])

    def scale(self) -> float:
        scaler = self.state[2]
        return float(scaler.loss_scale if hasattr(scaler, "loss_scale") else scaler.scale)


class PolympJax(Jax):
    """The same with polymp's scaler, and its report of many skips in a row."""

    def __init__(self, train_step: Callable[..., Any]) -> None:
        from polymp.jax import GradScaler

        super().__init__(GradScaler(growth_interval=INTERVAL), train_step)

    def stepped(self, grads: Any) -> None:
        scaler = self.state[2]
        if scaler.state.skips == 50:
            warnings.warn(scaler.report(grads).why_stuck, ScalerWarning, stacklevel=2)

    def scale(self) -> float:
        return float(self.state[2].state.scale)


def _apply(grads: Any, params: Any, opt: Any) -> Any:
    import optax

    updates, opt = optax.sgd(0.05, 0.5).update(grads, opt, params)
    return optax.apply_updates(params, updates), opt


def polymp_jax() -> Jax:
    def train_step(params: Any, opt: Any, scaler: Any, x: Any, y: Any, kind: str) -> Any:
        import jax

        def scaled_loss(params: Any) -> Any:
            loss = _loss(params, x, y, kind)
            return scaler.scale(loss), loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
        (params, opt), scaler, _ = scaler.step(grads, _apply, params, opt, loss=loss)
        return params, opt, scaler, grads

    return PolympJax(train_step)


def flax_dynamic_scale() -> Jax:
    from flax.training.dynamic_scale import DynamicScale

    def train_step(params: Any, opt: Any, scaler: Any, x: Any, y: Any, kind: str) -> Any:
        import jax
        import jax.numpy as jnp

        loss_fn = partial(_loss, kind=kind)
        scaler, finite, _, grads = scaler.value_and_grad(loss_fn)(params, x, y)
        new = _apply(grads, params, opt)
        select = partial(jnp.where, finite)
        params, opt = jax.tree.map(select, new, (params, opt))
        return params, opt, scaler, grads

    return Jax(DynamicScale(growth_interval=INTERVAL), train_step)


def jmp_dynamic_loss_scale() -> Jax:
    import jax.numpy as jnp
    import jmp

    def train_step(params: Any, opt: Any, scaler: Any, x: Any, y: Any, kind: str) -> Any:
        import jax

        grads = jax.grad(lambda params: scaler.scale(_loss(params, x, y, kind)))(params)
        grads = scaler.unscale(grads)
        finite = jmp.all_finite(grads)
        scaler = scaler.adjust(finite)
        new = _apply(grads, params, opt)
        params, opt = jmp.select_tree(finite, new, (params, opt))
        return params, opt, scaler, grads

    return Jax(jmp.DynamicLossScale(jnp.float32(2.0**16), period=INTERVAL), train_step)


class Subject(NamedTuple):
    framework: str
    package: str
    make: Callable[..., Any]


SUBJECTS = {
    "polymp, torch": Subject("torch", "polymp", polymp_torch),
    "torch.amp": Subject("torch", "torch", torch_amp),
    "polymp, JAX": Subject("jax", "polymp", polymp_jax),
    "flax": Subject("jax", "flax", flax_dynamic_scale),
    "jmp": Subject("jax", "jmp", jmp_dynamic_loss_scale),
}


class Outcome(NamedTuple):
    finite: bool  # every parameter is finite at the end
    first: float  # the scale before what would kill the run
    scale: float  # the scale after it
    before: float  # error of the parameters before it
    after: float  # the error at the end
    said: tuple[str, ...]  # all that was printed and warned

    @property
    def trains(self) -> bool:
        return self.finite and self.after < self.before / 100


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collect warnings and printed text in a list, which is filled at the end."""
    said: list[str] = []
    printed = io.StringIO()
    with (
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        warnings.simplefilter("always")
        yield said
    said += [str(w.message) for w in caught] + printed.getvalue().splitlines()


def run(make: Callable[[], Any], kill: Kill) -> Outcome:
    with heard() as said:
        it = make()
        kinds = [GOOD] * BEFORE + [kill.kind] * kill.steps + [GOOD] * AFTER
        before = first = scale = math.nan
        for at, kind in enumerate(kinds):
            if at == BEFORE:
                before, first = error(it), it.scale()
            if at == BEFORE + kill.steps:
                scale = it.scale()
            it.step(kind, *batch(at, kind))
    finite = bool(np.isfinite(it.weights()).all())
    return Outcome(finite, first, scale, before, error(it), tuple(said))


def error(it: Any) -> float:
    return float(np.abs(it.weights() - np.float32([1, -2, 3, 0.5, 0.25])).max())


def shown(scale: float) -> str:
    mantissa, exponent = math.frexp(scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def page(found: Callable[[str, str], Outcome]) -> str:
    """The table in Markdown, and the messages. `found` gives the outcome of a scaler in a program.

    The messages are those of the first scaler: others name the gradients in another order, or come
    a few steps later.
    """
    heads = ["scaler", "scale before"]
    for kill in KILLS.values():
        heads += [f"after {kill.what}", "still trains", "warns"]
    rows, said = [heads, ["---"] * len(heads)], []
    for name in SUBJECTS:
        outcomes = [found(name, key) for key in KILLS]
        cells = [name, shown(outcomes[0].first)]
        for it in outcomes:
            trains = "yes" if it.trains else "**no**" if it.finite else "**no: NaN**"
            times = {0: "never", 1: "once"}.get(len(it.said), f"{len(it.said)} x")
            cells += [shown(it.scale), trains, times]
        rows.append(cells)
        said = said or [text for it in outcomes for text in it.said]
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n\n".join(["\n".join(lines), *(f"> {text}" for text in said)]) + "\n"


def versions() -> str:
    """The packages that were run."""
    names = dict.fromkeys(["torch", "jax"] + [subject.package for subject in SUBJECTS.values()])
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


if __name__ == "__main__":
    outcomes = page(lambda name, key: run(SUBJECTS[name].make, KILLS[key]))
    sys.stdout.write(f"{versions()}\n\n{outcomes}")
