"""Select keeps the keys that NVIDIA's kvpress keeps, whose presses run here on transformers' own pass, one a score."""

import json
import subprocess
import sys

import pytest
import torch

from gistkit.compress import Select
from gistkit.compress.scores import SnapKV
from gistkit.compress.selection import pyramid
from tests.compress.test_select import BOS, IDS, cached
from tests.helpers.models import byte_tokenizer, tiny_llama

pytestmark = pytest.mark.nightly
PACKAGES = ("kvpress==0.5.5", "cachetools==5.5.2", "fire==0.6.0", "termcolor")
# kvpress wants an older transformers, whose hooks its presses would run in: they are called by hand.
SCRIPT = """
import json, sys
import torch
from kvpress import ExpectedAttentionPress, KeyDiffPress, KnormPress, KVzipPress, PyramidKVPress, SnapKVPress
from kvpress import StreamingLLMPress
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from gistkit.hf import CACHE

folder, ids = sys.argv[1], json.loads(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)

def run(tokens, cache):
    states = []
    hooks = [layer.self_attn.register_forward_hook(lambda *call: states.append(call[2]), with_kwargs=True)
             for layer in model.model.layers]
    model.model(torch.tensor([tokens]), **{CACHE: cache})
    for hook in hooks:
        hook.remove()
    return states

ids_of, found = ids, {}
with torch.no_grad():
    cache = DynamicCache()
    states = run(ids, cache)
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
    presses = {
        "expected_attention": ExpectedAttentionPress(2 / 3), "key_diff": KeyDiffPress(2 / 3),
        "key_norm": KnormPress(2 / 3), "snapkv": SnapKVPress(2 / 3, window_size=8),
        "streaming": StreamingLLMPress(2 / 3),
    }
    for name, press in presses.items():
        scores = [
            press.score(layer.self_attn, state["hidden_states"], made.keys, made.values, None, state)
            for layer, state, made in zip(model.model.layers, states, cache.layers)
        ]
        found[name] = [each[0].tolist() for each in scores]
    zipped = KVzipPress(2 / 3)
    zipped._context_ids, zipped.context_length = torch.tensor([ids]), len(ids)
    zipped._suffix_ids = tokenizer.encode("\\n", return_tensors="pt", add_special_tokens=False)
    zipped.start_idx = 0
    for part, again in zipped.prepare(model, tokenizer):
        zipped.end_idx = zipped.start_idx + part.shape[1]
        # Of what it reads before, only the keys count.
        longer = DynamicCache()
        # Its own mask overflows in double precision.
        size = again.shape[1]
        zipped.causal_mask_score = torch.full((size, size), -1e300, dtype=torch.float64).triu(1)[None, None, None]
        for index, made in enumerate(cache.layers):
            longer.update(made.keys, made.values, index)
        for layer, state, made in zip(model.model.layers, run(again[0].tolist(), longer), longer.layers):
            zipped.score_kvzip(layer.self_attn, state["hidden_states"], made.keys, made.values, None, state)
        zipped.start_idx = zipped.end_idx
    zipped.score_val[..., : zipped.n_sink] = zipped.score_val.amax() + 1
    found["kvzip"] = zipped.score_val[:, 0].tolist()
found["pyramid"] = {
    f"{length} {ratio} {window}": [
        PyramidKVPress(1 - 1 / ratio, window_size=window).get_layer_budget(layer.self_attn, length)
        for layer in model.model.layers
    ]
    for length in (88, 96, 1024, 4096) for ratio in (2, 4, 8) for window in (1, 8, 16)
}
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The scores of kvpress by name: layers of heads of tokens."""
    folder = tmp_path_factory.mktemp("kvpress")
    tiny_llama(vocab_size=258, bos_token_id=BOS).save_pretrained(folder / "model")
    byte_tokenizer(start=True).save_pretrained(folder / "model")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder / "packages", *PACKAGES]
    subprocess.run([*map(str, install)], check=True, timeout=600)
    command = [sys.executable, "-c", SCRIPT, str(folder / "model"), json.dumps([BOS, *IDS])]
    path = ":".join([str(folder / "packages"), *filter(None, sys.path)])
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("FOUND ")[2])


@pytest.mark.parametrize("by", ["kvzip", "expected_attention", "snapkv", "key_diff", "key_norm", "streaming"])
def test_the_same_keys_are_kept(kept, by):
    compressor = Select(tiny_llama(vocab_size=258, bos_token_id=BOS), ratio=3, by=SnapKV(8) if by == "snapkv" else by)
    compressor.tokenizer = byte_tokenizer(start=True)
    memory = compressor.eval().encode([IDS])
    for layer, (_, key, value) in enumerate(cached(compressor.model, [BOS, *IDS])):
        scores = torch.tensor(kept[by][layer])
        # The streaming press has two scores only: which of equal ones topk takes is not said.
        places = scores.topk(memory.lengths[0], dim=-1).indices.sort(-1).values
        for head, own in enumerate(places):
            for mine, whole in zip(memory.layers[layer], (key, value), strict=True):
                torch.testing.assert_close(mine[0, head], whole[head, own], rtol=1e-6, atol=1e-6)


def test_layers_of_a_pyramid_keep_as_many(kept):
    found = {each: each.split() for each in kept["pyramid"]}
    assert len({tuple(budget) for budget in kept["pyramid"].values()}) > 15
    for each, (length, ratio, window) in found.items():
        count = int(length) // int(ratio)
        assert pyramid(count, int(length), len(kept["pyramid"][each]), int(window)) == kept["pyramid"][each], each


def test_heads_of_all_layers_share_what_kvzip_keeps(kept):
    compressor = Select(tiny_llama(vocab_size=258, bos_token_id=BOS), ratio=3, by="kvzip", shares="all")
    compressor.tokenizer = byte_tokenizer(start=True)
    memory = compressor.eval().encode([IDS])
    scores = torch.tensor(kept["kvzip"])
    # kvpress prunes the lowest of all layers and heads together.
    least = scores.flatten().topk((len(IDS) + 1) // 3 * scores.shape[0] * scores.shape[1]).values.min()
    for layer, (_, key, _) in enumerate(cached(compressor.model, [BOS, *IDS])):
        heads = memory.layers[layer][0].split(memory.counts[layer][0].tolist())
        for head, (mine, own) in enumerate(zip(heads, scores[layer], strict=True)):
            torch.testing.assert_close(mine, key[head, own >= least], rtol=1e-6, atol=1e-6)
