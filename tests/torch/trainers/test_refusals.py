"""Calls that the adapters refuse, before anything has changed, and the line to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import polymp
from polymp.errors import PolicyError
from polymp.torch import GradScaler, autocast
from tests.conftest import need

for _name in ("lightning", "accelerate", "transformers"):
    need(_name)

import lightning  # noqa: E402
from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import GradScalerKwargs  # noqa: E402
from lightning import Fabric  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from transformers import Trainer  # noqa: E402

import polymp.accelerate  # noqa: E402
import polymp.lightning  # noqa: E402
import polymp.transformers  # noqa: E402
from polymp.lightning import Precision  # noqa: E402
from tests.support import forks  # noqa: E402
from tests.support.torch.lightning_models import fit  # noqa: E402
from tests.support.torch.trainer_models import accelerator, reset, trainer  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("left_as_found", "fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


class DeepSpeed(Accelerator):
    """An Accelerator that says that it has another engine."""

    distributed_type = DistributedType.DEEPSPEED  # type: ignore[assignment]


def two_gpus() -> Any:
    found = trainer(bf16=True)
    found.args._n_gpu = 2
    return found


def prepared(found: Any) -> Any:
    getattr(found, "accelerator", found).prepare(nn.Linear(2, 2))
    return found


def accumulate_after_clipping() -> None:
    net, used = nn.Linear(2, 2), use(accelerator("fp16"))
    model, _ = used.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        used.backward(model(torch.ones(1, 2)).sum())
        used.clip_grad_norm_(model.parameters(), 1.0)


SCOPED = polymp.policy("amp").override(name="mine", scopes={"head": {"linear": "fp32"}})
OFF = GradScaler("cpu", enabled=False)


class Head(nn.Module):
    """A model one of whose layers has the path in `SCOPED`; it looks at the dtypes of both."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        y: torch.Tensor = self.head(x)
        assert (x.dtype, y.dtype) == (torch.bfloat16, torch.float32)
        return y


def called(used: Any, model: nn.Module | None = None) -> None:
    """Call a model, a linear layer by default, as an accelerator or Fabric prepares it."""
    prepare = used.setup if isinstance(used, Fabric) else used.prepare
    prepare(model or nn.Linear(2, 2))(torch.ones(1, 2))


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


def fabric(plugin: Any) -> Any:
    return Fabric(accelerator="cpu", plugins=[plugin])


class Refusal(NamedTuple):
    what: str  # the combination
    call: Callable[[], Any]  # does it
    error: type[Exception]  # the type of the error
    text: str  # its text


use, use_trainer = polymp.accelerate.use, polymp.transformers.use
ACCELERATE, TRANSFORMERS = "polymp.accelerate.use()", "polymp.transformers.use()"

TWICE = "Call it once, with the policy and the scaler."
LATE = (
    "comes too late: a model or an optimizer is prepared already. Call it right after "
    "Accelerator(...) or Trainer(...)."
)
NO_REGION = (
    "with mixed_precision='no' there is no region that a policy could act in. Write "
    "Accelerator(mixed_precision='bf16') or TrainingArguments(bf16=True), or the same with fp16."
)
FP16 = "Accelerator(mixed_precision='fp16') or TrainingArguments(fp16=True)."
MODES = (
    "precision must be 'bf16-mixed' or '16-mixed'. Write Precision('bf16-mixed', policy=...). "
    "Lightning's other modes work without it."
)
NO_SCALER = "takes no scaler: loss scaling is for float16. Leave it out, or write"
CLIPPED = (
    "these gradients were clipped before the last backward pass, which has added scaled ones. Clip "
    "once, before the step."
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
REFUSALS = (
    # Lightning and Fabric.
    Refusal("an unknown precision", lambda: Precision("bf16-true"), ValueError,
        f"Precision('bf16-true'): {MODES}"),
    Refusal(
        "Lightning's number for a precision", lambda: Precision(16), ValueError,  # type: ignore[arg-type]
        f"Precision(16): {MODES}",
    ),
    Refusal("the Trainer's plugin in Fabric", lambda: called(fabric(Precision())), RuntimeError,
        "Precision is for lightning.Trainer, and no Trainer has set it up. In Fabric, put the "
        "policy on the model, polymp.torch.scoped(model, policy), and write "
        "Fabric(precision='bf16-mixed')."),
    Refusal("a scaler for bfloat16", lambda: Precision("bf16-mixed", scaler=GradScaler("cpu")),
        ValueError, f"Precision('bf16-mixed') {NO_SCALER} Precision('16-mixed', scaler=scaler)."),
    # accelerate.
    Refusal(
        "something else than an Accelerator", lambda: use(nn.Linear(1, 1)), TypeError,  # type: ignore[type-var]
        f"{ACCELERATE} takes an accelerate.Accelerator, got Linear. Write accelerator = "
        "polymp.accelerate.use(Accelerator(...), policy=...); for a Trainer of transformers, "
        "polymp.transformers.use(trainer, policy=...).",
    ),
    Refusal("DeepSpeed", lambda: use(DeepSpeed(mixed_precision="bf16", cpu=True), "lean"),
        ValueError,
        f"{ACCELERATE}: DEEPSPEED casts and scales by itself, and no policy sees it. Use DDP or "
        "FSDP."),
    Refusal("too late", lambda: use(prepared(accelerator()), "lean"), ValueError,
        f"{ACCELERATE} {LATE}"),
    Refusal("twice", lambda: use(use(accelerator()), "lean"), ValueError,
        f"{ACCELERATE} was called before. {TWICE}"),
    Refusal("a scaler for bf16", lambda: use(accelerator(), scaler=GradScaler("cpu")), ValueError,
        f"{ACCELERATE} with mixed_precision='bf16' {NO_SCALER} {FP16}"),
    Refusal("fp16 with GradScalerKwargs that disable the scaler",
        lambda: use(accelerator("fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)])),
        ValueError,
        f"{ACCELERATE}: GradScalerKwargs(enabled=False) leaves float16 without a loss scaler, so "
        "that small gradients would become zero. Leave enabled=False out."),
    Refusal("gradients that are added to clipped ones", accumulate_after_clipping, RuntimeError,
        f"{CLIPPED} To accumulate gradients, write Accelerator(gradient_accumulation_steps=...) "
        "and with accelerator.accumulate(model): ..., and if accelerator.sync_gradients: "
        "accelerator.clip_grad_norm_(...)."),
    # transformers.
    Refusal(
        "something else than a Trainer", lambda: use_trainer(3), TypeError,  # type: ignore[type-var]
        f"{TRANSFORMERS} takes a transformers.Trainer, got int. Write trainer = Trainer(...), "
        "and then polymp.transformers.use(trainer, policy=...).",
    ),
    Refusal("a Trainer that has prepared its model",
        lambda: use_trainer(prepared(trainer(bf16=True)), "lean"), ValueError,
        f"{TRANSFORMERS} {LATE}"),
    Refusal("a Trainer twice", lambda: use_trainer(use_trainer(trainer(bf16=True))), ValueError,
        f"{TRANSFORMERS} was called before. {TWICE}"),
    Refusal("DataParallel", lambda: use_trainer(two_gpus()), ValueError,
        f"{TRANSFORMERS}: on 2 GPUs in one process the Trainer uses nn.DataParallel, without a "
        "region. Start one process for each GPU: torchrun --nproc_per_node 2 ..."),
    Refusal("a Trainer with a scaler for bf16",
        lambda: use_trainer(trainer(bf16=True), scaler=GradScaler("cpu")), ValueError,
        f"{TRANSFORMERS} with mixed_precision='bf16' {NO_SCALER} {FP16}"),
    # The same combinations in every adapter.
    Refusal("Lightning: two scalers", two_of_lightning, Exception,
        "Received multiple values for Precision flags in `plugins`. Expected one value for each "
        "type at most."),
    Refusal(
        "Lightning: another scaler",
        lambda: Precision("16-mixed", scaler=torch.amp.GradScaler("cpu")),  # type: ignore[arg-type]
        TypeError,
        "Precision('16-mixed') takes a polymp.torch.GradScaler, got "
        "torch.amp.grad_scaler.GradScaler. Leave scaler out, or write "
        "scaler=polymp.torch.GradScaler(device), with the device that is used.",
    ),
    Refusal(
        "accelerate: two scalers",
        lambda: use(
            accelerator("fp16", kwargs_handlers=[GradScalerKwargs()]), scaler=GradScaler("cpu")
        ),
        ValueError,
        "polymp.accelerate.use(): there are two loss scalers: scaler=... and the Accelerator's "
        "GradScalerKwargs. Leave one of them out.",
    ),
    Refusal("transformers: two scalers", two_of_the_trainer, ValueError,
        f"{TRANSFORMERS} was called before. {TWICE}"),
    Refusal("Keras: inside a region", keras_in_a_region, RuntimeError,
        "`with autocast(...)` marks a region for the autocast function around it, and there is "
        "none here. Wrap the function that is called from outside: polymp.jax.autocast(fn), or "
        "autocast(fn, enabled=False) if the rest of it is to run as written."),
    Refusal("Lightning: float16 without a scaler", lambda: Precision("16-mixed", scaler=OFF),
        ValueError, f"Precision('16-mixed') {DISABLED}"),
    Refusal("Lightning: rules for modules", lambda: Precision("16-mixed", SCOPED), PolicyError,
        f"{SCOPES}[Precision('16-mixed')]."),
    Refusal("accelerate: float16 without a scaler", lambda: use(accelerator("fp16"), scaler=OFF),
        ValueError, f"polymp.accelerate.use() with mixed_precision='fp16' {DISABLED}"),
    Refusal("transformers: float16 without a scaler",
        lambda: use_trainer(trainer(fp16=True), scaler=OFF), ValueError,
        f"polymp.transformers.use() with mixed_precision='fp16' {DISABLED}"),
    Refusal("accelerate: no mixed precision", lambda: use(accelerator("no"), SCOPED), ValueError,
        f"{ACCELERATE}: {NO_REGION}"),
    Refusal("transformers: no mixed precision", lambda: use_trainer(trainer(), SCOPED), ValueError,
        f"{TRANSFORMERS}: {NO_REGION}"),
    Refusal("Keras: no mixed precision", lambda: keras_model(policy=SCOPED, dtype="float32"),
        ValueError,
        "polymp.keras.use(): dtype 'float32' is not accepted here. Write float16 (fp16), bfloat16 "
        "(bf16), or such a dtype of torch, jax or numpy."),
)  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.what)
def test_what_cannot_work_is_refused(refusal: Refusal) -> None:
    with pytest.raises(refusal.error) as refused:
        refusal.call()
    assert str(refused.value) == refusal.text


@pytest.mark.parametrize(
    "call",
    [
        lambda: called(use(accelerator("bf16"), SCOPED), Head()),
        lambda: called(use_trainer(trainer(bf16=True), SCOPED).accelerator, Head()),
        keras_with_scopes,
    ],
    ids=["accelerate", "transformers", "Keras"],
)
def test_rules_for_modules_hold(call: Callable[[], Any]) -> None:
    call()


def test_nothing_has_changed_after_a_refusal() -> None:
    found = trainer()
    before = type(found), type(found.accelerator)
    with pytest.raises(ValueError, match="there is no region"):
        use_trainer(found, "lean")
    assert (type(found), type(found.accelerator)) == before
    reset()
    found = accelerator("fp16")
    with pytest.raises(PolicyError, match="no policy 'nonesuch'"):
        use(found, "nonesuch")
    assert (type(found), found.scaler, found.native_amp) == (Accelerator, None, False)


def test_lightning_refuses_a_mode_beside_the_plugin() -> None:
    with pytest.raises(Exception, match="Received both `precision=bf16-mixed` and `plugins="):
        fit(Precision("bf16-mixed"), precision="bf16-mixed")


@pytest.mark.parametrize(
    "make",
    [
        lambda policy: use(accelerator("bf16"), policy).prepare,
        lambda policy: use_trainer(trainer(bf16=True), policy).accelerator.prepare,
    ],
    ids=["accelerate", "transformers"],
)
def test_a_region_around_is_replaced(make: Callable[..., Any]) -> None:
    """As any region in another replaces it."""
    net, x = nn.Linear(64, 64), torch.randn(4, 64)
    exact = net(x)
    with autocast("cpu", dtype=torch.float16, policy="lean"):
        assert not torch.equal(net(x).float(), exact)
        assert torch.equal(make({"name": "mine", "rules": {"linear": "fp32"}})(net)(x), exact)


MISSING = """
import sys
import polymp.torch
names = ("lightning", "accelerate", "transformers", "keras")
print(*sorted({name.partition(".")[0] for name in sys.modules} & {*names, "jax"}))
sys.modules.update(dict.fromkeys(names))
for name in names:
    try:
        __import__(f"polymp.{name}")
    except polymp.BackendMissingError as error:
        print(error)
"""


def test_a_missing_package_is_named() -> None:
    """In a process without them; polymp.torch imports none of them."""
    assert forks.program(MISSING).splitlines() == [
        "",
        "polymp.lightning needs the lightning package: pip install 'polymp[lightning]'.",
        "polymp.accelerate needs the accelerate package: pip install 'polymp[accelerate]'.",
        "polymp.transformers needs the transformers package: pip install 'polymp[transformers]'.",
        "polymp.keras needs the keras package: pip install 'polymp[keras]'.",
    ]


def test_the_names_of_the_frameworks_that_the_adapters_rely_on() -> None:
    """Those that their documentation does not promise; a version that changes one fails here."""
    from lightning.pytorch.plugins.precision import Precision as Base

    assert list(inspect.signature(Base._after_closure).parameters) == ["self", "model", "optimizer"]
    found = accelerator()
    assert (found._models, found._optimizers, found.scaler) == ([], [], None)
    assert found.native_amp
    assert isinstance(inspect.getattr_static(AcceleratedOptimizer, "step_was_skipped"), property)
    assert "create_accelerator_and_postprocess" in vars(Trainer)
