"""GistTextGeneration: a transformers pipeline that compresses a context and answers questions about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from gistkit.common.text_ids import filled_ids
from gistkit.compress.compressor import Compressor
from gistkit.compress.tokens import QUESTION, texts_of
from gistkit.evaluate.prompts import CONTEXT, chat_markers

PIPELINE = "gist-text-generation"


def register_pipeline() -> None:
    """Makes `transformers.pipeline("gist-text-generation", ...)` a `GistTextGeneration`, until the process ends."""
    PIPELINE_REGISTRY.supported_tasks.pop(PIPELINE, None)
    PIPELINE_REGISTRY.register_pipeline(PIPELINE, pipeline_class=GistTextGeneration, pt_model=AutoModelForCausalLM)


class GistTextGeneration(Pipeline):
    """Answers questions about a context that it compresses; `register_pipeline` registers it.

        register_pipeline()
        pipe = pipeline("gist-text-generation", model=model, tokenizer=tokenizer, compressor=compressor)
        pipe(context, question="Who wrote it?", max_new_tokens=40)["answer"]
        pipe(context, questions=["Who wrote it?", "When?"])["answers"]

    Several contexts give a list of such results. A tokenizer with a chat template puts context and question into one
    message, including what the template writes before the context.

    Args:
        compressor: a compressor around `model`, or a folder or name for `Compressor.from_pretrained` with `model` as
            base model.
        args, kwargs: as for any pipeline, such as model and tokenizer; and defaults of a call's.

    A call takes a context, or a list of them, and

        question, questions: a text about each context, or several.
        template: the text around a {question}, after the context. None: the tokenizer's chat template, or else the
            lines of training.
        others: as `Compressor.generate`, such as max_new_tokens, num_beams and generation_config.
    """

    _load_processor: Any = False
    _load_image_processor: Any = False
    _load_feature_extractor: Any = False
    _load_tokenizer: Any = True

    def __init__(self, *args: Any, compressor: Compressor | str | Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(compressor, Compressor):
            compressor = Compressor.from_pretrained(compressor, self.model).eval()
        if compressor.model is not self.model:
            raise ValueError(
                f"compressor: expected one around model, got one around another {type(compressor.model).__name__}"
            )
        self.compressor = compressor.to(self.model.device)
        if self.tokenizer is not None:
            compressor.tokenizer = self.tokenizer

    def _sanitize_parameters(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        asked = {name: options.pop(name, None) for name in ("question", "questions", "template")}
        return {name: value for name, value in asked.items() if value is not None}, options, {}

    def preprocess(  # type: ignore[override]
        self,
        context: str,
        question: str | None = None,
        questions: Sequence[str] | None = None,
        template: str | None = None,
    ) -> dict[str, Any]:
        """The text to compress, what to ask of it, and the template of that."""
        if (question is None) == (questions is None):
            got = "neither" if question is None else "both"
            raise ValueError(f"question: expected either it or questions, got {got}")
        if template is None and getattr(self.compressor.tokenizer, "chat_template", None):
            before, after = chat_markers(self.compressor.tokenizer)
            template = f"\n{{question}}{after}"
        else:
            before = ""
        (text,) = texts_of("context", context)
        context_ids = filled_ids(before + CONTEXT, CONTEXT, text, self.compressor.tokenizer, special_tokens=True)
        return {"context": context_ids, "asked": questions if question is None else question, "template": template}

    def _forward(self, inputs: dict[str, Any], **options: Any) -> Any:  # type: ignore[override]
        if isinstance(inputs["context"][0], list):
            # A batch_size above 1.
            rows = zip(*inputs.values(), strict=True)
            return {"answer": [self._forward(dict(zip(inputs, row, strict=True)), **options)["answer"] for row in rows]}
        memory = self.compressor.encode([inputs["context"]])
        template = QUESTION if inputs["template"] is None else inputs["template"]
        return {"answer": self.compressor.ask(memory, inputs["asked"], template=template, **options)}

    def postprocess(self, outputs: Any) -> dict[str, Any]:  # type: ignore[override]
        """{"answer": text} of one question, or {"answers": texts}."""
        answer = outputs["answer"]
        return {"answer": answer} if isinstance(answer, str) else {"answers": answer}
