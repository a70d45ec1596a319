"""How many of polymp's names have a type that every checker agrees on; below the bar it fails.

    python tests/support/type_completeness.py

basedpyright's `--verifytypes`, without what torch and jax leave open. The rest is listed by file.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

BAR = 0.95
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Print the score, and the files that lower it."""
    command = [sys.executable, "-m", "basedpyright", "--verifytypes", "polymp", "--ignoreexternal"]
    ran = subprocess.run(
        [*command, "--outputjson", "--pythonpath", sys.executable],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    if not ran.stdout.startswith("{"):
        print(ran.stdout, ran.stderr, sep="\n", file=sys.stderr)
        return 2
    found = json.loads(ran.stdout)["typeCompleteness"]
    unsure = [s for s in found["symbols"] if s["isExported"] and not s["isTypeKnown"]]
    unsure += [s for s in found["symbols"] if s["isExported"] and s["isTypeAmbiguous"]]
    modules = Counter(symbol["name"].rpartition(".")[0] for symbol in unsure)
    for module, count in modules.most_common(20):
        print(f"{count:5d}  {module}")
    score, counts = found["completenessScore"], found["exportedSymbolCounts"]
    print(f"{counts['withKnownType']} of {sum(counts.values())} names: {score:.1%}, bar {BAR:.0%}")
    return int(score < BAR)


if __name__ == "__main__":
    sys.exit(main())
