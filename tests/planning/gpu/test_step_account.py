"""The account of two small programs that XLA's GPU compiler made (`record_hlo.py`), against closed forms."""

import dataclasses
import json
from pathlib import Path

import pytest
from record_hlo import BATCH, HEAD_WIDTH, HEADS, NUM_LAYERS, ROWS, TOKENS, WIDTH

from openpi_train.planning.forecast import Machine
from openpi_train.planning.gpu import step_account
from openpi_train.planning.gpu.kernels import KernelWork
from openpi_train.planning.gpu.step_account import GpuAccount, PartBound, PeakBuffer, StepCosts, named_buffers
from openpi_train.planning.gpu.targets import target_of
from openpi_train.planning.hlo_text import HloProgram, read_hlo
from openpi_train.runtime.device_kinds import GIB, find_kind

H100 = find_kind("h100")
RECORDED = Path(__file__).resolve().parent / "recorded"
# Bytes of a layer's weights and activations in bfloat16; a product has one factor of each.
WEIGHTS, ACTIVATIONS = 2 * WIDTH * WIDTH, 2 * ROWS * WIDTH
PRODUCT = 2 * ROWS * WIDTH * WIDTH


def program(name: str) -> HloProgram:
    return read_hlo((RECORDED / f"{name}.hlo").read_text())


def costs(name: str, num_devices: int = 2, num_hosts: int = 1) -> StepCosts:
    machine = Machine(kind=H100, num_devices=num_devices, num_hosts=num_hosts, available_bytes=72 * GIB)
    return StepCosts(program(name), machine, target_of(H100))


def test_layers_compute_three_products_each():
    flops = {(one.part, one.phase): one.flops for one in costs("layers").parts() if one.flops}
    assert flops == {
        ("mlp", "forward"): NUM_LAYERS * PRODUCT,
        ("mlp", "backward"): 2 * NUM_LAYERS * PRODUCT,
    }


def test_products_move_their_factors_and_their_result():
    found = costs("layers")
    products = [(times, found.work(where, one)) for where, one, times in found.runs if found.work(where, one).flops]
    # Forward, and for both gradients: each time two of these three arrays are read, and the other one is written.
    moved = sum(times * work.moved for times, work in products)
    assert moved == 3 * NUM_LAYERS * (WEIGHTS + 2 * ACTIVATIONS)


def test_half_of_every_layer_is_sent_to_the_other_device_and_of_its_gradient():
    sent = costs("layers").sent_bytes()
    assert sent == {"all-gather": NUM_LAYERS * WEIGHTS / 2, "reduce-scatter": NUM_LAYERS * WEIGHTS / 2}


def test_transfers_to_another_host_wait_for_the_network():
    near, far = (costs("layers", num_hosts=hosts).played() for hosts in (1, 2))
    kernels = near.total_s - near.exposed_s
    assert far.total_s - far.exposed_s == pytest.approx(kernels)
    assert kernels == pytest.approx(sum(one.bound_s for one in costs("layers").parts()))
    # By turns: each layer's weights are gathered before their product, and nothing hides that.
    assert far.exposed_s - near.exposed_s > NUM_LAYERS * WEIGHTS / 2 * (1 / 40e9 - 1 / 360e9)


BESIDE = """
%copy (a: bf16[9,1024,1024], b: bf16[1,1024,1024], i: s32[]) -> bf16[9,1024,1024] {
  %stack = bf16[9,1024,1024]{2,1,0} parameter(0)
  %row = bf16[1,1024,1024]{2,1,0} parameter(1)
  %index = s32[] parameter(2)
  ROOT %update = bf16[9,1024,1024]{2,1,0} dynamic-update-slice(%stack, %row, %index, %index, %index)
}
ENTRY %m (a: bf16[9,1024,1024], b: bf16[1,1024,1024], i: s32[]) -> bf16[9,1024,1024] {
  %a = bf16[9,1024,1024]{2,1,0} parameter(0)
  %b = bf16[1,1024,1024]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %s = ((bf16[9,1024,1024], bf16[1,1024,1024], s32[]), bf16[9,1024,1024], u32[]) fusion-start(%a, %b, %i), calls=%copy
  %half = bf16[1,512,1024]{2,1,0} slice(%b), slice={[0:1], [0:512], [0:1024]}
  ROOT %d = bf16[9,1024,1024]{2,1,0} fusion-done(%s)
}
"""


def test_what_is_copied_beside_the_kernels_is_waited_for_and_no_part_of_their_bound():
    machine = Machine(kind=H100, num_devices=1, num_hosts=1, available_bytes=72 * GIB)
    found = StepCosts(read_hlo(BESIDE), machine, target_of(H100))
    size, rate = 2 * 1024 * 1024, step_account.MEMORY_SHARE * target_of(H100).bandwidth
    copied, kernel = (part / rate + step_account.LAUNCH_S for part in (2 * size + 4, size))
    parts, played = found.parts(), found.played()
    assert sum(one.bound_s for one in parts) == pytest.approx(kernel)
    assert (sum(one.moved_bytes for one in parts), sum(one.kernels for one in parts)) == (3 * size + 4, 2)
    assert (played.total_s, played.exposed_s) == pytest.approx((copied, copied - kernel))


def test_attention_by_cudnn_computes_two_products_forward_and_five_backward():
    found = costs("attention", num_devices=1)
    product = 2 * BATCH * HEADS * TOKENS * TOKENS * HEAD_WIDTH
    assert {(one.part, one.phase): one.flops for one in found.parts() if one.flops} == {
        ("attention", "forward"): 2 * product,
        ("attention", "backward"): 5 * product,
    }
    assert found.libraries() == {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 1}
    assert found.sent_bytes() == {}


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (KernelWork(flops=989e12), 1 / 0.81),
        (KernelWork(flops=989e12, item_bytes=4), 2 / 0.81),
        (KernelWork(read=3.35e12 / 2, written=3.35e12 / 2), 1 / 0.9),
        # The longer of the two.
        (KernelWork(flops=989e12, read=2 * 3.35e12), 2 / 0.9),
    ],
)
def test_a_kernel_is_bound_by_its_products_or_by_its_traffic(work, seconds):
    assert costs("layers").bound_s(work) == pytest.approx(seconds + step_account.LAUNCH_S)


def test_the_largest_buffers_are_told_by_what_makes_them():
    live = """
  Live ranges at 7 (peak):
    while.28{2}: 1572864 bytes (cumulative: 1572864 bytes)
    param.6{}: 1572864 bytes (cumulative: 3145728 bytes)
    custom-call.1{0}: 262144 bytes (cumulative: 3407872 bytes)
    gone.1{}: 7 bytes (cumulative: 3407879 bytes)
"""
    found = named_buffers(program("layers"), live)
    assert [(one.num_bytes, one.shape, one.op_name.rpartition("/")[2], one.instruction) for one in found] == [
        (1572864, "bf16[3,512,512]", "while", "while.28"),
        (1572864, "f32[3,256,512]", "parts", "param.6"),
        (262144, "bf16[256,512]", "dot_general", "custom-call.1"),
        (7, "", "", "gone.1"),
    ]


def test_an_account_comes_back_from_its_json():
    parts = [
        PartBound(part="gemma", phase="forward", kernels=2, flops=3.0, moved_bytes=5.0, bound_s=0.5),
        PartBound(part="gemma", phase="backward", kernels=1, flops=4.0, moved_bytes=6.0, bound_s=1.0),
        PartBound(part="rest", phase="backward", kernels=1, flops=0.0, moved_bytes=7.0, bound_s=2.0),
    ]
    numbers = {field.name: 1 for field in dataclasses.fields(GpuAccount)}
    buffers = [PeakBuffer(num_bytes=8, shape="f32[2]", instruction="a.1", op_name="jit(step)/add")]
    found = GpuAccount(
        **{**numbers, "kind": "h100", "parts": parts, "buffers": buffers, "sent_bytes": {}, "libraries": {}}
    )
    text = json.dumps(found.as_json())
    assert GpuAccount.from_json(json.loads(text)) == found
    assert json.loads(text)["phases"] == {"backward": 3.0, "forward": 0.5}
    assert [(one.part, one.kernels, one.bound_s) for one in found.by_part()] == [("rest", 1, 2.0), ("gemma", 3, 1.5)]
