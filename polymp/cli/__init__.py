"""The command line: policies, show, diff, check, doctor and compare.

    argv -> collect(args) -> data -> JSON | draw(data) -> exit code

Here are the arguments, and `compare`; `policies` and `doctor` find the data of the others and draw
it. `check` and `doctor` alone import torch and jax.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import polymp
from polymp import backends, text_table
from polymp.cli import doctor, policies
from polymp.errors import BackendMissingError, PolicyError, UsageError, escaped

Data = dict[str, Any]

EXIT = """\
exit codes:
  0  done; diff: no difference; compare: rounding explains all; check, doctor:
     nothing is wrong
  1  diff: there are differences; compare: rounding does not explain one; check:
     the policy is wrong; doctor: something is wrong
  2  the command could not be carried out: bad arguments, no such policy or
     record, a package is missing
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default the process's own; return its exit code, see `EXIT`."""
    parser = _parser()
    args = parser.parse_args(argv)
    if "collect" not in args:
        parser.print_help()
        return 0
    if sys.stdout is None:
        print("polymp: standard output is closed.", file=sys.stderr)
        return 2
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a user's model prints
            data = args.collect(args)
    except (PolicyError, BackendMissingError, UsageError) as error:
        print(f"polymp: {error}", file=sys.stderr)
        return 2
    for line in data.get("errors", ()):
        print(f"polymp: {line}", file=sys.stderr)
    if args.json:
        lines = [json.dumps(data, indent=2, default=dataclasses.asdict)]
    else:
        lines = _drawn(args, data)
    try:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    except (OSError, UnicodeError) as error:
        _silence_stdout()
        if not isinstance(error, BrokenPipeError):  # a reader such as `head` has seen enough
            print(f"polymp: cannot write to standard output: {error}", file=sys.stderr)
            return 2
    return int(not data.get("ok", data.get("same", data.get("explained", True))))


def _drawn(args: argparse.Namespace, data: Data) -> list[str]:
    """Lines no wider than the terminal; lists are lines of tables already."""
    lines = list[str]()
    for part in args.draw(data):
        lines += part if isinstance(part, list) else text_table.folded(part)
    return list(map(escaped, lines))  # names cannot give orders to a terminal


def _silence_stdout() -> None:
    """Send what is left in the buffer nowhere, so that Python's exit does not fail on it again."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _parser() -> argparse.ArgumentParser:
    about = (
        "Mixed precision for PyTorch and JAX: look at policies and at this machine, and compare "
        "records of runs."
    )
    end: Data = {"epilog": EXIT, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="polymp", description=_wrapped(about), **end)
    parser.add_argument("--version", action="version", version=f"polymp {polymp.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")

    def command(
        name: str,
        text: str,
        collect: Callable[[argparse.Namespace], Data],
        draw: Callable[[Data], Iterable[str | list[str]]] | None,
    ) -> argparse.ArgumentParser:
        sentence = _wrapped(text[0].upper() + text[1:] + ".")
        added = commands.add_parser(name, help=text, description=sentence, **end)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(collect=collect, draw=draw)
        return added

    named = "the name of a shipped policy, or the path of a .toml file"
    text = "list the shipped policies"
    command("policies", text, policies.listed, policies.draw_list)

    text = "show the rule of every op under a policy"
    show = command("show", text, policies.shown, policies.draw_rules)
    show.add_argument("policy", help=named)
    text = "only this op, class (class:NAME) or spelling (aten:NAME)"
    show.add_argument("--op", default="", help=text)
    text = "in the module at this path, as blocks.0.attn"
    show.add_argument("--scope", default="", metavar="PATH", help=text)

    text = "show where two policies differ"
    diff = command("diff", text, policies.compared, policies.draw_differences)
    diff.add_argument("policies", nargs=2, metavar="POLICY", help=named)

    text = "compare two records of runs, and find the first call that rounding cannot explain"
    runs = command("compare", text, _compared, None)  # it sets its own
    text = "a file that polymp.torch.record or polymp.jax.record wrote"
    runs.add_argument("one", metavar="A", help=text)
    runs.add_argument("other", metavar="B", help=f"another: {text}")
    runs.add_argument("--html", metavar="FILE", help="also write a page with a curve and all calls")
    text = "the beginning of B's module paths that A names otherwise; may be given several times"
    runs.add_argument(
        "--modules",
        metavar="THEIRS=OURS",
        type=_renamed,
        action="append",
        default=[],
        help=text,
    )

    text = "read a policy and check that torch and jax can run ops by each row"
    asked = command("check", text, policies.checked, policies.draw_faults)
    asked.add_argument("policy", help=named)
    text = "check for this one; if left out, both"
    asked.add_argument("--backend", choices=backends.NAMES, help=text)

    text = "report the versions and devices of this machine"
    examine = command("doctor", text, doctor.examined, doctor.draw)
    text = "time the model that the function returns with example inputs, in each dtype"
    examine.add_argument("--model", metavar="MODULE:FUNCTION", help=text)
    return parser


def _compared(args: argparse.Namespace) -> Data:
    """The comparison of two records, also as a page if a path for one is given."""
    try:
        from polymp.diagnostics.compare import compare
        from polymp.errors import RecordError
    except ModuleNotFoundError as error:
        raise UsageError(
            f"compare needs the package {error.name}: pip install {error.name}."
        ) from None
    try:
        found = compare(args.one, args.other, modules=dict(args.modules) or None)
        if args.html is not None:
            found.to_html(args.html)
    except RecordError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"--html: cannot write {args.html!r}: {error.strerror}.") from None
    args.draw = lambda data: [str(found).split("\n")]  # made of more than its data
    return found.to_dict()


def _renamed(given: str) -> tuple[str, str]:
    """A module path of the other record and that of the first, of "THEIRS=OURS"."""
    theirs, equals, ours = given.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(
            f"{given!r} is no pair of module paths. Write THEIRS=OURS: model.layers=blocks"
        )
    return theirs, ours


def _wrapped(text: str) -> str:
    """A text in lines of a help, which argparse leaves as they are."""
    return textwrap.fill(text, 80)
