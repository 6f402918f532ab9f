"""The study `compression-loss`: its two stages, their states, its tables, its picture and its command."""

import pytest
import torch
from safetensors.torch import load_file
from study_runs import Bar, session

from gistkit.hf import attach
from gistkit.train import load_corpus
from gistkit_lab.studies.compression_loss import PAPER, SETTINGS, STUDY, Recipe, Run, Texts, build_compressor
from gistkit_lab.studies.needles import as_batch, evaluate
from gistkit_lab.studies.study import SavedRun

RECIPE = Recipe(
    steps=4, batch=3, warmup=2, eval_every=2, chunk=20, continuation=12, eval_chunks=6, final_chunks=8, hidden_size=32,
    intermediate_size=48, tuning_steps=3, tuning_eval_every=2, cue=4, answer=5, eval_questions=4, final_questions=6,
)  # fmt: skip


def test_each_stage_trains_its_losses_alone_and_fine_tuning_begins_where_pretraining_ends(corpus, tmp_path):
    run = STUDY.train(session(RECIPE, "without-ae", tmp_path, corpus, seed=1))
    start = dict(build_compressor(RECIPE, "without-ae", 1).named_parameters())
    pretrained, ae, qa = (
        load_file(tmp_path / f"without-ae-1{name}" / f"checkpoint-{steps}" / "trainable.safetensors")
        for name, steps in (("", 4), ("-ae", 3), ("-qa", 3))
    )

    def changed(before, after):
        return {name for name, value in after.items() if not torch.equal(value, before[name])}

    head, ae_token, lm_token = "compression_head.projection.weight", "task_embeddings.ae", "task_embeddings.lm"
    assert changed(start, pretrained) == pretrained.keys() - {ae_token}
    assert changed(pretrained, ae) == ae.keys() - {head, lm_token}
    # A question is read behind the same token as a continuation.
    assert changed(pretrained, qa) == qa.keys() - {head, ae_token}

    assert run.curves.keys() == {"pretraining", "ae", "qa"}
    assert run.curves["ae"][0][1:] == run.curves["pretraining"][-1][1:]
    for stage, seconds in run.seconds.items():
        assert len(seconds) == 3 and seconds == sorted(seconds)
        end = run.seconds["pretraining"][-1]
        assert seconds[0] == pytest.approx(0 if stage == "pretraining" else end, abs=1e-2)
        assert stage == "pretraining" or seconds[-1] > end
    for figures in (run.held_out, run.test):
        assert figures.keys() == {"pretraining", "ae", "qa"}
        assert figures["pretraining"].keys() == {"loss", "share", "lm", "compression"}


@pytest.mark.slow
def test_a_fresh_run_keeps_no_state_of_the_run_before(corpus, tmp_path):
    STUDY.train(session(RECIPE, "without-ae-cl", tmp_path, corpus))
    assert len(list(tmp_path.glob("*/checkpoint-*"))) == 6
    with pytest.raises(KeyboardInterrupt):
        STUDY.train(session(RECIPE, "without-ae-cl", tmp_path, corpus, bar=Bar(1)))
    assert not list(tmp_path.glob("*/checkpoint-*"))


def test_questions_about_whole_chunks_are_measured_as_they_are_trained(corpus):
    texts, compressor = Texts(RECIPE, corpus, 0, "cpu"), build_compressor(RECIPE, "full", 0)
    compressor.set_losses(["qa"])
    # `evaluate` asks in one group, as many as a batch has at most.
    batch = as_batch(texts.questions.groups("held_out", 6)[0])
    assert batch["input_ids"].shape == (6, 20) and batch["answer_ids"].shape == (6, 5)
    for context, question, answer in zip(*(batch[name].tolist() for name in batch), strict=True):
        assert bytes(context).find(bytes(question[-4:] + answer)) >= 0
    with torch.no_grad(), attach(compressor.model):
        found = evaluate(compressor, texts.questions, "held_out", 6)["all"]["loss"]
        assert found == pytest.approx(float(compressor(**batch)["loss"]), rel=1e-5)


def test_a_text_too_short_for_a_chunk_is_refused(tmp_path):
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 4)
    with pytest.raises(ValueError, match=r"text: expected at least 32 bytes in the held-out part of text.txt, got 19"):
        Texts(RECIPE, load_corpus(tmp_path / "text.txt"), 0, "cpu")


def made(setting, seed, pretraining, tuning):
    """A run whose points are (second, AE loss)."""
    curves = {"pretraining": [(i, loss, 0.5) for i, (_, loss) in enumerate(pretraining)],
              "ae": [(10 * i, loss, 0.5) for i, (_, loss) in enumerate(tuning)], "qa": [(0, 1.0, 0.0)]}  # fmt: skip
    seconds = {"pretraining": [at for at, _ in pretraining], "ae": [at for at, _ in tuning], "qa": [9.0]}
    figures = {"pretraining": {"loss": 2.0 + seed, "share": 0.1, "lm": 1.5, "compression": 0.25},
               "ae": {"loss": tuning[-1][1], "share": 0.9}, "qa": {"loss": 1.25, "share": 0.5}}  # fmt: skip
    return Run(setting, seed, curves, seconds, figures, figures)


RUNS = [
    # It ends after 15 s, where the next one still pretrains: halfway between 3 and 1.
    made("without-ae", 0, [(0, 5), (7, 4)], [(7, 4), (15, 1.5)]),
    made("without-cl", 0, [(0, 5), (10, 3), (20, 1)], [(20, 1), (26, 0.25)]),
    made("without-ae", 1, [(0, 5), (10, 4)], [(10, 4), (20, 1.75)]),
    made("without-cl", 1, [(0, 5), (10, 3), (20, 1)], [(20, 1), (30, 0.5)]),
    # It ends before the first one.
    made("without-ae-cl", 0, [(0, 5), (5, 4)], [(5, 4), (11, 3.5)]),
    made("without-ae-cl", 1, [(0, 5), (5, 4)], [(5, 4), (11, 3.25)]),
]


def test_gaps_at_the_end_and_at_equal_time():
    header, *rows = STUDY.gap_rows(RUNS)
    assert header[1:] == ["LM+CL less LM+AE", "at equal time", "LM less LM+CL", "at equal time"]
    assert rows == [
        ["seed 0", "+1.250", "-0.500", "+2.000", "+0.750"],
        ["seed 1", "+1.250", "+0.750", "+1.500", "-0.525"],
    ]
    assert STUDY.gap_rows(RUNS[:4])[1:] == [[*row[:3], "-", "-"] for row in rows]
    assert STUDY.gap_rows(RUNS[1:2])[1:] == []


def test_the_table_stands_beside_the_papers():
    header, with_ae, with_cl, neither = STUDY.rows(RUNS, RECIPE)
    cells = [dict(zip(header, row, strict=True)) for row in (with_ae, with_cl, neither)]
    assert [row["setting"] for row in cells] == ["without CL", "without AE", "without AE and CL"]
    assert [row["CL loss"] for row in cells] == ["-", "0.250 (0.250-0.250)", "-"]
    assert [row["AE loss"] for row in cells] == ["2.500 (2.000-3.000)", *["(2.500 (2.000-3.000))"] * 2]
    assert [row["tuned: AE loss"] for row in cells[:2]] == ["0.375 (0.250-0.500)", "1.625 (1.500-1.750)"]
    assert cells[0]["tuned: question loss"] == "1.250 (1.250-1.250)"
    assert [row["pretraining time"] for row in cells] == ["1.00 (1.00-1.00)", "0.42 (0.35-0.50)", "0.25 (0.25-0.25)"]
    paper = len(header) - header.index("paper: CL")
    assert with_ae[-paper:] == ["-", "0.02", "2.06", "95.8", "26.0", "34.4 h"]
    assert with_cl[-paper:] == ["0.15", "-", "2.06", "-", "26.5", "24.3 h"] and neither[-paper:] == ["-"] * paper
    assert STUDY.rows(RUNS[:1], RECIPE)[1][header.index("pretraining time")] == "-"
    assert PAPER.keys() < SETTINGS.keys()


def test_times_of_different_machines_are_not_compared():
    common = {"threads": 1, "instruction_set": "avx2", "torch": "2", "commit": "c"}
    # The last run, of seed 1, is of another one.
    machines = [{"processor": name, **common} for name in "AAAAAB"]
    page = STUDY.page([[SavedRun(*saved) for saved in zip(RUNS, [RECIPE] * 6, machines, strict=True)]])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    (header, _, *settings), (_, _, *gaps) = lines[:-4], lines[-4:]
    times = {row[0]: row[header.index("pretraining time")] for row in settings}
    assert times == {"without CL": "1.00", "without AE": "0.35", "without AE and CL": "0.25"}
    assert gaps == [["seed 0", "+1.250", "-0.500", "+2.000", "+0.750"], ["seed 1", "+1.250", "-", "+1.500", "-"]]


def test_the_picture_has_a_line_a_setting_by_steps_and_by_seconds():
    pytest.importorskip("matplotlib", reason="the viz extra is not installed")
    steps, seconds = STUDY.figures(RUNS, RECIPE)["fine-tuning"].axes
    assert [line.get_label() for line in steps.lines] == ["without CL", "without AE", "without AE and CL"]
    assert steps.lines[1].get_xdata().tolist() == [0, 10] and steps.lines[1].get_ydata().tolist() == [4, 1.625]
    assert seconds.lines[1].get_xdata().tolist() == [0, 8.5, 8.5, 17.5]
    assert len(steps.collections) == len(seconds.collections) == 3
