"""Weights of products in 8 bits: quantised at every use, or stored so.

A form of a weight is what one way to quantise it makes. With one scale for a tensor, all products
read the same form; with scales by row, the product for the input's gradient reads another one.
`freeze` notes which forms products read, and stores these alone, as a `WeightInBits`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from polymp.backends.torch.autocast.dtype_names import DTYPES
from polymp.backends.torch.autocast.fp8_operand import InBits, Quantisation
from polymp.backends.torch.compat import modes
from polymp.errors import PolicyError
from polymp.fp8 import quantise

Forms = dict[Quantisation, InBits]

_aten = torch.ops.aten


class WeightInBits(torch.Tensor):
    """A weight that is stored in 8 bits alone; to a program it has float32 and its shape.

    It has no derivative. Products in 8 bits read its forms; it can be copied, moved to a device and
    loaded into. Any other op raises an error.

    Args:
        forms: of the weight, at least one.
    """

    __torch_function__: ClassVar[Any] = modes.NO_FUNCTIONS

    @staticmethod
    def __new__(cls, forms: Mapping[Quantisation, InBits]) -> "WeightInBits":
        """Make a tensor of the shape of the forms, on their device."""
        array = next(iter(forms.values())).array
        made = modes.wrapper(cls, array.shape, torch.float32, array.device)
        assert isinstance(made, cls)
        return made

    def __init__(self, forms: Mapping[Quantisation, InBits]) -> None:
        self.ways: tuple[Quantisation, ...] = tuple(forms)
        for at, form in enumerate(forms.values()):  # torch.compile looks for tensors by name
            setattr(self, f"array{at}", form.array)
            setattr(self, f"scale{at}", form.scale)

    @property
    def forms(self) -> Forms:
        """The forms, by the way to quantise."""
        pairs = ((getattr(self, f"array{i}"), getattr(self, f"scale{i}")) for i in self._range())
        return {how: InBits(*pair) for how, pair in zip(self.ways, pairs, strict=True)}

    def _range(self) -> range:
        return range(len(self.ways))

    def parts(self) -> list[torch.Tensor]:
        """Return the tensors that it is stored in."""
        return [part for form in self.forms.values() for part in form]

    def form(self, how: Quantisation) -> InBits:
        """Return a form."""
        if how not in self.ways:
            raise PolicyError(
                f"freeze() stored a weight of shape {tuple(self.shape)} in 8 bits as its examples "
                "read it, and it is now read in another way: for the gradient of its layer's "
                "input, or by another recipe. Give freeze() an example whose input requires "
                "gradients, with gradients enabled, and the policy that the model runs with."
            )
        return self.forms[how]

    def values(self) -> torch.Tensor:
        """Return the weight in float32, as its first form has it."""
        array, scale = next(iter(self.forms.values()))
        values: torch.Tensor = array.float() * quantise.inverse(scale)
        return values

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "WeightInBits":
        return WeightInBits({how: InBits(*map(change, form)) for how, form in self.forms.items()})

    def _load(self, source: torch.Tensor) -> None:
        """Take the values of another tensor, quantised in the same ways."""
        given = source.forms if isinstance(source, WeightInBits) else {}
        wide = source.values() if isinstance(source, WeightInBits) else source.detach().float()
        for how, mine in self.forms.items():
            form = given[how] if how in given else how(wide)
            for to, part in zip(mine, form, strict=True):
                to.copy_(part)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WeightInBits(shape={tuple(self.shape)}, device={str(self.device)!r})"

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Take it apart for pickle, which has no 8-bit floats (torch 2.13): as bytes."""
        parts = [(how, array.view(torch.uint8), s) for how, (array, s) in self.forms.items()]
        return _unpickled, (parts, isinstance(self, torch.nn.Parameter))

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Quantisation, ...]]:
        """Return the names of the tensors inside, and what else it takes to make this again."""
        return [f"{part}{i}" for i in self._range() for part in InBits._fields], self.ways

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor],
        ways: tuple[Quantisation, ...],
        size: object,
        stride: object,
    ) -> "WeightInBits":
        """Make a weight of what `__tensor_flatten__` returned."""
        pairs = ((inner[f"array{i}"], inner[f"scale{i}"]) for i in range(len(ways)))
        return WeightInBits({how: InBits(*pair) for how, pair in zip(ways, pairs, strict=True)})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one of the few ops that there are for such a weight."""
        given = dict(kwargs or {})
        mine = args[0] if args else None
        if func is _aten.copy_.default and isinstance(mine, WeightInBits):
            mine._load(args[1])
            return mine
        if func is _aten._to_copy.default and given.get("dtype") in (None, torch.float32):
            given.pop("dtype", None)
        elif func not in (_aten.detach.default, _aten.alias.default, _aten.clone.default):
            _refuse(func, args)
        assert isinstance(mine, WeightInBits), "it is the only argument that is a tensor"
        return mine._each(lambda part: func(part, *args[1:], **given))


def _unpickled(
    parts: Sequence[tuple[Quantisation, torch.Tensor, torch.Tensor]], parameter: bool
) -> torch.Tensor:
    dtypes = [DTYPES[how.recipe.format_of(how.role)] for how, *_ in parts]
    made = WeightInBits(
        {
            how: InBits(array.view(dtype), scale)
            for (how, array, scale), dtype in zip(parts, dtypes, strict=True)
        }
    )
    return torch.nn.Parameter(made, requires_grad=False) if parameter else made


def _refuse(func: torch._ops.OpOverload, args: Sequence[Any]) -> NoReturn:
    shape = next(tuple(a.shape) for a in tree_leaves(args) if isinstance(a, WeightInBits))
    raise PolicyError(
        f"{func} reads a weight of shape {shape} that freeze() stored in 8 bits. Only a product "
        "that runs in 8 bits can read it; explain() says why one does not. Give freeze() an "
        "example of this call as well: the weight then stays in float32."
    )


class _Noted:
    """Weights of which the forms that products read are noted.

    Attributes:
        by_id: the forms, by the identity of a weight.
        quantising: True while a form is made, in ops that are no reads of the program.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, tuple[torch.Tensor, Forms]] = {}
        self.quantising: bool = False


noted: _Noted = _Noted()


@contextmanager
def noting(weights: Sequence[tuple[torch.Tensor, Forms]]) -> Iterator[None]:
    """In the block, note the forms of weights that products read, each in its dictionary."""
    before, noted.by_id = noted.by_id, {id(t): (t, forms) for t, forms in weights}
    try:
        yield
    finally:
        noted.by_id = before


def of_weight(weight: torch.Tensor, how: Quantisation) -> InBits:
    """Quantise a weight, unless it is stored in 8 bits or being noted."""
    if isinstance(weight, WeightInBits):
        return weight.form(how)
    if noted.by_id:
        found = noted.by_id.get(id(weight))
        if found is not None:
            return _note(weight, how, found[1])
    return how(weight)


def _note(weight: torch.Tensor, how: Quantisation, forms: Forms) -> InBits:
    if how not in forms:
        noted.quantising = True
        try:
            with torch.no_grad():
                forms[how] = how(weight.detach())
        finally:
            noted.quantising = False
    return forms[how]
