"""The cost of polymp's JAX backend before a program runs: ratios of paired medians.

The price of planning and tracing again, beside `jax.make_jaxpr`, for functions of 1,000 to 100,000
equations that no cache has seen, and whether it grows as they do; in processor time, as all of it
is Python. Then what a call costs. How fast programs run is shown by jax_speed.py.
"""

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from pairing import Row, machine, measure, missed, row, save, show, timed

from polymp.jax import autocast

PARTS = ("rewrite", "call")
EXTRA_BAR = 1.0  # plan and re-emit / make_jaxpr
CALL_BAR = 2.0  # a call under autocast / the call
GROWTH_BAR = 1.2  # exponent; make_jaxpr's own is above 1, too: caches and the garbage collector


def running(f: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(f(*args))


@dataclass(frozen=True)
class Rewrite:
    """The price of autocast over `jax.make_jaxpr`: milliseconds of processor time, in pairs."""

    equations: int
    traces: list[float]
    extras: list[float]

    @property
    def us_an_equation(self) -> float:
        """Of planning and tracing again."""
        return statistics.median(self.extras) / self.equations * 1e3


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


def rewriting(counts: Iterable[int], rounds: int) -> Iterator[Rewrite]:
    """Trace and rewrite functions that no cache has seen, in pairs."""
    x = jnp.linspace(-1, 1, 32).reshape(8, 4)
    jax.make_jaxpr(autocast(chain(2)))(x)
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
        yield Rewrite(equations, traces, extras)


def rows(rewrites: Sequence[Rewrite]) -> list[Row]:
    """The price beside make_jaxpr's, and how both grow."""
    found = [
        row(
            f"{r.equations:,} equations: plan and re-emit / make_jaxpr",
            r.traces,
            r.extras,
            EXTRA_BAR,
        )
        for r in rewrites
    ]
    if len(rewrites) > 1:
        trace, extra = (growth(rewrites, part) for part in ("traces", "extras"))
        what = "exponent of growth: plan and re-emit / 1"
        found.append(row(what, [1.0], [extra], GROWTH_BAR, ""))
        found.append(row("exponent of growth: make_jaxpr / 1", [1.0], [trace], None, ""))
    return found


def growth(rewrites: Sequence[Rewrite], part: str) -> float:
    """The exponent of time against equations, by least squares: 1 is linear."""
    x = [math.log(r.equations) for r in rewrites]
    y = [math.log(max(statistics.median(getattr(r, part)), 1e-9)) for r in rewrites]
    return statistics.linear_regression(x, y).slope


def calling(rounds: int) -> Iterator[Row]:
    """Time calls, with and without autocast, to their end."""
    w = jnp.linspace(-1, 1, 64 * 64).reshape(64, 64)

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.tanh(x @ w) @ w)

    def traced(w: jax.Array, x: jax.Array) -> jax.Array:
        jax.make_jaxpr(lambda w, x: f(w, x))(w, x)  # a new function: no cache has its trace
        return f(w, x)

    programs = {
        "jit(f)": jax.jit(f),
        "jit(autocast(f))": jax.jit(autocast(f)),
        "autocast(jit(f))": autocast(jax.jit(f)),
        "f": f,
        "autocast(f)": autocast(f),
        "make_jaxpr(f) and f": traced,
    }
    times = measure({k: timed(running(g, w, w), 50) for k, g in programs.items()}, rounds)
    times = {name: [1e3 * t for t in ms] for name, ms in times.items()}
    for name, base, bar in (
        ("jit(autocast(f))", "jit(f)", None),
        ("autocast(jit(f))", "jit(f)", CALL_BAR),
        ("autocast(f)", "f", CALL_BAR),
        ("make_jaxpr(f) and f", "f", None),  # the least that a call costs which is traced anew
    ):
        yield row(f"call: {name} / {base}", times[base], times[name], bar, "us")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for, print the tables, save them as JSON; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--rounds", type=int, default=20, help="paired rounds")
    parser.add_argument("--equations", type=int, nargs="*",
                        default=[1_000, 3_000, 10_000, 30_000, 100_000])  # fmt: skip
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date and device")
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    device = jax.default_backend()
    rewrites = list(rewriting(args.equations, args.rounds)) if "rewrite" in parts else []
    prices = rows(rewrites)
    calls = list(calling(args.rounds)) if "call" in parts else []
    title = "Time to rewrite a program, compared with the time to trace it"
    show(title, prices)
    of_calls = "Calls of a small function"
    show(of_calls, calls)
    lost = missed([*prices, *calls])
    print(f"Bars missed: {', '.join(lost) or 'none'}.")
    record = {
        "machine": machine("jax", "jaxlib", device=device),
        "rounds": args.rounds,
        "tables": {title: prices, of_calls: calls},
        "us_an_equation": {r.equations: r.us_an_equation for r in rewrites},
    }
    save("jax-overhead", device, record, args.out)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
