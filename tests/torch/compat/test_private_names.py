"""Every private name of torch that polymp uses does what `compat` says; loud when one changes."""

import inspect
import math
import warnings
from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch._dynamo.eval_frame
import torch.distributed as dist
from torch._inductor.utils import get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from polymp import versions
from polymp.backends.torch import compat
from polymp.backends.torch.autocast import dtype_names, regions
from polymp.backends.torch.compat import (
    accelerators,
    dispatcher,
    distributed,
    dynamo,
    inductor,
    modes,
    optimizers,
)
from tests.support import forks
from tests.support.processes import in_thread
from tests.support.torch.compiled import Count
from tests.support.torch.each_op import EachOp


def test_autocast_keys_and_their_kernels_are_known():
    for device in ("cpu", "cuda", "mps", "xpu"):
        names = dispatcher.registered(dispatcher.autocast_key(device))
        assert names, f"torch registers nothing for {device}"
        assert {dispatcher.overload(name).name() for name in names} == {f"aten::{n}" for n in names}
    assert accelerators.private_dtypes("cuda") is None


def test_trees_are_taken_apart_and_put_together():
    tree = {"a": [1, (2.0, None)]}
    leaves, shape = compat.tree_flatten(tree)
    assert compat.tree_leaves(tree) == leaves == [1, 2.0, None]
    assert compat.tree_unflatten(leaves, shape) == compat.tree_map(lambda x: x, tree) == tree
    assert compat.tree_map_only(float, math.sqrt, [4.0, 4]) == [2.0, 4]


def test_a_function_mode_is_noticed():
    assert not modes.are_functions_watched()
    with torch.overrides.TorchFunctionMode():
        assert modes.are_functions_watched()


def test_without_classes_lazy_parameters_take_hooks():
    p = torch.nn.UninitializedParameter()
    with pytest.raises(ValueError, match="uninitialized parameter"):
        p.register_post_accumulate_grad_hook(print)
    with modes.without_classes():
        p.register_post_accumulate_grad_hook(print)


class Mode(modes.OpMode):
    """Notes the ops that run, and whether dynamo is compiling then."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def op(self, func, types, args, kwargs):
        self.seen.append((str(func), torch._dynamo.is_compiling()))
        return func(*args, **kwargs)


def test_a_mode_of_ours_is_not_wrapped():
    class Wrapped(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert Wrapped._should_skip_dynamo()
    assert hasattr(Wrapped.__torch_dispatch__, "__wrapped__"), "torch no longer wraps it"
    assert not hasattr(Mode.__torch_dispatch__, "__wrapped__")


@pytest.mark.parametrize("runs", [False, True])
def test_dynamo_compiles_nothing_under_a_mode_that_does_not_let_it(runs):
    torch._dynamo.reset()  # else the code that was left uncompiled stays so
    graphs, x = Count(), torch.ones(2)
    compiled = torch.compile(lambda x: x.cos() * 2, backend=graphs)
    with Mode(compiled=runs) as mode:
        compiled(x)
    assert graphs.graphs == runs, "torch asks ignore_compile_internals no more, or another way"
    assert TorchDispatchMode.ignore_compile_internals() is False
    if not runs:
        assert mode.seen == [("aten.cos.default", False), ("aten.mul.Tensor", False)]
        torch.compile(lambda x: x.sin() * 3, backend=graphs)(x)
        assert graphs.graphs == 1, "it can tell"


def test_excluding_the_key_turns_autocast_off_inside():
    with dispatcher.ExcludeKeys(dispatcher.keyset("AutocastCPU")):
        with torch.autocast("cpu"):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    torch.set_autocast_enabled("cpu", True)
    try:
        with dispatcher.ExcludeKeys(dispatcher.keyset("AutocastCPU")):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
    finally:
        torch.set_autocast_enabled("cpu", False)


def test_an_op_runs_with_autocast_as_it_was_where_it_was_called():
    class Each(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return dispatcher.in_region(func, args, kwargs or {}, args[0].device.type)

    w = torch.eye(4)
    for enabled, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with torch.autocast("cpu", enabled=enabled), Each():
            assert torch.linalg.pinv(w).dtype is dtype
            assert torch.is_autocast_enabled("cpu") == enabled
    meta = torch.ones(2, device="meta")  # a device without regions
    with Each():
        assert meta.sin().is_meta


def test_below_leaves_the_key_and_all_above_it_out():
    keys = dispatcher.below("AutocastCPU")
    assert not keys.has(torch._C.DispatchKey.AutocastCPU)
    assert not keys.has(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)
    assert keys.has(torch._C.DispatchKey.AutogradCPU)
    assert keys.has(torch._C.DispatchKey.CPU)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # no batching rule, torch 2.15
def test_the_front_key_is_where_torch_func_looks_first():
    library = torch.library.Library("polymp_front", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
    seen = []
    op = torch.ops.polymp_front.twice.default
    front = torch.library.get_kernel(op, dispatcher.FUNC_FRONT)

    def kernel(keys, x):
        seen.append(x.shape)
        return front.call_boxed(keys, x)

    dispatcher.put(library, {"twice": kernel}, dispatcher.FUNC_FRONT)
    assert torch.equal(torch.func.vmap(op)(torch.ones(3, 2)), torch.full((3, 2), 2.0))
    assert seen == [(2,)], "the kernel did not see one row of the batch"
    assert torch.equal(op(torch.ones(2)), torch.full((2,), 2.0))
    assert len(seen) == 1, "without a transform the front key is not asked"


def test_slots_are_free_per_thread_and_guarded():
    """No tensor of this build is on the devices whose state holds the policies' code."""
    slots = regions.SLOTS
    before = [torch.get_autocast_dtype(slot) for slot in slots]
    for slot in slots:
        with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
            torch.ones(1, device=slot)
        for dtype in dtype_names.NAMES:
            torch.set_autocast_dtype(slot, dtype)
            assert torch.get_autocast_dtype(slot) is dtype
    seen = in_thread(lambda: [torch.get_autocast_dtype(slot) for slot in slots])
    assert seen == [*regions.NONE], "a new thread starts with no policy"
    for slot, dtype in zip(slots, before, strict=True):
        torch.set_autocast_dtype(slot, dtype)


def test_a_function_marked_as_run_at_trace_time_is():
    calls = []

    @dynamo.at_trace_time
    def constant(n):
        calls.append(n)
        return n + 1

    compiled = torch.compile(lambda x: x * constant(2), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    compiled(torch.ones(2))
    assert calls == [2]


def test_versions():
    known = versions.SUPPORTED["torch"]
    assert versions.within(torch.__version__, known), f"polymp knows {known}"


def test_an_op_of_a_library_is_found_by_what_a_user_has_of_it():
    @torch.library.custom_op("polymp_names::same", mutates_args=())
    def same(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    packet = torch.ops.polymp_names.same
    for given in ("polymp_names::same", same, packet, packet.default):
        assert dispatcher.qualified_name(given) == "polymp_names::same"
    assert dispatcher.overload("polymp_names::same") is packet.default
    assert dispatcher.qualified_name(torch.relu) is None
    assert not dispatcher.has_kernel("polymp_names::same", "AutocastCPU")
    same.register_autocast("cpu", torch.bfloat16)
    assert dispatcher.has_kernel("polymp_names::same", "AutocastCPU")


def test_a_number_may_stand_for_a_tensor():
    x = torch.tensor([5.0, 7.0])
    assert dispatcher.calling(torch.ops.aten.remainder.Tensor)(x, 4).tolist() == [1.0, 3.0]
    assert dispatcher.calling(torch.ops.aten.add.Tensor)(x, 1, alpha=2).tolist() == [7.0, 9.0]
    assert dispatcher.calling(torch.ops.aten.relu.default)(-x).tolist() == [0.0, 0.0]


def test_kernels_of_a_library_go_and_the_old_ones_come_back():
    seen = []

    def kernel(keys, x):
        seen.append(x.shape)
        with dispatcher.ExcludeKeys(dispatcher.keyset("AutocastCPU")):
            return torch.ops.aten.erfinv.default(x)

    x = torch.zeros(3, dtype=torch.bfloat16)
    with torch.autocast("cpu"):
        before = torch.erfinv(x).dtype
        library = torch.library.Library("aten", "IMPL")
        dispatcher.put(library, {"erfinv": kernel}, "AutocastCPU")
        torch.erfinv(x)
        dispatcher.destroy(library)
        dispatcher.destroy(library)  # again: it is gone
        assert seen == [(3,)]
        assert torch.erfinv(x).dtype is before
        assert seen == [(3,)]


def test_a_kernel_goes_over_one_of_another_library():
    """torch up to 2.12 refuses it unless it is asked not to."""
    x = torch.ones(2)
    with ExitStack() as stack:
        for number in (1, 2):
            library = torch.library.Library("aten", "IMPL")
            stack.callback(dispatcher.destroy, library)
            dispatcher.put(library, {"erfinv": lambda keys, x, n=number: x + n}, "AutocastCPU")
        with torch.autocast("cpu"):
            assert torch.equal(torch.erfinv(x), x + 2)


@pytest.mark.parametrize("method", ["_call_impl", "_apply", "_load_from_state_dict"])
def test_modules_are_called_cast_and_loaded_by_methods_that_scoped_and_pin_replace(method):
    calls = []

    def replaced(self, *args, **kwargs):
        calls.append(method)
        return getattr(torch.nn.Linear, method)(self, *args, **kwargs)

    module = type("Module", (torch.nn.Linear,), {method: replaced})(2, 2)
    assert module._compiled_call_impl is None
    module(torch.ones(1, 2))
    module.to(torch.bfloat16).half()
    module.load_state_dict(module.state_dict())
    assert len(calls) == (2 if method == "_apply" else 1)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_storage_has_one_key_and_keeps_it_while_it_is_referred_to():
    t = torch.ones(4, 4)
    key, reference = modes.storage_key(t), modes.storage_reference(t)
    assert key == modes.storage_key(t[1:].t()) == modes.storage_key(t.detach()) != 0
    assert key != modes.storage_key(t.clone())
    assert modes.storage_key(t.to_sparse()) == 0
    sparse = torch.eye(4)
    stored = {modes.stored_bytes(t) for t in (sparse.to_sparse(), sparse.to_sparse_csr())}
    assert (modes.stored_bytes(sparse), stored) == (64, {16})
    assert not reference.expired()
    del t
    assert reference.expired()
    assert key not in {modes.storage_key(torch.ones(4, 4)) for _ in range(100)}


def test_an_op_that_is_made_of_others_can_run_as_these():
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    parts = dispatcher.parts_of(torch.ops.aten.linear.default, "cpu")
    assert torch.equal(parts(x, w), torch.nn.functional.linear(x, w))
    assert dispatcher.parts_of(torch.ops.aten.mm.default, "cpu") is None


def test_keys_of_freed_storages_are_not_used_again_while_they_are_kept():
    kept, keys = modes.KeptKeys(), set()
    for _ in range(100):
        t = torch.ones(4, 4)
        keys.add(modes.storage_key(t))
        kept.keep(t)
    assert len(keys) == 100
    assert not kept.is_freed(key := modes.storage_key(t))
    del t
    assert kept.is_freed(key)


def test_modules_whose_calls_run_are_read_off_the_stack():
    class Inner(torch.nn.Module):
        def forward(self):
            return [*optimizers.running_modules()]

    inner = Inner()
    outer = torch.nn.Sequential(inner)
    inner.register_forward_hook(lambda *_: None)
    outer.forward = lambda: inner()
    assert outer() == [inner, outer]
    assert [*optimizers.running_modules()] == []


def test_a_tensor_is_plain_if_its_class_has_no_say_in_ops():
    class Named(torch.nn.Parameter):
        pass

    class Function(torch.Tensor):
        pass

    class Dispatch(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl
        __torch_dispatch__ = classmethod(lambda cls, func, types, args=(), kwargs=None: func(*args))

    t = torch.ones(2)
    plain = (t, torch.nn.Parameter(t), torch.nn.Buffer(t), Named(t))
    assert all(map(modes.is_plain, plain))
    assert not any(map(modes.is_plain, (t.as_subclass(Function), t.as_subclass(Dispatch))))
    with FakeTensorMode():
        assert not modes.is_plain(torch.ones(2))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_fused_kernel_unscales_the_dtypes_that_are_named(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    found, inverse = torch.zeros((), device=device), torch.tensor(0.5, device=device)
    refuses = pytest.raises((RuntimeError, NotImplementedError), match="not implemented")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        grad = torch.full((2,), 8.0, dtype=dtype, device=device)
        unscales = device == "cpu" or dtype is not torch.bfloat16
        with nullcontext() if unscales else refuses:
            torch._amp_foreach_non_finite_check_and_unscale_([grad], found, inverse)
        assert grad.tolist() == [4.0 if unscales else 8.0] * 2


def test_the_fused_kernel_refuses_sparse_gradients_before_it_changes_any():
    grads = [torch.full((2,), 8.0), torch.ones(2).to_sparse()]
    with pytest.raises(NotImplementedError, match="SparseCPU"):
        torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(()), torch.tensor(0.5))
    assert grads[0].tolist() == [8.0, 8.0]


def test_local_shares_the_memory_of_a_dtensor(alone):
    whole = distribute_tensor(torch.ones(4), alone, [Shard(0)]).requires_grad_()
    part = distributed.local(whole)
    assert type(part) is torch.Tensor
    assert not part.requires_grad
    part.mul_(2)
    assert whole.full_tensor().tolist() == [2.0] * 4
    plain = torch.ones(2)
    assert distributed.local(plain) is plain


def test_the_place_of_a_part_and_a_tensor_laid_out_alike(alone):
    whole = distribute_tensor(torch.ones(4, 3), alone, [Shard(0)])
    assert distributed.offset(whole) == (0, 0)
    assert distributed.offset(torch.ones(2, 2, 2)) == (0, 0, 0)
    part = torch.zeros(4, 3, dtype=torch.int16)
    made = distributed.like(part, whole)
    assert isinstance(made, DTensor)
    assert (made.placements, made.shape, made.dtype) == ((Shard(0),), whole.shape, torch.int16)
    distributed.local(made).add_(1)
    assert part.sum() == 12
    assert distributed.like(part, torch.ones(4, 3)) is part


def test_meshes_are_named_once_in_the_order_of_their_use(alone):
    other = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    again = init_device_mesh("cpu", (1,))
    placed = (
        (other, [Replicate(), Shard(0)]),
        (alone, [Shard(0)]),
        (again, [Shard(0)]),
        (other, [Shard(0), Replicate()]),
    )
    made = [distribute_tensor(torch.ones(2), *each) for each in placed]
    assert distributed.meshes([torch.ones(1), *made]) == [other, alone]
    assert distributed.meshes([torch.ones(1)]) == []


def test_a_sum_that_is_not_made_yet_is_partial(alone):
    for placement in (Partial(), Replicate(), Shard(0)):
        tensor = DTensor.from_local(torch.ones(2), alone, [placement])
        made = distributed.added_up(tensor)
        assert (made is tensor) is not isinstance(placement, Partial)
        assert not any(p.is_partial() for p in made.placements)
        assert distributed.local(made).tolist() == [1.0, 1.0]
    assert distributed.added_up(plain := torch.ones(2)) is plain


@pytest.mark.parametrize("original", [True, False])
def test_parameters_of_fsdp1_are_known_by_its_mark(alone, original):
    plain = torch.nn.Linear(2, 2)
    assert not any(map(distributed.in_fsdp1, plain.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        wrapped = fsdp.FullyShardedDataParallel(
            plain, device_id=torch.device("cpu"), use_orig_params=original
        )
    params = list(wrapped.parameters())
    assert params
    assert all(map(distributed.in_fsdp1, params))


def test_a_group_is_spoken_to_on_a_device_that_it_knows(alone):
    with FakeTensorMode():
        elsewhere = torch.zeros((), device="cuda")
        kinds = dist.get_backend_config(dist.group.WORLD)
        expected = "cuda" if "cuda:" in kinds else "cpu"
        assert distributed.speaking(dist.group.WORLD, elsewhere).device.type == expected


def test_a_tensor_goes_to_a_device_that_the_group_speaks(monkeypatch):
    tensor = torch.ones(3)
    for config, device in (
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cpu:gloo", "cpu"),
        ("undefined", "cpu"),
        ("meta:fake", "meta"),
    ):
        monkeypatch.setattr("torch.distributed.get_backend_config", lambda group, c=config: c)
        there = distributed.speaking(None, tensor)
        assert there.device.type == device
        assert (there is tensor) == (device == "cpu")


def test_steps_of_torch_s_optimizers_are_in_the_two_wrappers_that_are_left_out():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    class Derived(torch.optim.SGD):
        pass

    torchs = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Rprop, Derived
    w = torch.ones((2, 2), requires_grad=True)
    for kind in (*torchs, torch.optim.Muon, torch.optim.Adafactor, Own):
        optimizer = kind([w], lr=0.5)  # the outer wrapper comes with the first of a class
        assert (optimizers._lists_of(kind) is None) is (kind is Own)
        if kind in torchs:
            assert optimizer.defaults["differentiable"] is False
    torch.optim.LBFGS([w]), torch.optim.SparseAdam([w])
    assert optimizers._lists_of(torch.optim.LBFGS) is None
    assert optimizers._lists_of(torch.optim.SparseAdam) is None


def test_a_step_without_hooks_and_one_without_wrappers():
    w, seen = torch.nn.Parameter(torch.ones(2)), []
    optimizer = torch.optim.Adam([w], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append("hook"))
    w.grad = torch.ones(2)
    optimizers.step_without_hooks(torch.optim.Adam)(optimizer)
    assert w[0] < 0.1
    with torch.no_grad():
        inspect.unwrap(torch.optim.Adam.step)(optimizer)
    assert w[0] < -0.8
    assert seen == []
    optimizer.step()
    assert seen == ["hook"]


def test_dynamo_marks_init_group_on_a_wrapper_that_can_be_taken_off():
    torch.compile(lambda x: x, backend="eager")(torch.ones(1))  # dynamo patches the classes
    marked = torch.optim.SGD._init_group
    plain = inspect.unwrap(marked)
    assert plain.__name__ == "_init_group"
    assert not hasattr(plain, "_torchdynamo_disable")


def test_low_weights_complete_their_state():
    class Low(torch.optim.SGD):
        def complete_state(self):
            calls.append(self)

    calls, w = [], torch.nn.Parameter(torch.ones(2))
    optimizers.complete_state(torch.optim.SGD([w]))
    optimizers.complete_state(low := Low([w]))
    assert calls == [low]


def test_the_lists_that_an_optimizer_s_state_is_gathered_in():
    class Own(torch.optim.SGD):
        def _init_group(self, group):
            raise AssertionError

    w = torch.ones((2, 2), requires_grad=True)
    counts = {torch.optim.SGD: 3, torch.optim.Adam: 6, torch.optim.Muon: 3, Own: None}
    assert {kind: optimizers._lists_of(type(kind([w]))) for kind in counts} == counts


def test_what_is_not_traced_breaks_a_graph_and_says_why():
    @dynamo.untraced("for a reason")
    def read(x):
        return x.sum().item()

    graphs = Count()
    compiled = torch.compile(lambda x: read(x) + 1, backend=graphs)
    assert compiled(torch.ones(3)) == 4.0
    assert graphs.graphs == 0
    with pytest.raises(torch._dynamo.exc.Unsupported, match="for a reason"):
        torch.compile(lambda x: read(x) + 1, backend="eager", fullgraph=True)(torch.ones(3))


# The first tangent of a process has torch load scripts.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_records_ops_is_seen() -> None:
    """`is_recorded`: modes, transforms and tangents, and none of them left behind."""
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(modes.is_recorded())
        return x

    x = torch.ones(2, requires_grad=True)
    look(x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        look(x)
    x.register_hook(look)
    x.sum().backward()
    assert seen == [False] * 3
    seen.clear()
    torch.func.vmap(look)(x)
    torch.func.grad(lambda t: look(t).sum())(x)
    torch.func.jvp(look, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        look(x)
    with FakeTensorMode():
        look(torch.ones(2))
    make_fx(look)(x.detach())
    assert seen == [True] * 6
    assert not modes.is_recorded()


def test_a_mode_that_only_looks_on_records_nothing() -> None:
    class Looks(TorchDispatchMode):
        looks_on = True

    with Looks():
        assert not modes.is_recorded()
        with TorchDispatchMode():
            assert modes.is_recorded()
    with TorchDispatchMode(), Looks():
        assert modes.is_recorded()


def test_nodes_are_numbered_as_they_are_made_and_known_in_backward() -> None:
    """The number below autograd is that of the op's own node; outside of backward there is none."""
    w, v = (torch.ones((), requires_grad=True) for _ in range(2))
    assert dispatcher.leaves([((w.half() + v) * v).grad_fn], torch.float16) == {w: True, v: False}

    def look(func, *_):
        if func is not torch.ops.aten.detach.default:
            return dispatcher.latest_node(), dispatcher.backward_node()
        return None

    x = torch.ones(2, requires_grad=True)
    with EachOp(look) as ops:
        y = x.exp().sin()
    exponential, sine = y.grad_fn.next_functions[0][0]._sequence_nr(), y.grad_fn._sequence_nr()
    assert ops.seen == [(exponential, None), (sine, None)]
    with torch.no_grad():
        x.exp()
    assert dispatcher.latest_node() == sine, "no node, no number"
    x.grad, given = torch.ones(2), torch.ones(2)
    with EachOp(look) as ops:
        y.backward(given)
    behind = {backward for _, backward in ops.seen}
    assert behind == {sine, exponential, -1}, "-1 where a gradient is accumulated"
    assert dispatcher.backward_node() is None


def test_what_a_recording_mode_asks_first() -> None:
    def record(x: torch.Tensor) -> torch.Tensor:
        dynamo.decompositions(dynamo.proxy_mode())[torch.ops.aten.tanh.default] = torch.sin
        return torch.tanh(x)

    called = {node.target for node in make_fx(record)(torch.ones(2)).graph.nodes}
    assert torch.ops.aten.sin.default in called
    assert torch.ops.aten.tanh.default not in called


def test_flops_are_known_of_the_kernels_that_have_some() -> None:
    aten = torch.ops.aten
    a, b = torch.ones(2, 3), torch.ones(3, 5)
    assert modes.flops(aten.mm.default, (a, b), {}, a @ b) == 2 * 2 * 3 * 5
    assert modes.flops(aten.addmm.default, (torch.ones(5), a, b), {}, a @ b) == 2 * 2 * 3 * 5
    assert modes.flops(aten.exp.default, (a,), {}, a.exp()) == 0
    q = torch.ones(1, 2, 3, 4)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = kernel(q, q, q)
    assert modes.flops(kernel.default, (q, q, q), {}, (out, logsumexp)) == 2 * 2 * (2 * 3 * 3 * 4)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    given = out, q, q, q, out, logsumexp, 0.0, False
    made = backward(*given)
    assert modes.flops(backward.default, given, {}, made) == 5 * 2 * (2 * 3 * 3 * 4)
    k, v = torch.ones(1, 1, 7, 4), torch.ones(1, 1, 7, 5)  # both heads of queries share them
    scores, results = 2 * (2 * 3 * 7 * 4), 2 * (2 * 3 * 7 * 5)
    assert modes.flops(kernel.default, (q, k, v), {}, None) == scores + results
    given = torch.ones(1, 2, 3, 5), q, k, v
    assert modes.flops(backward.default, given, {}, None) == 3 * scores + 2 * results


def test_what_is_saved_is_shown_and_torch_func_is_let_by() -> None:
    seen: list[torch.Tensor] = []
    x = torch.ones(2, requires_grad=True)
    with ExitStack() as stack:
        for _ in range(2):
            dispatcher.saved_tensors_shown(stack, seen.append)
        refuses = torch.autograd.graph.disable_saved_tensors_hooks("refuses")
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            with pytest.raises(RuntimeError, match="refuses"):
                refuses.__enter__()
        torch.func.grad(lambda t: t.exp().sum())(x.detach())
        assert seen == []
        y = x.exp()
        assert len(seen) == 1, "the inner one sees it, as of any hooks"
        assert seen[0].data_ptr() == y.data_ptr()
    assert torch.autograd.graph.disable_saved_tensors_hooks is dispatcher._DISABLE
    assert dispatcher.showing == {}


def test_autocast_keys_of_several_devices_in_one_set() -> None:
    both = dispatcher.autocast_keys(["cpu", "cuda"])
    for device in ("cpu", "cuda"):
        assert both.has(getattr(torch._C.DispatchKey, dispatcher.autocast_key(device)))
    assert not dispatcher.autocast_keys(["cpu"]).has(torch._C.DispatchKey.AutocastCUDA)


def test_the_innermost_mode_and_whether_one_sees_this_thread() -> None:
    outer, inner = TorchDispatchMode(), TorchDispatchMode()
    assert modes.innermost_mode() is None
    with outer:
        assert modes.innermost_mode() is outer
        assert modes.sees(outer)
        with inner:
            assert modes.innermost_mode() is inner
            assert modes.sees(outer)
        assert not modes.sees(inner)
        assert not in_thread(lambda: modes.sees(outer))
    assert not modes.sees(outer)


def test_backward_passes_have_numbers() -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[int | None] = []
    x.register_hook(lambda g: seen.append(dispatcher.backward_task()))
    assert dispatcher.backward_task() is None
    x.exp().sum().backward()
    (x * x).sum().backward()
    assert None not in seen
    assert len({*seen}) == 2
    assert dispatcher.backward_task() is None


def test_what_an_op_writes() -> None:
    aten = torch.ops.aten
    x, y = torch.ones(2), torch.ones(2)
    for op, args, kwargs, expected in (
        (aten.add_.Tensor, (x, y), {}, [x]),
        (aten.add.out, (x, x), {"out": y}, [y]),
        (aten._foreach_add_.Scalar, ([x, y], 1), {}, [x, y]),
        (aten.add.Tensor, (x, y), {}, []),
    ):
        written = dispatcher.written(op, args, kwargs)
        assert [id(t) for t in written] == [id(t) for t in expected]
        assert dispatcher.writes(op) == bool(expected)


@pytest.mark.parametrize("name", sorted(dispatcher._SILENT))
def test_batch_norms_that_write_statistics_say_nothing_of_it(name: str) -> None:
    """Once torch says so of one, its name goes from the list."""
    op = getattr(torch.ops.aten, name).default
    assert not op._schema.is_mutable
    given = {argument.name: torch.ones(2) for argument in op._schema.arguments}
    wrote = {id(t) for t in dispatcher.written(op, [*given.values()], {})}
    assert {name for name, t in given.items() if id(t) in wrote} == dispatcher._STATISTICS
    assert dispatcher.writes(op)
    if name == "native_batch_norm":
        x, mean, var = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
        op(x, None, None, mean, var, True, 0.1, 1e-5)
        assert not torch.equal(mean, torch.zeros(3))


def test_ops_of_classes_that_hold_tensors_are_seen_as_the_ops_they_make(alone) -> None:
    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if modes.unwrapped_first(types):
                return NotImplemented
            seen.append((func, [type(t) for t in args if isinstance(t, torch.Tensor)]))
            return func(*args, **(kwargs or {}))

    seen: list[tuple[torch._ops.OpOverload, list[type]]] = []
    assert distributed.default_store().add("polymp", 1) == 1
    x = DTensor.from_local(torch.ones(2), alone, [Replicate()])
    with Seeing():
        x.add_(1)
        dist.all_reduce(torch.ones(2))
    assert (torch.ops.aten.add_.Tensor, [torch.Tensor]) in seen
    assert not any(DTensor in kinds for _, kinds in seen)
    assert [op.namespace for op, _ in seen if distributed.talks(op)] == ["c10d"]
    assert distributed.talks(torch.ops._c10d_functional.all_reduce.default)
    assert not distributed.talks(torch.ops.aten.add_.Tensor)
    assert distributed.receives(torch.ops._c10d_functional.all_reduce.default)
    assert not distributed.receives(torch.ops.aten.add_.Tensor)


def test_fsdp_makes_room_for_what_other_ranks_send() -> None:
    """Its results are the room: this rank's part of it, and the whole, which is not written yet."""
    op = torch.ops.fsdp.all_gather_copy_in.default
    parts = [torch.ones(2), torch.ones(2)]
    room = torch.full((8,), math.inf)
    mine, whole = op(parts, room, [2, 2], 4, 1)
    assert distributed.receives(op)
    assert not distributed.talks(op)
    assert whole.isfinite().tolist() == [False] * 4 + [True] * 4
    assert mine.data_ptr() == whole[4:].data_ptr()
    assert not modes.unwrapped_first([torch.Tensor, torch.nn.Parameter])


def test_wrappers_that_are_sure_to_talk() -> None:
    class Wrapper(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, talks: bool) -> None:
            self.require_backward_grad_sync = talks

    assert distributed.will_talk(Wrapper(True))
    assert not distributed.will_talk(Wrapper(False))
    with torch.no_grad():
        assert not distributed.will_talk(Wrapper(True))
    assert distributed.will_talk(object.__new__(fsdp.FSDPModule))
    assert distributed.will_talk(object.__new__(fsdp.FullyShardedDataParallel))
    assert not distributed.will_talk(torch.nn.Linear(1, 1))


def test_what_is_asked_in_a_process_of_its_own() -> None:
    """No tensor is a DTensor before somebody imports them, and polymp does not.

    And what checkpoints run again is carried.
    """
    script = """
import sys, torch
tensor = sys.modules.pop('torch.distributed.tensor')  # which dynamo imports
import polymp.torch
from torch.utils.checkpoint import checkpoint
from polymp.backends.torch.compat import dispatcher as autograd
from polymp.backends.torch.compat import distributed as dtensor
x = torch.ones(2)
assert 'torch.distributed.tensor' not in sys.modules
assert dtensor._dtensor() is None
assert dtensor.local(x) is x and dtensor.meshes([x]) == [] and dtensor.added_up(x) is x
calls = []
def carry(function):
    def carried(*args, **kwargs):
        calls.append("again")
        return function(*args, **kwargs)
    calls.append("forward")
    return carried
autograd.carry_into_recomputation(carry)
for reentrant in (True, False):
    x = torch.ones(2, requires_grad=True)
    y = checkpoint(lambda x: x.exp() * x, x, use_reentrant=reentrant)
    assert calls == ["forward"], calls
    y.sum().backward()
    assert calls == ["forward", "again"], calls
    calls.clear()
sys.modules['torch.distributed.tensor'] = tensor
assert dtensor._dtensor() is tensor.DTensor
"""
    forks.program(script, strict=True)


def test_a_tensor_of_a_transform_is_told_from_others():
    seen = []

    def look(x):
        seen.append(modes.in_transform(x))
        return x.sum()

    for transform in (torch.func.grad, torch.vmap, lambda f: f):
        transform(look)(torch.ones(2, 3))
    assert seen == [True, True, False]


def test_a_tensor_that_stays_is_as_dynamo_marks_it():
    ours, theirs = torch.ones(()), torch.ones(())
    dynamo.stays(ours)
    torch._dynamo.mark_static_address(theirs, guard=True)
    assert vars(ours) == vars(theirs) == {"_dynamo_static_input_type": "guarded"}


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_inductor_computes_numbers_before_the_loop_over_an_array():
    def decayed(x, step):
        return x * (1 - 0.9**step)

    def pow_is_first(**given):
        with torch._inductor.config.patch(fx_graph_cache=False):  # and nothing is built
            code, *_ = get_code(torch.compile(decayed, **given), torch.ones(64), torch.tensor(3.0))
        return code.index("std::pow") < code.index("for(")

    assert pow_is_first(options=inductor.OPTIONS)
    assert not pow_is_first(), "inductor does it by itself: remove the pass"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_inputs_and_results_of_compiled_graphs_are_told():
    compiled, told = torch.compile(lambda x: x.sin() * 2), []
    x = torch.randn(8)
    with inductor.graphs_watched(lambda inputs: told.extend(inputs) or told.extend):
        made = compiled(x)
    assert compiled(x).equal(made), "and no longer told"
    given, seen = told
    assert given.equal(x)
    assert seen.equal(made)
