"""The pipeline "gist-text-generation": contexts and questions in, answers out, by transformers' own factory."""

import pytest
import torch
from transformers import GenerationConfig, pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from gistkit.ask import GistTextGeneration, register_pipeline
from gistkit.compress import Compressor, FiveHundredX
from tests.helpers.models import byte_tokenizer, tiny_llama

TASK = "gist-text-generation"
# Before any test runs, whatever the tests have imported.
REGISTERED = TASK in PIPELINE_REGISTRY.supported_tasks
CONTEXT = "The survey was started by Ines Moreau."
CHAT = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def registered():
    register_pipeline()
    yield
    PIPELINE_REGISTRY.supported_tasks.pop(TASK)


def compressor_of():
    torch.manual_seed(0)
    compressor = FiveHundredX(tiny_llama(vocab_size=258, bos_token_id=257).float(), chunk=8, ratio=4, lora=4).eval()
    compressor.tokenizer = byte_tokenizer(start=True)
    return compressor


def pipe_of(compressor, **settings):
    tokenizer = compressor.tokenizer
    return pipeline(TASK, model=compressor.model, tokenizer=tokenizer, compressor=compressor, device="cpu", **settings)


def test_answers_are_those_of_the_compressor(registered):
    compressor = compressor_of()
    pipe = pipe_of(compressor)
    assert isinstance(pipe, GistTextGeneration)
    expected = compressor.ask(CONTEXT, "Who?", max_new_tokens=9)
    assert pipe(CONTEXT, question="Who?", max_new_tokens=9) == {"answer": expected}
    both = compressor.ask(CONTEXT, ["Who?", "When was it?"], max_new_tokens=9)
    assert pipe(CONTEXT, questions=["Who?", "When was it?"], max_new_tokens=9) == {"answers": both}
    assert pipe(CONTEXT, questions=["Who?"], max_new_tokens=9) == {"answers": [expected]}
    several = pipe([CONTEXT, "Short."], question="Who?", max_new_tokens=9)
    assert several == [{"answer": compressor.ask(text, "Who?", max_new_tokens=9)} for text in (CONTEXT, "Short.")]
    # transformers asks for one before it makes batches.
    pipe.tokenizer.pad_token_id = 256
    assert pipe([CONTEXT, "Short."], question="Who?", max_new_tokens=9, batch_size=2) == several
    two = pipe([CONTEXT] * 2, questions=["Who?", "When was it?"], max_new_tokens=9, batch_size=2)
    assert two == [{"answers": both}] * 2
    options = {"template": "{question}: ", "generation_config": GenerationConfig(num_beams=2, max_new_tokens=5)}
    assert pipe(CONTEXT, question="Who?", **options) == {"answer": compressor.ask(CONTEXT, "Who?", **options)}
    # What the pipeline was made with holds for its calls.
    asks = pipe_of(compressor, question="Who?", max_new_tokens=9)
    assert asks(CONTEXT) == {"answer": expected}


def test_a_chat_template_makes_one_message_of_context_and_question(registered):
    compressor = compressor_of()
    tokenizer = compressor.tokenizer
    tokenizer.chat_template = CHAT
    answer = pipe_of(compressor)(CONTEXT, question="Who?", max_new_tokens=9)["answer"]
    # The tokenizer writes the first token itself.
    message = [{"role": "user", "content": f"{CONTEXT}\nWho?"}]
    whole = tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
    context = tokenizer(f"<user>{CONTEXT}")["input_ids"]
    assert whole[: len(context)] == context
    rows = compressor.generate(
        compressor.encode([context]), [whole[len(context) :]], task="qa", max_new_tokens=9, stop_tokens=256
    )
    assert answer == tokenizer.decode(rows[0], skip_special_tokens=True).strip()
    lengths = []
    with pytest.MonkeyPatch.context() as patch:
        encode = compressor.encode
        patch.setattr(compressor, "encode", lambda ids: lengths.append(len(ids[0])) or encode(ids))
        tokenizer.chat_template = CHAT.replace("<{{", "<start>{{")
        pipe_of(compressor)("a<end>", question="Who?", max_new_tokens=1)
    # The template's own first token is one; the text's end is letters.
    assert lengths == [len("?????>a<end>") + 1]
    plain = pipe_of(compressor)(CONTEXT, question="Who?", max_new_tokens=9, template="{question}: ")["answer"]
    assert plain == compressor.ask(CONTEXT, "Who?", max_new_tokens=9, template="{question}: ")


def test_models_and_compressors_may_be_names(registered, tmp_path):
    compressor = compressor_of()
    compressor.save_pretrained(tmp_path / "x500")
    tiny_llama(vocab_size=258, bos_token_id=257).float().save_pretrained(tmp_path / "base")
    compressor.tokenizer.save_pretrained(tmp_path / "base")
    pipe = pipeline(TASK, model=str(tmp_path / "base"), compressor=tmp_path / "x500", device="cpu")
    expected = compressor.ask(CONTEXT, "Who?", max_new_tokens=9)
    assert pipe(CONTEXT, question="Who?", max_new_tokens=9) == {"answer": expected}
    assert isinstance(pipe.compressor, Compressor) and pipe.compressor.model is pipe.model


def test_what_is_missing_or_foreign_is_named(registered):
    compressor = compressor_of()
    pipe = pipe_of(compressor)
    for asked, got in (({}, "neither"), ({"question": "Who?", "questions": ["When?"]}, "both")):
        with pytest.raises(ValueError, match=f"question: expected either it or questions, got {got}"):
            pipe(CONTEXT, **asked)
    with pytest.raises(ValueError, match="compressor: expected one around model, got one around another LlamaFor"):
        pipeline(
            TASK, model=tiny_llama(vocab_size=258), tokenizer=compressor.tokenizer, compressor=compressor, device="cpu"
        )


def test_importing_registers_nothing():
    assert not REGISTERED
