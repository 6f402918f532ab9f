"""gistkit inside a transformers Llama: plans, caches, what is refused, and layers that come and go."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from transformers import StaticCache

import gistkit
from gistkit.hf import CACHE, KeptKeys, attach, first_layers
from gistkit.layouts import causal_plan, gistpool
from tests.helpers.models import additive, double_angles, tiny_llama

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def causal(length):
    return gistkit.layouts.causal(length).compile()


def own_logits(model, ids, mask, positions):
    with double_angles(model):
        return model(ids, attention_mask=additive(mask), position_ids=positions, use_cache=False).logits


def test_errors_say_what_was_expected():
    model = tiny_llama()
    ids = torch.randint(0, 50, (2, 4))
    with attach(model):
        with pytest.raises(ValueError, match=r"attention_mask: expected none or all ones.*compile_batch"):
            model(ids, attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]))
        with pytest.raises(ValueError, match=r"attention_mask: expected none with a plan, got a dense mask"):
            model(ids, attention_mask=torch.zeros(2, 1, 4, 4))
    with (
        pytest.raises(TypeError, match="model: expected a transformers model, got Linear"),
        attach(torch.nn.Linear(2, 2)),
    ):
        pass


def test_dropout_of_attention_s_weights_is_the_models_own():
    model = tiny_llama(attention_dropout=0.4)
    ids = torch.randint(0, 50, (3, 13))
    positions = torch.arange(13)[None].expand(3, -1)
    mask = torch.ones(13, 13).tril().bool()

    def draw(logits):
        torch.manual_seed(5)
        return logits()

    expected = draw(lambda: own_logits(model.train(), ids, mask, positions))
    with attach(model):
        torch.testing.assert_close(draw(lambda: model(ids).logits), expected, **TOLERANCE)
        assert not torch.allclose(model(ids).logits, expected)
        torch.testing.assert_close(model.eval()(ids).logits, model(ids).logits, **TOLERANCE)


def test_arguments_that_no_layer_would_read_are_refused():
    ids = torch.randint(0, 50, (1, 4))
    unread = {"Plan": causal_plan(4, 4, "cpu", None), "keeper": KeptKeys(slice(2)), "recorder": print}
    with attach(tiny_llama()) as model:
        for name, value in unread.items():
            message = f"{name}: expected one of the arguments plan, memory, .* for an object of type "
            with pytest.raises(TypeError, match=message + type(value).__name__):
                model(ids, **{name: value})
        model(ids, labels=ids, num_items_in_batch=torch.tensor(3), output_hidden_states=True)


def test_attention_weights_are_refused_and_the_recorder_named():
    model, ids = tiny_llama(attn_implementation="eager"), torch.arange(5)[None]
    with attach(model):
        with pytest.raises(ValueError, match=r"output_attentions: expected False .*AttentionRecorder records"):
            model(ids, output_attentions=True)
        assert model(ids, output_attentions=False).logits.isfinite().all()


def test_a_forward_of_the_instance_is_put_back():
    model = tiny_llama()
    layer = model.model.layers[0].self_attn
    own = layer.forward
    layer.forward = wrapped = lambda *args, **kwargs: own(*args, **kwargs)
    with attach(model):
        assert layer.forward is not wrapped
    assert layer.forward is wrapped


def test_a_static_cache_needs_a_plan():
    model = tiny_llama()
    cache = StaticCache(config=model.config, max_cache_len=12)
    message = f"{CACHE}: expected a cache that grows, such as DynamicCache, or a plan"
    with attach(model), pytest.raises(ValueError, match=message):
        model(torch.randint(0, 50, (1, 5)), **{CACHE: cache}, use_cache=True)


def test_positions_of_several_axes_are_refused():
    layout = gistkit.layouts.causal(3)
    layout = dataclasses.replace(layout, positions=np.zeros((2, 3), np.int64))
    with attach(tiny_llama()) as model, pytest.raises(ValueError, match=r"expected position IDs \[N\] or \[B, N\]"):
        model(torch.randint(0, 50, (1, 3)), plan=layout.compile())


def test_the_first_layers_of_a_model_and_that_all_come_back():
    model = tiny_llama()
    layers, ids = model.model.layers, torch.randint(0, 50, (2, 5))
    with attach(model), first_layers(model, 1):
        found = model.model(ids, use_cache=False).last_hidden_state
    expected = model.model(ids, use_cache=False, output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(found, model.model.norm(expected), rtol=1e-6, atol=1e-6)
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    with attach(model), first_layers(model, 1, norm=False):
        found = model.model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(KeyError), attach(model), first_layers(model, 1, norm=False):
        raise KeyError
    assert hooks == [dict(module._forward_hooks) for module in model.modules()]
    assert model.model.layers is layers
    assert len(layers) == 2
    for count in (0, 3, True, 1.0):
        with pytest.raises(ValueError, match=f"count: expected 1 to 2 layers, got {count}"), first_layers(model, count):
            pass
    message = "model: expected a decoder with a list of its 2 layers, got LlamaModel"
    with pytest.raises(TypeError, match=message), first_layers(model, 1), first_layers(model, 1):
        pass
    assert model.model.layers is layers


def test_a_layer_put_in_later_is_attached_too():
    model, ids = tiny_llama(), torch.randint(50, (1, 12))
    with attach(model), torch.no_grad():
        model(ids)
    other = tiny_llama(num_hidden_layers=1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    model.model.layers[1] = other.model.layers[0]
    model.model.layers[1].self_attn.layer_idx = 1
    with torch.no_grad():
        expected = own_logits(model, ids, torch.ones(12, 12).tril().bool(), torch.arange(12)[None])
    keep = KeptKeys(slice(None))
    with attach(model), torch.no_grad():
        found = model(ids, plan=causal(12), keep=keep).logits
    torch.testing.assert_close(found, expected)
    assert len(keep.layers) == 2


def test_attaching_walks_through_a_model_once(monkeypatch):
    model, ids = tiny_llama(), torch.randint(50, (1, 4))
    seen = []
    named = torch.nn.Module.named_modules

    def counted(self, *args, **kwargs):
        for name, module in named(self, *args, **kwargs):
            seen.append(module)
            yield name, module

    with attach(model), torch.no_grad():
        model(ids)
    monkeypatch.setattr(torch.nn.Module, "named_modules", counted)
    with attach(model), torch.no_grad():
        model(ids)
    assert seen == [model]


def test_blocks_overlap_in_threads_and_the_last_to_end_detaches():
    model, layout = tiny_llama(), gistpool(context=12, ratio=4, text=4)
    plan, ids = layout.compile(), torch.randint(0, 50, (1, len(layout)))
    plain = model(ids).logits
    with attach(model):
        right = model(ids, plan=plan).logits
    opened, closed, found = threading.Event(), threading.Event(), []

    def second():
        with torch.no_grad(), attach(model):
            opened.set()
            closed.wait(60)
            found.append(model(ids, plan=plan).logits)

    thread = threading.Thread(target=second)
    with attach(model):
        thread.start()
        assert opened.wait(60)
    closed.set()
    thread.join(60)
    assert torch.equal(found[0], right) and not torch.allclose(right, plain)
    assert torch.equal(model(ids).logits, plain) and model.config._attn_implementation == "sdpa"
