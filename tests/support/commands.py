"""The command line in a process of its own, what it prints as data, and machines made up."""

import re
import tomllib

from tests.support import processes
from tests.support.processes import ROOT

TORCH = {"name": "torch", "version": "2.13.0+cpu", "devices": ["cpu"], "problem": ""}
JAX = {"name": "jax", "version": "0.10.2", "devices": ["cpu"], "problem": ""}


def facts(*frameworks, nvidia=False):
    """The frameworks and devices of a machine made up, as `gather` has them."""
    return [dict(framework) for framework in frameworks or (TORCH, JAX)], nvidia


def process(*argv, blocked=(), cwd=ROOT, **env):
    """The command in a process of its own, in which some modules cannot be imported."""
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
    code += f"from polymp.cli import main; sys.exit(main({argv!r}))"
    return processes.python("-c", code, code=None, cwd=cwd, env={"COLUMNS": "80", **env})


def table(out: str) -> dict[str, list[str]]:
    """Cells of a table's lines by the first of them; none of the cells may have two spaces."""
    lines = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    return {first: rest for first, *rest in lines if rest}


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
