"""The bodies of requests. What would change an answer and is not supported is refused, not passed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from gistkit_serve.server.errors import Refused

# Fields of OpenAI's chat format that change no answer, and those that change none with these values.
_IDLE = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "prediction",
}  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none", "minimal"),
    "verbosity": ("medium",),
    # Those of other servers.
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
}
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
# An answer sent back has them.
_OF_ANSWERS = {"refusal", "annotations", "audio", "function_call", "tool_calls", "name"}


def _characters(text: str) -> str:
    """JSON can name halves of characters, which no tokenizer takes."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("expected a text of whole characters, got half of one")
    return text


Words = Annotated[str, AfterValidator(_characters)]
Stop = Annotated[str, Field(max_length=1000), AfterValidator(_characters)]


class TextBody(BaseModel):
    """A text to compress."""

    model_config = _STRICT
    text: Words


class Part(BaseModel):
    """A part of a message."""

    model_config = _STRICT
    type: Literal["text"]
    text: Words


class Message(BaseModel):
    """A question or the answer to one, or before them what a system or a developer says."""

    model_config = _STRICT
    role: Literal["system", "developer", "user", "assistant"]
    content: Words | list[Part]

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name not in _OF_ANSWERS or value not in (None, [], "")}

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(BaseModel):
    """What a stream has besides the answer."""

    model_config = _STRICT
    include_usage: bool = False
    # Padding of the stream's chunks, which there is none of here.
    include_obfuscation: bool = False


class ChatBody(BaseModel):
    """A chat completion of OpenAI's format, with the field `memory`."""

    model_config = _STRICT
    memory: Annotated[list[str], Field(max_length=64)] = []
    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)]
    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: Annotated[list[Stop], Field(max_length=4)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        """One name for each thing, without fields that change nothing."""
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if value is not None and name not in _IDLE}
        for name, neutral in _NEUTRAL.items():
            if name in data and data.pop(name) not in neutral:
                raise Refused(400, f"{name}: expected {neutral[0]!r} or none, other values are not supported", name)
        if "max_completion_tokens" in data:
            data["max_tokens"] = data.pop("max_completion_tokens")
        # One text is a list of one.
        return data | {name: [data[name]] for name in ("memory", "stop") if isinstance(data.get(name), str)}

    def turns(self) -> list[str]:
        """Questions and the answers between them; what a system says begins the first question.

        Raises:
            Refused: if they do not alternate, or a question is not the last one.
        """
        count = next((place for place, one in enumerate(self.messages) if one.role in ("user", "assistant")), None)
        system, turns = self.messages[:count], self.messages[len(self.messages) if count is None else count :]
        roles = [message.role for message in turns]
        expected = ["user" if index % 2 == 0 else "assistant" for index in range(len(roles))]
        if roles != expected or len(roles) % 2 == 0:
            shown = ", ".join(message.role for message in self.messages[:6]) + (", ..." if self.messages[6:] else "")
            raise Refused(
                400, f"messages: expected system messages, then user and assistant in turn, user last, got {shown}",
                "messages",
            )  # fmt: skip
        first, *others = [message.text for message in turns]
        return ["\n\n".join([*(message.text for message in system), first]), *others]
