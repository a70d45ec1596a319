"""The training job, whatever the framework: its arguments, its text, its batches, first weights.

Arguments in, numpy arrays out. A bad argument is a `BadArgument` before anything is trained.
Nothing here knows torch or jax, so every framework trains from the same weights on the same bytes
in the same order.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from polymp import dtypes
from polymp.backends import processor

DTYPES = ("fp32", "bf16", "fp16")


class BadArgument(ValueError):
    """An argument that cannot be used; the text says which to write instead."""


class Parser(argparse.ArgumentParser):
    """Answers a bad argument with one line and exit code 2, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


class Text(NamedTuple):
    """A text as numbers from 0 to `alphabet` - 1, one for each byte.

    `chance` is the held-out loss, in nats per byte, of a guess by byte frequency alone.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray
    alphabet: int
    chance: float


class Sizes(NamedTuple):
    """How much is trained: the defaults of the arguments of these names."""

    steps: int
    batch: int
    context: int
    width: int
    layers: int
    heads: int
    lr: float
    held_out: int


# Products large enough to save time in bfloat16 on a processor with instructions for them. Without
# instructions for float16, a step in that dtype takes 50 times as long in torch: most of the time.
LARGE = Sizes(steps=36, batch=16, context=64, width=256, layers=2, heads=4, lr=0.003, held_out=32)

# Products so small that they end soon without such instructions, too. Tests and benchmarks that
# compare losses take 1,000 steps.
SMALL = Sizes(steps=1000, batch=12, context=32, width=48, layers=2, heads=3, lr=0.01, held_out=128)
SHORT = SMALL._replace(steps=300)


def default_sizes() -> Sizes:
    """The sizes for this machine's processor: all six runs end within three minutes."""
    return LARGE if _instructions() else SHORT


def speed_of_bfloat16() -> str:
    """Say whether products in bfloat16 save time on this machine's processor."""
    listed = _instructions()
    if listed is None:
        return "This system does not list the processor's instructions for bfloat16."
    if listed:
        return f"This processor has instructions for bfloat16 products: {', '.join(listed)}."
    return (
        "This processor has no instructions for bfloat16 products: torch's kernels emulate them, "
        "JAX's multiply in float32. Expect bfloat16 to save memory, and little or no time. On "
        f"processors that have them the model is larger: --width {LARGE.width}."
    )


def _instructions() -> list[str] | None:
    """The instructions for products in bfloat16; None if the system does not list them."""
    _, features = processor()
    return None if features is None else [x for x in _MULTIPLY_BFLOAT16 if x in features]


# The CPU features, as Linux and macOS name them, that multiply bfloat16 in hardware.
_MULTIPLY_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16", "FEAT_BF16")


def parser(prog: str, about: str, sizes: Sizes) -> Parser:
    """The arguments that every framework's example has, with some sizes as their defaults."""
    here = Path(__file__).resolve().parent
    flags = Parser(prog, description=about, allow_abbrev=False, formatter_class=_Help)
    add = flags.add_argument
    add("--text", type=Path, metavar="FILE", help="learn this text, not Python's documentation")
    add("--device", default="cpu", help="where to train")
    add("--dtypes", type=dtype_names, default=",".join(DTYPES), help="what to train in, in order")
    add("--steps", type=whole(1), default=sizes.steps, help="optimizer steps for each dtype")
    add("--batch", type=whole(1), default=sizes.batch, help="sequences in a step")
    add("--context", type=whole(1), default=sizes.context, help="bytes in a sequence")
    add("--width", type=whole(1), default=sizes.width, help="features of the model")
    add("--layers", type=whole(1), default=sizes.layers, help="blocks of the model")
    add("--heads", type=whole(1), default=sizes.heads, help="attention heads of a block")
    add("--lr", type=_positive, default=sizes.lr, help="learning rate after the warm-up")
    add("--held-out", type=whole(1), default=sizes.held_out, help="sequences of the held-out text")
    add("--seed", type=whole(0), default=0, help="chooses the first weights and the batches")
    add("--out", type=Path, default=here / "out" / f"{Path(prog).stem}.png", help="the picture")
    add("--json", type=Path, help="the figures (default: next to the picture)")
    add("--quiet", action="store_true", help="no progress bars")
    return flags


def arguments(flags: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line, checked.

    Raises:
        BadArgument: an argument is unknown, or two do not fit together.
    """
    args, unknown = flags.parse_known_args(argv)
    if unknown:
        raise BadArgument(f"unknown arguments: {' '.join(unknown)}. See {flags.prog} --help.")
    if args.width % args.heads:
        raise BadArgument(
            f"--width {args.width} cannot be split over --heads {args.heads}. "
            f"Give a --width that is a multiple of {args.heads}."
        )
    return args


def whole(least: int) -> Callable[[str], int]:
    """A type of argument: a whole number from `least` up, of digits that fit into 64 bits."""

    def convert(given: str) -> int:
        if not given.isdecimal() or len(given) > 18 or int(given) < least:
            raise argparse.ArgumentTypeError(f"got '{given}', give a whole number from {least} up")
        return int(given)

    return convert


def check_outputs(args: argparse.Namespace) -> None:
    """Give the figures a place if they have none, and see that both outputs can be written.

    Raises:
        BadArgument: one cannot, or would overwrite something that is needed.
    """
    check_png(args.out)
    args.json = args.json or args.out.with_suffix(".json")
    inputs = {"--text": args.text} if args.text else {}
    check_writable(inputs, {"--out": args.out, "--json": args.json})


def check_png(path: Path) -> None:
    """Raise a BadArgument if --out does not end like a picture."""
    if path.suffix != ".png":
        raise BadArgument(f"--out '{path}' does not end in .png. Give the path of a PNG file.")


def check_writable(inputs: Mapping[str, Path], outputs: Mapping[str, Path]) -> None:
    """See that files can be written, and leave everything as it was.

    Args:
        inputs: what must not be overwritten, by what the caller calls it.
        outputs: what is to be written, likewise.

    Raises:
        BadArgument: one cannot, or would overwrite another.
    """
    taken = {path.resolve(): name for name, path in inputs.items()}
    for name, path in outputs.items():
        if other := taken.get(path.resolve()):
            raise BadArgument(f"{name} '{path}' would overwrite {other}. Choose another path.")
        taken[path.resolve()] = name
        _try_to_write(name, path)


def read(path: Path | None, context: int) -> Text:
    """The text of a file, or of Python's own documentation.

    Every tenth of a hundred stretches is held out, so that both parts are of the same kind.

    Raises:
        BadArgument: the file cannot be read or is too short for the context.
    """
    name, data = f"--text '{path}'", b""
    if path:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BadArgument(
                f"{name} cannot be read: {error.strerror}. Give the path of a text file."
            ) from None
    else:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            raise BadArgument("this Python lacks pydoc_data.topics. Give --text FILE.") from None
        name = "Python's documentation"
        data = "\n".join(topics.values()).encode()
    if len(data) < 10 * (context + 1):
        raise BadArgument(
            f"{name} has {len(data)} bytes, and --context {context} needs {10 * (context + 1)} "
            "or more. Give a longer text or a smaller --context."
        )
    alphabet, numbers = np.unique(np.frombuffer(data, np.uint8), return_inverse=True)
    stretches = np.array_split(numbers, 100)
    held_out = np.concatenate(stretches[9::10])
    train = np.concatenate([part for i, part in enumerate(stretches) if i % 10 != 9])
    counts = np.bincount(train, minlength=len(alphabet)) + 1  # + 1: a byte may be held out only
    chance = -np.log(counts / counts.sum())[held_out].mean()
    title = path.name if path else "pydoc_data.topics"
    return Text(title, train, held_out, len(alphabet), float(chance))


def first_weights(alphabet: int, args: argparse.Namespace) -> dict[str, np.ndarray]:
    """The model's parameters before the first step, by name; float32, the same in any framework.

    Drawn as torch's layers draw theirs: embeddings from a normal distribution, a linear layer's
    weight and bias evenly from within one over the root of its inputs. That weight is
    [inputs, outputs], so that x @ weight is the layer.
    """
    random = np.random.default_rng([args.seed, 1])  # not the numbers that choose the batches
    width = args.width
    weights = {
        "bytes.weight": random.standard_normal((alphabet, width)),
        "places.weight": random.standard_normal((args.context, width)),
    }

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = np.ones(width)
        weights[f"{name}.bias"] = np.zeros(width)

    def linear(name: str, inputs: int, outputs: int, *, bias: bool) -> None:
        most = inputs**-0.5
        weights[f"{name}.weight"] = random.uniform(-most, most, (inputs, outputs))
        if bias:
            weights[f"{name}.bias"] = random.uniform(-most, most, outputs)

    for number in range(args.layers):
        block = f"blocks.{number}"
        norm(f"{block}.norm1")
        linear(f"{block}.qkv", width, 3 * width, bias=False)
        linear(f"{block}.out", width, width, bias=False)
        norm(f"{block}.norm2")
        linear(f"{block}.up", width, 4 * width, bias=True)
        linear(f"{block}.down", 4 * width, width, bias=True)
    norm("norm")
    linear("head", width, alphabet, bias=False)
    return {name: values.astype(np.float32) for name, values in weights.items()}


def batches(text: Text, args: argparse.Namespace) -> Iterator[np.ndarray]:
    """For each step, int64 [batch, context + 1] from random places of the training text."""
    random = np.random.default_rng(args.seed)
    for _ in range(args.steps):
        starts = random.integers(0, len(text.train) - args.context, args.batch)
        yield text.train[starts[:, None] + np.arange(args.context + 1)]


def held_out(text: Text, args: argparse.Namespace) -> np.ndarray:
    """int64 [up to args.held_out, context + 1], evenly spread over the held-out text."""
    last = len(text.held_out) - args.context - 1
    starts = np.unique(np.linspace(0, last, args.held_out).astype(np.int64))
    return text.held_out[starts[:, None] + np.arange(args.context + 1)]


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Up in a line over the first twentieth, then down along a cosine to a twentieth."""
    warm = min(1.0, (step + 1) / (args.steps / 20))
    return args.lr * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * step / args.steps)) / 2)


def look_at(step: int, args: argparse.Namespace) -> bool:
    """True before the steps at which the held-out loss is taken: ten in a run, evenly spread."""
    return step * 10 % args.steps < 10


def near(path: Path) -> Path:
    """The path as seen from here, where that is shorter."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds a default where there is one to tell."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def _positive(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got '{given}', give a number above 0")
    return value


def dtype_names(given: str) -> tuple[str, ...]:
    """The dtypes that an argument lists, with commas, each by the name that tables print.

    Raises:
        argparse.ArgumentTypeError: one is another dtype, or is there twice.
    """
    short = {dtypes.FULL[name]: name for name in DTYPES}
    names = tuple(short.get(dtypes.FULL.get(name, ""), name) for name in given.split(","))
    if not set(names) <= set(DTYPES) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"got '{given}', give one or more of {','.join(DTYPES)}, each once, "
            "with commas and no spaces"
        )
    return names


def _try_to_write(name: str, path: Path) -> None:
    existed = path.exists()
    try:
        try:
            path.open("ab").close()
        except FileNotFoundError:
            path.parent.mkdir(parents=True)
            path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise BadArgument(
            f"{name} '{path}' cannot be written: {error.strerror}. Choose another path."
        ) from None
