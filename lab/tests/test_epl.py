"""The study `epl` and its command, at a few steps."""

import dataclasses

import pytest
import torch
from study_runs import Bar, outcome, session

from gistkit import cli, layouts
from gistkit.evaluate.report import format_table
from gistkit.train import load_corpus
from gistkit_lab.studies import epl, smollm2
from gistkit_lab.studies import reconstruction as training
from gistkit_lab.studies.reconstruction import memory_attention

RECIPE = epl.Recipe(
    steps=6, chunk=20, batch=4, eval_every=2, eval_chunks=8, final_chunks=8, hidden_size=32, intermediate_size=48
)


def test_a_run_learns_and_layouts_differ_in_no_parameter(corpus, tmp_path):
    first, other = (epl.STUDY.train(session(RECIPE, layout, tmp_path, corpus)) for layout in ("epl", "dpl"))
    assert first.curve[-1][1] < first.curve[0][1]
    assert other.parameters == first.parameters and other.curve != first.curve


def staged(corpus, out, *, resume=False, bar=None):
    recipe = smollm2.Recipe(
        steps=6, chunk=20, batch=4, eval_every=2, eval_chunks=8, final_chunks=8, lengths=(5, 10, 20),
        compression_steps=3,
    )  # fmt: skip
    seen = []

    def build(_, layout, seed):
        compressor = epl.build_compressor(RECIPE, layout, seed, losses=("ae", "compression"))
        forward = compressor.forward

        def recorded(rows, **texts):
            if torch.is_grad_enabled():
                seen.append((tuple(rows.shape), set(compressor.loss_weights)))
            return forward(rows, **texts)

        compressor.forward = recorded
        return compressor

    run = training.train(session(recipe, "epl", out, corpus, resume=resume, bar=bar), build)
    return run, seen


def test_contexts_and_losses_come_in_stages(corpus, tmp_path):
    whole, seen = staged(corpus, tmp_path / "whole")
    both = {"ae", "compression"}
    assert (
        seen == [((16, 5), {"compression"})] * 2 + [((8, 10), {"compression"}), ((8, 10), both)] + [((4, 20), both)] * 2
    )
    assert set(whole.losses) == both | {"loss"}
    with pytest.raises(KeyboardInterrupt):
        staged(corpus, tmp_path / "cut", bar=Bar(3))
    assert outcome(staged(corpus, tmp_path / "cut", resume=True)[0]) == outcome(whole)


def test_layouts_of_a_seed_start_from_the_same_weights():
    models = [epl.build_compressor(RECIPE, layout, 3) for layout in ("dpl", "upl", "epl")]
    for name, parameter in models[0].named_parameters():
        assert all(torch.equal(parameter, dict(model.named_parameters())[name]) for model in models[1:]), name


def test_a_text_too_short_for_a_chunk_is_refused(tmp_path, capsys):
    (tmp_path / "text.txt").write_bytes(bytes(range(100)))
    text = load_corpus(tmp_path / "text.txt")
    with pytest.raises(ValueError, match=r"text: expected at least 20 bytes in the held-out part of text.txt, got 10"):
        epl.STUDY.train(session(RECIPE, "epl", tmp_path, text))
    longer = dataclasses.replace(RECIPE, chunk=5, continuation=15)
    with pytest.raises(ValueError, match="text: expected at least 20 bytes"):
        epl.STUDY.train(session(longer, "epl", tmp_path, text))
    assert cli.main(["study", "epl", "--text", str(tmp_path / "text.txt"), "--steps", "2"]) == 2
    assert "text: expected at least 80 bytes" in capsys.readouterr().err


def test_memory_attention_is_that_of_the_eager_model():
    compressor = epl.build_compressor(RECIPE, "epl", 0).double()
    chunks = torch.randint(0, 256, (3, 20))
    maps = memory_attention(compressor, chunks)
    model, plan = compressor.model, layouts.icae_encoder(20, 20, 4, positions="epl").compile()
    model.set_attn_implementation("eager")
    embeddings = model.get_input_embeddings()(chunks)
    out = model.model(
        inputs_embeds=torch.cat([embeddings, compressor.memory_embeddings.expand(3, -1, -1)], 1),
        position_ids=plan.positions[None].expand(3, -1),
        attention_mask=torch.ones(3, 24, dtype=torch.long),
        output_attentions=True,
    )
    assert len(maps) == len(out.attentions) == 2
    for ours, theirs in zip(maps, out.attentions, strict=True):
        torch.testing.assert_close(ours, theirs[:, :, 20:, :20].mean((0, 1)).double(), rtol=1e-4, atol=1e-6)


def test_report_has_a_row_a_layout_beside_the_paper():
    make = lambda layout, seed, losses: training.Run(  # noqa: E731
        layout, seed, [(25 * i, loss, 0.5) for i, loss in enumerate(losses)], losses[-1], 0.5, 0.4, 10.0
    )
    runs = [make("dpl", 0, [5, 3]), make("epl", 0, [5, 0.9]), make("dpl", 1, [5, 2]), make("epl", 1, [5, 1.1])]
    header, dpl, ours = epl.STUDY.rows(runs, RECIPE)
    assert dpl[:3] == ["DPL", "not reached", "2.500 (2.000-3.000)"]
    assert dpl[3:] == ["0.500 (0.500-0.500)", "0.400 (0.400-0.400)", "10 s (10 s-10 s)", "31.80", "12.18", "39.95"]
    assert ours[:3] == ["EPL", "25, 1 of 2 runs", "1.000 (0.900-1.100)"] and ours[-3:] == ["95.98", "11.42", "43.87"]
    lines = format_table([header, dpl, ours]).splitlines()
    assert len(lines) == 4 and len(set(map(len, lines))) == 1


def test_mistakes_end_in_one_line(tmp_path, capsys):
    assert cli.main(["study", "epl", "--text", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(["study", "epl", "--steps", "1", "--out", str(tmp_path / "file")]) == 2
    assert "--out: cannot write to" in capsys.readouterr().err
    for wrong, message in [
        (["--layouts", "dpl,xyz"], "expected some of dpl,upl,cpl,epl, each once, got 'dpl,xyz'"),
        (["--steps", "0"], "expected a whole number of at least 1, got '0'"),
        (["--seeds", "abc"], "expected a whole number from 1 to 10000, got 'abc'"),
    ]:
        with pytest.raises(SystemExit):
            cli.main(["study", "epl", *wrong])
        assert message in capsys.readouterr().err
