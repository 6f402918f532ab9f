"""Learned positions of BERT, GPT-2 and T5, against plain loops and against what T5's own attention adds."""

import math

import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, T5Config, T5ForConditionalGeneration

from gistkit_lab.viz import draw_position_similarity, draw_relative_bias, position_similarity, relative_bias
from tests.helpers.models import tiny_llama

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}


@pytest.mark.parametrize(
    ("make", "table"),
    [
        (lambda: BertModel(BertConfig(max_position_embeddings=6, **SMALL)), "embeddings.position_embeddings"),
        (lambda: GPT2Model(GPT2Config(n_positions=6, n_embd=8, n_layer=1, n_head=2, vocab_size=9)), "wpe"),
    ],
)
def test_similarities_are_cosines_of_the_table(make, table):
    model = make()
    rows = model.get_submodule(table).weight.detach().double()
    found = position_similarity(model)
    for first in range(6):
        for second in range(6):
            a, b = rows[first], rows[second]
            cosine = float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
            assert float(found[first, second]) == pytest.approx(cosine, abs=1e-5)
    axes = draw_position_similarity(found, (0, 3, 100)).axes[0]
    assert [line.get_label() for line in axes.lines] == ["position 0", "position 3"]
    assert list(axes.lines[1].get_ydata()) == pytest.approx(found[3].tolist())


def test_biases_are_what_t5s_encoder_adds_to_its_logits():
    config = T5Config(
        d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9, relative_attention_num_buckets=8,
        relative_attention_max_distance=12, attn_implementation="eager",
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    attention = model.encoder.block[0].layer[0].SelfAttention
    # Without queries a logit is its bias.
    torch.nn.init.zeros_(attention.q.weight)
    with torch.no_grad():
        out = model.encoder(input_ids=torch.ones(1, 20, dtype=torch.long), output_attentions=True)
    weights, found = out.attentions[0][0, :, -1].flip(-1), relative_bias(model, 20)
    assert found.shape == (2, 20) and len({round(float(value), 6) for value in found[0]}) > 3
    torch.testing.assert_close(found.softmax(-1), weights, rtol=1e-5, atol=1e-6)
    axes = draw_relative_bias(found).axes[0]
    assert list(axes.lines[0].get_ydata()) == pytest.approx(found.mean(0).tolist())


def test_mistakes():
    for function, kind in ((position_similarity, "learned position embeddings"), (relative_bias, "relative attention")):
        with pytest.raises(TypeError, match=f"model: expected one with {kind}.*, got LlamaForCausalLM"):
            function(tiny_llama())
    with pytest.raises(ValueError, match="distances: expected at least 1, got 0"):
        relative_bias(tiny_llama(), 0)
    for values, message in ((torch.zeros(2, 3), "a square matrix"), (torch.zeros(2, 2), "positions: expected 1 to 8")):
        with pytest.raises(ValueError, match=message):
            draw_position_similarity(values, (5,))
    with pytest.raises(ValueError, match=r"bias: expected \[heads, distances\], got shape \(3,\)"):
        draw_relative_bias(torch.zeros(3))
