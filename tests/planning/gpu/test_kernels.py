"""FLOPs and bytes of kernels, against what is counted by hand."""

import pytest

from openpi_train.planning.gpu.kernels import KernelWork, is_kernel, kernel_work
from openpi_train.planning.hlo_text import read_hlo


def work(instruction: str, inputs: dict[str, str], fused: str = "") -> KernelWork:
    """Of the instruction `%k` with these inputs by name; `fused` are the lines of its computation."""
    lines = [f"  %{name} = {shape} parameter({number})" for number, (name, shape) in enumerate(inputs.items())]
    body = f"%fused (p: f32[1]) -> f32[1] {{\n{fused}\n}}\n" if fused else ""
    program = read_hlo(
        f"{body}ENTRY %m (p: f32[1]) -> f32[1] {{\n" + "\n".join(lines) + f"\n  ROOT {instruction}\n}}\n"
    )
    return kernel_work(program, "m", program.computations["m"]["k"])


def test_a_product_has_two_operations_per_multiply_add():
    dims = "lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2,3}, rhs_contracting_dims={1,2}"
    found = work(
        f"%k = f32[4,5,9]{{2,1,0}} dot(%a, %b), {dims}", {"a": "f32[4,5,3,7]{3,2,1,0}", "b": "f32[4,3,7,9]{3,2,1,0}"}
    )
    assert found == KernelWork(2 * 4 * 5 * 9 * 3 * 7, 4 * (4 * 5 * 21 + 4 * 21 * 9), 4 * 4 * 5 * 9, item_bytes=4)


def test_a_librarys_product_writes_its_result_and_not_its_workspace():
    config = '{"gemm_backend_config":{"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    call = f'custom_call_target="__cublas$lt$matmul", backend_config={config}'
    found = work(
        f"%k = (bf16[6,10]{{1,0}}, s8[4194304]{{0}}) custom-call(%a, %b), {call}",
        {"a": "bf16[6,8]{1,0}", "b": "bf16[8,10]{1,0}"},
    )
    assert found == KernelWork(2 * 6 * 10 * 8, 2 * (48 + 80), 2 * 60, item_bytes=2)


@pytest.mark.parametrize(("target", "products"), [("Softmax", 2), ("SoftmaxBackward", 5)])
def test_attention_counts_its_products(target, products):
    sizes = '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "4", "16", "32"]}'
    call = f'custom_call_target="__cudnn$fmha{target}", backend_config={{"cudnn_fmha_backend_config":{{{sizes}}}}}'
    found = work(
        f"%k = (bf16[2,16,4,8]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %k0, %v), {call}",
        {"q": "bf16[2,16,4,8]{3,2,1,0}", "k0": "bf16[2,32,4,8]{3,2,1,0}", "v": "bf16[2,32,4,8]{3,2,1,0}"},
    )
    assert found.flops == products * 2 * (2 * 4 * 16 * 32) * 8
    assert (found.read, found.written) == (2 * (1024 + 2 * 2048), 2 * 1024)


@pytest.mark.parametrize(
    ("target", "left", "right", "result"),
    [
        ("convForward", "bf16[2,8,8,3]", "bf16[4,4,3,16]", "bf16[2,5,5,16]"),
        ("convBackwardInput", "bf16[2,5,5,16]", "bf16[4,4,3,16]", "bf16[2,8,8,3]"),
        ("convBackwardFilter", "bf16[2,8,8,3]", "bf16[2,5,5,16]", "bf16[4,4,3,16]"),
    ],
)
def test_a_convolution_and_its_gradients_count_alike(target, left, right, result):
    attributes = f'window={{size=4x4}}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn${target}"'
    found = work(f"%k = ({result}, u8[8]{{0}}) custom-call(%a, %b), {attributes}", {"a": left, "b": right})
    assert found.flops == 2 * (2 * 5 * 5 * 16) * (4 * 4 * 3)


def test_a_librarys_product_in_a_fusion_writes_its_part_of_a_stack():
    """As jaxlib 0.11 has them, with the product's result and the stack's update in one kernel."""
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    layer = f"""
  %left = bf16[6,8]{{1,0}} parameter(0)
  %right = bf16[8,10]{{1,0}} parameter(1)
  %stack = bf16[17,6,10]{{2,1,0}} parameter(2)
  %index = s32[] parameter(3)
  %call = (bf16[6,10], s8[99]) custom-call(%left, %right), custom_call_target="__cublas$lt$matmul", x={config}
  %product = bf16[6,10]{{1,0}} get-tuple-element(%call), index=0
  %row = bf16[1,6,10]{{2,1,0}} bitcast(%product)
  %update = bf16[17,6,10]{{2,1,0}} dynamic-update-slice(%stack, %row, %index, %index, %index)
  %scratch = s8[99]{{0}} get-tuple-element(%call), index=1
  ROOT %both = (bf16[17,6,10], s8[99]) tuple(%update, %scratch)"""
    inputs = {"a": "bf16[6,8]", "b": "bf16[8,10]", "c": "bf16[17,6,10]", "d": "s32[]"}
    found = work("%k = (bf16[17,6,10], s8[99]) fusion(%a, %b, %c, %d), kind=kCustom, calls=%fused", inputs, layer)
    assert found == KernelWork(2 * 6 * 10 * 8, 2 * (48 + 80) + 4, 2 * 60, item_bytes=2)


def test_a_copy_that_runs_beside_the_kernels_moves_its_slice_twice():
    copy = """
  %stack = bf16[17,6,10]{2,1,0} parameter(0)
  %row = bf16[1,6,10]{2,1,0} parameter(1)
  %index = s32[] parameter(2)
  ROOT %update = bf16[17,6,10]{2,1,0} dynamic-update-slice(%stack, %row, %index, %index, %index)"""
    inputs = {"a": "bf16[17,6,10]", "b": "bf16[1,6,10]", "c": "s32[]"}
    shape = "((bf16[17,6,10], bf16[1,6,10], s32[]), bf16[17,6,10], u32[])"
    found = work(f"%k = {shape} fusion-start(%a, %b, %c), kind=kLoop, calls=%fused", inputs, copy)
    assert (found.read, found.written) == (2 * 60 + 4, 2 * 60)


def test_a_fusion_reads_the_slices_that_it_uses_and_writes_what_it_updates():
    layer = """
  %stack = f32[18,4,6]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %whole = bf16[4,6]{1,0} parameter(2)
  %narrow = bf16[18,4,6]{2,1,0} convert(%stack)
  %slice = bf16[1,4,6]{2,1,0} dynamic-slice(%narrow, %index, %index, %index), dynamic_slice_sizes={1,4,6}
  %flat = bf16[4,6]{1,0} bitcast(%slice)
  %sum = bf16[4,6]{1,0} add(%flat, %whole)
  %kept = bf16[18,4,6]{2,1,0} parameter(3)
  %row = bf16[1,4,6]{2,1,0} bitcast(%sum)
  %update = bf16[18,4,6]{2,1,0} dynamic-update-slice(%kept, %row, %index, %index, %index)
  ROOT %both = (bf16[18,4,6]{2,1,0}, bf16[4,6]{1,0}) tuple(%update, %sum)"""
    inputs = {"a": "f32[18,4,6]", "b": "s32[]", "c": "bf16[4,6]", "d": "bf16[18,4,6]"}
    found = work("%k = (bf16[18,4,6], bf16[4,6]) fusion(%a, %b, %c, %d), kind=kLoop, calls=%fused", inputs, layer)
    assert found.read == 24 * 4 + 4 + 24 * 2 and found.written == 24 * 2 + 24 * 2
    # The same update of an array that the fusion makes writes that array.
    fresh = layer.replace("%kept = bf16[18,4,6]{2,1,0} parameter(3)", "%kept = bf16[18,4,6]{2,1,0} broadcast(%index)")
    found = work("%k = (bf16[18,4,6], bf16[4,6]) fusion(%a, %b, %c), kind=kLoop, calls=%fused", inputs, fresh)
    assert found.written == 18 * 24 * 2 + 24 * 2


def test_a_gather_reads_rows_and_a_scatter_writes_rows():
    taken = """
  %table = bf16[1000,8]{1,0} parameter(0)
  %rows = s32[5,1]{1,0} parameter(1)
  ROOT %g = bf16[5,8]{1,0} gather(%table, %rows), slice_sizes={1,8}"""
    inputs = {"a": "bf16[1000,8]", "b": "s32[5,1]", "c": "bf16[5,8]"}
    found = work("%k = bf16[5,8] fusion(%a, %b), kind=kLoop, calls=%fused", inputs, taken)
    assert (found.read, found.written) == (2 * 40 + 20, 2 * 40)
    added = """
  %table = bf16[1000,8]{1,0} parameter(0)
  %rows = s32[5,1]{1,0} parameter(1)
  %new = bf16[5,8]{1,0} parameter(2)
  ROOT %s = bf16[1000,8]{1,0} scatter(%table, %rows, %new), to_apply=%add"""
    found = work("%k = bf16[1000,8] fusion(%a, %b, %c), kind=kInput, calls=%fused", inputs, added)
    assert (found.read, found.written) == (20 + 2 * 40, 2 * 40)


def test_products_inside_a_fusion_count():
    fused = """
  %a0 = bf16[6,8]{1,0} parameter(0)
  %b0 = bf16[8,10]{1,0} parameter(1)
  %d = f32[6,10]{1,0} dot(%a0, %b0), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %n = bf16[6,10]{1,0} convert(%d)"""
    found = work(
        "%k = bf16[6,10] fusion(%a, %b), kind=kCustom, calls=%fused", {"a": "bf16[6,8]", "b": "bf16[8,10]"}, fused
    )
    assert found == KernelWork(2 * 6 * 8 * 10, 2 * (48 + 80), 2 * 60, item_bytes=2)


def test_what_launches_nothing_is_no_kernel():
    text = """
ENTRY %m (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %b = f32[2,4]{1,0} bitcast(%p)
  %c = f32[8]{0} copy(%p)
  %d = f32[8]{0} all-gather-done(%s)
  %t = (f32[8]{0}) tuple(%c)
}
"""
    assert [one.name for one in read_hlo(text).computations["m"].values() if is_kernel(one)] == ["c"]
