"""Every private name of torch that polymp uses does what `compat` says; loud when one changes."""

import threading

import pytest
import torch
from torch._C import _dynamo

from polymp.backends.torch import compat, regions

TESTED = (2, 13)


def test_autocast_keys_exist_for_the_devices_that_have_tables():
    for device in ("cpu", "cuda", "mps", "xpu"):
        key = compat.autocast_key(device)
        assert hasattr(torch._C.DispatchKey, key)
        assert compat.registered(key), f"torch registers nothing on {key}"


def test_registered_names_are_overloads():
    for name in compat.registered("AutocastCPU") | compat.registered("AutocastCUDA"):
        op = compat.overload(name)
        assert op is not None, name
        assert op.name() == f"aten::{name}"
    assert compat.overload("no_such_op") is None
    assert compat.overload("mm.no_such_overload") is None


def test_excluding_the_key_turns_autocast_off_inside():
    with compat.ExcludeKeys(compat.keyset("AutocastCPU")):
        with torch.autocast("cpu"):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    torch.set_autocast_enabled("cpu", True)
    try:
        with compat.ExcludeKeys(compat.keyset("AutocastCPU")):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
    finally:
        torch.set_autocast_enabled("cpu", False)


def test_below_leaves_the_key_and_all_above_it_out():
    keys = compat.below("AutocastCPU")
    assert not keys.has(torch._C.DispatchKey.AutocastCPU)
    assert not keys.has(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)
    assert keys.has(torch._C.DispatchKey.AutogradCPU)
    assert keys.has(torch._C.DispatchKey.CPU)


def test_the_front_key_is_where_torch_func_looks_first():
    library = torch.library.Library("polymp_front", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
    seen = []
    op = torch.ops.polymp_front.twice.default
    front = torch.library.get_kernel(op, compat.FUNC_FRONT)

    def kernel(keys, x):
        seen.append(x.shape)
        return front.call_boxed(keys, x)

    compat.put(library, "twice", kernel, compat.FUNC_FRONT)
    assert torch.equal(torch.func.vmap(op)(torch.ones(3, 2)), torch.full((3, 2), 2.0))
    assert seen == [(2,)], "the kernel did not see one row of the batch"
    assert torch.equal(op(torch.ones(2)), torch.full((2,), 2.0))
    assert len(seen) == 1, "without a transform the front key is not asked"


def test_slots_are_free_per_thread_and_guarded():
    """No tensor of this build is on the devices whose state holds the policies' code."""
    before = [torch.get_autocast_dtype(slot) for slot in regions._SLOTS]
    seen = []
    for slot in regions._SLOTS:
        with pytest.raises((RuntimeError, NotImplementedError)):
            torch.ones(1, device=slot)
        for dtype in regions.FORMATS:
            torch.set_autocast_dtype(slot, dtype)
            assert torch.get_autocast_dtype(slot) is dtype
    thread = threading.Thread(
        target=lambda: seen.extend(torch.get_autocast_dtype(slot) for slot in regions._SLOTS)
    )
    thread.start()
    thread.join()
    assert seen == list(regions._NONE), "a new thread starts with no policy"
    for slot, dtype in zip(regions._SLOTS, before, strict=True):
        torch.set_autocast_dtype(slot, dtype)


def test_dynamo_has_the_switch_that_keeps_a_frame_from_being_compiled():
    frame = _dynamo.eval_frame
    assert {"set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction"} <= set(dir(frame))
    assert hasattr(frame._FrameAction, "SKIP")
    assert hasattr(frame._FrameAction, "DEFAULT")


def test_a_function_marked_as_run_at_trace_time_is():
    calls = []

    @compat.at_trace_time
    def constant(n):
        calls.append(n)
        return n + 1

    compiled = torch.compile(lambda x: x * constant(2), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    compiled(torch.ones(2))
    assert calls == [2]


def test_fused_scaler_kernels_keep_their_signatures():
    def arguments(name):
        return [a.name for a in getattr(torch.ops.aten, name).default._schema.arguments]

    assert arguments("_amp_foreach_non_finite_check_and_unscale_") == [
        "self",
        "found_inf",
        "inv_scale",
    ]
    assert arguments("_amp_update_scale_") == [
        "self",
        "growth_tracker",
        "found_inf",
        "scale_growth_factor",
        "scale_backoff_factor",
        "growth_interval",
    ]


def test_cuda_missing_reads_what_torch_amp_reads(monkeypatch):
    for said in (True, False):
        monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda s=said: s)
        assert compat.cuda_missing() is said


def test_versions():
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    assert (2, 11) <= version <= TESTED, f"polymp knows torch 2.11 to 2.13, this is {version}"


def test_an_op_of_a_library_is_found_by_what_a_user_has_of_it():
    @torch.library.custom_op("polymp_names::same", mutates_args=())
    def same(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    packet = torch.ops.polymp_names.same
    for given in ("polymp_names::same", same, packet, packet.default):
        assert compat.qualified_name(given) == "polymp_names::same"
    assert compat.overload("polymp_names::same") is packet.default
    assert compat.qualified_name(torch.relu) is None
    assert not compat.has_kernel("polymp_names::same", "AutocastCPU")
    same.register_autocast("cpu", torch.bfloat16)
    assert compat.has_kernel("polymp_names::same", "AutocastCPU")


def test_a_number_may_stand_for_a_tensor():
    x = torch.tensor([5.0, 7.0])
    assert compat.calling(torch.ops.aten.remainder.Tensor)(x, 4).tolist() == [1.0, 3.0]
    assert compat.calling(torch.ops.aten.add.Tensor)(x, 1, alpha=2).tolist() == [7.0, 9.0]
    assert compat.calling(torch.ops.aten.relu.default)(-x).tolist() == [0.0, 0.0]


def test_kernels_of_a_temporary_library_go_and_the_old_ones_come_back():
    seen = []

    def kernel(keys, x):
        seen.append(x.shape)
        with compat.ExcludeKeys(compat.keyset("AutocastCPU")):
            return torch.ops.aten.erfinv.default(x)

    x = torch.zeros(3, dtype=torch.bfloat16)
    with torch.autocast("cpu"):
        before = torch.erfinv(x).dtype
        with compat.temporary_library("aten") as library:
            compat.put(library, "erfinv", kernel, "AutocastCPU")
            torch.erfinv(x)
        assert seen == [(3,)]
        assert torch.erfinv(x).dtype is before
        assert seen == [(3,)]


def test_modules_are_called_cast_and_loaded_by_the_methods_that_scoped_and_pin_replace():
    calls = []

    class Module(torch.nn.Linear):
        def _call_impl(self, *args, **kwargs):
            calls.append("call")
            return super()._call_impl(*args, **kwargs)

        def _apply(self, fn, *recurse):
            calls.append("apply")
            return super()._apply(fn, *recurse)

        def _load_from_state_dict(self, *args, **kwargs):
            calls.append("load")
            return super()._load_from_state_dict(*args, **kwargs)

    module = Module(2, 2)
    assert module._compiled_call_impl is None
    module(torch.ones(1, 2))
    module.to(torch.bfloat16)
    module.half()
    module.load_state_dict(module.state_dict())
    assert calls == ["call", "apply", "apply", "load"]
