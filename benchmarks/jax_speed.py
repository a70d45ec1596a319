"""How fast JAX programs run in float32, cast by hand, under polymp and under the other packages.

Every program is compiled whole and run in its turn, in one process; the ratio of the medians is
what counts, and the middle half of the paired ratios stands beside it. Of what is compiled, casts
are counted and memory is read; of what the forward pass leaves to the backward pass, the bytes.
What cannot be run is recorded with the reason.

    pip install -r benchmarks/requirements-jax.txt    # jmp, mpx, jaxamp
    python benchmarks/jax_speed.py                    # about 6 minutes on two cores
    python benchmarks/jax_speed.py --workloads mlp,decode --rounds 3 --out /tmp/some.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ways_jax as ways
import workloads_jax as workloads
from pairing import Row, Timed, machine, measure, missed, row, save, show, timed
from ways_jax import FEW, FEW_FROZEN, FLAX, FROZEN, FULL, HAND, JAXAMP, JMP, MPX, OURS
from workloads_jax import DYNAMIC, LARGE, PLAIN, SCALED, SKIPPING, SMALL, Made, Size

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.jax import hlo, transformer

# From jax 0.11 on, XLA runs bfloat16 contractions of a CPU in a slow kernel; see docs.
OLD = jax.__version_info__ < (0, 11)


@dataclass(frozen=True)
class Plan:
    """A workload and the way it is measured.

    Attributes:
        title: of its table; `Size` goes in.
        make: a program in one of the ways.
        ways: the first is ours; the others are what it is compared with, where `pairs` is empty.
        pairs: (ours, base) of each row.
        bars: base, or a pair -> the most that ours / base, or the ratio of the pair, may be, on a
            CPU with a fast low kernel.
        casts: the most casts in optimised HLO, beside the program by hand; nothing is counted if 0.
        kept: the most bytes kept for the backward pass, beside it; nothing is counted if 0.
    """

    title: str
    make: Callable[[str, Size], Made]
    ways: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...] = ()
    bars: dict[str | tuple[str, str], float] = field(default_factory=dict)
    casts: float = 0
    kept: float = 0


RIVALS = (JMP, MPX, JAXAMP, FLAX)
SERVED = ((FROZEN, OURS), (FROZEN, FULL), (FROZEN, HAND), (OURS, FULL), (OURS, HAND))
FEW_ROWS = ((FEW, FULL), (FEW_FROZEN, FULL))
SCALERS = ((SCALED, PLAIN), (SCALED, DYNAMIC), (DYNAMIC, PLAIN), (SKIPPING, PLAIN))
PLANS = {
    "mlp": Plan(
        "MLP: {linears} x Linear({features}), batch {batch}, a train step",
        workloads.mlp,
        (OURS, FULL, HAND, *RIVALS),
    ),
    "train": Plan(
        "Transformer, {lm.layers} layers of width {lm.width}: a train step of {lm.batch} x "
        "{lm.length} tokens",
        workloads.train,
        (OURS, HAND, FULL, *RIVALS),
        bars={HAND: 0.80, FULL: 0.70},
        casts=0.8,
        kept=1.0,
    ),
    "train scanned": Plan(
        "The same transformer, its layers in a scan with remat",
        partial(workloads.train, scanned=True),
        (OURS, HAND, FULL),
        casts=0.8,
        kept=1.0,
    ),
    "sharded": Plan(
        "The same transformer, its parameters and batch sharded over all devices",
        workloads.sharded,
        (OURS, HAND, FULL),
        casts=0.8,
    ),
    "forward": Plan("The same transformer: its loss alone", workloads.forward, (OURS, HAND, FULL)),
    "accumulate": Plan(
        "The same transformer: {microbatches} microbatches of 1 x {lm.length} tokens and a step",
        workloads.accumulate,
        (OURS, HAND, FULL),
        casts=0.8,
    ),
    "decode": Plan(
        "Transformer, {serve.layers} layers of width {serve.width}: tokens decoded one by one",
        workloads.decode,
        (FROZEN, OURS, FULL, HAND, FEW, FEW_FROZEN),
        (*SERVED, *FEW_ROWS),
        bars={OURS: 0.65, (FEW, FULL): 1.1, (FEW_FROZEN, FULL): 1.0},
    ),
    **{
        f"decode {rows}": Plan(
            f"The same transformer: tokens of {rows} sequences decoded one by one",
            partial(workloads.decode, rows=rows),
            (FROZEN, OURS, FULL, HAND, FEW, FEW_FROZEN),
            (*SERVED, *FEW_ROWS),
            bars={(FROZEN, FULL): 1.0, (FEW, FULL): 1.1, (FEW_FROZEN, FULL): 1.0},
        )
        for rows in (4, 16)
    },
    "convnet": Plan(
        "Convnet: a train step of {images} x 32 x 32 x 3",
        workloads.convnet,
        (OURS, HAND, FULL, FLAX),
    ),
    "lora": Plan(
        "LoRA: a step of 1 x {lm.length} tokens, frozen base, adapters of rank {rank}",
        workloads.lora,
        (FROZEN, OURS, FULL, HAND),
        SERVED,
    ),
    **{
        f"scaler {batch}": Plan(
            f"Full step with Adam, {{scaled_linears}} x Linear({{scaled_features}}), batch {batch}",
            partial(workloads.scaler, batch=batch),
            (SCALED, PLAIN, DYNAMIC, SKIPPING),
            SCALERS,
            bars={PLAIN: 1.15} if batch == Size().scaled_batches[0] else {},
        )
        for batch in Size().scaled_batches
    },
}
GRADIENTS = "gradients"  # a part beside the plans: how far they are from float32's

NOTES = (
    'In the rows "by hand", softmax is float32, too, and trained parameters have a float32 master '
    "copy. jmp and mpx run the same program; they make its casts of parameters and inputs.",
    "Training steps use plain gradient descent. The tables about Adam compare scalers; all their "
    "arithmetic is float32.",
    'Decoding has batch 1 and uses a cache of keys and values. In its rows "by hand", the '
    "parameters are stored in bfloat16.",
    '"few_rows" is autocast under a policy with few_rows = 32.',
    '"casts" counts the casts between float dtypes in the compiled program. "kept" is the memory '
    "of what the forward pass stores for the backward pass, without the arguments.",
)


class Program:
    """A compiled program that goes on from its own result."""

    def __init__(self, made: Made) -> None:
        jitted = jax.jit(made.step, donate_argnums=0)
        self.compiled = jitted.lower(made.state, *made.rest).compile()
        self.state, self.rest, self.kept = jax.tree.map(jnp.copy, made.state), made.rest, made.kept

    def __call__(self) -> None:
        self.state, value = self.compiled(self.state, *self.rest)
        jax.block_until_ready((self.state, value))


@dataclass(frozen=True)
class Facts:
    """Facts of a compiled program that need no run; -1 where they are not known.

    Attributes:
        casts: between float dtypes, in the optimised HLO.
        fusions: in the same.
        contractions: by dtypes, such as "bfloat16 x bfloat16 -> float32".
        kept: bytes left to the backward pass.
        arguments: bytes of them.
        temporary: bytes in use while it runs, beside arguments and results.
        accessed: bytes, as XLA's cost analysis has them.
        flops: the same.
    """

    casts: int
    fusions: int
    contractions: dict[str, int]
    kept: int
    arguments: int
    temporary: int
    accessed: float
    flops: float


def facts(program: Program, kept: bool) -> Facts:
    text = program.compiled.as_text() or ""
    memory: Any = program.compiled.memory_analysis()
    cost: Any = program.compiled.cost_analysis() or {}
    cost = cost[0] if isinstance(cost, (list, tuple)) else cost
    return Facts(
        casts=hlo.casts(text),
        fusions=text.count(" fusion("),
        contractions=dict(hlo.summary(text)),
        kept=hlo.residual_bytes(*program.kept) if kept and program.kept else -1,
        arguments=getattr(memory, "argument_size_in_bytes", -1),
        temporary=getattr(memory, "temp_size_in_bytes", -1),
        accessed=float(cost.get("bytes accessed", -1)),
        flops=float(cost.get("flops", -1)),
    )


class Bench:
    """Runs plans, and keeps what was found.

    Attributes:
        tables: title -> rows.
        missing: what could not be measured -> why.
        facts: workload -> way -> facts.
    """

    def __init__(self, size: Size, rounds: int, clock: Callable[[], float], bars: bool) -> None:
        self.size, self.rounds, self.clock, self.bars = size, rounds, clock, bars
        self.tables: dict[str, list[Row]] = {}
        self.missing: dict[str, str] = {}
        self.facts: dict[str, dict[str, Facts]] = {}

    def run(self, name: str, most: int | None = None) -> None:
        """Measure a workload in all of its ways, or in the first `most`, and show it."""
        plan = PLANS[name]
        programs, known = {}, {}
        for way in plan.ways[:most]:
            try:
                programs[way] = Program(plan.make(way, self.size))
                programs[way]()
            except Exception as error:
                programs.pop(way, None)
                self.missing[f"{name}: {way}"] = reason(way, error)
                continue
            try:
                known[way] = facts(programs[way], bool(plan.kept))
            except Exception as error:  # a platform may write its HLO in another way
                self.missing[f"{name}: {way}, what is compiled"] = reason(way, error)
        inner = self.size.decoded if name.startswith("decode") else 1
        once: dict[str, Timed] = {
            way: timed(program, inner, self.clock) for way, program in programs.items()
        }
        times = measure(once, self.rounds, warm=1) if once else {}
        self.facts[name] = known
        rows = list(self.rows(name, plan, times, known))
        self.tables[plan.title.format(**vars(self.size))] = rows
        show(plan.title.format(**vars(self.size)), rows)
        for what, why in self.missing.items():
            if what.startswith(f"{name}: "):
                print(f"Not measured: {what}: {why}")

    def rows(
        self, name: str, plan: Plan, times: dict[str, list[float]], known: dict[str, Facts]
    ) -> Iterator[Row]:
        ours = plan.ways[0]
        pairs = plan.pairs or tuple((ours, way) for way in plan.ways[1:])
        if not plan.pairs:
            pairs += ((HAND, FULL),)
        for way, base in pairs:
            if way in times and base in times:
                bar = plan.bars.get((way, base), plan.bars.get(base) if way == ours else None)
                bar = bar if self.bars else None
                yield row(f"{name}: {way} / {base}", times[base], times[way], bar)
        if not {ours, HAND} <= set(known):
            return
        a, b = known[HAND], known[ours]
        if plan.kept:
            figures = [a.kept / 1e6], [b.kept / 1e6]
            yield row(f"{name}, kept: {ours} / {HAND}", *figures, plan.kept, "MB")
        if plan.casts and a.casts:
            bar = plan.casts if self.bars else None
            yield row(f"{name}, casts: {ours} / {HAND}", [a.casts], [b.casts], bar, "")
        if min(a.temporary, b.temporary) > 0:
            figures = [a.temporary / 1e6], [b.temporary / 1e6]
            yield row(f"{name}, temporary memory: {ours} / {HAND}", *figures, unit="MB")

    def gradients(self, seeds: int) -> None:
        """How far the transformer's gradients are from float32's, by hand and under autocast."""
        plain = partial(transformer.loss, heads=self.size.lm.heads)
        made = {way: jax.jit(jax.grad(ways.under(way, plain))) for way in (FULL, HAND, OURS)}
        errors: dict[str, list[float]] = {way: [] for way in made}
        for seed in range(seeds):
            given = (
                transformer.parameters(self.size.lm, seed),
                transformer.tokens(self.size.lm, seed),
            )
            exact = made[FULL](*given)
            for way, gradient in made.items():
                errors[way].append(100 * distance(gradient(*given), exact))
        title = "The same transformer: distance of its gradient from float32's"
        self.tables[title] = [
            row(f"error of the gradient: {OURS} / {HAND}", errors[HAND], errors[OURS], 1.0, "%"),
        ]
        show(title, self.tables[title])


def distance(grads: Any, exact: Any) -> float:
    """Relative l2 distance over the whole gradient."""
    pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True))
    apart = sum(float(jnp.sum((g - e) ** 2)) for g, e in pairs)
    return math.sqrt(apart / sum(float(jnp.sum(e**2)) for _, e in pairs))


def reason(way: str, error: Exception) -> str:
    """Why a way could not be run, with the version of its package."""
    package = ways.PACKAGES.get(way, "")
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    try:
        version = f"{package} {importlib.metadata.version(package)}: " if package else ""
    except importlib.metadata.PackageNotFoundError:
        version = f"{package}: "
    lines = str(error).strip().splitlines() or [""]
    return f"{version}{type(error).__name__}: {lines[0][:200]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for, print the tables, save them as JSON; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = (*PLANS, GRADIENTS)
    parser.add_argument("--workloads", default=",".join(parts), help="some of %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="paired rounds")
    parser.add_argument("--seeds", type=int, default=3, help="gradients to take errors of")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall",
                        help="processor: the time of all threads, for a busy machine")  # fmt: skip
    parser.add_argument("--small", action="store_true", help="tiny programs, no bars: a try-out")
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date and device")
    args = parser.parse_args(argv)
    chosen = args.workloads.split(",")
    if unknown := set(chosen) - set(parts):
        parser.error(f"--workloads: {', '.join(sorted(unknown))} is none of {', '.join(parts)}")
    device = jax.default_backend()
    clock = time.process_time if args.clock == "processor" else time.perf_counter
    bench = Bench(
        SMALL if args.small else Size() if device == "cpu" else LARGE,
        args.rounds,
        clock,
        device == "cpu" and OLD and not args.small,
    )
    started = time.monotonic()
    for name in chosen:
        bench.gradients(args.seeds) if name == GRADIENTS else bench.run(name)
    rows = [r for table in bench.tables.values() for r in table]
    print(f"Bars missed: {'; '.join(missed(rows)) or 'none'}.")
    packages = ("jax", "jaxlib", "optax", *dict.fromkeys(ways.PACKAGES.values()))
    save(
        "jax-speed",
        device,
        {
            "machine": machine(*packages, device=device),
            "clock": args.clock,
            "rounds": args.rounds,
            "seconds": round(time.monotonic() - started),
            "size": bench.size,
            "tables": bench.tables,
            "facts": bench.facts,
            "missing": bench.missing,
            "notes": NOTES,
        },
        args.out,
    )
    return int(bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
