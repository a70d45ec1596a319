"""Ways to run a torch model in low precision, each as its own documentation has it.

A way takes a float32 model, on its device, and gives it back as `Run` has it: what to call, under
what region, how to go backward and how to step. The low dtype is bfloat16 unless the name says
float16. A way that cannot be had raises, and the text of the error says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
LOW = torch.bfloat16


@dataclass
class Job:
    """The arguments of every way.

    Attributes:
        model: float32; where it is trained it returns the loss.
        inputs: example arguments of a call.
        optimizer: makes one of the trainable parameters; None to serve.
        stack: closed when the program is no longer needed.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    optimizer: Optimizer | None = None
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def device(self) -> str:
        return next(self.model.parameters()).device.type

    def trainable(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def made(self) -> torch.optim.Optimizer | None:
        return None if self.optimizer is None else self.optimizer(self.trainable())


@dataclass
class Run:
    """A model that runs in some precision.

    Attributes:
        call: the model.
        region: what its calls run in.
        backward: of the loss.
        step: updates the weights and drops the gradients.
        dtype: of what a caller makes for the model, as the keys and values it decodes with.
        casts_inputs: whether floating-point inputs must be made that dtype by the caller.
    """

    call: Callable[..., Any]
    region: Callable[[], AbstractContextManager[Any]] = nullcontext
    backward: Callable[[Tensor], Any] = Tensor.backward
    step: Callable[[], None] = lambda: None
    dtype: torch.dtype = LOW
    casts_inputs: bool = False


def stepping(optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
    def step() -> None:
        assert optimizer is not None
        optimizer.step()
        optimizer.zero_grad()

    return step


def fp32(job: Job) -> Run:
    return Run(job.model, step=stepping(job.made()), dtype=torch.float32)


class Float32Norm(nn.Module):
    """A LayerNorm computed in float32, whatever comes in; in the dtype of what came in."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.float()).to(x.dtype)  # type: ignore[no-any-return]


def lowered(model: nn.Module) -> None:
    """Make every weight low but those of norms, which compute in float32."""
    norms = (nn.LayerNorm, nn.BatchNorm2d)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.LayerNorm):
                setattr(module, name, Float32Norm(child))
    for module in model.modules():
        if not isinstance(module, norms):
            for param in module.parameters(recurse=False):
                param.data = param.data.to(LOW)


def by_hand(job: Job) -> Run:
    """Low weights and activations, norms in float32; training keeps float32 masters beside them."""
    lowered(job.model)
    if job.optimizer is None:
        return Run(job.model, casts_inputs=True)
    params = job.trainable()
    low = [p for p in params if p.dtype is LOW]
    masters = [p.detach().float().requires_grad_() for p in low]
    optimizer = job.optimizer([*masters, *(p for p in params if p.dtype is not LOW)])

    def step() -> None:
        for param, master in zip(low, masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            param.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(low, masters)

    return Run(job.model, step=step, casts_inputs=True)


def by_hand_wide(job: Job) -> Run:
    """As by hand, but every backward pass adds its gradients to float32 ones, as autocast does."""
    assert job.optimizer is not None
    lowered(job.model)
    params = job.trainable()
    low = [p for p in params if p.dtype is LOW]
    masters = [p.detach().float().requires_grad_() for p in low]
    optimizer = job.optimizer([*masters, *(p for p in params if p.dtype is not LOW)])

    def backward(loss: Tensor) -> None:
        loss.backward()
        for param, master in zip(low, masters, strict=True):
            assert param.grad is not None
            grad, param.grad = param.grad.float(), None
            master.grad = grad if master.grad is None else master.grad.add_(grad)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(low, masters)

    return Run(job.model, backward=backward, step=step, casts_inputs=True)


def regions(autocast: Any, job: Job, dtype: torch.dtype) -> Callable[[], Any]:
    return lambda: autocast(job.device, dtype=dtype)


def with_autocast(autocast: Any, job: Job) -> Run:
    return Run(job.model, regions(autocast, job, LOW), step=stepping(job.made()))


def with_scaler(amp: Any, job: Job) -> Run:
    """float16, with the loss scaled."""
    scaler, optimizer = amp.GradScaler(job.device), job.made()

    def backward(loss: Tensor) -> None:
        scaler.scale(loss).backward()

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()
        assert optimizer is not None
        optimizer.zero_grad()

    half = torch.float16
    return Run(job.model, regions(amp.autocast, job, half), backward, step, half)


def torch_autocast(job: Job) -> Run:
    return with_autocast(torch.autocast, job)


def torch_scaler(job: Job) -> Run:
    return with_scaler(torch.amp, job)


def low_weights(job: Job) -> Run:
    """A region of torch's, and the weights of its products stored low: no weight is cast."""
    for module in job.model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.to(LOW)
    return Run(job.model, regions(torch.autocast, job, LOW))


def one_region(job: Job) -> Run:
    """A region of torch's around all calls: it casts a weight once, until the weight changes."""
    optimizer = job.made()
    job.stack.enter_context(torch.autocast(job.device, dtype=LOW))

    def step() -> None:
        stepping(optimizer)()
        torch.clear_autocast_cache()

    return Run(job.model, step=step)


def polymp_autocast(job: Job) -> Run:
    import polymp.torch

    return with_autocast(polymp.torch.autocast, job)


def polymp_scaler(job: Job) -> Run:
    import polymp.torch

    return with_scaler(polymp.torch, job)


def polymp_frozen(job: Job) -> Run:
    """Weights that are not trained, stored in the dtype that they are used in."""
    import polymp.torch

    if job.optimizer is None:
        job.model.requires_grad_(False)
    polymp.torch.freeze(job.model, job.inputs, dtype=LOW)
    return Run(job.model, step=stepping(job.made()))


def accelerate(job: Job) -> Run:
    from accelerate import Accelerator

    made = Accelerator(mixed_precision="bf16", cpu=job.device == "cpu")
    optimizer = job.made()
    if optimizer is None:
        return Run(made.prepare_model(job.model, evaluation_mode=True))
    model, optimizer = made.prepare(job.model, optimizer)
    return Run(model, backward=made.backward, step=stepping(optimizer))


def fabric(job: Job) -> Run:
    from lightning_fabric import Fabric

    made = Fabric(accelerator=job.device, devices=1, precision="bf16-mixed")
    optimizer = job.made()
    if optimizer is None:
        return Run(made.setup_module(job.model))
    model, optimizer = made.setup(job.model, optimizer)
    return Run(model, backward=made.backward, step=stepping(optimizer))


def transformer_engine(job: Job) -> Run:
    """Every Linear is its own, with low weights; no FP8."""
    if job.device != "cuda":
        raise RuntimeError(f"it runs on CUDA, not on {job.device}")
    import transformer_engine.pytorch as te

    for module in list(job.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                bias = child.bias is not None
                new = te.Linear(child.in_features, child.out_features, bias, params_dtype=LOW)
                with torch.no_grad():
                    new.weight.copy_(child.weight)
                    if bias:
                        new.bias.copy_(child.bias)
                setattr(module, name, new)
    return Run(job.model, casts_inputs=True)


def apex(job: Job) -> Run:
    """Its opt level O1: functions patched, float16, with the loss scaled."""
    try:
        from apex import amp
    except ImportError as error:
        why = "no package registry has it; it is built from its source, against CUDA"
        raise RuntimeError(f"{error}: {why}") from error
    model, optimizer = amp.initialize(job.model, job.made(), opt_level="O1")

    def backward(loss: Tensor) -> None:
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    return Run(model, backward=backward, step=stepping(optimizer), dtype=torch.float16)


WAYS: dict[str, Callable[[Job], Run]] = {
    "fp32": fp32,
    "by hand": by_hand,
    "by hand, float32 gradients": by_hand_wide,
    "torch.autocast": torch_autocast,
    "torch.autocast, low weights": low_weights,
    "torch.autocast, one region": one_region,
    "polymp": polymp_autocast,
    "frozen": polymp_frozen,
    "torch.autocast, float16, GradScaler": torch_scaler,
    "polymp, float16, GradScaler": polymp_scaler,
    "accelerate": accelerate,
    "Lightning Fabric": fabric,
    "TransformerEngine": transformer_engine,
    "Apex O1": apex,
}
PACKAGES = {
    "accelerate": "accelerate",
    "Lightning Fabric": "lightning-fabric",
    "TransformerEngine": "transformer-engine",
    "Apex O1": "apex",
}
COMPILED, GRAPHED = ", compiled", ", compiled, CUDA graphs"


def plain(way: str) -> str:
    """The way without how it is compiled."""
    return way.removesuffix(GRAPHED).removesuffix(COMPILED)


def run(way: str, job: Job) -> Run:
    """A job in a way; with ", compiled" after its name, through torch.compile.

    With ", compiled, CUDA graphs" its kernels are captured once and replayed.
    """
    made = WAYS[plain(way)](job)
    if way.endswith(GRAPHED):
        made.call = torch.compile(made.call, mode="reduce-overhead")
    elif way.endswith(COMPILED):
        made.call = torch.compile(made.call)
    return made


def cross_entropy(scores: Tensor, wanted: Tensor) -> Tensor:
    """The mean loss, as the dtypes of the scores and the region have it; float32 by hand."""
    if scores.dtype is not torch.float32 and not torch.is_autocast_enabled(scores.device.type):
        scores = scores.float()
    return F.cross_entropy(scores, wanted)
