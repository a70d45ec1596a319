"""Trains a small language model in float32, bfloat16 and float16, and compares the three.

    python examples/train_jax.py                         # on the CPU, within two minutes
    python examples/train_jax.py --device gpu --width 512 --heads 8 --layers 6 --batch 64

The same job as in train_torch.py, with flax's nnx and optax. The step in `train` is the usual one;
only `autocast` and `scaler` are polymp's. Every dtype starts from the same weights and sees the
same batches.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

try:
    import jax
    import job
    import numpy as np
    import optax
    import picture
    import report
    from flax import nnx
    from jax import Array
    from jax import numpy as jnp
    from tqdm import tqdm

    from polymp.jax import GradScaler, autocast
except ModuleNotFoundError as error:
    print(
        f"train_jax.py: error: the package {error.name!r} is missing. Run "
        "pip install -e '.[jax,examples]' at the top of the repository.",
        file=sys.stderr,
    )
    sys.exit(2)

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
MEMORY = {
    "gpu": "what the compiled step takes: arguments, results, temporary arrays",
    "cpu": "counted in the trace: parameters, optimizer state, what jax.vjp saves for backward",
}


class Block(nnx.Module):
    """Attention, then a small network, each added to what came in."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.reshape(batch, length, width))
        return x + self.down(nnx.gelu(self.up(self.norm2(x)), approximate=False))


class Transformer(nnx.Module):
    """From the bytes so far to the scores of the next: int [batch, length] to [..., alphabet]."""

    def __init__(
        self, alphabet: int, context: int, width: int, layers: int, heads: int, rngs: nnx.Rngs
    ) -> None:
        self.bytes = nnx.Embed(alphabet, width, rngs=rngs)
        self.places = nnx.Embed(context, width, rngs=rngs)
        self.blocks = nnx.Sequential(*(Block(width, heads, rngs) for _ in range(layers)))
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.head = nnx.Linear(width, alphabet, use_bias=False, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = self.bytes(x) + self.places(jnp.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def first_model(text: job.Text, args: argparse.Namespace) -> Transformer:
    """A model with the job's first weights."""
    sizes = text.alphabet, args.context, args.width, args.layers, args.heads
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(*sizes, nnx.Rngs(0))))
    weights = job.first_weights(text.alphabet, args)

    def fill(path: tuple[Any, ...], parameter: nnx.Param) -> nnx.Param:
        module = [str(part) for part in path[:-1] if part != "layers"]  # those of a Sequential
        kind = "bias" if path[-1] == "bias" else "weight"  # kernel, scale, embedding
        return parameter.replace(jnp.asarray(weights.pop(".".join([*module, kind]))))

    return nnx.merge(graph, nnx.map_state(fill, state))


def loss_on(model: nnx.Module, tokens: Array) -> Array:
    """The mean loss of guessing every byte from those before it, in nats; float32 []."""
    scores = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()


def optimizer(rate: Any) -> optax.GradientTransformation:
    """Clips the gradients, then AdamW. Its state is the same at any learning rate."""
    adamw = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def train(name: str, text: job.Text, args: argparse.Namespace, device: jax.Device) -> report.Run:
    """Train in one dtype."""
    graph, params = nnx.split(first_model(text, args))
    # The usual 2,000 good steps before the scale doubles are more than this run has.
    interval = max(1, args.steps // 10)
    scaler = GradScaler(growth_interval=interval, enabled=name == "fp16")
    opt_state = optimizer(0.0).init(params)
    params, opt_state, scaler = jax.device_put((params, opt_state, scaler), device)

    @autocast(dtype=DTYPES[name], enabled=name != "fp32")
    def region(params: nnx.State, tokens: Array) -> Array:
        return loss_on(nnx.merge(graph, params), tokens)

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def train_step(
        params: nnx.State, opt_state: Any, scaler: GradScaler, tokens: Array, rate: Array
    ) -> tuple[nnx.State, Any, GradScaler, Array, Array]:
        def scaled_loss(params: nnx.State) -> tuple[Array, Array]:
            loss = region(params, tokens)
            return scaler.scale(loss), loss

        def update(grads: nnx.State, params: nnx.State, opt_state: Any) -> tuple[nnx.State, Any]:
            updates, opt_state = optimizer(rate).update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
        (params, opt_state), scaler, finite = scaler.step(grads, update, params, opt_state)
        return params, opt_state, scaler, loss, finite

    exam = job.held_out(text, args)
    run = report.Run(name, parameters=sum(p.size for p in jax.tree.leaves(params)))
    run.scale = [scaler.state.scale.item()] if scaler.enabled else []
    loss_in_region = jax.jit(region)

    def held_out_loss() -> float:
        total = 0.0
        for tokens in np.split(exam, range(args.batch, len(exam), args.batch)):
            total += loss_in_region(params, tokens).item() * len(tokens)
        return total / len(exam)

    pause = 0.1 if sys.stderr.isatty() else 10  # a log needs fewer lines than a terminal
    numbered = enumerate(job.batches(text, args))
    bar = tqdm(numbered, name, args.steps, unit=" step", mininterval=pause, disable=args.quiet)
    for step, tokens in bar:
        if job.look_at(step, args):
            run.held_out.append((step, held_out_loss()))
        start = time.perf_counter()
        rate = job.learning_rate(step, args)

        params, opt_state, scaler, loss, finite = train_step(
            params, opt_state, scaler, tokens, rate
        )

        run.train_loss.append(loss.item())
        run.seconds.append(time.perf_counter() - start)  # the first has the compiling in it
        if scaler.enabled:
            run.scale.append(scaler.state.scale.item())
        if not finite:
            run.skipped.append(step + 1)
        bar.set_postfix(loss=f"{run.train_loss[-1]:.3f}", refresh=False)
    run.held_out.append((args.steps, held_out_loss()))

    run.saved = bytes_saved(params, lambda params: region(params, tokens))
    if device.platform == "gpu":
        step_args = params, opt_state, scaler, tokens, rate
        run.peak_memory = bytes_compiled(train_step.lower(*step_args).compile())
    else:
        run.peak_memory = bytes_of(jax.tree.leaves((params, opt_state))) + run.saved
    return run


def bytes_saved(params: nnx.State, forward: Callable[[nnx.State], Array]) -> int:
    """Bytes that jax.vjp saves for backward in a forward pass, besides the parameters."""
    trace = jax.make_jaxpr(lambda params: jax.tree.leaves(jax.vjp(forward, params)[1]))(params)
    held = {id(variable): variable.aval for variable in trace.jaxpr.outvars}
    for variable in trace.jaxpr.invars:  # parameters that are saved as they are
        held.pop(id(variable), None)
    return bytes_of(held.values())


def bytes_of(arrays: Iterable[Any]) -> int:
    """Bytes of arrays, or of their types."""
    return sum(x.size * x.dtype.itemsize for x in arrays)


def bytes_compiled(step: jax.stages.Compiled) -> int:
    """Bytes of a compiled step's arguments, results and temporaries; what is donated counts once.

    JAX knows the most that a device ever held, too, but only of the whole process, not of a run.
    """
    sizes = step.memory_analysis()
    results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes + results + sizes.temp_size_in_bytes


def find_device(name: str) -> jax.Device:
    """The device of that name.

    Raises:
        BadArgument: there is no such device, or not here.
    """
    if not re.fullmatch(r"cpu|gpu(:\d+)?", name):
        raise job.BadArgument(f"--device '{name}' is not known. Use cpu, gpu or gpu:N.")
    kind, _, number = name.partition(":")
    try:
        devices = jax.devices(kind)
    except RuntimeError:
        raise job.BadArgument(
            f"--device '{name}' needs a GPU, and jax {jax.__version__} finds none. "
            "Use --device cpu."
        ) from None
    if int(number or 0) >= len(devices):
        raise job.BadArgument(
            f"--device '{name}' is not here: jax finds gpu:0 to gpu:{len(devices) - 1}. "
            "Use one of these."
        )
    return devices[int(number or 0)]


def main(argv: Sequence[str] | None = None) -> None:
    """Train in every dtype that was asked for, then print and save what came of it."""
    about = "Train a small language model in several float dtypes and compare them."
    flags = job.parser("train_jax.py", about, job.default_sizes())
    try:
        args = job.arguments(flags, argv)
        device = find_device(args.device)
        text = job.read(args.text, args.context)
        job.check_outputs(args)
    except job.BadArgument as bad:
        flags.error(str(bad))

    runs = [train(name, text, args, device) for name in args.dtypes]
    memory = MEMORY[device.platform]
    report.show(runs, text, args, memory)
    if device.platform == "cpu":
        print(job.speed_of_bfloat16())
    kind = device.device_kind if device.platform == "gpu" else "CPU"
    made_by = {"framework": f"jax {jax.__version__}", "device": kind}
    report.save(runs, text, args, memory=memory, **made_by)
    picture.draw(args.out, runs, text, ", ".join(made_by.values()))
    print(f"saved {job.near(args.out)} and {job.near(args.json)}")


if __name__ == "__main__":
    main()
