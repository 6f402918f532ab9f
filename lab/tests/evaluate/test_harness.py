"""lm_eval's own tasks on texts of this file: against its adapter of transformers, and against the memory by hand."""

import json
import math
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is missing; run pip install 'gistkit[lm-eval]'")

import yaml  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from gistkit import cli  # noqa: E402
from gistkit.compress import ICAE, GistPool  # noqa: E402
from gistkit.evaluate import FullContext  # noqa: E402
from gistkit.options.models import new_compressor  # noqa: E402
from gistkit_lab.evaluate.harness import CompressorLM  # noqa: E402
from tests.helpers.models import byte_tokenizer, tiny_llama  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # lm_eval's own, and those of what it imports.
    pytest.mark.filterwarnings("default::RuntimeWarning"),
]

SCIENCE = [
    ("Water boils at a hundred degrees.", "When does water boil?", ["ten", "never", "at one", "at a hundred"]),
    ("Plants take up light.", "What do plants take up?", ["sand", "oil", "iron", "light"]),
    ("", "What is one and one?", ["three", "four", "ten", "two"]),
]
PAGES = [" = A title = \n Some words , and more words of a page . \n", " = Another = \n It rained for days . \n" * 3]
TRIVIA = [("Who rained", ["Rain"]), ("What is it that is asked here", ["It", "This"]), ("Where", ["Here"])]


def model_of_bytes(**changes):
    return tiny_llama(vocab_size=257, eos_token_id=256, **changes)


def requests(*arguments):
    return [SimpleNamespace(args=each) for each in arguments]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of sciq, wikitext and triviaqa, whose files are lm_eval's, on the texts above."""
    root = tmp_path_factory.mktemp("tasks")
    documents = {
        "sciq": [
            {"support": s, "question": q, "distractor1": a, "distractor2": b, "distractor3": c, "correct_answer": d}
            for s, q, (a, b, c, d) in SCIENCE
        ],
        "wikitext": [{"page": page} for page in PAGES],
        "triviaqa": [{"question": q, "answer": {"aliases": aliases}} for q, aliases in TRIVIA],
    }
    originals = {"sciq": "sciq/sciq", "wikitext": "wikitext/wikitext", "triviaqa": "triviaqa/default"}
    for name, rows in documents.items():
        data = root / f"{name}.json"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        split = "validation" if name == "triviaqa" else "test"
        settings = {
            "include": str(Path(lm_eval.__file__).parent / "tasks" / f"{originals[name]}.yaml"),
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(data)}, "cache_dir": str(root / "cache")},
            "training_split": None,
            "validation_split": split if split == "validation" else None,
            "test_split": split if split == "test" else None,
        }
        (root / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    return root


def evaluated(model, tasks, *names, **settings):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model, tasks=list(names), task_manager=manager, bootstrap_iters=0, batch_size=1, **settings
    )
    samples = {name: [sample["resps"] for sample in found["samples"][name]] for name in names}
    return found["results"], samples


def test_the_plain_model_has_the_scores_that_lm_evals_own_adapter_has(tasks):
    tokenizer, model = byte_tokenizer(), model_of_bytes()
    ours = CompressorLM(FullContext(model), tokenizer, keep=5, stride=7, batch_size=3)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1)
    names = ("local_sciq", "local_wikitext", "local_triviaqa")
    results, samples = evaluated(ours, tasks, *names)
    expected, expected_samples = evaluated(theirs, tasks, *names)
    for name in names:
        figures = {key: value for key, value in results[name].items() if isinstance(value, float)}
        assert figures == pytest.approx({key: expected[name][key] for key in figures}, rel=1e-5) and figures
    logs, expected_logs = (
        [[float(value) for ((value, _),) in sample] for sample in found["local_sciq"]]
        for found in (samples, expected_samples)
    )
    for row, other in zip(logs, expected_logs, strict=True):
        assert len(row) == 4 and row == pytest.approx(other, rel=1e-5) and len(set(row)) == 4
    assert samples["local_triviaqa"] == expected_samples["local_triviaqa"]
    assert any(text for ((text,),) in samples["local_triviaqa"])


def by_hand(compressor, compressed, kept, target, task="qa"):
    """The log probability of a target behind a memory, and whether it is the greedy one."""
    with torch.no_grad():
        memory = compressor.encode([compressed])
        hidden = compressor.decode(memory, task, [[*kept, *target[:-1]]] if kept or target[:-1] else [[]])
        logs = compressor.logits(hidden)[0, len(kept) :].log_softmax(-1)
    picked = logs[torch.arange(len(target)), torch.tensor(target)]
    return float(picked.sum()), bool((logs.argmax(-1) == torch.tensor(target)).all())


def compressors():
    return {
        "icae": ICAE(tiny_llama(vocab_size=257), chunk=8, ratio=4, lora=2).eval(),
        "gistpool": GistPool(tiny_llama(vocab_size=257), ratio=4, lora=2, bos_token=1).eval(),
    }


@pytest.mark.parametrize("name", ["icae", "gistpool"])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_choices_behind_a_marker_are_read_from_the_memory_before_it(tasks, name, batch_size):
    tokenizer, compressor = byte_tokenizer(), compressors()[name]
    model = CompressorLM(compressor, tokenizer, keep=4, marker="Question:", batch_size=batch_size)
    _, samples = evaluated(model, tasks, "local_sciq")
    for (support, question, choices), sample in zip(SCIENCE, samples["local_sciq"], strict=True):
        text = f"{support}\nQuestion: {question}\nAnswer:"
        ids = tokenizer(text)["input_ids"]
        at = len(f"{support}\n".encode())
        for choice, ((log_probability, greedy),) in zip(choices, sample, strict=True):
            expected = by_hand(compressor, ids[:at], ids[at:], tokenizer(f" {choice}")["input_ids"])
            assert float(log_probability) == pytest.approx(expected[0], rel=1e-5)
            assert str(greedy) == str(expected[1])


def test_texts_are_predicted_in_strides_each_token_once(tasks):
    tokenizer, compressor = byte_tokenizer(), compressors()["icae"]
    model = CompressorLM(compressor, byte_tokenizer(), keep=6, stride=10, max_length=40)
    assert model.prefix_token_id == model.eot_token_id == 256
    results, _ = evaluated(model, tasks, "local_wikitext")
    total = words = 0
    for page in PAGES:
        ids = [256, *tokenizer(detokenised(page))["input_ids"]]
        for start in range(1, len(ids), 10):
            target = ids[start : start + 10]
            context = ids[max(0, start - (40 - len(target))) : start]
            at = max(1, len(context) - 6)
            total += by_hand(compressor, context[:at], context[at:], target, "lm")[0]
        # It counts what stands before and behind a page's white space too.
        words += len(page.split()) + 2
    assert results["local_wikitext"]["word_perplexity,none"] == pytest.approx(math.exp(-total / words), rel=1e-5)


def detokenised(page):
    """A page as lm_eval's task predicts it, with its own function."""
    file = Path(lm_eval.__file__).parent / "tasks" / "wikitext" / "preprocess_wikitext.py"
    return runpy.run_path(str(file))["wikitext_detokenizer"]({"page": page})


def test_what_is_generated_ends_at_the_first_stop_text():
    tokenizer, compressor = byte_tokenizer(), compressors()["icae"]
    model = CompressorLM(compressor, tokenizer, keep=3)
    context = "It rained for days."
    whole = model.generate_until(requests((context, {"until": [], "max_gen_toks": 30})), disable_tqdm=True)[0]
    ids = tokenizer(context)["input_ids"]
    memory = compressor.encode([ids[:-3]])
    greedy = compressor.generate(memory, [ids[-3:]], task="qa", max_new_tokens=30, stop_tokens=[256])[0].tolist()
    assert whole == tokenizer.decode([index for index in greedy if index != 256]) and len(whole) > 8
    later, sooner = whole[6], whole[4]
    asked = requests(
        (context, {"until": [later, sooner], "max_gen_toks": 30}),
        ("Other.", {"until": [], "max_gen_toks": 2}),
        (context, {"until": later, "max_gen_toks": 30, "do_sample": False, "temperature": 0.0}),
    )
    texts = model.generate_until(asked, disable_tqdm=True)
    assert texts[0] == whole[: min(whole.index(later), whole.index(sooner))] and texts[2] == whole[: whole.index(later)]
    assert texts[1] == model.generate_until(asked[1:2], disable_tqdm=True)[0] and len(texts[1].encode()) <= 6
    for settings, message in [
        ({"do_sample": True, "temperature": 0.5}, "generation_kwargs: expected greedy generation, got"),
        ({"num_beams": 4}, "generation_kwargs: expected only until and max_gen_toks, got num_beams too"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.generate_until(requests((context, settings)), disable_tqdm=True)


def test_where_a_context_is_split(monkeypatch):
    tokenizer = byte_tokenizer(start=True)
    model = CompressorLM(
        ICAE(tiny_llama(vocab_size=258), chunk=8, ratio=4, lora=2), tokenizer, keep=4, marker="Q:", max_length=20
    )
    split = lambda text, room=2: model.split(text, model.tok_encode(text), room)  # noqa: E731
    assert [len(part) for part in split("one Q: two")] == [5, 6]
    assert split("one Q: two").compressed[0] == 257 == model.prefix_token_id
    assert [len(part) for part in split("Q: one Q: a")] == [8, 4]
    # Without the marker, or with nothing before it, by the last tokens; at least one is compressed.
    assert [len(part) for part in split("one two")] == [4, 4]
    assert [len(part) for part in split("Q: one")] == [3, 4]
    assert [len(part) for part in split("a")] == [1, 1] and [len(part) for part in split("")] == [1, 0]
    # 18 tokens have room; the cut is at the beginning.
    assert [len(part) for part in split("x" * 30)] == [14, 4]
    assert [len(part) for part in split("Q: " + "x" * 30)] == [14, 4]
    assert [len(part) for part in split("long Q: " + "x" * 30)] == [1, 17]
    with pytest.raises(ValueError, match="max_length: expected more than the 20 tokens after a context, got 20"):
        split("one", 20)
    # A token of a space and the marker belongs to the marker.
    monkeypatch.setattr(model, "tok_encode", lambda text: re.findall(" Q:|.", text))
    assert split("one Q: two") == (("o", "n", "e"), (" Q:", " ", "t", "w", "o"))
    monkeypatch.undo()
    # A text that has the first token already gets no second one.
    assert model.tok_encode("<start>a") == model.tok_encode("a") == [257, *model.tok_encode("a", False)]


def test_a_context_that_choices_share_is_encoded_once(monkeypatch):
    compressor, seen = compressors()["icae"], []
    encode = compressor.encode
    monkeypatch.setattr(compressor, "encode", lambda rows: seen.append(len(rows)) or encode(rows))
    model = CompressorLM(compressor, byte_tokenizer(), keep=2, batch_size=8)
    asked = requests(*(("The same text.", choice) for choice in (" a", " bc", " d")), ("Another.", " a"))
    together = model.loglikelihood(asked, disable_tqdm=True)
    assert seen == [2]
    alone = [model.loglikelihood([request], disable_tqdm=True)[0] for request in asked]
    assert [value for value, _ in together] == pytest.approx([value for value, _ in alone], rel=1e-5)
    assert model.loglikelihood(requests(("", "abc")), disable_tqdm=True)[0][0] < 0


@pytest.fixture
def folder(tmp_path):
    model_of_bytes().float().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    new_compressor(model, "icae", chunk=8, ratio=4, lora=2).save_pretrained(tmp_path / "compressor")
    return tmp_path


def test_bad_arguments_are_named():
    for given, message in [({"keep": 0}, "CompressorLM: expected keep >= 1, got 0"),
                           ({"marker": ""}, "marker: expected a text that is not empty, got ''")]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            CompressorLM(FullContext(model_of_bytes()), byte_tokenizer(), **given)


def test_the_command_runs_tasks_of_ones_own(folder, tasks, capsys):
    out = folder / "found.json"
    words = ["lm-eval", "--model", str(folder / "model"), "--include-path", str(tasks), "--out", str(out)]
    compressor = ["--compressor", str(folder / "compressor"), "--marker", "Question:"]
    assert cli.main([*words, *compressor, "--tasks", "local_sciq,local_triviaqa", "--limit", "2"]) == 0
    shown = capsys.readouterr().out
    assert "local_sciq" in shown and f"Written: {out}" in shown
    assert json.loads(out.read_text())["results"]["local_sciq"]["sample_len"] == 2
    assert cli.main([*words, "--plain", "--tasks", "local_sciq"]) == 0
    assert cli.main([*words, "--plain", "--tasks", "none_such"]) == 2
    assert "--tasks: expected names of lm_eval's tasks, got 'none_such'" in capsys.readouterr().err
    assert cli.main([*words, "--plain", "--tasks", "local_sciq", *compressor]) == 2
    assert "--compressor: not allowed with --plain, got" in capsys.readouterr().err
