"""Compares what train_torch.py and train_jax.py saved: one table and one picture of both.

    python examples/compare.py

Two files of figures in; the table is printed and saved, the picture saved. Both files must be of
the same job. Nothing is trained, and neither torch nor jax is needed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

try:
    import job
    import picture
    import report
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from report import Figures, Run
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as error:
    print(
        f"compare.py: error: the package {error.name!r} is missing. Run "
        "pip install -e '.[examples]' at the top of the repository.",
        file=sys.stderr,
    )
    sys.exit(2)

NAMES = ("torch", "JAX")
ROWS = (
    "loss before",
    "loss after",
    "against fp32",
    "against torch",
    "tokens per s",
    "saved, MiB",
    "memory, MiB",
    "steps skipped",
    "final scale",
)
# What one framework may do differently without training another model.
OWN = {"device", "threads", "out", "json", "quiet"}
# The wide line of torch shows on both sides of JAX's.
UNDER = {"color": "#c9ced4", "linewidth": 5.0, "markersize": 10}
OVER = {
    name: {"color": colour, "linewidth": 1.4, "markersize": 5.0}
    for name, colour in (("fp32", picture.INK), ("bf16", "#0072b2"), ("fp16", "#f28e2b"))
}


def read(framework: str, path: Path) -> Figures:
    """The figures that a framework's example saved.

    Raises:
        BadArgument: the file is missing, or holds something else.
    """
    script = f"train_{framework}.py"
    try:
        figures = report.load(path)
    except OSError as error:
        raise job.BadArgument(
            f"--{framework} '{path}' cannot be read: {error.strerror}. Run {script} first."
        ) from None
    except ValueError:
        raise job.BadArgument(
            f"--{framework} '{path}' does not hold the figures of {script}. Run it again."
        ) from None
    found = figures.made_by["framework"]
    if found.split()[0] != framework or not figures.runs:
        raise job.BadArgument(
            f"--{framework} '{path}' holds figures of {found}. Give those of {script}."
        )
    return figures


def check_same_job(torch: Figures, jax: Figures) -> None:
    """Raise a BadArgument if the two did not learn the same in the same way."""
    ours = [
        {k: v for k, v in vars(one.args).items() if k not in OWN | {"text"}} | vars(one.text)
        for one in (torch, jax)
    ]
    for name in sorted(ours[0].keys() | ours[1].keys()):
        theirs = [one.get(name) for one in ours]
        if theirs[0] != theirs[1]:
            raise job.BadArgument(
                f"the figures are of different jobs: {name} is {theirs[0]} in torch's and "
                f"{theirs[1]} in JAX's. Run both examples with the same arguments."
            )


def table(torch: Figures, jax: Figures) -> Table:
    """Both frameworks side by side, in every dtype."""
    grid = Table("")
    columns = []
    for pair in zip(torch.runs, jax.runs, strict=True):
        for name, figures, run in zip(NAMES, (torch, jax), pair, strict=True):
            base = next((one for one in figures.runs if one.dtype == "fp32"), None)
            grid.add_column(f"{run.dtype}\n{name}", justify="right")
            columns.append(
                (
                    f"{run.held_out[0][1]:.5f}",
                    f"{run.loss:.4f}",
                    report.percent(run, base),
                    report.percent(run, pair[0]),
                    f"{run.tokens_per_second(figures.args):,.0f}",
                    f"{run.saved / 2**20:,.2f}",
                    f"{run.peak_memory / 2**20:,.2f}",
                    f"{len(run.skipped):,}",
                    report.last_scale(run),
                )
            )
    for name, row in zip(ROWS, zip(*columns, strict=True), strict=True):
        grid.add_row(name, *row)
    return grid


def notes(torch: Figures, jax: Figures) -> list[str]:
    """The notes below the table, which explain its rows."""
    lines = [
        "loss: on held-out text, before the first step and after the last",
        report.SAVED,
        report.SPEED,
    ]
    if torch.made_by["device"] == jax.made_by["device"] == "CPU":
        threads = torch.args.threads
        lines[-1] += f"; torch on {threads} thread{'s' * (threads != 1)}, JAX on every core"
    for name, figures in zip(NAMES, (torch, jax), strict=True):
        lines.append(f"memory of {name}: {figures.made_by['memory']}")
    for name, figures in zip(NAMES, (torch, jax), strict=True):
        lines += [f"{name}, {line}" for line in report.gains(figures.runs, figures.args)]
    return lines


def gain_of_bfloat16(torch: Figures, jax: Figures) -> str:
    """Say how fast bfloat16 is on this CPU, and why; "" without runs of it and fp32 on a CPU."""
    both = [{run.dtype: run for run in figures.runs} for figures in (torch, jax)]
    on_cpus = torch.made_by["device"] == jax.made_by["device"] == "CPU"
    if not on_cpus or not all({"fp32", "bf16"} <= runs.keys() for runs in both):
        return ""
    theirs, ours = (
        runs["bf16"].tokens_per_second(of.args) / runs["fp32"].tokens_per_second(of.args)
        for runs, of in zip(both, (torch, jax), strict=True)
    )
    return (
        f"bfloat16 here: {theirs:.2f} times the tokens per s of fp32 in torch, {ours:.2f} in JAX. "
        f"{job.speed_of_bfloat16()}"
    )


def introduce(torch: Figures, jax: Figures) -> str:
    """The number of parameters, the text and the devices."""
    places = ", ".join("{framework} on {device}".format(**one.made_by) for one in (torch, jax))
    return f"{torch.runs[0].parameters:,} parameters, {torch.text.name[:40]}, {places}"


def draw(path: Path, torch: Figures, jax: Figures) -> None:
    """Save the picture: every dtype's losses, how far the two lie apart, and the loss scales."""
    pairs = list(zip(torch.runs, jax.runs, strict=True))
    dtypes = [run.dtype for run in torch.runs]
    scaled = [pair for pair in pairs if pair[0].scale]
    below = ["gap", "scale"] if scaled else ["gap"]
    rows = [[name for name in names for _ in range(6 // len(names))] for names in (dtypes, below)]
    figure = Figure(figsize=(12, 8.4), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12, rect=(0, 0, 1, 0.91))
    panels = figure.subplot_mosaic(rows, height_ratios=[1.4, 1])
    seen: list[float] = []
    for pair in pairs:
        seen += _losses(panels[pair[0].dtype], *pair)
    for name in dtypes:
        picture.loss_limits(panels[name], seen)
    panels[dtypes[0]].set_ylabel("loss, nats per byte", color=picture.SOFT)
    _gaps(panels["gap"], pairs)
    for pair in scaled:
        _scales(panels["scale"], pair)
    for panel in panels.values():
        picture.finish(panel, len(torch.runs[0].train_loss))
    heading = f"One language model, trained by torch and JAX in {picture.listed(dtypes)}"
    heads = {"color": picture.INK, "fontsize": 15, "fontweight": "bold"}
    figure.text(0.0175, 0.955, heading, **heads)
    about = introduce(torch, jax)
    figure.text(0.0175, 0.925, about, color=picture.SOFT, parse_math=False)
    figure.savefig(path)


def _losses(axes: Axes, torch: Run, jax: Run) -> list[float]:
    looks = UNDER, OVER[torch.dtype]
    seen = picture.losses(axes, torch, looks[0]) + picture.losses(axes, jax, looks[1])
    axes.legend(
        list(map(picture.handle, looks)),
        [f"{name}  {run.loss:.4f}" for name, run in zip(NAMES, (torch, jax), strict=True)],
        frameon=False,
        labelcolor=picture.INK,
    )
    about = "lines: training; dots, figures: held-out text"
    picture.title(axes, torch.dtype + ", with a scaler" * bool(torch.scale), about)
    return seen


def _gaps(axes: Axes, pairs: Sequence[tuple[Run, Run]]) -> None:
    picture.gaps(axes, [(jax, torch) for torch, jax in pairs])
    axes.legend(
        [picture.handle(picture.LOOKS[run.dtype]) for run, _ in pairs],
        [run.dtype for run, _ in pairs],
        ncols=len(pairs),
        frameon=False,
        labelcolor=picture.INK,
    )
    picture.title(axes, "JAX's loss above torch's", "in percent")


def _scales(axes: Axes, pair: tuple[Run, Run]) -> None:
    looks, marks = (UNDER, OVER[pair[0].dtype]), (picture.SOFT, picture.INK)
    picture.scales(axes, pair, looks, marks)
    handles = [
        Line2D([], [], **look | {"marker": "x", "markersize": 7}, markeredgecolor=mark)
        for look, mark in zip(looks, marks, strict=True)
    ]
    axes.legend(
        handles,
        [f"{name}  {len(run.skipped)} skipped" for name, run in zip(NAMES, pair, strict=True)],
        loc="upper left",
        frameon=False,
        labelcolor=picture.INK,
    )
    picture.title(axes, f"Loss scale of {pair[0].dtype}", "skipped steps are marked x")


def main(argv: Sequence[str] | None = None) -> None:
    """Read both files, print the table and save the picture."""
    out = Path(__file__).resolve().parent / "out"
    flags = job.Parser(
        "compare.py",
        description="Compare the figures that train_torch.py and train_jax.py saved.",
        allow_abbrev=False,
    )
    for name, default in (("torch", "train_torch.json"), ("jax", "train_jax.json")):
        about = f"figures of train_{name}.py"
        flags.add_argument(
            f"--{name}", type=Path, default=out / default, metavar="FILE", help=about
        )
    about = "the picture; the table goes next to it, as .txt"
    flags.add_argument("--out", type=Path, default=out / "compare.png", metavar="FILE", help=about)
    try:
        args, unknown = flags.parse_known_args(argv)
        if unknown:
            raise job.BadArgument(f"unknown arguments: {' '.join(unknown)}. See compare.py --help.")
        torch, jax = read("torch", args.torch), read("jax", args.jax)
        check_same_job(torch, jax)
        job.check_png(args.out)
        text = args.out.with_suffix(".txt")
        inputs = {"--torch": args.torch, "--jax": args.jax}
        job.check_writable(inputs, {"--out": args.out, "the table": text})
    except job.BadArgument as bad:
        flags.error(str(bad))

    console = Console(markup=False, emoji=False, record=True)
    for part in (introduce(torch, jax), table(torch, jax), *notes(torch, jax)):
        console.print(part, highlight=False)
    text.write_text(console.export_text(), encoding="utf-8")
    draw(args.out, torch, jax)
    print(f"saved {job.near(args.out)} and {job.near(text)}")
    if said := gain_of_bfloat16(torch, jax):
        print(said)


if __name__ == "__main__":
    main()
