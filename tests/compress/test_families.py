"""Compressors around every family of decoders: sliding windows, caps on logits, norms of heads, learned positions."""

import pytest
import torch
import transformers
from torch.nn import functional as F

from gistkit.compress import FiveHundredX
from tests.helpers.models import COMMON, tiny
from tests.helpers.tiers import tiers


@pytest.mark.parametrize("family", tiers(["gemma2", "gemma3", "qwen2", "mistral"]))
def test_a_window_counts_tokens_that_are_there(family):
    # Ragged memories leave columns empty between memory and text; a sliding window must not count them.
    compressor = FiveHundredX(tiny(family), chunk=4, ratio=2, layout="dpl", lora=None)
    contexts = [list(range(1, 17)), list(range(20, 24))]
    memory = compressor.encode(contexts)
    text = [[5, 6, 7, 8, 9, 10]] * 2
    together = compressor.decode(memory, "lm", text)
    for row in range(2):
        alone = compressor.decode(compressor.encode([contexts[row]]), "lm", text[:1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-6, atol=1e-6)


def test_a_table_of_positions_is_not_read_beyond_its_end():
    compressor = FiveHundredX(tiny("gpt2"), chunk=8, ratio=4, lora=4).eval()
    table = compressor.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"input_ids: expected position IDs below {table}"):
        compressor.encode(torch.zeros(1, table + 8, dtype=torch.int64))
    memory = compressor.encode(torch.zeros(1, table - 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=f"input_ids: expected position IDs below {table}.*got {table + 1}"):
        compressor.decode(memory, "lm", torch.zeros(1, 9, dtype=torch.int64))
    assert compressor.generate(memory, max_new_tokens=8).shape == (1, 8)
    with pytest.raises(ValueError, match=f"max_new_tokens: expected position IDs below {table}"):
        compressor.generate(memory, max_new_tokens=9)


HEADS = {
    "phi": ("PhiForCausalLM", "PhiConfig", {"partial_rotary_factor": 0.5}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {"logits_scaling": 4.0, "attention_multiplier": 0.3}),
    "cohere": ("CohereForCausalLM", "CohereConfig", {"logit_scale": 0.25, "pad_token_id": 0}),
}


@pytest.mark.parametrize("family", tiers(HEADS, ["phi"]))
def test_losses_are_of_the_logits_that_the_model_makes(family):
    # An output bias, a divisor and a factor of logits.
    name, config, own = HEADS[family]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**COMMON | own)).double().eval()
    if model.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    compressor = FiveHundredX(model, chunk=6, ratio=3, losses=("ae", "kl", "qa"), lora=2)
    ids, question, answer = torch.randint(1, 50, (2, 6)), torch.randint(1, 50, (2, 2)), torch.randint(1, 50, (2, 3))
    hidden = model.get_decoder()(ids).last_hidden_state
    torch.testing.assert_close(compressor.logits(hidden), model(ids).logits.float(), rtol=1e-5, atol=1e-5)
    losses = compressor(ids, question_ids=question, answer_ids=answer)
    memory = compressor.encode(ids)
    logits = compressor.logits(compressor.decode(memory, "ae", ids[:, :-1]))
    torch.testing.assert_close(losses["ae"], F.cross_entropy(logits.flatten(0, 1), ids.flatten()), rtol=1e-5, atol=1e-5)
    text = torch.cat([question, answer], 1)
    found = compressor.logits(compressor.decode(memory, "qa", text[:, :-1]))[:, 2:].log_softmax(-1)
    torch.testing.assert_close(losses["qa"], -found.gather(2, answer[..., None]).mean(), rtol=1e-5, atol=1e-5)
    with compressor.using(None):
        whole = model(torch.cat([ids, text], 1)).logits[:, 7:10].float().log_softmax(-1)
    divergence = (whole.exp() * (whole - found)).sum(-1).mean()
    torch.testing.assert_close(losses["kl"], divergence, rtol=1e-5, atol=1e-5)
