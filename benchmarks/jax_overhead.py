"""What polymp's JAX backend gains and costs: ratios of paired medians.

A transformer in float32, cast by hand to bfloat16, and under autocast: time of a train step and of
a forward pass, memory left for the backward pass, error of the gradient, formats in the optimised
HLO. Then the price of rewriting a trace, and of a call. Programs are measured in turn, many times,
in one run; the ratio of the medians is what counts, and the spread of the paired ratios stands
beside it. The bars hold on the CPU.
"""

import argparse
import gc
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import polymp
from polymp.jax import autocast

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.jax import hlo, transformer

RESULTS = Path(__file__).parent / "results"
PARTS = ("step", "forward", "model", "rewrite", "call")
# From jax 0.11 on, XLA runs bfloat16 contractions of the CPU in a slow kernel; see docs.
OLD = jax.__version_info__ < (0, 11)
Program = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One comparison: medians in milliseconds, their ratio; quartiles of the paired ratios."""

    what: str
    base: float
    ours: float
    ratio: float
    low: float
    paired: float
    high: float
    bar: float | None


def measure(programs: dict[str, Program], rounds: int, inner: int = 1) -> dict[str, list[float]]:
    """Times in milliseconds, of programs that run in turn; each round starts with another one."""
    names = list(programs)
    for name in names:  # compile, then settle
        programs[name]()
        programs[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = time.perf_counter()
            for _ in range(inner):
                programs[name]()
            times[name].append((time.perf_counter() - start) / inner * 1e3)
    return times


def row(what: str, base: list[float], ours: list[float], bar: float | None) -> Row:
    ratios = sorted(o / b for o, b in zip(ours, base, strict=True))
    a, b = statistics.median(base), statistics.median(ours)
    quarter = len(ratios) // 4
    middle = statistics.median(ratios)
    return Row(what, a, b, b / a, ratios[quarter], middle, ratios[-1 - quarter], bar)


def versions(size: transformer.Size) -> dict[str, transformer.Loss]:
    """The three programs: loss(params, batch)."""
    plain = partial(transformer.loss, heads=size.heads)
    return {
        "float32": plain,
        "by hand": partial(plain, compute=jnp.bfloat16),
        "autocast": autocast(plain),
    }


def stepping(loss: transformer.Loss, params: transformer.Params, batch: jax.Array) -> Program:
    """Train steps, one a call, that reuse the memory of the parameters."""
    step = jax.jit(transformer.train_step(loss, 1e-3), donate_argnums=0)
    state = jax.tree.map(jnp.copy, params)

    def program() -> None:
        nonlocal state
        state, value = step(state, batch)
        jax.block_until_ready((state, value))

    return program


def running(f: Callable[..., Any], *args: Any) -> Program:
    return lambda: jax.block_until_ready(f(*args))


def speed(part: str, size: transformer.Size, scanned: bool, rounds: int, cpu: bool) -> list[Row]:
    """The three versions in turn: a train step, or the forward pass alone."""
    params = transformer.parameters(size, scanned=scanned)
    batch = transformer.tokens(size)
    times = measure(
        {
            name: stepping(loss, params, batch)
            if part == "step"
            else running(jax.jit(loss), params, batch)
            for name, loss in versions(size).items()
        },
        rounds,
    )
    bars: dict[str, float | None] = {}
    if cpu and not scanned and OLD:
        # A forward pass gains less over float32, as there is less to contract.
        hand, plain = {"step": (0.85, 0.75), "forward": (0.75, 0.85)}[part]
        bars = {"by hand": hand, "float32": plain}
    elif cpu and not scanned and part == "step":
        bars = {"float32": 1.0}
    what = {"step": "train step", "forward": "forward pass"}[part]
    what += ", scan and remat" if scanned else ""
    rows = [
        row(f"{what}: autocast / {base}", times[base], times["autocast"], bars.get(base))
        for base in ("by hand", "float32")
    ]
    return [*rows, row(f"{what}: by hand / float32", times["float32"], times["by hand"], None)]


@dataclass(frozen=True)
class Model:
    """What a version of the transformer keeps, rounds, and lets XLA run."""

    version: str
    residual_mb: float
    gradient_error: float  # median over the seeds
    worst_seed: float
    low_contractions: int  # those with low operands and a float32 result
    contractions: dict[str, int]


def models(size: transformer.Size, scanned: bool, seeds: int) -> list[Model]:
    """Residuals, error of the gradient against float32's, and formats of the compiled step."""
    made = versions(size)
    batches = [transformer.tokens(size, seed) for seed in range(seeds)]
    states = [transformer.parameters(size, seed, scanned=scanned) for seed in range(seeds)]
    exact: list[Any] = []
    found = []
    for name, loss in made.items():
        gradient = jax.jit(jax.grad(loss))
        grads = [gradient(p, b) for p, b in zip(states, batches, strict=True)]
        exact = exact or grads
        errors = [distance(g, e) for g, e in zip(grads, exact, strict=True)]
        step = jax.jit(transformer.train_step(loss))
        text = step.lower(states[0], batches[0]).compile().as_text() or ""
        found.append(
            Model(
                f"{name}, scan and remat" if scanned else name,
                hlo.residual_bytes(loss, states[0], batches[0]) / 1e6,
                statistics.median(errors),
                max(errors),
                sum(c.low and c.full for c in hlo.contractions(text)),
                dict(hlo.summary(text)),
            )
        )
    return found


def distance(grads: Any, exact: Any) -> float:
    """Relative l2 distance over the whole gradient."""
    pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True))
    apart = sum(float(jnp.sum((g - e) ** 2)) for g, e in pairs)
    return math.sqrt(apart / sum(float(jnp.sum(e**2)) for _, e in pairs))


@dataclass(frozen=True)
class Rewrite:
    """The price of autocast over `jax.make_jaxpr`: medians in milliseconds."""

    equations: int
    trace: float
    extra: float
    ratio: float
    us_an_equation: float
    bar: float | None = 2.0


def chain(blocks: int) -> Callable[[jax.Array], jax.Array]:
    """Ten equations a block, of all kinds: contraction, float32, native. A new function a call."""

    def f(x: jax.Array) -> jax.Array:
        w, b = x[:4] * 0.5, x[4] * 0.1
        bias = jax.lax.broadcast_in_dim(b, (8, 4), (1,))
        for _ in range(blocks):
            h = jax.lax.dot(x, w) + bias
            g = jax.lax.exp(-jax.lax.abs(h))
            s = jax.lax.reduce_sum(g, (1,))
            x = jax.lax.tanh(h) * jax.lax.broadcast_in_dim(s, (8, 4), (0,)) + x
        return x

    return f


def rewriting(counts: Iterable[int], rounds: int) -> list[Rewrite]:
    """Trace and rewrite functions that no cache has seen; in processor time, as all is Python."""
    x = jnp.linspace(-1, 1, 32).reshape(8, 4)
    jax.make_jaxpr(autocast(chain(2)))(x)
    found = []
    for count in counts:
        traces, extras = [], []
        blocks = max(1, count // 10)
        for i in range(max(3, min(rounds, 100_000 // count))):
            took = {}
            for ours in (False, True) if i % 2 else (True, False):
                f = chain(blocks)
                g = autocast(f) if ours else f
                gc.collect()
                start = time.process_time()
                jaxpr = jax.make_jaxpr(g)(x)
                took[ours] = (time.process_time() - start) * 1e3
                if not ours:
                    equations = len(jaxpr.jaxpr.eqns)
                del jaxpr
            traces.append(took[False])
            extras.append(took[True] - took[False])
        trace, extra = statistics.median(traces), statistics.median(extras)
        found.append(Rewrite(equations, trace, extra, extra / trace, extra / equations * 1e3))
    return found


@dataclass(frozen=True)
class Growth:
    """The exponent of time against equations, by least squares: 1 is linear."""

    trace: float
    extra: float
    bar: float = 1.2  # make_jaxpr's own is above 1 too: caches and the garbage collector


def growth(rows: list[Rewrite]) -> Growth:
    def slope(ys: list[float]) -> float:
        x, y = [math.log(r.equations) for r in rows], [math.log(max(y, 1e-9)) for y in ys]
        return statistics.linear_regression(x, y).slope

    return Growth(slope([r.trace for r in rows]), slope([r.extra for r in rows]))


@dataclass(frozen=True)
class Calls:
    """Calls of a small function: how often Python ran it, and medians in microseconds."""

    traces_first: int
    traces_second: int
    jit: float
    jit_of_autocast: float
    autocast_of_jit: float
    autocast_eager: float


def calling(rounds: int) -> Calls:
    """Two eager calls, counted by a side effect, then what a call costs."""
    traces = 0
    w = jnp.linspace(-1, 1, 64 * 64).reshape(64, 64)

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        nonlocal traces
        traces += 1
        return jax.nn.softmax(jnp.tanh(x @ w) @ w)

    eager = autocast(f)
    jax.block_until_ready(eager(w, w))
    first = traces
    jax.block_until_ready(eager(w, w))
    second = traces
    programs = {
        "jit": jax.jit(f),
        "jit_of_autocast": jax.jit(autocast(f)),
        "autocast_of_jit": autocast(jax.jit(f)),
        "autocast_eager": eager,
    }
    times = measure({k: running(g, w, w) for k, g in programs.items()}, rounds, inner=50)
    return Calls(first, second, **{k: statistics.median(t) * 1e3 for k, t in times.items()})


def main() -> int:
    """Run what was asked for, print the tables, save them as JSON; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--rounds", type=int, default=20, help="paired rounds")
    parser.add_argument("--seeds", type=int, default=3, help="gradients to take errors of")
    parser.add_argument("--equations", type=int, nargs="*",
                        default=[1_000, 3_000, 10_000, 30_000, 100_000])  # fmt: skip
    for field in fields(transformer.Size):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date and device")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    size = transformer.Size(**{f.name: getattr(args, f.name) for f in fields(transformer.Size)})
    device = jax.devices()[0]
    cpu = device.platform == "cpu"
    machine = f"CPU, {platform.machine()}" if cpu else device.device_kind

    speeds, kept = [], []
    for scanned in (False, True):
        for part in ("step", "forward"):
            if part in parts:
                speeds += speed(part, size, scanned, args.rounds, cpu)
        if "model" in parts:
            kept += models(size, scanned, args.seeds)
    rewrites = rewriting(args.equations, args.rounds) if "rewrite" in parts else []
    grown = [growth(rewrites)] if len(rewrites) > 1 else []
    calls = [calling(args.rounds)] if "call" in parts else []

    missed = [r.what for r in speeds if r.bar is not None and r.ratio > r.bar]
    missed += [f"rewrite of {r.equations:,} equations" for r in rewrites if r.ratio > r.bar]
    missed += ["growth of the rewrite" for g in grown if g.extra > g.bar]
    missed += ["a second call traces" for c in calls if c.traces_second > 1]
    for hand, ours in zip(kept[1::3], kept[2::3], strict=True):
        if ours.residual_mb > hand.residual_mb:
            missed.append(f"residuals of {ours.version}")
        if ours.gradient_error > hand.gradient_error:
            missed.append(f"gradient error of {ours.version}")
        if cpu and OLD and ours.low_contractions < sum(ours.contractions.values()):
            missed.append(f"formats of contractions of {ours.version}")

    show(f"Time, ms, jax {jax.__version__}, {machine}", speeds)
    show("The transformer", kept)
    show("Rewriting a trace, ms", rewrites)
    show("Time of a rewrite grows with the equations to the power", grown)
    show("Calls, us", calls)
    print(f"Bars missed: {', '.join(missed) or 'none'}.")
    now = datetime.now(UTC)
    path = args.out or RESULTS / f"{now:%Y-%m-%d}-jax-overhead-{device.platform}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "date": f"{now:%Y-%m-%d}",
        "machine": machine,
        "devices": len(jax.devices()),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "polymp": polymp.__version__,
        "size": asdict(size),
        "rounds": args.rounds,
        "speed": [asdict(r) for r in speeds],
        "model": [asdict(m) for m in kept],
        "rewrite": [asdict(r) for r in rewrites],
        "growth": [asdict(g) for g in grown],
        "call": [asdict(c) for c in calls],
        "missed": missed,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return int(bool(missed))


def show(title: str, rows: Sequence[Any]) -> None:
    """Print dataclasses of one kind as a table: a row each, a column per field."""
    if not rows:
        return
    table = Table(title=title)
    for i, field in enumerate(fields(rows[0])):
        table.add_column(field.name.replace("_", " "), justify="right" if i else "left")
    for r in rows:
        table.add_row(*(_cell(getattr(r, field.name)) for field in fields(r)))
    Console(width=130).print(table)


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case dict():
            return ", ".join(f"{n} {name}" for name, n in value.items())
        case float():
            return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        case int():
            return f"{value:,}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
