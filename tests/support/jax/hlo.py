"""Readers of XLA's optimised HLO of a program, and of the values it saves for backward.

In: the text of `compiled.as_text()`. Out: every contraction in it with the dtypes of its operands
and of its result, wherever it stands (entry, fusion, loop body); the casts that run in every turn
of a loop, and those of them that make the same in every turn. XLA rewrites dtypes as it likes, so
the jaxpr cannot answer this: on the CPU of jax 0.10 a contraction of bfloat16 with a bfloat16
result is run on float32 operands.
`residual_bytes` reads a jaxpr instead. Nothing here knows of polymp.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.extend.core import Var

DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
}
LOW = {"bfloat16", "float16"}
# Options for `compile`, so that what is read is what users get: the flags in tests/conftest.py ask
# for XLA's older way to make code of a fusion, where it has one.
AS_FOR_USERS: dict[str, Any] = (
    {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
)


def as_for_users(fn: Callable[..., Any], *args: Any) -> Any:
    """A function as XLA compiles it for users, and not with the flags of tests."""
    return jax.jit(fn).lower(*args).compile(AS_FOR_USERS)


# Libraries that XLA calls for a contraction: cuBLAS, cuDNN, oneDNN, Eigen.
_LIBRARY = re.compile(r"gemm|matmul|dot|conv", re.IGNORECASE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_PLACE = re.compile(r"\bindex=(\d+)")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
# Results that may differ though the operands do not.
_CHANGING = {"rng", "rng-bit-generator", "rng-get-and-update-state", "infeed", "recv", "while"}


@dataclass(frozen=True)
class Instruction:
    """One line of HLO; dtype and shape are those of its first result.

    `place` is the number of a parameter, or the place of what is taken from a tuple.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    opcode: str
    operands: tuple[str, ...]
    place: int
    rest: str

    def text(self, key: str) -> str:
        """The value of a quoted attribute, or nothing."""
        found = re.search(rf'{key}="([^"]*)"', self.rest)
        return found[1] if found else ""


Program = dict[str, dict[str, Instruction]]


@dataclass(frozen=True)
class Contraction:
    """A matrix product or convolution as it runs."""

    kind: str  # dot, convolution, or what a library call names itself
    operands: tuple[str, str]
    result: str
    shape: tuple[int, ...]
    backward: bool
    looped: bool

    @property
    def low(self) -> bool:
        """Whether both operands are read in a low dtype."""
        return LOW.issuperset(self.operands)

    @property
    def full(self) -> bool:
        """Whether its sum is handed over in float32: nothing was rounded before."""
        return self.result == "float32"


def read(text: str) -> Program:
    """The instructions of every computation, by name."""
    program: Program = {}
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            program[found[1]] = current = {}
        elif program and (found := _INSTRUCTION.match(line)):
            current[found[1]] = _instruction(*found.groups())
    if not program:
        raise ValueError("Cannot read this text as HLO because no computation was found in it.")
    return program


def contractions(text: str) -> list[Contraction]:
    program = read(text)
    looped = _looped(program)
    return [
        Contraction(
            kind=op.opcode if op.opcode != "custom-call" else op.text("custom_call_target"),
            operands=(body[op.operands[0]].dtype, body[op.operands[1]].dtype),
            result=op.dtype,
            shape=op.shape,
            backward="transpose(" in op.text("op_name"),
            looped=name in looped,
        )
        for name, body in program.items()
        for op in body.values()
        if _contracts(op)
    ]


def summary(text: str) -> Counter[str]:
    """How many contractions there are of each kind, as "bfloat16 x bfloat16 -> float32"."""
    return Counter(f"{' x '.join(c.operands)} -> {c.result}" for c in contractions(text))


def casts(text: str) -> int:
    """How many casts from one float dtype to another there are, those in fusions too."""
    floats = set(DTYPES.values())
    return sum(
        op.opcode == "convert" and floats.issuperset((op.dtype, body[op.operands[0]].dtype))
        for body in read(text).values()
        for op in body.values()
    )


def repeated_casts(text: str, size: int = 2) -> list[Instruction]:
    """The casts in a loop that make the same in every turn, and so could stand before it.

    The same in every turn is what the body of the loop hands on as it got it, and what is computed
    from nothing else. Conditionals are not looked into.
    """
    program = read(text)
    ops = [op for body in program.values() for op in body.values() if op.opcode == "while"]
    found = []
    for name in dict.fromkeys(_BODY.findall(" ".join(op.rest for op in ops))):
        found += _same_casts(program, program[name], _handed_on(program[name]), loop=True)
    return [op for op in dict.fromkeys(found) if prod(op.shape) >= size]


def in_stablehlo(op: str, text: str) -> list[tuple[str, str, str]]:
    """The dtypes of both operands and of the result of every such op in StableHLO."""
    tensor = r"tensor<(?:\d+x)*(\w+)>"
    return re.findall(rf"stablehlo.{op}.*: \({tensor}, {tensor}\) -> {tensor}", text)


def residual_bytes(loss: Callable[..., Any], params: Any, *rest: Any) -> int:
    """How much memory the forward pass of `loss` leaves to the backward pass.

    Every array that the pullback of `jax.vjp` holds counts once. Arguments do not count, as they
    are there anyway; a copy of an argument in another dtype does. Nothing is run.
    """

    def saved(params: Any, *rest: Any) -> list[Any]:
        _, pullback = jax.vjp(lambda p: loss(p, *rest), params)
        return jax.tree.leaves(pullback)

    jaxpr = jax.make_jaxpr(saved)(params, *rest).jaxpr
    held = {v for v in jaxpr.outvars if isinstance(v, Var)} - set(jaxpr.invars)
    return sum(prod(v.aval.shape) * v.aval.dtype.itemsize for v in held)


def _instruction(name: str, text: str) -> Instruction:
    # A tuple's type holds spaces, and layouts such as {1,0:T(8,128)} hold brackets.
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    array = _ARRAY.search(text[:end])
    dtype, shape = array.groups() if array else ("", "")
    call = text[end:].lstrip()
    opcode, _, arguments = call.partition("(")
    close = _closing("(" + arguments)
    return Instruction(
        name=name,
        dtype=DTYPES.get(dtype, dtype),
        shape=tuple(int(n.strip("<=")) for n in shape.split(",") if n),
        opcode=opcode,
        operands=tuple(_NAME.findall(arguments[: close - 1])),
        place=_place(opcode, arguments[: close - 1], arguments[close:]),
        rest=arguments[close:],
    )


def _place(opcode: str, arguments: str, rest: str) -> int:
    if opcode == "parameter":
        return int(arguments)
    found = _PLACE.search(rest) if opcode == "get-tuple-element" else None
    return int(found[1]) if found else -1


def _closing(text: str) -> int:
    """Where the bracket that opens `text` is closed."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    raise ValueError(f"Cannot read this HLO because a bracket is not closed: {text[:80]}")


def _contracts(op: Instruction) -> bool:
    if op.opcode == "custom-call":
        return bool(_LIBRARY.search(op.text("custom_call_target")))
    return op.opcode in ("dot", "convolution", "ragged-dot", "scaled-dot")


def _calls(op: Instruction, program: Program) -> Iterator[str]:
    return (name for name in _NAME.findall(op.rest) if name in program)


def _looped(program: Program) -> set[str]:
    """The computations that run inside a loop."""
    ops = [op for body in program.values() for op in body.values() if op.opcode == "while"]
    todo = [name for op in ops for name in _calls(op, program)]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [n for op in program[name].values() for n in _calls(op, program)]
    return found


def _handed_on(body: dict[str, Instruction]) -> set[int]:
    """The places of a loop's state that its body leaves as they are."""

    def source(name: str) -> Instruction:
        while body[name].opcode in ("copy", "bitcast"):
            (name,) = body[name].operands
        return body[name]

    (state,) = (op for op in body.values() if op.opcode == "parameter")
    result = list(body.values())[-1]  # a schedule ends with the root
    ends = [source(name) for name in result.operands]
    return {i for i, op in enumerate(ends) if op.operands == (state.name,) and op.place == i}


def _same_casts(
    program: Program, body: dict[str, Instruction], given: set[int], loop: bool = False
) -> list[Instruction]:
    """The casts of what is the same in every turn."""
    same: set[str] = set()
    found = []
    for op in body.values():
        if op.opcode == "parameter":
            fixed = not loop and op.place in given
        elif op.opcode == "get-tuple-element" and loop and body[op.operands[0]].place == 0:
            fixed = op.place in given
        else:
            fixed = op.opcode not in _CHANGING and same.issuperset(op.operands)
        if fixed:
            same.add(op.name)
            found += [op] if op.opcode == "convert" else []
        if op.opcode in ("fusion", "call"):
            (called,) = _CALLED.findall(op.rest)
            known = {i for i, name in enumerate(op.operands) if name in same}
            found += _same_casts(program, program[called], known)
    return found
