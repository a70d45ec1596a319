"""The programs of tests/jax's corpus under polymp and the other mixed-precision packages for JAX.

Every library runs every program in a process of its own, through its own API (`LIBRARIES`): plain,
under jit, and its gradient. Written down is what raised, whether values are finite and as near
float32's as the corpus' own bound asks, and what the independent walker of the tests finds in the
traces. A library that is not installed is named as missing. The tables are printed as text and as
Markdown; the record is JSON, and `--show` prints it again.

`--also jaxamp=PYTHON` runs a library once more in another interpreter, with another jax.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.support.jax import corpus_runs, walker  # noqa: E402
from tests.support.jax.corpus import PROGRAMS, corpus  # noqa: E402

DTYPES = ("bfloat16", "float16")
LOOPS = ("scan", "while", "cond")
RAN = {"eager": "runs eagerly", "jit": "runs under jit", "gradient": "its gradient runs"}
STALL = 300  # seconds without a finished program, after which a process is given up
Fn = Callable[..., Any]
Graded = Callable[..., corpus_runs.Ran]  # (leaves, scale) -> results and gradients


# How each library is asked, as its own README asks it.


@dataclass(frozen=True)
class Adapted:
    """A program under a library; without `graded`, jax.grad differentiates `forward`."""

    forward: Fn
    graded: Graded | None = None


def float32(it: corpus_runs.Problem, fmt: str) -> Adapted:
    """The program itself."""
    return Adapted(it.fn)


def polymp(it: corpus_runs.Problem, fmt: str) -> Adapted:
    """`autocast` around the function."""
    from polymp.jax import autocast

    return Adapted(autocast(it.fn, dtype=jnp.dtype(fmt)))


def jmp(it: corpus_runs.Problem, fmt: str) -> Adapted:
    """A policy: arguments cast to the low dtype, results to float32."""
    import jmp

    policy = jmp.Policy(jnp.float32, jnp.dtype(fmt), jnp.float32)

    def forward(*args: Any) -> Any:
        return policy.cast_to_output(it.fn(*policy.cast_to_compute(args)))

    return Adapted(forward)


def mpx(it: corpus_runs.Problem, fmt: str) -> Adapted:
    """`cast_function` for results; `filter_value_and_grad`, scaled by a constant, for gradients."""
    import mpx

    dtype = jnp.dtype(fmt).type
    mpx.set_half_precision_datatype(jnp.bfloat16 if fmt == "bfloat16" else jnp.float16)
    leaves, tree = jax.tree.flatten(it.args)

    def cost(chosen: list[Any], rest: list[Any]) -> Any:
        full = list(rest)
        for i, leaf in zip(it.at, chosen, strict=True):
            full[i] = leaf
        out = jax.tree.leaves(it.fn(*jax.tree.unflatten(tree, full)))
        return sum(map(corpus_runs._weighted, out)), out

    def graded(chosen: list[Any], scale: Any) -> corpus_runs.Ran:
        scaling = mpx.DynamicLossScaling(scale, jnp.float32(1))
        rest = [None if i in it.at else leaf for i, leaf in enumerate(leaves)]
        (_, out), _, _, grads = mpx.filter_value_and_grad(cost, scaling, has_aux=True)(chosen, rest)
        return corpus_runs.Ran(out, grads)

    return Adapted(mpx.cast_function(it.fn, dtype, return_dtype=jnp.float32), graded)


def jaxamp(it: corpus_runs.Problem, fmt: str) -> Adapted:
    """`amp` around the function."""
    from jaxamp import amp

    return Adapted(amp(it.fn, compute_dtype=jnp.dtype(fmt).type))


def grampax(it: corpus_runs.Problem, fmt: str) -> Adapted:
    """`autocast` around the function of one argument, as it sees no other: a tuple of all."""
    from grampax import autocast

    def packed(args: Any) -> Any:
        return it.fn(*args)

    fn = autocast(packed, dtype=jnp.dtype(fmt).type)
    return Adapted(lambda *args: fn(args))


# The scalers on one history. The true gradient is 3; `x` is 3, or inf where a step overflows.

HISTORY = (3.0, 3.0, float("inf"), 3.0, 3.0)
Step = Callable[[Any, Any], tuple[Any, Any, Any]]  # (state, x) -> state, its scale, gradient


def _loss(w: Any, x: Any) -> Any:
    return w * x


def scaler_polymp(floor: float | None) -> tuple[Any, Step] | None:
    """Scale 8, growth after 2 steps."""
    from polymp.jax import GradScaler

    def step(scaler: Any, x: Any) -> Any:
        grad, finite = scaler.unscale(jax.grad(lambda w: scaler.scale(_loss(w, x)))(jnp.float32(1)))
        scaler = scaler.update(finite)
        return scaler, scaler.state.scale, grad

    least = floor or 2.0**-126
    return GradScaler(init_scale=8.0, growth_interval=2, min_scale=least), step


def scaler_jmp(floor: float | None) -> tuple[Any, Step] | None:
    """Scale 8, growth after 2 steps."""
    import jmp

    def step(scaler: Any, x: Any) -> Any:
        grad = scaler.unscale(jax.grad(lambda w: scaler.scale(_loss(w, x)))(jnp.float32(1)))
        scaler = scaler.adjust(jmp.all_finite(grad))
        return scaler, scaler.loss_scale, grad

    least = jnp.float32(floor or 1)
    return jmp.DynamicLossScale(jnp.float32(8), period=2, min_loss_scale=least), step


def scaler_mpx(floor: float | None) -> tuple[Any, Step] | None:
    """Scale 8, growth after 2 steps."""
    import equinox
    import mpx

    static = mpx.DynamicLossScaling(jnp.float32(8), jnp.float32(floor or 1), period=2)
    arrays, static = equinox.partition(static, equinox.is_array)

    def step(scaler: Any, x: Any) -> Any:
        whole = equinox.combine(scaler, static)
        whole, _, grad = mpx.filter_grad(_loss, whole)(jnp.float32(1), x)
        return equinox.filter(whole, equinox.is_array), whole.loss_scaling, grad

    return arrays, step


def scaler_jaxamp(floor: float | None) -> tuple[Any, Step] | None:
    """Scale 8, growth after 2 steps."""
    from jaxamp import DynamicScalerState, dynamic_scale_grad

    def step(scaler: Any, x: Any) -> Any:
        scaler, grad = dynamic_scale_grad(_loss)(jnp.float32(1), x, dynamic_scaler_state=scaler)
        return scaler, scaler.scaler, grad

    state = DynamicScalerState(patience=jnp.int32(2), scaler=jnp.float32(8))
    return None if floor else (state, step)


@dataclass(frozen=True)
class Library:
    """A library: how a program runs under it, and the distributions whose versions matter."""

    adapt: Callable[[corpus_runs.Problem, str], Adapted]
    packages: tuple[str, ...] = ()
    scaler: Callable[[float | None], tuple[Any, Step] | None] | None = None


LIBRARIES = {
    "float32": Library(float32),
    "polymp": Library(polymp, ("polymp",), scaler_polymp),
    "jmp": Library(jmp, ("jmp",), scaler_jmp),
    "mpx": Library(mpx, ("mixed-precision-for-JAX",), scaler_mpx),
    "jaxamp": Library(jaxamp, ("jaxamp",), scaler_jaxamp),
    "grampax": Library(grampax, ("grampax", "quax")),
}


# One process: a library on every program.


def work(
    library: str, dtypes: Iterable[str], reference: Path, out: Path, done: set[str], eager: bool
) -> None:
    """Write one line for each program; what is in `done` is left out."""
    with out.open("a") as file, contextlib.redirect_stdout(io.StringIO()):

        def say(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        exact = pickle.loads(reference.read_bytes()) if reference.exists() else {}
        for program in corpus():
            if program.name in done or "region" in program.tags:
                continue
            say(start=program.name)
            if program.missing():
                say(program=program.name, missing=program.needs)
                continue
            if library == "float32" and program.name not in exact:
                exact[program.name] = _reference(program.name, dtypes)
                reference.write_bytes(pickle.dumps(exact))
            rows = {
                fmt: _row(library, program.name, fmt, exact[program.name], eager) for fmt in dtypes
            }
            say(program=program.name, rows=rows)
        if LIBRARIES[library].scaler and "scaler" not in done:
            say(start="scaler")
            say(scaler=_scaling(library))


def _reference(name: str, dtypes: Iterable[str]) -> dict[str, Any]:
    """float32's results and gradients, and how far others may be from them."""
    ran = corpus_runs.reference(name)
    return {
        "out": [_plain(x) for x in ran.out],
        "grads": [_plain(x) for x in ran.grads],
        "bounds": {fmt: corpus_runs.bounds(name, fmt) for fmt in dtypes},
    }


def _row(library: str, name: str, fmt: str, exact: dict[str, Any], eager: bool) -> dict[str, Any]:
    """One program under one library: errors, traces, values."""
    program = PROGRAMS[name]
    row: dict[str, Any] = {"errors": {}}

    def attempt(what: str, call: Fn) -> Any:
        try:
            with jax.enable_x64(program.x64):
                return jax.block_until_ready(call())
        except Exception as error:
            text = " ".join(str(error).partition("Traceback")[0].split())[:150]
            row["errors"][what] = f"{type(error).__name__}: {text}"
            return None

    it = attempt("program", lambda: corpus_runs.problem(name))
    if it is None:
        return row
    made = attempt("call", lambda: LIBRARIES[library].adapt(it, fmt))
    if made is None:
        return row
    graded = made.graded or it.graded(made.forward)
    scale = jnp.float32(program.scale if fmt == "float16" else 1)
    forward = attempt("trace", lambda: jax.make_jaxpr(made.forward)(*it.args))
    backward = attempt("trace of gradient", lambda: jax.make_jaxpr(graded)(*it.inputs()))
    if eager:
        row["eager"] = attempt("eager", lambda: made.forward(*it.args)) is not None
    ran = attempt(
        "gradient",
        lambda: jax.jit(graded, compiler_options=corpus_runs.QUICK)(it.inputs()[0], scale),
    )
    out = ran and ran.out  # jit has run the function, too; compiling is what takes the time
    if ran is None:
        jitted = jax.jit(made.forward, compiler_options=corpus_runs.QUICK)
        out = attempt("jit", lambda: jax.tree.leaves(jitted(*it.args)))

    got = {"out": out, "grads": ran and ran.grads}
    for part, limits in zip(("out", "grads"), exact["bounds"][fmt], strict=True):
        if got[part] is not None:
            found = [_plain(x) for x in got[part]]
            row[f"{part} finite"] = all(bool(np.isfinite(x).all()) for x in found)
            away = [corpus_runs.distance(a, b) for a, b in zip(found, exact[part], strict=True)]
            row[f"{part} close"] = all(d <= b for d, b in zip(away, limits, strict=True))
            if part == "grads":
                size = np.linalg.norm([np.linalg.norm(x) for x in exact[part]])
                row["gradient error"] = float(np.linalg.norm(away) / size)
    if got["grads"] is not None:
        own = [x.dtype for x in it.inputs()[0]]
        row["gradients as parameters"] = [x.dtype for x in got["grads"]] == own
    if forward is not None:
        row["broken"] = dict(Counter(v.rule for v in walker.violations(forward, fmt)))
        row["broken"].pop("low", None)  # counted below
    trace = forward if backward is None else backward
    if trace is not None:
        row["products"] = _products(trace)
    return row


def _products(trace: Any) -> dict[str, list[int]]:
    """How many contractions are low, of all that autocast lowers, by place."""
    count: dict[str, list[int]] = {"top": [0, 0], "calls": [0, 0], "loops": [0, 0]}
    for site in walker.equations(trace):
        if site.op not in (*walker.CONTRACTIONS, walker.OURS) or site.as_written:
            continue
        floats = {x for x in site.operands if "float" in x or "complex" in x}
        low = site.op == walker.OURS or floats <= {*walker.LOW}
        asked = "HIGH" in str(site.params.get("precision"))
        if asked or not floats or floats - {*walker.LOW, "float32"}:
            continue  # the program's own: a precision that it has set, integers, float64
        place = "calls" if site.where else "top"
        place = "loops" if any(word in site.where for word in LOOPS) else place
        count[place][0] += low
        count[place][1] += 1
    return count


def _plain(x: Any) -> np.ndarray:
    """The values as wide numpy numbers; a key counts as 0."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.zeros(x.shape)
    return np.asarray(x).astype(np.complex128)


def _scaling(library: str) -> dict[str, Any]:
    """Scales and gradients over the history, and where three overflows end above a floor of 4."""
    make = LIBRARIES[library].scaler
    assert make is not None
    found: dict[str, Any] = {}
    for floor, history in ((None, HISTORY), (4.0, (float("inf"),) * 3)):
        try:
            made = make(floor)
            if made is None:
                continue
            state, step = made
            step, rows = jax.jit(step), []
            for x in history:
                state, scale, grad = step(state, jnp.float32(x))
                rows.append([float(scale), float(grad)])
            found["floor" if floor else "history"] = [[str(v) for v in row] for row in rows]
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    return found


def versions(library: str) -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {"jax": jax.__version__}
    for name in LIBRARIES[library].packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# All processes.


def column(
    library: str, python: str, dtypes: list[str], reference: Path, eager: bool
) -> dict[str, Any]:
    """A library in an interpreter, all programs; one that ends its process is stepped over."""
    call = [python, __file__, "--worker", library, "--dtypes", *dtypes]
    call += ["--reference", str(reference), *(["--eager"] if eager else [])]
    asked = subprocess.run([*call, "--versions"], capture_output=True, text=True, check=False)
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:]
        return {"library": library, "versions": {}, "missing": " ".join(last)}
    found: dict[str, Any] = {"library": library, "versions": json.loads(asked.stdout)}
    lacking = set(LIBRARIES[library].packages) - set(found["versions"])
    if lacking:
        return found | {"missing": f"{', '.join(sorted(lacking))} is not installed"}
    programs: dict[str, Any] = {}
    done: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        while True:
            out = Path(folder, f"{len(done)}.jsonl")
            child = subprocess.Popen(
                [*call, "--out", str(out), "--done", *done],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            end = _wait(child, out)
            started = None
            for line in map(json.loads, out.read_text().splitlines() if out.exists() else []):
                started = line.get("start", started)
                if "rows" in line:
                    programs[line["program"]] = line["rows"]
                elif "missing" in line:
                    found.setdefault("packages missing", []).append(line["missing"])
                elif "scaler" in line:
                    found["scaler"] = line["scaler"]
                if "start" not in line:
                    done.append(started or "")
                    started = None
            if child.returncode == 0:
                return found | {"programs": programs}
            if started is None:
                return found | {"programs": programs, "missing": end}
            programs[started] = {fmt: {"errors": {"process": end}} for fmt in dtypes}
            done.append(started)


def _wait(child: subprocess.Popen[str], out: Path) -> str:
    """Wait for a process and say how it ended; one without progress is stopped."""
    size = -1
    while True:
        try:
            _, said = child.communicate(timeout=STALL)
        except subprocess.TimeoutExpired:
            now = out.stat().st_size if out.exists() else 0
            if now == size:
                child.kill()
                child.communicate()
                return f"nothing finished in {STALL} seconds"
            size = now
        else:
            last = said.strip().splitlines()[-1:] or [""]
            return f"the process ended with code {child.returncode}: {last[0][:150]}"


# The tables.


def title(one: dict[str, Any], current: str) -> str:
    """The library with what is not obvious: other packages, an older jax."""
    parts = [f"quax {v}" for k, v in one["versions"].items() if k == "quax"]
    parts += [f"jax {v}" for k, v in one["versions"].items() if k == "jax" and v != current]
    return " ".join([one["library"], f"({', '.join(parts)})" if parts else ""]).strip()


def summary(one: dict[str, Any], fmt: str, shared: set[str]) -> dict[str, str]:
    """One column of the table: what is counted, how many of how many."""
    programs = {name: rows[fmt] for name, rows in one.get("programs", {}).items()}
    if not programs:
        return {"runs eagerly": one.get("missing", "nothing ran")}
    total = len(programs)
    cells = {}
    for what, name in RAN.items():
        if what == "eager" and not any("eager" in r for r in programs.values()):
            continue
        bad = {"program", "call", "process", what}
        cells[name] = f"{sum(not bad & set(r['errors']) for r in programs.values())} of {total}"
    for part, name in (("out", "results"), ("grads", "gradients")):
        ran = [r for r in programs.values() if f"{part} close" in r]
        for word, how in (("finite", "finite"), ("close", "within the bound")):
            cells[f"{name} {how}"] = f"{sum(r[f'{part} {word}'] for r in ran)} of {len(ran)}"
    ran = [r for r in programs.values() if "gradients as parameters" in r]
    good = sum(r["gradients as parameters"] for r in ran)
    cells["gradients in the parameters' dtypes"] = f"{good} of {len(ran)}"
    traced = [r for r in programs.values() if "products" in r]
    where = {
        "top": "products in the low dtype, not in the next two rows",
        "calls": "inside jit, remat, custom rules, shard_map",
        "loops": "inside scan, while, cond",
    }
    for place, name in where.items():
        low, of = (sum(r["products"][place][i] for r in traced) for i in (0, 1))
        cells[name] = f"{low} of {of}"
    ran = [r for r in programs.values() if "broken" in r]
    for name, rules in (
        ("low operands for torch's float32 ops, in", {"float32", "shift"}),
        ("float64 narrowed in", {"narrow"}),
    ):
        cells[name] = f"{sum(bool(rules & set(r['broken'])) for r in ran)} of {len(ran)}"
    errors = [programs[n]["gradient error"] for n in shared if "gradient error" in programs[n]]
    if shared and len(errors) == len(shared):
        cells["median error of gradients"] = f"{statistics.median(errors):.2%}"
    return cells


def table(record: dict[str, Any], fmt: str) -> list[list[str]]:
    """Rows of cells, the first one the titles."""
    columns = [one for one in record["columns"] if not _idle(one)]
    plain = columns[0]["programs"]
    lowering = {  # programs with a product to lower, that every library that runs here can train
        name
        for name, rows in plain.items()
        if sum(of for _, of in rows[fmt].get("products", {"": [0, 0]}).values())
    }
    shared = set(lowering)
    for one in columns:
        ran = {n for n, rows in one.get("programs", {}).items() if "gradient error" in rows[fmt]}
        if len(ran) > len(plain) // 2:
            shared &= ran
    cells = [summary(one, fmt, shared) for one in columns]
    names = list(dict.fromkeys(name for column in cells for name in column))
    titles = [title(one, record["jax"]) for one in columns]
    rows = [[name, *(column.get(name, "") for column in cells)] for name in names]
    return [[f"{fmt}; median error over {len(shared)} programs", *titles], *rows]


def _idle(one: dict[str, Any]) -> bool:
    """Whether the library ran nothing at all."""
    rows = (row for rows in one.get("programs", {}).values() for row in rows.values())
    return not any("out close" in row for row in rows)


def failures(record: dict[str, Any]) -> list[str]:
    """The programs that do not run, or not well, by library."""
    lines = []
    for one in record["columns"]:
        groups: dict[str, list[str]] = {}
        for name, rows in one.get("programs", {}).items():
            for fmt, row in rows.items():
                seen = set()
                for what, text in row["errors"].items():
                    if "trace" in what or text in seen:
                        continue
                    seen.add(text)
                    groups.setdefault(text[:110], []).append(f"{name} ({fmt}, {what})")
                for part in ("out", "grads"):
                    for word in ("finite", "close"):
                        if row.get(f"{part} {word}") is False:
                            groups.setdefault(f"{part} not {word}", []).append(f"{name} ({fmt})")
        for text, names in sorted(groups.items(), key=lambda g: -len(g[1])):
            shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            lines.append(f"{title(one, record['jax'])}: {len(names)} x {text}: {shown}")
    return lines


def scalers(record: dict[str, Any]) -> list[list[str]]:
    """Scales and gradients over the history."""
    rows = [["scaler", *(f"gradient {x:g}" for x in HISTORY), "floor of 4, three overflows"]]
    for one in record["columns"]:
        found = one.get("scaler")
        if not found:
            continue
        cells = [f"{float(s):g}, {float(g):g}" for s, g in found.get("history", [])]
        cells = cells or [found.get("error", "")] + [""] * (len(HISTORY) - 1)
        unset = "not set" if one["library"] == "polymp" else "none offered"
        floor = found["floor"][-1][0] if "floor" in found else unset
        rows.append([title(one, record["jax"]), *cells, floor])
    return rows


def show(record: dict[str, Any]) -> None:
    """Print everything, as text and as Markdown."""
    from rich.console import Console
    from rich.table import Table

    tables = [table(record, fmt) for fmt in record["dtypes"]] + [scalers(record)]
    for rows in tables:
        drawn = Table(*rows[0])
        for row in rows[1:]:
            drawn.add_row(*row)
        Console(width=170).print(drawn)
    for rows in tables:
        print()
        print("| " + " | ".join(rows[0]) + " |")
        print("|---" * len(rows[0]) + "|")
        for row in rows[1:]:
            print("| " + " | ".join(row) + " |")
    print()
    for one in filter(_idle, record["columns"]):
        print(f"{title(one, record['jax'])}: nothing ran. {one.get('missing', '')}")
    print("\n".join(failures(record)))


def main() -> int:
    """Run what was asked for, print the tables, save the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--libraries", nargs="*", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument("--also", nargs="*", default=[], metavar="LIBRARY=PYTHON")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--eager", action="store_true", help="run every program eagerly, too")
    parser.add_argument("--add", action="store_true", help="keep the columns that the file has")
    parser.add_argument("--show", type=Path, help="print the tables of a record, run nothing")
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date")
    parser.add_argument("--reference", type=Path, help="keep float32's values here")
    parser.add_argument("--worker", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("--versions", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--done", nargs="*", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.versions:
        print(json.dumps(versions(args.worker)))
        return 0
    if args.worker:
        warnings.simplefilter("ignore")
        work(args.worker, args.dtypes, args.reference, args.out, set(args.done), args.eager)
        return 0
    if args.show:
        show(json.loads(args.show.read_text()))
        return 0
    now = datetime.now(UTC)
    path = args.out or ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-jax-rivals-cpu.json"
    record = {
        "date": f"{now:%Y-%m-%d}",
        "machine": f"CPU, {platform.machine()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "dtypes": args.dtypes,
        "left out": [p.name for p in corpus() if "region" in p.tags],
        "columns": json.loads(path.read_text())["columns"] if args.add else [],
    }
    # float32 comes first: it makes the reference of all others.
    first = [] if args.add else ["float32"]
    names = first + [name for name in args.libraries if name not in first]
    asked = [(name, sys.executable) for name in names]
    asked += [tuple(one.split("=", 1)) for one in args.also]
    with tempfile.TemporaryDirectory() as folder:
        reference = args.reference or Path(folder, "reference")
        for name, python in asked:
            print(f"{name}, {python}", file=sys.stderr, flush=True)
            record["columns"].append(column(name, python, args.dtypes, reference, args.eager))
            path.write_text(json.dumps(record, indent=1) + "\n")
    show(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
