"""VoCo around vision-language models, against one dense pass of plain transformers in double precision."""

import dataclasses

import numpy
import PIL.Image
import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from gistkit.compress import ICAE, AvgPool, Compressor, Memory, VoCo
from gistkit.hf.attach import cache_of
from tests.helpers.models import same_under_checkpointing, tiny_llama
from tests.helpers.tiers import slow, tiers
from tests.helpers.vision import IMAGE, PROMPTS, SIZES, Image, processed, processor, tiny_vision, whole, written_out

QUESTION = [11, 12, 13, 14]
TILES = ("idefics3", "smolvlm")
# Processors that give more than that of llava.
OTHERS = [("qwen2_5_vl", "image_grid_thw"), ("llava_next", "image_sizes"), ("smolvlm", "pixel_attention_mask")]
# VoCo tokens are more than the vision tokens of the smallest images here.
pytestmark = pytest.mark.filterwarnings("ignore:memory_tokens")


def rows_of(family):
    """A row with two images of different sizes and text between, and a shorter one with a single image."""
    first, second = SIZES[family]
    return [[1, 5, 6, Image(first, 1), 7, 8, Image(second, 2), 9], [1, 10, Image(second, 3)]]


def build(family, **options):
    options = {"memory_tokens": 3, "lora": None} | options
    if family in TILES:
        options = {"separators": [50, 51, 52]} | options
    model = tiny_vision(family, **options.pop("text", {}))
    torch.manual_seed(1)
    return VoCo(model, **options).double().eval()


def expect(compressor, family, row, question, **options):
    """`written_out` of a row of parts and its question; and which tokens before the question a memory keeps."""
    parts = [part.size for part in row if isinstance(part, Image)] if compressor.separators else None
    layout = compressor.options.layout
    inputs = processed(family, [row + question])
    found = written_out(compressor.model, family, inputs, compressor.memory_embeddings, layout, parts=parts, **options)
    hidden, layers, tokens, ids = found
    seen = tokens[: len(tokens) - len(question)]
    last = max(image for kind, image in seen if kind == "voco") + 1
    before = options.get("sees_before", True)
    kept = [i for i, (kind, of) in enumerate(seen) if kind == "voco" or (kind == "text" and (before or of == last))]
    return hidden, layers, kept, ids


# Each family, and each layout with one and with three axes of position IDs.
LAYOUTS = [("llava", "epl"), ("qwen2_5_vl", "dpl")]
MORE = [("llava", "cpl"), ("llava_next", "upl"), ("idefics3", "epl"), ("smolvlm", "dpl"), ("qwen2_vl", "epl")]
MORE += [("qwen2_5_vl", "upl"), ("qwen2_vl", "cpl"), ("gemma3", "epl"), ("gemma3", "dpl")]


@pytest.mark.parametrize(("family", "layout"), [*LAYOUTS, *slow(*MORE)])
def test_equals_one_dense_pass(family, layout):
    check_against_one_pass(family, rows_of(family), {"layout": layout})


def test_rows_of_equal_sizes_share_a_plan():
    check_against_one_pass("llava", [[1, Image(None, 1), 7], [1, Image(None, 2), 8]], {})


@pytest.mark.parametrize("layout", ["dpl", "epl"])
def test_images_may_follow_each_other_and_begin_a_row(layout):
    rows = [[Image(None, 1), Image(None, 2)], [Image(None, 3), 5]]
    compressor = build("llava", layout=layout)
    memory = compressor.encode(processed("llava", rows))
    assert memory.lengths == (6, 4)
    expected = [[2, 5, 8, 11, 14, 17], [2, 5, 8, 10]] if layout == "epl" else [[9, 10, 11, 21, 22, 23], [9, 10, 11, 12]]
    assert [memory[row].positions[0].tolist() for row in range(2)] == expected
    assert memory.starts == ((19, 11) if layout == "epl" else (24, 13))


@pytest.mark.parametrize(
    ("family", "options", "oracle"),
    [
        ("llava", {"text_sees_before": False}, {"sees_before": False}),
        *slow(("gemma3", {"text_sees_before": False, "layout": "dpl"}, {"sees_before": False})),
        ("qwen2_5_vl", {"gap": 1}, {"gap": 1}),
        ("llava", {"gap": 1, "layout": "upl", "text_sees_before": False}, {"gap": 1, "sees_before": False}),
        ("smolvlm", {"separators": []}, {}),
        *slow(("qwen2_5_vl", {"memory_tokens": 9}, {})),
        ("qwen2_5_vl", {"text": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}}, {}),
    ],
)
def test_options_equal_one_dense_pass(family, options, oracle):
    first, second = SIZES[family]
    rows = [[1, 5, Image(first, 1), 7, 8, Image(second, 2), 9, 4], [1, 10, Image(second, 3), 6]]
    check_against_one_pass(family, rows, options, **oracle)


@pytest.mark.parametrize("family", tiers(["llava", "llava_next", "idefics3", "gemma3"], ["llava"]))
def test_reads_what_the_family_s_own_processor_gives(family):
    pictures = [
        PIL.Image.fromarray(numpy.random.default_rng(side).integers(0, 255, (20, side, 3), dtype=numpy.uint8))
        for side in (30, 9)
    ]
    image, make = PROMPTS.get(family, "<image>"), processor(family)
    texts = [f"user : {image} what is this", f"what {image} who"]
    inputs = make(images=[[one] for one in pictures], text=texts, return_tensors="pt", padding=True)
    # The tiles of Idefics3's images are joined by its tokens between them.
    compressor = build(family, separators=[0, 41, 42, 43, 44, 50, 51] if family == "idefics3" else [])
    context, questions = compressor.split(inputs)
    expected_questions = [[3, 4, 5], [6]]
    assert [text[-len(own) :] for text, own in zip(questions, expected_questions, strict=True)] == expected_questions
    with torch.no_grad():
        memory = compressor.encode(context)
        assert [len(one) for one in memory.positions] == [memory.num_tokens] * 2
        logits = compressor.logits(compressor.decode(memory, "qa", questions))
        for row, (picture, text, question) in enumerate(zip(pictures, texts, questions, strict=True)):
            alone = make(images=[[picture]], text=[text], return_tensors="pt")
            runs = (alone["input_ids"] == IMAGE).int().diff(prepend=torch.zeros(1, 1)).eq(1).sum()
            parts = [int(runs)] if family == "idefics3" else None
            hidden, *_ = written_out(compressor.model, family, alone, compressor.memory_embeddings, "epl", parts=parts)
            expected = compressor.model.lm_head(hidden[-len(question) - 1 :]).float()
            torch.testing.assert_close(logits[row, : len(question) + 1], expected, rtol=1e-6, atol=1e-6)


def test_half_precision_and_autocast():
    compressor, inputs = build("gemma3").bfloat16(), processed("gemma3", rows_of("gemma3"))
    memory = compressor.encode(inputs)
    assert memory.dtype == torch.bfloat16
    assert compressor.generate(memory, [QUESTION] * 2, max_new_tokens=2).shape == (2, 2)
    whole_precision = build("gemma3").float()
    with torch.autocast("cpu", torch.bfloat16):
        losses = whole_precision(inputs, question_ids=[QUESTION] * 2, answer_ids=[[3]] * 2)
    losses["loss"].backward()
    assert whole_precision.memory_embeddings.grad.isfinite().all()


def check_against_one_pass(family, rows, options, **oracle):
    """Encodes ragged rows, padded at the left, and reads ragged questions; each row as in a dense pass of its own."""
    compressor = build(family, **options)
    questions = [QUESTION, QUESTION[:2]]
    with torch.no_grad():
        memory = compressor.encode(processed(family, rows, side="left"))
        logits = compressor.logits(compressor.decode(memory, "qa", questions))
        for row, (parts, question) in enumerate(zip(rows, questions, strict=True)):
            hidden, layers, kept, ids = expect(compressor, family, parts, question, **oracle)
            assert memory.lengths[row] == len(kept)
            for (key, value), (own_key, own_value) in zip(memory[row].layers, layers, strict=True):
                torch.testing.assert_close(key[0], own_key[:, kept], rtol=1e-9, atol=1e-10)
                torch.testing.assert_close(value[0], own_value[:, kept], rtol=1e-9, atol=1e-10)
            assert memory[row].positions[0].reshape(len(kept), -1).tolist() == ids[:, 0, kept].T.tolist()
            assert memory.starts[row] == int(ids[:, 0, -len(question)].max())
            expected = compressor.model.lm_head(hidden[-len(question) - 1 :])
            torch.testing.assert_close(logits[row, : len(question) + 1], expected.float(), rtol=1e-6, atol=1e-6)


def test_the_images_of_gemma3_see_what_they_see_without_voco():
    # The oracle's rule is the model's own: its mask lets an image's tokens see each other, and nothing else ahead.
    model, row = tiny_vision("gemma3"), [1, 5, Image(None, 1), 7, Image(None, 2), 9]
    inputs = processed("gemma3", [row])
    seen = whole(model, inputs)[2]["full_attention"][0, 0] == 0
    ids = inputs["input_ids"][0]
    image = torch.where(ids == IMAGE, ((ids == IMAGE) & (ids.roll(1) != IMAGE)).cumsum(0), -torch.arange(len(ids)) - 1)
    expected = torch.ones_like(seen).tril() | (image[:, None] == image)
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("family", tiers(["llava", "qwen2_5_vl", "gemma3"], ["qwen2_5_vl"]))
def test_generates_from_memory_tokens_alone(family, tmp_path):
    compressor = build(family)
    rows = rows_of(family)
    compressor.encode(processed(family, rows)).save(tmp_path / "images.gist")
    memory = Memory.load(tmp_path / "images.gist")
    before = [tensor.clone() for tensor in memory.tensors]
    keys, visions = [], []

    def look(_, args, kwargs):
        keys.append(cache_of(kwargs).layers[0].num_keys)

    handles = [
        compressor.model.get_decoder().register_forward_pre_hook(look, with_kwargs=True),
        compressor.vision.tower.register_forward_hook(lambda *_: visions.append(1)),
    ]
    answers = compressor.generate(memory, [QUESTION, QUESTION[:2]], max_new_tokens=4)
    for handle in handles:
        handle.remove()
    # The cache holds VoCo tokens and text between images, then the questions and what has been written.
    assert keys == [memory.num_tokens + n for n in (0, 4, 5, 6)] and not visions
    for row, (parts, question) in enumerate(zip(rows, [QUESTION, QUESTION[:2]], strict=True)):
        text = list(question)
        for _ in range(4):
            hidden, *_ = expect(compressor, family, parts, text)
            text.append(int(compressor.model.lm_head(hidden[-1]).argmax()))
        assert answers[row].tolist() == text[len(question) :]
    # Several questions of one memory, which stays as it was.
    one = memory[1]
    both = compressor.generate(one, [QUESTION[:2], QUESTION], max_new_tokens=4)
    assert both[0].tolist() == answers[1].tolist() and both.shape == (2, 4)
    assert all(map(torch.equal, memory.tensors, before))
    # Without a question the last state of the pass predicts what follows the images.
    hidden, *_ = expect(compressor, family, rows[1], [3])
    assert int(compressor.generate(one, max_new_tokens=1)) == int(compressor.model.lm_head(hidden[-2]).argmax())
    stacked = Memory.stack([memory[1], memory[0]])
    assert torch.equal(compressor.generate(stacked, [QUESTION[:2], QUESTION], max_new_tokens=4), answers.flip(0))


def test_losses_and_gradients_are_those_of_one_pass():
    family = "llava"
    compressor = build(family, losses=("lm", "qa"), text_sees_before=True)
    row, answer = rows_of(family)[0], [15, 16, 17]
    inputs = processed(family, [row])
    losses = compressor(inputs, continuation_ids=[QUESTION], question_ids=[QUESTION], answer_ids=[answer])
    hidden, *_ = expect(compressor, family, row, QUESTION + answer)
    logits = compressor.model.lm_head(hidden).float()
    qa = F.cross_entropy(logits[-4:-1], torch.tensor(answer))
    lm = F.cross_entropy(logits[-8:-4], torch.tensor(QUESTION))
    torch.testing.assert_close(losses["qa"], qa, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(losses["lm"], lm, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(losses["loss"], (qa + lm) / 2, rtol=1e-6, atol=1e-6)
    weights = [compressor.memory_embeddings, compressor.model.get_decoder().layers[0].self_attn.k_proj.weight]
    found = torch.autograd.grad(losses["qa"], weights)
    for own, expected in zip(found, torch.autograd.grad(qa, weights), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-7)
    # The same as a Trainer's batch, whose images are arguments.
    apart = compressor(**inputs, continuation_ids=[QUESTION], question_ids=[QUESTION], answer_ids=[answer])
    assert torch.equal(apart["loss"], losses["loss"])


def names_of_trained(compressor):
    """The parts of the model whose weights get a gradient from a loss."""
    rows = rows_of("qwen2_5_vl")[:1]
    compressor(processed("qwen2_5_vl", rows), question_ids=[QUESTION], answer_ids=[[15]])["loss"].backward()
    trained = [name for name, parameter in compressor.trainable() if parameter.grad is not None]
    return {
        "projector" if ".merger." in name else "tower" if ".visual." in name else name.split(".")[0] for name in trained
    } | ({"lora"} if any("lora_" in name for name in trained) else set())


@pytest.mark.parametrize("lora", [None, 2])
def test_vision_trains_by_choice(lora, tmp_path):
    adapter = {"lora"} if lora else set()
    assert names_of_trained(build("qwen2_5_vl", lora=lora)) == {"memory_embeddings", "model"} | adapter
    projector = build("qwen2_5_vl", lora=lora, train_projector=True)
    assert names_of_trained(projector) == {"memory_embeddings", "model", "projector"} | adapter
    both = build("qwen2_5_vl", lora=lora, train_projector=True, train_vision=True, layout="cpl", gap=1)
    assert names_of_trained(both) == {"memory_embeddings", "model", "projector", "tower"} | adapter

    # A step changes all of them; what is saved and loaded is what answers.
    with torch.no_grad():
        for _, parameter in both.trainable():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad / (1e-9 + parameter.grad.norm())
    inputs = processed("qwen2_5_vl", rows_of("qwen2_5_vl"))
    memory = both.encode(inputs)
    both.save_pretrained(tmp_path)
    loaded = Compressor.from_pretrained(tmp_path, tiny_vision("qwen2_5_vl") if lora else None).double().eval()
    assert type(loaded) is VoCo and loaded.settings == both.settings
    # A new compressor's own weights are in single precision, to which the saved ones are rounded.
    for found, expected in zip(loaded.encode(inputs).tensors, memory.tensors, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", tiers(["gemma3", "qwen2_5_vl"], ["gemma3"]))
def test_gradient_checkpointing_changes_nothing(family):
    compressor = build(family, lora=2, train_projector=True, train_vision=True)
    with torch.no_grad():
        for _, parameter in compressor.trainable():
            parameter += 0.05 * torch.randn_like(parameter)  # LoRA starts as nothing
    batch = {"question_ids": [QUESTION, [3]], "answer_ids": [[15], [16, 17]]}
    inputs = processed(family, rows_of(family))
    same_under_checkpointing(compressor, lambda: compressor(inputs, **batch)["loss"], atol=1e-12)


TEMPLATE = (
    "{% for m in messages %}{{ m.role }} : {% for c in m.content %}"
    "{% if c.type == 'image' %}<image> {% else %}{{ c.text }} {% endif %}{% endfor %}{% endfor %}assistant :"
)


def test_a_chat_is_split_at_its_image():
    # A tokenizer of words with a chat template, and what a LLaVA processor makes of its output.
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "user", "assistant", ":", "what", "is", "this", "who", "where", "system", "answer"]
    vocabulary = {word: index for index, word in enumerate(words)} | {"<image>": IMAGE}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", chat_template=TEMPLATE)

    def prompt(*question):
        content = [{"type": "image"}, {"type": "text", "text": " ".join(question)}]
        chat = [
            {"role": "system", "content": [{"type": "text", "text": "answer"}]},
            {"role": "user", "content": content},
        ]
        ids = words.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
        before, behind = ids[: ids.index(IMAGE)], ids[ids.index(IMAGE) + 1 :]
        return before, behind, processed("llava", [[*before, Image(None, 4), *behind]])

    compressor = build("llava")
    before, question, inputs = prompt("what", "is", "this")
    context, texts = compressor.split(inputs)
    assert context["input_ids"] == [[*before, *[IMAGE] * 9]] and texts == [question]
    memory = compressor.encode(context)
    for asked in (("what", "is", "this"), ("who", "is")):
        _, question, inputs = prompt(*asked)
        whole_prompt = compressor.generate(compressor.encode(inputs), max_new_tokens=3)
        assert torch.equal(compressor.generate(memory, compressor.split(inputs)[1], max_new_tokens=3), whole_prompt)


def test_other_models_are_refused_by_name():
    newer, pixtral = tiny_vision("llava"), tiny_vision("llava")
    newer.config.model_type, pixtral.config.vision_config.model_type = "qwen3_vl", "pixtral"
    for model, message in [
        (tiny_llama(), "model: expected a vision-language model of type llava, .* LlamaForCausalLM"),
        ("llava", "model: expected a transformers causal language model, got str"),
        (newer, "got LlavaForConditionalGeneration of type qwen3_vl"),
        (pixtral, "got LlavaForConditionalGeneration with a pixtral tower"),
    ]:
        with pytest.raises(TypeError, match=message):
            VoCo(model)


@pytest.fixture(scope="module")
def llava():
    return build("llava", lora=2)


def without(inputs, *names):
    return {name: value for name, value in inputs.items() if name not in names}


def test_bad_inputs_are_refused(llava):
    good = processed("llava", [[1, Image(None, 1), 5]])
    pixels, image, own = good["pixel_values"], [IMAGE] * 9, "expected the output of the llava model's own processor"
    of = lambda *rows: good | {"input_ids": [*rows], "attention_mask": None}  # noqa: E731
    for message, inputs in [
        (f"input_ids: {own}, .* got list", [[1, 2]]),
        ("input_ids: expected at least one image.* got none in row 0: a text without", {"input_ids": [[1, 2]]}),
        ("expected at least one image.* got none in row 1", of([1, *image], [1, 2])),
        ("expected at least one image.* got none in row 0: although there are pixel_values", of([1, 5])),
        ("pixel_values: expected the output .* for texts with images, got none", without(good, "pixel_values")),
        # Fewer or more images than the text has places for.
        ("pixel_values: expected images of 9 features, as input_ids have 9 image tokens .* got 18",
         good | {"pixel_values": pixels.repeat(2, 1, 1, 1)}),
        ("input_ids: expected 9 image tokens in a row for an image, .* got 5 in row 0",
         of([1, *image[:5], 6, *image[5:]])),
        # The output of other models' processors.
        *((f"{name}: {own}", processed(family, [[1, Image(SIZES[family][0])]])) for family, name in OTHERS),
        (r"pixel_values: expected images as the llava model's .* got pixel_values \(1, 3, 8, 8\), on",
         good | {"pixel_values": pixels[..., :8, :8]}),
        ("pixel_values: expected .* floating-point values of 4 dimensions, got torch.int64",
         good | {"pixel_values": pixels.long()}),
        (f"pixel_values_videos: {own}", good | {"pixel_values_videos": torch.zeros(1)}),
        (r"input_ids: expected token ids in \[0, 60\), got 60", of([1, 60, *image])),
    ]:  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            llava.encode(inputs)
    with pytest.raises(ValueError, match="gap: expected at least 2 tokens after each image, got 1 in row 0"):
        build("llava", gap=2).encode(good)
    other = without(processed("qwen2_5_vl", [[1, Image((8, 16), 1)]]), "attention_mask")
    with pytest.raises(ValueError, match="pixel_values: expected images of 4 features"):
        build("qwen2_5_vl").encode(other | {"input_ids": [[57, *[IMAGE] * 4, 58]]})


def test_texts_have_no_images(llava):
    inputs = processed("llava", [[1, Image(None, 1), 5]])
    memory = llava.encode(inputs)
    for match, call in [
        ("prompt_ids: expected only text after a memory, got pixel_values", lambda: llava.generate(memory, inputs)),
        ("input_ids: expected text without image tokens, got id 55", lambda: llava.decode(memory, "qa", [[3, IMAGE]])),
        ("question_ids: expected text without image tokens, got id 55",
         lambda: llava(inputs, question_ids=[[IMAGE]], answer_ids=[[3]])),
        ("task: expected lm or qa for voco, which compresses images", lambda: llava.generate(memory, task="ae")),
        ("memories: expected those of a method that compresses chunks .* voco's", lambda: llava.join([memory] * 2)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            call()


def test_a_file_with_other_ordinals_is_refused(llava, tmp_path):
    memory = llava.encode(processed("llava", [[1, Image(None, 1), 5]]))
    for ordinals in (memory.ordinals[:, 1:], memory.ordinals.double(), memory.ordinals - 5):
        dataclasses.replace(memory, ordinals=ordinals).save(tmp_path / "broken.gist")
        with pytest.raises(ValueError, match=r"broken\.gist: expected the contents of a memory, got .*ordinals"):
            Memory.load(tmp_path / "broken.gist")
    without_them = dataclasses.replace(memory, ordinals=None)
    for memories in ([memory, without_them], [without_them, memory]):
        with pytest.raises(ValueError, match="stack: expected `ordinals` in all memories or in none"):
            Memory.stack(memories)
    with pytest.raises(ValueError, match="memory: expected one with ordinals, as voco makes it, got one without"):
        llava.generate(without_them)


@pytest.mark.filterwarnings("default:memory_tokens")
def test_more_memory_tokens_than_vision_tokens_are_allowed():
    compressor = build("llava", memory_tokens=12)
    with pytest.warns(
        UserWarning, match=r"memory_tokens: expected at most the vision tokens .* got 12 for an image of 9"
    ):
        memory = compressor.encode(processed("llava", [[1, Image(None, 1)]]))
    assert memory.lengths == (13,) and memory.context_lengths == (10,)


def test_a_text_compressor_reads_text_around_the_same_model():
    # Its contexts are text: the model's vision is not used, and gets no adapters.
    for method, options in ((ICAE, {"chunk": 4, "ratio": 2}), (AvgPool, {"ratio": 2, "bos_token": 1})):
        model = tiny_vision("llava")
        compressor = method(model, lora=2, **options)
        memory = compressor.encode([[1, 2, 3, 4, 5]])
        assert memory.num_tokens in (3, 4) and compressor.generate(memory, [[3]], max_new_tokens=2).shape == (1, 2)
        with pytest.raises(ValueError, match=r"input_ids: expected only text, got pixel_values; .*VoCo reads images"):
            compressor.encode(processed("llava", [[1, Image(None, 1), 5]]))
        outside = {"vision_tower", "multi_modal_projector", "lm_head"}
        assert not [name for name, _ in compressor.trainable() if outside & set(name.split("."))]


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_a_tower_without_memory_does_not_blame_the_pixels(kind, monkeypatch):
    model = tiny_vision("llava")
    compressor = VoCo(model, memory_tokens=2, lora=2)

    def fail(**_):
        raise kind("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes")

    monkeypatch.setattr(model.model, "get_image_features", fail)
    with pytest.raises(kind, match=r"^DefaultCPUAllocator: can't allocate memory"):
        compressor.encode(processed("llava", [[1, Image()]]))
