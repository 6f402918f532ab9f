"""Tensors whose storage was freed, as FSDP and offloading leave them: an error that says so, in every op."""

import pytest
import torch

from gistkit import Plan, ops
from tests.ops.test_attention import causal_plan


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def attention_gradient(grad):
    query = torch.ones(1, 2, 9, 8, requires_grad=True)
    return torch.autograd.grad(ops.attention(query, query, query, causal_plan(9)), query, grad)


HEADS = torch.ones(1, 2, 9, 8)
CASES = {
    "attention": (lambda *tensors: ops.attention(*tensors, causal_plan(9)), (HEADS, HEADS, HEADS)),
    "attention's gradient": (attention_gradient, (HEADS,)),
    "rope": (ops.rope, (HEADS, HEADS, torch.arange(9), torch.ones(4))),
    "window_pool": (lambda key, value: ops.window_pool(key, value, windows=3), (HEADS, HEADS)),
}


@pytest.mark.parametrize(("name", "place"), [(n, i) for n, (_, given) in CASES.items() for i in range(len(given))])
def test_an_op_refuses_it(name, place):
    call, given = CASES[name]
    call(*given)
    with pytest.raises(RuntimeError, match="expected tensors with storage, got one that was freed"):
        call(*(freed(tensor) if index == place else tensor for index, tensor in enumerate(given)))


def test_empty_tensors_have_no_storage_and_are_none():
    empty = torch.ones(1, 2, 0, 8)
    assert ops.attention(empty, empty, empty, Plan(torch.zeros(1, 0, 1, 2, dtype=torch.int32), 0)).shape == empty.shape
