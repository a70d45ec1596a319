"""`polymp compare`: two records of runs, and what of their difference rounding does not explain."""

import argparse
from typing import Any

from polymp.errors import UsageError

Data = dict[str, Any]


def compared(args: argparse.Namespace) -> Data:
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


def renamed(given: str) -> tuple[str, str]:
    """A module path of the other record and that of the first, of "THEIRS=OURS"."""
    theirs, equals, ours = given.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(
            f"{given!r} is no pair of module paths. Write THEIRS=OURS: model.layers=blocks"
        )
    return theirs, ours
