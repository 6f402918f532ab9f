"""Tiny models and data for the papers' tables."""

import base64
import gzip
import io
import json

import numpy as np
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from gistkit import cli
from tests.cli.test_cli import small_llama
from tests.cli.test_images import save
from tests.helpers.models import byte_tokenizer

INSIDE = ("SQuAD", "NewsQA", "TriviaQA-web", "SearchQA", "HotpotQA", "NaturalQuestionsShort")
OUTSIDE = ("BioASQ", "DROP", "DuoRC.ParaphraseRC", "RACE", "RelationExtraction", "TextbookQA")
# How the papers' tables call them.
CALLED = {"TriviaQA-web": "TriQA", "HotpotQA": "HQA", "NaturalQuestionsShort": "NQ", "DuoRC.ParaphraseRC": "DuoRC",
          "RelationExtraction": "RE", "TextbookQA": "TQA"}  # fmt: skip
SETS = ("alpaca", "squad", "drop", "race", "narrativeqa", "fairytaleqa")
# Examples of a test set, so that each has a number of its own.
SIZES = {name: 2 + number for number, name in enumerate(SETS)}
BATCH = "--steps 1 --batch 2 --held-out 2"


def models(root):
    """Folders of a Llama, a Gemma 2 and a LLaVA with their tokenizers."""
    small_llama(num_hidden_layers=3, max_position_embeddings=16384).save_pretrained(root / "llama")
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, query_pre_attn_scalar=16, sliding_window=32, max_position_embeddings=8192,
        bos_token_id=0, eos_token_id=256, pad_token_id=None,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(root / "gemma")
    for name in ("llama", "gemma"):
        byte_tokenizer().save_pretrained(root / name)
    (root / "llava").mkdir()
    save("llava", root / "llava")
    return root


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rain(days):
    return "".join(f"<unk> day {day:03} it rained {day * 7 % 10} times. " for day in days)


def data(root):
    """{paper: {name of data: path}}, in the formats of the papers' data sets."""
    long = lines(root / "long.jsonl", [{"text": f"{number}. " + rain(range(150))} for number in range(40)])
    # Two passages of the longest in the test split, and in WikiText's one article of three.
    (root / "pile").mkdir()
    for split, days in (("train", range(900)), ("val", range(900, 1100)), ("test", range(100))):
        lines(root / "pile" / f"{split}.jsonl", [{"text": rain(days)}])
    (root / "wiki.test.tokens").write_text(" \n = Rain = \n \n " + rain(range(100)) + "\n")
    (root / "train").mkdir()
    (root / "dev").mkdir()
    for split in ("train", "dev"):
        for index, name in enumerate(INSIDE if split == "train" else INSIDE + OUTSIDE):
            rows = [{"header": {"dataset": name, "split": split}}]
            rows += [asked(name, number, mrqa=True) for number in range(2 + index % 2)]
            with gzip.open(root / split / f"{name}.jsonl.gz", "wt") as out:
                out.writelines(json.dumps(row) + "\n" for row in rows)
    pwc = [{"input": f"{number}. " + "it rained. " * 60, "prompt": "What?", "answer": "rain"} for number in range(20)]
    news = [{"article": f"News {number}: " + rain(range(number + 3)), "highlights": "Rain."} for number in range(20)]
    gistpool = {}
    for name in SETS:
        gistpool[f"{name}-train"] = lines(root / f"{name}-train.jsonl", [asked(name, n) for n in range(20)])
        gistpool[f"{name}-test"] = lines(root / f"{name}-test.jsonl", [asked(name, n) for n in range(SIZES[name])])
    pile = root / "pile"
    return {
        "epl": {"text": long, "train": root / "train", "test": root / "dev", **_of_images(root)},
        "cl": {"text": long, "train": lines(root / "pwc.jsonl", pwc), "test": lines(root / "pwc-test.jsonl", pwc[:3])},
        "dodo": {"text": pile, "wikitext": root / "wiki.test.tokens"},
        "dodo-chat": {
            "text": pile, "squad": gistpool["squad-test"], "train": lines(root / "news.jsonl", news),
            "test": lines(root / "news-test.jsonl", news[:4]),
        },
        "gistpool": gistpool,
    }  # fmt: skip


def asked(name, number, mrqa=False):
    """A record of a question about a context that names its set."""
    context = f"{name}: it rained on day {number}. " * (1 + number % 3)
    if mrqa:
        return {"context": context, "qas": [{"question": "When?", "qid": str(number), "answers": [f"day {number}"]}]}
    return {"context": context, "question": "When?", "answers": [f"day {number}"]}


def _of_images(root):
    from PIL import Image

    photos = root / "photos"
    (photos / "test").mkdir(parents=True)

    def taken(seed):
        pixels = np.random.default_rng(seed).integers(0, 255, (12, 20, 3), dtype=np.uint8)
        stored = io.BytesIO()
        Image.fromarray(pixels).save(stored, "PNG")
        return stored.getvalue()

    problems, rows = {}, ["index\tquestion\thint\tA\tB\tC\tD\tanswer\timage"]
    for number in range(4):
        (photos / f"{number}.png").write_bytes(taken(number))
        (photos / "test" / str(number)).mkdir()
        (photos / "test" / str(number) / "image.png").write_bytes(taken(number))
        problems[str(number)] = {
            "question": "which", "choices": ["who", "this", "is"], "answer": number % 3, "hint": "", "split": "test",
            "image": "image.png",
        }  # fmt: skip
        image = base64.b64encode(taken(number)).decode()
        rows.append(f"{number}\twhich\t\twho\tthis\t\t\t{'AB'[number % 2]}\t{image}")
    (root / "problems.json").write_text(json.dumps(problems))
    (root / "mmbench.tsv").write_text("\n".join(rows) + "\n")
    said = [("human", "<image>\nthis one"), ("gpt", "this"), ("human", "and"), ("gpt", "that")]
    chats = [
        {"image": f"{number}.png", "conversations": [{"from": who, "value": text} for who, text in said]}
        for number in range(4)
    ]
    people = [{"image": f"{n}.png", "question": "which", "answers": ["this"] * 7 + ["who"] * 3} for n in range(2)]
    return {
        "conversations": lines(root / "chats.jsonl", chats), "images": photos, "sqa": root / "problems.json",
        "mmb": root / "mmbench.tsv", "vqav2": lines(root / "vqav2.jsonl", people),
    }  # fmt: skip


KEPT = "--keep-examples"
MORE = {
    "epl": {
        "pretrain": f"{BATCH} --min-length 1020 --max-length 1020",
        "reconstruction": f"--examples 2 {KEPT}",
        "finetune": f"{BATCH} --min-length 2 --max-length 300",
        "answers": KEPT,
    },
    "images": {"train": BATCH} | dict.fromkeys(("sqa", "mmb", "vqav2"), KEPT),
    "cl": {"pretrain": BATCH, "held-out": f"--examples 2 {KEPT}", "finetune": BATCH, "answers": KEPT},
    "dodo": {"autoencoder": f"{BATCH} --max-length 64", "train": BATCH},
    "dodo-chat": {"train": BATCH, "answers": KEPT, "summaries": KEPT},
    "gistpool": {"train": BATCH, "answers": KEPT},
}


def data_of(name, table, found):
    """The data of a table."""
    if name.startswith("gistpool") and "train" in table.data:
        own = name.rpartition("-")[2]
        return {split: found["gistpool"][f"{own}-{split}"] for split in ("train", "test")}
    return {each: found[table.paper.removesuffix("-9b")][each] for each in table.data}


def make(name, table, model, given, out, titles=None, more=""):
    """Makes a table, or some of its rows; its status."""
    words = ["study", "paper-table", name, "--model", model, "--device", "cpu", "--out", out]
    words += [word for each, path in given.items() for word in ("--data", f"{each}={path}")]
    kind = "images" if "images" in table.data else table.paper.removesuffix("-9b")
    stages = {stage.partition("-")[0] for arm in table.arms for stage in arm.stages} | {"held-out"}
    for stage, options in MORE[kind].items():
        if stage in stages:
            words += ["--more", f"{stage}={options} {more if stage == 'answers' else ''}"]
    return cli.main([str(word) for word in (*words, *(["--arms", ";".join(titles)] if titles else []))])


def cells(out, name):
    """{row: {heading: what is printed}} of a table that was made."""
    rows = [line for line in (out / f"{name}.md").read_text().splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    return {row[0]: dict(zip(split[0][1:], row[1:], strict=True)) for row in split[2:]}
