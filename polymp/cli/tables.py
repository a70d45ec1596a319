"""The tables that commands print: the one part of polymp that needs rich.

    drawn(command, data) -> text

Nothing here reads a policy or asks a framework: all that is drawn is in the data, which is what
`--json` prints.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from polymp.diagnostics.report_text import by
from polymp.rules.row import LOW, Row, Rule

Data = dict[str, Any]

_MANY = 6  # ops that differ alike are listed one by one up to here
_NAMED = 3  # of more, so many


def drawn(command: str, data: Data, every: bool = False) -> str:
    """Draw the data of a command, with colours if standard output is a terminal."""
    differing = partial(_diff, every=every)
    draws: dict[str, Callable[[Data], Iterator[RenderableType]]] = {
        "policies": _policies,
        "show": _show,
        "diff": differing,
        "doctor": _doctor,
    }
    console = Console(markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        for part in draws[command](data):
            console.print(part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, show_header=any(heads))
    for head in heads:
        table.add_column(head, justify="right" if head == "rows" else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _policies(data: Data) -> Iterator[RenderableType]:
    yield _table(
        ("name", "rows", "extends", "summary"),
        ((p["name"], str(p["rows"]), p["extends"] or "", p["summary"]) for p in data["policies"]),
    )


def _by(row: Data | None, op: str, known: str = "") -> str:
    """The op, class or spelling that a row is for and its source, as far as they are not known."""
    return by(Row(**row), op, known) if row else "no row"


def _merged(by_dtype: Mapping[str, Any]) -> str:
    """One text for all dtypes, if they agree, or one for each."""
    texts = {low: str(value) for low, value in by_dtype.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "\n".join(f"{low}: {text}" for low, text in texts.items())


def _show(data: Data) -> Iterator[RenderableType]:
    at = f" in {data['scope']}" if data["scope"] else ""
    title = f"policy {data['policy']}{at}, {' and '.join(data['dtypes'])}"
    if "device" in data:
        yield from _device(data, title)
    elif "op" in data:
        yield from _one(data, title)
    else:
        yield from _all(data, title)


def _all(data: Data, title: str) -> Iterator[RenderableType]:
    table, silent = list[Sequence[Any]](), dict[str, list[str]]()
    kind = ""
    for entry in data["ops"]:
        if not any(entry["rows"].values()):
            silent.setdefault(entry["class"], []).append(entry["op"])
            continue
        if entry["class"] != kind:
            kind = entry["class"]
            table.append((Text(f"class:{kind}", style="bold"), "", ""))
        sources = {low: _by(row, entry["op"]) for low, row in entry["rows"].items()}
        table.append((f"  {entry['op']}", _merged(entry["rules"]), _merged(sources)))
    without = sum(map(len, silent.values()))
    yield f"{title}: {len(data['ops']) - without} of {len(data['ops'])} ops have a row\n"
    if table:
        yield _table(("op", "rule", "from"), table)
        used = {rule for entry in data["ops"] for rule in entry["rules"].values()}
        yield ""
        yield from (f"{rule}: {rule.phrase}" for rule in Rule if rule in used - {Rule.PARTS})
    if silent:
        yield "\nno row: these run in their inputs' dtypes, the ops inside them by their own rows\n"
        yield _table(("class", "ops"), ((k, ", ".join(ops)) for k, ops in silent.items()))
    if data["scopes"]:
        yield f"\n--scope PATH shows the rows for modules: {', '.join(data['scopes'])}"


def _one(data: Data, title: str) -> Iterator[RenderableType]:
    rows = [(low, why.partition(": ")[2]) for low, why in data["why"].items()]
    rows += [("class", f"{data['class']}: {data['about']}" if data["class"] else data["about"])]
    rows += [("torch", ", ".join(data["aten"]) or "no op")]
    functions = [f"functions {', '.join(data['functions'])}"] if data["functions"] else []
    primitives = [f"primitives {', '.join(data['jax'])}"] if data["jax"] else []
    traces = [f"becomes {', '.join(data['traces'])}"] if data["traces"] else []
    rows += [("jax", "\n".join(primitives + functions + traces) or "no op")]
    rows += [("note", data["note"])] if data["note"] else []
    yield f"{data['op']}: {title}\n"
    yield _table(("", ""), rows)


_HALVES = "\nwidest where float16 meets bfloat16: (widen) runs in float32, (raise) is an error"


def _shown(answer: Data, other: Data) -> str:
    """A rule, with its detail where another answer differs in nothing else."""
    detail = answer["detail"] if answer["rule"] == other["rule"] else ""
    return f"{answer['rule']} ({detail})" if detail else str(answer["rule"])


def _device(data: Data, title: str) -> Iterator[RenderableType]:
    yield f"{title}, on {data['device']}: torch has {data['compiled']} compiled kernels"
    if not data["differ"]:
        yield "no op differs: all run with torch's own kernels, at torch's own speed"
        return
    yield f"ops that differ, and run with a kernel of polymp's: {len(data['differ'])}\n"
    rows = []
    for entry in data["differ"]:
        one, other = entry["torch"], entry["policy"]
        own = {low: _by(row, entry["op"]) for low, row in entry["rows"].items()}
        left = {low: _shown(one[low], other[low]) for low in data["dtypes"]}
        right = {low: _shown(other[low], one[low]) for low in data["dtypes"]}
        rows.append((entry["aten"], _merged(left), _merged(right), _merged(own)))
    yield _table(("aten op", "torch", data["policy"], "from"), rows)
    if any("(widen)" in row[1] + row[2] for row in rows):
        yield _HALVES


def _diff(data: Data, every: bool) -> Iterator[RenderableType]:
    one, other = data["policies"]
    if data["same"]:
        yield f"{one} and {other}: no difference"
        return
    lines: dict[tuple[str, ...], list[str]] = {}
    for entry in data["differences"]:
        rules, rows = entry["rules"], entry["rows"]
        left = _shown(rules[0], rules[1]), _by(rows[0], entry["op"], one)
        right = _shown(rules[1], rules[0]), _by(rows[1], entry["op"], other)
        key = entry["scope"], entry["op"], *(", ".join(filter(None, s)) for s in (left, right))
        lines.setdefault(key, []).append(entry["dtype"])
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for (scope, op, *sides), dtypes in lines.items():
        alike.setdefault(((scope, *sides), tuple(dtypes)), []).append(op)
    scoped = any(scope for scope, *_ in lines)
    table = []
    for ((scope, *sides), only), ops in alike.items():
        of = f" ({', '.join(only)})" if len(only) < len(LOW) else ""
        for label in ops if every or len(ops) <= _MANY else [_few(ops)]:
            table.append((f"{label}{of}", *sides, *([scope] if scoped else [])))
    count = len({key[:2] for key in lines})
    rows = "" if len(table) == len(lines) else f", in {len(table)} rows; --all lists each op"
    yield f"{one} and {other}, ops that differ: {count}{rows}\n"
    yield _table(("op", one, other, *(["scope"] if scoped else [])), table)
    if any("(widen)" in cell for row in table for cell in row):
        yield _HALVES


def _few(ops: Sequence[str]) -> str:
    """The first of many ops, and how many more there are."""
    return f"{', '.join(ops[:_NAMED])} and {len(ops) - _NAMED} more"


def _doctor(data: Data) -> Iterator[RenderableType]:
    yield f"polymp {data['polymp']}, Python {data['python']}, {data['system']}\n"
    if "step" in data:  # the advice then rests on it, not on the hardware's features
        yield from _step(data["step"])
    else:
        yield from _facts(data)
    yield ""
    yield from (f"note: {text}" for text in data["notes"])
    yield from (f"problem: {text}" for text in data["problems"])
    if data["ok"]:
        yield "nothing is wrong"


def _step(data: Data) -> Iterator[RenderableType]:
    yield (
        f"{data['model']} in {data['framework']} on {data['device']}, {data['passes']}: "
        f"{data['rounds']} rounds in {data['took']:.1f} s\n"
    )
    ratios = {
        dtype: f"{r['ratio']:.2f}  ({r['low']:.2f} to {r['high']:.2f})"
        for dtype, r in data["ratio"].items()
    }
    yield _table(
        ("dtype", "time", "of float32's"),
        ((dtype, _time(s), ratios.get(dtype, "1")) for dtype, s in data["seconds"].items()),
    )
    yield f"\nuse {data['use']}: {data['why']}"
    yield from (f"{dtype} does not run: {why}" for dtype, why in data["lacking"].items())


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _facts(data: Data) -> Iterator[RenderableType]:
    yield _table(
        ("framework", "version", "supported", "runs on"),
        (
            (f["name"], f["version"] or "not installed", f["supported"], f["platform"])
            for f in data["frameworks"]
        ),
    )
    if data["devices"]:
        yield ""
        yield _table(
            ("device", "fast dtypes", "use"),
            (
                (
                    f"{d['framework']} {d['kind']}\n{d['name']}",
                    f"{_fast(d)}\n{d['by']}",
                    f"{d['use'] or 'float32'}\n{d['why']}",
                )
                for d in data["devices"]
            ),
        )
    if data["engines"]:
        policies = list(data["engines"][0]["ours"])
        yield (
            "\nops that torch has compiled kernels for, and ops that need a kernel of polymp, "
            "by policy\n"
        )
        yield _table(
            ("device", "torch's", *policies, "drift"),
            (
                (
                    e["device"],
                    str(e["compiled"]),
                    *(str(e["ours"][name]) for name in policies),
                    ", ".join([f"+{op}" for op in e["new"]] + [f"-{op}" for op in e["gone"]])
                    or "none",
                )
                for e in data["engines"]
            ),
        )
    if any(f["name"] == "jax" and f["platform"] for f in data["frameworks"]):
        yield "\njax: programs are traced and rewritten, with jax's own kernels in every policy"
    if data["libraries"]:
        yield ""
        yield _table(
            ("library", "version", "tested with", "the line"),
            (
                (row["name"], row["version"], row["tested"], row["line"])
                for row in data["libraries"]
            ),
        )


def _fast(device: Data) -> str:
    low = [dtype for dtype in ("bfloat16", "float16") if device[dtype]]
    unknown = device["bfloat16"] is None
    return " and ".join(low) or ("unknown" if unknown else "none")
