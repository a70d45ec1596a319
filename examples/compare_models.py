"""Compares one transformer in torch and in flax: dtypes, values, gradients and ten training steps.

    python examples/compare_models.py                    # on the CPU, in half a minute

The models are those of train_torch.py and train_jax.py, with the same first weights. Their
results may differ by rounding alone; `polymp.testing.assert_parity` measures the tolerance.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

try:
    import jax
    import job
    import numpy as np
    import torch
    import train_jax
    import train_torch
    from flax import nnx
    from torch.func import functional_call

    import polymp.jax
    import polymp.torch
    from polymp.testing import Parity, ParityError, assert_parity
except ModuleNotFoundError as error:
    print(
        f"compare_models.py: error: the package {error.name!r} is missing. Run "
        "pip install -e '.[torch,jax,examples]' at the top of the repository.",
        file=sys.stderr,
    )
    sys.exit(2)

DTYPES = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}
SCALE = 1024.0  # of the loss: float16's gradients stay above its subnormal numbers
RATE = 0.1
STEPS = 10


def torch_loss(args: argparse.Namespace, alphabet: int) -> Callable[..., Any]:
    """The scaled loss in torch, of the job's weights by name and of tokens [batch, context + 1]."""
    sizes = alphabet, args.context, args.width, args.layers, args.heads
    model = train_torch.Transformer(*sizes)
    linear = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}

    def loss(weights: Mapping[str, Any], tokens: Any) -> Any:
        own = {
            name: w.T if name in {f"{layer}.weight" for layer in linear} else w
            for name, w in weights.items()
        }
        scores = functional_call(model, own, (tokens[:, :-1],))
        scores = scores.flatten(0, 1).float()
        return SCALE * torch.nn.functional.cross_entropy(scores, tokens[:, 1:].flatten())

    return loss


def jax_loss(args: argparse.Namespace, alphabet: int) -> Callable[..., Any]:
    """The same in JAX."""
    sizes = alphabet, args.context, args.width, args.layers, args.heads
    graph, empty = nnx.split(nnx.eval_shape(lambda: train_jax.Transformer(*sizes, nnx.Rngs(0))))

    def loss(weights: Mapping[str, Any], tokens: Any) -> Any:
        def fill(path: tuple[Any, ...], parameter: Any) -> Any:
            module = [str(part) for part in path[:-1] if part != "layers"]
            kind = "bias" if path[-1] == "bias" else "weight"
            return parameter.replace(weights[".".join([*module, kind])])

        model = nnx.merge(graph, nnx.map_state(fill, empty))
        return SCALE * train_jax.loss_on(model, tokens)

    return loss


def torch_steps(loss: Callable[..., Any], dtype: str | None) -> Callable[..., Any]:
    """The losses of ten steps of gradient descent in torch, of weights and batches of tokens."""

    def losses(weights: Mapping[str, Any], batches: Any) -> Any:
        found = []
        for tokens in batches:
            weights = {name: w.detach().requires_grad_() for name, w in weights.items()}
            low = getattr(torch, dtype or "bfloat16")
            with polymp.torch.autocast("cpu", low, enabled=dtype is not None, policy="amp"):
                value = loss(weights, tokens)
            value.backward()
            with torch.no_grad():
                weights = {n: w - RATE / SCALE * w.grad for n, w in weights.items()}
            found.append(value.detach() / SCALE)
        return torch.stack(found)

    return losses


def jax_steps(loss: Callable[..., Any], dtype: str | None) -> Callable[..., Any]:
    """The same in JAX."""
    region = polymp.jax.autocast(loss, dtype=dtype or "bfloat16", enabled=dtype is not None)

    def losses(weights: Mapping[str, Any], batches: Any) -> Any:
        def step(weights: Mapping[str, Any], tokens: Any) -> tuple[Any, Any]:
            value, grads = jax.value_and_grad(region)(weights, tokens)
            moved = jax.tree.map(lambda w, g: w - RATE / SCALE * g, weights, grads)
            return moved, value / SCALE

        return jax.lax.scan(step, dict(weights), batches)[1]

    return losses


def compare(name: str, text: job.Text, args: argparse.Namespace) -> tuple[Parity, Parity]:
    """The parity of the loss and its gradients, and of the losses of ten steps, in one dtype.

    Raises:
        ParityError: the models are not the same.
    """
    dtype = DTYPES[name]
    weights = job.first_weights(text.alphabet, args)
    batches = np.stack(list(job.batches(text, args)))
    ours, theirs = torch_loss(args, text.alphabet), jax_loss(args, text.alphabet)
    once = assert_parity(ours, theirs, [weights, batches[0]], dtype=dtype, probes=4)
    steps = torch_steps(ours, dtype), jax_steps(theirs, dtype)
    trained = assert_parity(*steps, [weights, batches], dtype=None, grads=False, probes=2)
    return once, trained


def main(argv: Sequence[str] | None = None) -> None:
    """Compare in every dtype that was asked for, and print how far the models are apart."""
    flags = job.Parser("compare_models.py", allow_abbrev=False, description=__doc__.splitlines()[0])
    flags.add_argument(
        "--dtypes",
        type=job.dtype_names,
        default=",".join(job.DTYPES),
        help="what to compare in",
    )
    for size, default in (("batch", 2), ("context", 8), ("width", 16), ("layers", 1), ("heads", 2)):
        flags.add_argument(f"--{size}", type=job.whole(1), default=default)
    args = flags.parse_args(argv)
    args.seed, args.steps, args.lr = 0, STEPS, RATE
    if args.width % args.heads:
        flags.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    text = job.read(None, args.context)
    for name in args.dtypes:
        start = time.perf_counter()
        try:
            once, trained = compare(name, text, args)
        except ParityError as error:
            flags.exit(1, f"{name}: {error}\n")
        worst = min(once.gaps, key=lambda gap: gap.margin)
        print(f"{name}: {once.calls[0]} and {once.calls[1]} calls in the same dtypes")
        print(f"  {len(once.gaps)} arrays; the nearest to its tolerance: {worst}")
        print(f"  losses of {STEPS} steps, {trained.gaps[0]}")
        print(f"  {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
