"""Training steps of compressors on SmolLM2-135M against the same steps in plain transformers: times and peak memory.

A step reads half of its tokens as the context and reconstructs them as the other half, or reads on through all of them;
the optimizer is left out. The contender runs transformers' own attention (sdpa) with dense masks made beforehand, the
same adapters through PEFT, the same tokens and the same loss. Loss and gradients of the two are compared before the
time runs, with adapters that change the model. All roles share their adapters where PEFT could not tell tokens apart.
bfloat16 is autocast of float32 weights.

--memory: peak of a step above the loaded model, each in a fresh process (Linux only). --encode: the same of a long
context that is compressed without gradients; the target is 1.2 times the bytes of the memory plus those of a chunk.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import harness
import torch
from compressor import RATIO, Layers, active, additive, placed, projected, seen_by_decoder, watched
from memory import peak_of, reset_peak, status
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from gistkit.compress import ICAE, AvgPool, Compressor, Dodo, FiveHundredX, GistPool, LanguageModel, MixedResolution
from gistkit.compress.methods.in_place import InPlace
from gistkit.hf.cache import CACHE
from gistkit.hf.smollm2 import load_smollm2
from gistkit.layouts import dodo
from gistkit.train.rounded import RoundedMaps

CHUNK, TAU, SEGMENT = 512, 128, 32
READING_ON = "Dodo, reading on"
Step = Callable[[], Tensor]
Trained = Compressor | LanguageModel
SHAPES = {"4x240": (4, 240), "4x1024": (4, 1024), "2x4096": (2, 4096)}
SUITES = {"float32": "training", "bfloat16": "training-bfloat16"}
FORMS = ("gistkit", "transformers sdpa, dense mask")
# How far losses and gradients may differ, as a share of theirs; in bfloat16 gradients of how far theirs are from exact.
TOLERANCES = {"float32": (1e-4, 1e-3), "bfloat16": (1e-2, 2.0)}
MAKERS: dict[str, Callable[[PreTrainedModel, int], Trained]] = {
    "ICAE": lambda model, context: ICAE(
        model, chunk=min(context, CHUNK), ratio=RATIO, losses=("ae",), lora=64, match_embeddings=True
    ),
    "500x": lambda model, context: FiveHundredX(model, chunk=min(context, CHUNK), ratio=RATIO, losses=("ae",), lora=64),
    "GistPool": lambda model, _: GistPool(model, ratio=RATIO, losses=("ae",), separate=False),
    "AvgPool": lambda model, _: AvgPool(model, ratio=RATIO, losses=("ae",)),
    "Dodo": lambda model, _: Dodo(model, ratio=RATIO, selection="strided", losses=("ae",)),
    READING_ON: lambda model, _: MixedResolution(
        Dodo(model, ratio=RATIO, selection="strided", separate=False), tau=TAU, segment=SEGMENT
    ),
}


def compressor_of(trained: Trained) -> Compressor:
    """What has the model and the parameters."""
    return trained.compressor if isinstance(trained, LanguageModel) else trained


def made(method: str, model: PreTrainedModel, context: int) -> Trained:
    """A compressor or language model whose adapters change the model, so that what leaves them out differs."""
    trained = MAKERS[method](model, context)
    change(compressor_of(trained).train())
    return trained


def change(compressor: Compressor) -> None:
    """Draws adapters that change the model, so little that rounding does not grow through its layers.

    At 0.01 in place of 0.003 the gradients of ICAE in bfloat16, in plain transformers too, are up to 1.4 times their
    norm from those in float32.
    """
    for name, parameter in compressor.trainable():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.003)


def plain_reconstruction(compressor: Compressor, ids: Tensor, dtype: torch.dtype) -> Step:
    """The autoencoding loss as it is written on transformers alone."""
    model: Any = compressor.model
    decoder, embed = model.model, model.get_input_embeddings()
    with torch.no_grad():
        memory = compressor.encode(ids)
    # Of a training step: without gradients a long context is read in parts.
    passes = seen_by_decoder(compressor, lambda: compressor(ids))
    encoding, reading = (placed(plan, dtype) for _, plan, _ in passes)
    rows, count, carried = len(ids), memory.num_tokens, isinstance(compressor, ICAE)
    encoder = {"icae": "encoder", "x500": "encoder", "dodo": "memory"}.get(compressor.method, "text")
    nuggets = memory.positions[0]

    def compressed() -> tuple[Tensor, Layers]:
        tokens = ids
        if isinstance(compressor, InPlace):
            tokens = torch.cat([torch.full_like(ids[:, :1], compressor.bos_token), ids], 1)
        inputs = embed(tokens)
        slots = getattr(compressor, "memory_embeddings", None)
        if slots is not None:
            wanted = count - isinstance(compressor, InPlace)
            inputs = torch.cat([inputs, slots.repeat(wanted // len(slots), 1).expand(rows, -1, -1)], 1)
        cache = DynamicCache()
        with watched(decoder) as (entered, left):
            hidden = decoder(inputs_embeds=inputs, use_cache=True, **{CACHE: cache}, **encoding).last_hidden_state
        layers: Layers = [(layer.keys, layer.values) for layer in cache.layers]
        if isinstance(compressor, AvgPool | GistPool):
            layers = projected(compressor, memory, layers, entered, left)
        elif isinstance(compressor, Dodo):
            layers = [(key[:, :, nuggets], value[:, :, nuggets]) for key, value in layers]
        else:
            layers = [(key[:, :, -count:], value[:, :, -count:]) for key, value in layers]
        return hidden[:, -count:], layers

    def step() -> Tensor:
        with active(compressor, encoder):
            hidden, layers = compressed()
        inputs = [compressor.task_embeddings["ae"].expand(rows, 1, -1), embed(ids[:, :-1])]
        cache = DynamicCache()
        if carried:
            normed = torch.nn.functional.rms_norm(hidden.float(), hidden.shape[-1:])
            inputs.insert(0, normed * compressor.gain + compressor.shift)
        else:
            for index, (key, value) in enumerate(layers):
                cache.update(key, value, index)
        with active(compressor, compressor.reader):
            hidden = decoder(
                inputs_embeds=torch.cat(inputs, 1), use_cache=True, **{CACHE: cache}, **reading
            ).last_hidden_state
        logits = model.lm_head(hidden[:, -ids.shape[1] :])
        return cross_entropy(logits.float().flatten(0, 1), ids.flatten())

    return step


def plain_reading(reader: MixedResolution, ids: Tensor, dtype: torch.dtype) -> Step:
    """The loss of a text that sees recent tokens and nuggets, as it is written on transformers alone."""
    compressor, model = reader.compressor, reader.compressor.model
    rows = reader.rows(ids)
    is_nugget = reader.nuggets(rows)[0].numpy()
    layout = dodo(is_nugget, reader.tau, segment=reader.segment, bos=True)
    mask = additive(torch.from_numpy(layout.dense_mask()), dtype)
    positions = torch.tensor(layout.positions)[None]

    def step() -> Tensor:
        with active(compressor, compressor.reader):
            hidden = model.model(
                inputs_embeds=model.get_input_embeddings()(rows.ids), attention_mask=mask, position_ids=positions,
                use_cache=False,
            ).last_hidden_state  # fmt: skip
        logits = model.lm_head(hidden[:, :-1])
        return cross_entropy(logits.float().flatten(0, 1), rows.ids[:, 1:].flatten())

    return step


def differentiated(trained: Trained, loss: Step, dtype: str) -> Tensor:
    """The loss of one training step without the optimizer; parameters have its gradients."""
    for _, parameter in compressor_of(trained).trainable():
        parameter.grad = None
    with torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext():
        value = loss()
    value.backward()
    return value.detach()


def smollm2(method: str, rows: int, tokens: int) -> tuple[PreTrainedModel, Tensor]:
    """SmolLM2-135M, and rows of English text that a step reads as its contexts, of all tokens or of half of them."""
    model, tokenizer = load_smollm2()
    text = "".join((harness.ROOT / name).read_text() for name in ("docs/guide.md", "README.md"))
    context = tokens if method == READING_ON else tokens // 2
    ids = torch.tensor(tokenizer(text)["input_ids"])
    return model, ids.repeat(-(-rows * context // len(ids)))[: rows * context].view(rows, context)


def plain_form(trained: Trained, ids: Tensor, dtype: str) -> Step:
    """A step in plain transformers."""
    plain: Any = plain_reading if isinstance(trained, LanguageModel) else plain_reconstruction
    return partial(differentiated, trained, plain(trained, ids, getattr(torch, dtype)), dtype)


def our_form(trained: Trained, ids: Tensor, dtype: str) -> Step:
    """The step as `Trainer` makes it."""
    ours: Any = trained
    rounded = RoundedMaps(compressor_of(trained), torch.bfloat16 if dtype == "bfloat16" else None)

    def step() -> Tensor:
        with rounded.used():
            return differentiated(trained, lambda: ours(ids)["loss"], dtype)

    return step


def contenders(method: str, model: PreTrainedModel, ids: Tensor, dtype: str) -> tuple[Trained, dict[str, Step]]:
    """What trains, and the two forms of a step on contexts [B, N], ours first."""
    trained = made(method, model, ids.shape[1])
    return trained, {FORMS[0]: our_form(trained, ids, dtype), FORMS[1]: plain_form(trained, ids, dtype)}


def results_of(trained: Trained, step: Step) -> tuple[float, list[Tensor]]:
    """A step's loss and the gradient of every parameter, zeros where nothing reads it."""
    loss = float(step())
    parameters = [parameter for _, parameter in compressor_of(trained).trainable()]
    return loss, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


def apart_of(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """How far each parameter's gradient is from the wanted one, as a share of its norm, where that is not zero."""
    return [float((f - w).norm() / w.norm()) for f, w in zip(found, wanted, strict=True) if w.any()]


def compare(method: str, trained: Trained, ids: Tensor, forms: dict[str, Step], dtype: str) -> None:
    """Refuses contenders whose losses or gradients differ by more than rounding.

    Rounding to bfloat16 moves gradients far through so many layers: there the measure is how far plain transformers'
    are from those in float32. It is the median over parameters, because one memory token can carry most of the error
    to the first layers, a multiple that differs from draw to draw in either form.
    """
    of_loss, of_gradients = TOLERANCES[dtype]
    (ours, found), (theirs, wanted) = (results_of(trained, step) for step in forms.values())
    if dtype == "float32":
        (apart,) = apart_of(*([torch.cat([g.flatten() for g in gradients])] for gradients in (found, wanted)))
        allowed = of_gradients
    else:
        exact = results_of(trained, plain_form(trained, ids, "float32"))[1]
        apart, rounding = (statistics.median(apart_of(gradients, exact)) for gradients in (found, wanted))
        # Half of their size at most: what says nothing of the gradients is all of it.
        allowed = min(of_gradients * rounding, 0.5)
    print(f"{method}, {dtype}: losses {ours:.5f} and {theirs:.5f}, gradients {apart:.2g} apart of {allowed:.2g}")
    if abs(ours - theirs) > of_loss * abs(theirs) or apart > allowed:
        raise ValueError(
            f"{method}: expected one loss and one gradient from both contenders, got {ours} and {theirs}, and "
            f"gradients that are {apart:.2g} of their norm apart, above {allowed:.2g}"
        )


def compared(method: str, model: PreTrainedModel, ids: Tensor, dtype: str) -> dict[str, Step]:
    """The two forms of a step, which agree."""
    trained, forms = contenders(method, model, ids, dtype)
    compare(method, trained, ids, forms, dtype)
    return forms


def step_peak(method: str, rows: int, tokens: int, dtype: str, form: str) -> float:
    """MiB above the loaded model at the peak of a step, in this process: call it once in a fresh one."""
    model, ids = smollm2(method, rows, tokens)
    gc.collect()
    reset_peak()
    before = status("VmRSS")
    step = contenders(method, model, ids, dtype)[1][form]
    step()
    gc.collect()
    reset_peak()
    step()
    return (status("VmHWM") - before) / 2**20


def encode_peak(method: str, tokens: int) -> dict[str, float]:
    """MiB of a long context's memory, and what compressing takes at its peak: all of it, and one chunk alone."""
    model, ids = smollm2(READING_ON, 1, tokens)
    compressor = compressor_of(made(method, model, tokens)).eval()
    found: dict[str, float] = {}
    compressor.encode(ids[:, : CHUNK // 2])
    for name, count in (("chunk", CHUNK), ("mib", tokens)):
        memory, found[name] = peak_of(partial(compressor.encode, ids[:, :count]))
        found["result"] = memory.nbytes / 2**20
        del memory
    return found


def measured(method: str, *case: Any) -> Any:
    """Of a case of `measure_encode`, which has its tokens alone, or of `measure_steps`."""
    return encode_peak(method, *case) if len(case) == 1 else step_peak(method, *case)


def measure_steps(options: argparse.Namespace) -> None:
    """Peaks of both forms of every step."""
    found, rows = harness.begin("training-memory", options), []
    for method, shape, dtype in tqdm(options.cases, desc="training-memory", unit="case", dynamic_ncols=True):
        for form in FORMS:
            mib = harness.measured_apart(options, method, *SHAPES[shape], dtype, form)
            rows.append({"case": name_of(method, shape, dtype), "form": form, "mib": mib})
            tqdm.write(f"  {rows[-1]['case']:44} {form:32} {mib:8.0f} MiB")
    harness.write("training-memory", {"machine": found, "mebibytes": rows}, options)


def measure_encode(options: argparse.Namespace) -> None:
    """Peaks of a long context compressed."""
    found, rows = harness.begin("encode-memory", options), []
    for method in tqdm(options.methods, desc="encode-memory", unit="case", dynamic_ncols=True):
        peak = harness.measured_apart(options, method, options.encode)
        ratio = peak["mib"] / (peak["result"] + peak["chunk"])
        rows.append({"case": f"{method}, encode {options.encode} tokens", **peak, "ratio": ratio})
        tqdm.write(
            f"  {rows[-1]['case']:36} {peak['mib']:8.0f} MiB at its peak, {peak['result']:.0f} of its result, "
            f"{peak['chunk']:.0f} of a chunk: {ratio:.2f} x"
        )
    harness.write("encode-memory", {"machine": found, "mebibytes": rows}, options)


def name_of(method: str, shape: str, dtype: str) -> str:
    """What a case is called in tables."""
    rows, tokens = SHAPES[shape]
    return f"{method}, {rows} x {tokens} tokens, {dtype}"


def main() -> None:
    """Times the steps, or measures memory, and keeps the figures where asked."""
    example = "python benchmarks/training.py --methods 500x AvgPool --shapes 4x240 --dtype bfloat16"
    parser = harness.parser(__doc__, example, appends=True, apart=True)
    parser.add_argument("--methods", nargs="+", choices=MAKERS, default=list(MAKERS), metavar="METHOD",
                        help=f"some of {', '.join(MAKERS)} (default: all)")  # fmt: skip
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="rows x tokens (default: all)"
    )
    parser.add_argument("--dtype", nargs="+", choices=TOLERANCES, default=list(TOLERANCES), help="default: both")
    parser.add_argument("--memory", action="store_true", help="measure the peak of steps in place of their time")
    parser.add_argument("--encode", type=int, metavar="TOKENS",
                        help="measure the peak of compressing so many tokens, such as 100352")  # fmt: skip
    options = parser.parse_args()
    if harness.measured_here(options, measured):
        return
    if options.append and (options.memory or options.encode):
        parser.error("--append: expected none with --memory or --encode")
    if options.quick:
        options.shapes = options.shapes[:1]
    options.cases = [(m, s, d) for s in options.shapes for d in options.dtype for m in options.methods]
    if options.encode:
        options.methods = [method for method in options.methods if method != READING_ON]
        measure_encode(options)
    elif options.memory:
        measure_steps(options)
    else:
        for chosen in options.dtype:
            cases = [
                harness.Case(
                    name_of(method, shape, dtype),
                    lambda m=method, s=shape, d=dtype: compared(m, *smollm2(m, *SHAPES[s]), d),
                )
                for method, shape, dtype in options.cases
                if dtype == chosen
            ]
            harness.run(SUITES[chosen], cases, options, seconds=20, least=3)


if __name__ == "__main__":
    main()
