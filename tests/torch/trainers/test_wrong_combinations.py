"""Wrong combinations, in every adapter: each is refused, with the line to write instead.

    two scalers
    a region of polymp around that of the adapter
    float16 without a scaler
    a policy with rules for modules, where only a region is opened
    a policy, but no mixed precision, so no region in which it could act

Also those of Keras on JAX, where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.conftest import need

for _name in ("lightning", "accelerate", "transformers"):
    need(_name)

import lightning  # noqa: E402
from accelerate.utils import GradScalerKwargs  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

import polymp  # noqa: E402
import polymp.accelerate  # noqa: E402
import polymp.lightning  # noqa: E402
import polymp.transformers  # noqa: E402
from polymp.errors import PolicyError  # noqa: E402
from polymp.lightning import FabricPrecision, Precision  # noqa: E402
from polymp.torch import GradScaler, autocast  # noqa: E402
from tests.support.torch.lightning_models import Regression, fit  # noqa: E402
from tests.support.torch.trainer_models import accelerator, reset, trainer  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("left_as_found"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    reset()


SCOPED = polymp.policy("amp").override(name="mine", scopes={"head": {"linear": "fp32"}})
OFF = GradScaler("cpu", enabled=False)
use, use_trainer = polymp.accelerate.use, polymp.transformers.use


class Head(nn.Module):
    """A model whose one layer has the path in `SCOPED`; it notes the dtype of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(x)
        assert y.dtype is torch.float32
        return y


def called(accelerator: Any, model: nn.Module) -> None:
    accelerator.prepare(model)(torch.ones(1, 2))


def two_of_lightning() -> None:
    lightning.Trainer(
        accelerator="cpu", plugins=[Precision("16-mixed"), MixedPrecision("16-mixed", "cpu")]
    )


def two_of_the_trainer() -> None:
    found = trainer(fp16=True)
    use(found.accelerator)
    use_trainer(found)


def keras_model(optimizer: Any = "sgd", **given: Any) -> Any:
    need("keras")
    import keras

    import polymp.keras

    layer = keras.layers.Dense(2, name="head")
    model = keras.Sequential([keras.Input((3,)), layer], name="net")
    model.compile(optimizer, "mse")
    return polymp.keras.use(model, **given)


def keras_with_two() -> None:
    need("keras")
    import keras

    inner = keras.optimizers.SGD(name="sgd")
    keras_model(keras.optimizers.LossScaleOptimizer(inner, name="outer"), dtype="float16")


def keras_without_one() -> None:
    need("keras")
    import polymp.jax

    keras_model(dtype="float16", scaler=polymp.jax.GradScaler(enabled=False))


def keras_in_a_region() -> None:
    need("keras")
    import polymp.jax

    with polymp.jax.autocast(policy="lean"):
        keras_model(policy="amp").fit(torch.ones(2, 3).numpy(), verbose=0)


def keras_with_scopes() -> None:
    need("keras")
    import jax

    model = keras_model(policy=SCOPED)
    ones = torch.ones(2, 3).numpy()
    found = jax.make_jaxpr(lambda x: model.stateless_call(weights(model), [], x)[0])(ones)
    assert "bf16" not in str(found)
    low = keras_model(policy="amp")
    assert "bf16" in str(jax.make_jaxpr(lambda x: low.stateless_call(weights(low), [], x)[0])(ones))


def weights(model: Any) -> list[Any]:
    return [v.value for v in model.trainable_variables]


def around(call: Callable[[], Any]) -> None:
    with autocast("cpu", dtype=torch.bfloat16, policy="lean"):
        call()


def fabric_module() -> Any:
    plugin = FabricPrecision("bf16-mixed", "amp")
    return lightning.Fabric(accelerator="cpu", plugins=[plugin]).setup(nn.Linear(2, 2))


class Combination(NamedTuple):
    """A combination in an adapter.

    Attributes:
        call: makes it.
        error: the type of the error; None if the adapter can do it.
        text: of the error.
    """

    call: Callable[[], Any]
    error: type[Exception] | None = None
    text: str = ""


TWICE = "Call it once, with the policy and the scaler."
INSIDE = (
    "opens a region of bfloat16 with policy 'amp' inside a region of bfloat16 with policy 'lean', "
    "which would have no effect. Leave the outer region out, and write"
)
DISABLED = (
    "needs a loss scaler, and the one given is disabled, so that small gradients would become "
    "zero. Leave scaler out, or write scaler=polymp.torch.GradScaler(device), with the device that "
    "is used."
)
SCOPES = (
    "policy 'mine' has rules for modules (head), whose paths a region does not see. Write "
    "polymp.torch.scoped(model, policy), and then plugins="
)
NO_REGION = (
    "('32-true') opens no region that policy 'mine' could act in. Write {0}('bf16-mixed', "
    "policy=...), or {0}('32-true') without a policy."
)
LIGHTNING, FABRIC, KERAS = "Lightning", "Fabric", "Keras"
COMBINATIONS: dict[tuple[str, str], Combination] = {
    (LIGHTNING, "two scalers"): Combination(
        two_of_lightning, Exception,
        "Received multiple values for Precision flags in `plugins`. Expected one value for each "
        "type at most.",
    ),
    (FABRIC, "two scalers"): Combination(
        lambda: FabricPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu")),  # type: ignore[arg-type]
        TypeError,
        "FabricPrecision('16-mixed') takes a polymp.torch.GradScaler, got "
        "torch.amp.grad_scaler.GradScaler. Leave scaler out, or write "
        "scaler=polymp.torch.GradScaler(device), with the device that is used.",
    ),
    ("accelerate", "two scalers"): Combination(
        lambda: use(
            accelerator("fp16", kwargs_handlers=[GradScalerKwargs()]), scaler=GradScaler("cpu")
        ),
        ValueError,
        "polymp.accelerate.use(): there are two loss scalers: scaler=... and the Accelerator's "
        "GradScalerKwargs. Leave one of them out.",
    ),
    ("transformers", "two scalers"): Combination(
        two_of_the_trainer, ValueError,
        f"polymp.transformers.use() was called for this Accelerator before. {TWICE}",
    ),
    (KERAS, "two scalers"): Combination(
        keras_with_two, ValueError,
        "polymp.keras.use(model, dtype='float16'): 'outer' is a LossScaleOptimizer, which scales "
        "the loss itself. Give the optimizer in it: optimizer.inner_optimizer.",
    ),
    (LIGHTNING, "inside a region"): Combination(
        lambda: around(lambda: fit(Precision("bf16-mixed", "amp"), Regression())), PolicyError,
        f"Precision {INSIDE} Precision('bf16-mixed', policy=...).",
    ),
    (FABRIC, "inside a region"): Combination(
        lambda: around(lambda: fabric_module()(torch.ones(1, 2))), PolicyError,
        f"FabricPrecision {INSIDE} FabricPrecision('bf16-mixed', policy=...).",
    ),
    ("accelerate", "inside a region"): Combination(
        lambda: around(lambda: called(use(accelerator("bf16"), "amp"), nn.Linear(2, 2))),
        PolicyError,
        f"accelerate {INSIDE} polymp.accelerate.use(accelerator, policy=...).",
    ),
    ("transformers", "inside a region"): Combination(
        lambda: around(
            lambda: called(use_trainer(trainer(bf16=True), "amp").accelerator, nn.Linear(2, 2))
        ),
        PolicyError,
        f"the Trainer {INSIDE} polymp.transformers.use(trainer, policy=...).",
    ),
    (KERAS, "inside a region"): Combination(
        keras_in_a_region, RuntimeError,
        "`with autocast(...)` marks a region for the autocast function around it, and there is "
        "none here. Wrap the function that is called from outside: polymp.jax.autocast(fn), or "
        "autocast(fn, enabled=False) if the rest of it is to run as written.",
    ),
    (LIGHTNING, "float16 without a scaler"): Combination(
        lambda: Precision("16-mixed", scaler=OFF), ValueError, f"Precision('16-mixed') {DISABLED}",
    ),
    (FABRIC, "float16 without a scaler"): Combination(
        lambda: FabricPrecision("16-mixed", scaler=OFF), ValueError,
        f"FabricPrecision('16-mixed') {DISABLED}",
    ),
    ("accelerate", "float16 without a scaler"): Combination(
        lambda: use(accelerator("fp16"), scaler=OFF), ValueError,
        f"polymp.accelerate.use() with Accelerator(mixed_precision='fp16') {DISABLED}",
    ),
    ("transformers", "float16 without a scaler"): Combination(
        lambda: use_trainer(trainer(fp16=True), scaler=OFF), ValueError,
        f"polymp.transformers.use() with TrainingArguments(fp16=True) {DISABLED}",
    ),
    (KERAS, "float16 without a scaler"): Combination(
        keras_without_one, ValueError,
        "polymp.keras.use(model, dtype='float16') needs a loss scaler, and the one given is "
        "disabled, so that small gradients would become zero. Leave scaler out, or write "
        "scaler=polymp.jax.GradScaler(init_scale=...).",
    ),
    (LIGHTNING, "rules for modules"): Combination(
        lambda: Precision("bf16-mixed", SCOPED), PolicyError,
        f"{SCOPES}[Precision('bf16-mixed')].",
    ),
    (FABRIC, "rules for modules"): Combination(
        lambda: FabricPrecision("16-mixed", SCOPED), PolicyError,
        f"{SCOPES}[FabricPrecision('16-mixed')].",
    ),
    ("accelerate", "rules for modules"): Combination(
        lambda: called(use(accelerator("bf16"), SCOPED), Head())
    ),
    ("transformers", "rules for modules"): Combination(
        lambda: called(use_trainer(trainer(bf16=True), SCOPED).accelerator, Head())
    ),
    (KERAS, "rules for modules"): Combination(keras_with_scopes),
    (LIGHTNING, "no mixed precision"): Combination(
        lambda: Precision("32-true", SCOPED), ValueError,
        f"Precision{NO_REGION.format('Precision')}",
    ),
    (FABRIC, "no mixed precision"): Combination(
        lambda: FabricPrecision("32-true", SCOPED), ValueError,
        f"FabricPrecision{NO_REGION.format('FabricPrecision')}",
    ),
    ("accelerate", "no mixed precision"): Combination(
        lambda: use(accelerator("no"), SCOPED), ValueError,
        "polymp.accelerate.use(): Accelerator(mixed_precision='no') opens no region that a policy "
        "could act in, and does not unscale gradients before it clips them. Write "
        "Accelerator(mixed_precision='bf16') or Accelerator(mixed_precision='fp16').",
    ),
    ("transformers", "no mixed precision"): Combination(
        lambda: use_trainer(trainer(), SCOPED), ValueError,
        "polymp.transformers.use(): the Trainer opens no region that a policy could act in. Write "
        "TrainingArguments(bf16=True), or fp16=True.",
    ),
    (KERAS, "no mixed precision"): Combination(
        lambda: keras_model(policy=SCOPED, dtype="float32"), ValueError,
        "polymp.keras.use(): dtype 'float32' is not accepted here. Write float16 (fp16), bfloat16 "
        "(bf16), or such a dtype of torch, jax or numpy.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COMBINATIONS, ids=": ".join)
def test_a_wrong_combination_is_refused(case: tuple[str, str]) -> None:
    combination = COMBINATIONS[case]
    if combination.error is None:
        combination.call()
        return
    with pytest.raises(combination.error) as refused:
        combination.call()
    assert str(refused.value) == combination.text


def test_the_table_has_every_combination_of_every_adapter() -> None:
    adapters, combinations = (dict.fromkeys(names) for names in zip(*COMBINATIONS, strict=True))
    assert (len(adapters), len(combinations)) == (5, 5)
    assert len(COMBINATIONS) == len(adapters) * len(combinations)
