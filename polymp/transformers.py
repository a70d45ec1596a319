"""Mixed precision for the Trainer of transformers: a policy and polymp's loss scaler.

    trainer = polymp.transformers.use(Trainer(model, TrainingArguments(bf16=True)), policy="lean")

The Trainer leaves regions and scaling to its `Accelerator`, and so does this module: see
`polymp.accelerate`.
"""

from typing import Any, TypeVar

from polymp.backends.torch.autocast.api import PolicyLike
from polymp.backends.torch.scaler import trainer_steps
from polymp.torch import GradScaler
from polymp.versions import require

require("transformers")

from transformers import Trainer  # noqa: E402

from polymp import accelerate  # noqa: E402

__all__ = ["use"]

T = TypeVar("T", bound=Trainer)

_CALL = "polymp.transformers.use()"


def use(trainer: T, policy: PolicyLike | None = None, *, scaler: GradScaler | None = None) -> T:
    """Have a `Trainer` use a policy, and polymp's loss scaler if it trains in float16.

        trainer = use(Trainer(model, TrainingArguments(bf16=True), ...), policy="lean")
        trainer.train()

    Call it before `train` and `evaluate`; subclasses of Trainer work, too. The policy holds in
    every call of the model, also in `generate` and in what gradient checkpointing recomputes, and
    may have rules for modules. In float16, the logs have `loss_scale` and `skipped_steps`, and
    fp16=True works on the CPU as well. Each resumes the other's checkpoints.

    Args:
        trainer: with bf16=True or fp16=True. It is changed in place.
        policy: which ops run in which dtype, as in `polymp.torch.scoped`.
        scaler: for fp16, a loss scaler with other settings than `GradScaler(device)`.

    Returns:
        The trainer.

    Raises:
        TypeError: `trainer` is no Trainer, or `scaler` no `polymp.torch.GradScaler`.
        ValueError: the trainer uses neither bf16 nor fp16, or nn.DataParallel; or as in
            `polymp.accelerate.use`.
        PolicyError: as in `polymp.accelerate.use`.

    Source:
        transformers 5.23, `transformers.Trainer`.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"{_CALL} takes a transformers.Trainer, got "
            f"{type(trainer).__name__}. Write trainer = Trainer(...), and then "
            "polymp.transformers.use(trainer, policy=...)."
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"{_CALL}: on {trainer.args.n_gpu} GPUs in one process the Trainer "
            "uses nn.DataParallel, without a region. Start one process for each GPU: "
            f"torchrun --nproc_per_node {trainer.args.n_gpu} ..."
        )
    accelerate.use_in(_CALL, trainer.accelerator, policy, scaler)
    accelerate.extend(trainer, _Trainer)
    setattr(trainer, "polymp", (policy, scaler))  # noqa: B010
    return trainer


class _Trainer:
    """The methods of a Trainer that differ after `use`; the first base of its class."""

    polymp: tuple[PolicyLike | None, GradScaler | None]  # the arguments of `use`
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Prepare another accelerator, as a search for hyperparameters does for each trial."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerate.use_in(_CALL, self.accelerator, *self.polymp)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        logs.update(trainer_steps.metrics(self.accelerator.scaler))
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
