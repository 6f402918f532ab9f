"""Judges of answers: any Python function of a question, a reference and an answer, or a model behind an endpoint."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

# (question, reference, answer) -> a score from 0, wrong, to 1, right. See `judged` for what else one may have.
Judge = Callable[..., float]

# GistPool's Appendix C describes its prompt, a judge with the full context and the right response, without printing it
# in the stored text; these words are gistkit's own.
TEMPLATE = """\
You grade an answer to a question about a document.

Document:
{context}

Question:
{question}

Reference answer:
{reference}

Answer to grade:
{answer}

The answer is correct if it says what the reference answer says, in whatever words, and nothing that the document \
contradicts. Reply with a JSON object alone: {"score": 1} if it is correct, {"score": 0} if it is not."""

FIELDS = ("context", "question", "reference", "answer")
_FIELD = re.compile("{(" + "|".join(FIELDS) + ")}")
_OBJECT = re.compile(r"\{[^{}]*\}")
# What is read of a reply, in bytes, and the longest wait before another attempt, in seconds.
LARGEST, LONGEST_WAIT = 1 << 20, 30.0
MESSAGE = 200


class JudgeError(OSError):
    """A judge that gave no score."""


class Answered(NamedTuple):
    """What a judge is asked about: texts, with all right answers."""

    question: str
    references: Sequence[str]
    answer: str
    context: str = ""


class OpenAIJudge:
    """A model behind an OpenAI-compatible endpoint that grades answers; a call gives a score from 0 to 1.

    A reply counts if it holds a JSON object with a "score" from 0 to 1; the last such object is taken. A reply without
    one, a failed connection, a timeout and the HTTP statuses 408, 429 and 5xx are tried again, as GistPool's
    Appendix C does three times. Redirects are not followed, as they could carry the key elsewhere.

    Args:
        url: of the interface, such as "http://localhost:8000/v1"; requests go to `url`/chat/completions.
        model: its name there.
        template: the prompt, a user's message, with {question}, {reference}, {answer} and, if the judge is to read the
            whole document as in GistPool, {context}. Other braces are text.
        key: sent as a bearer token; it is in no message, report or `repr`. None: none is sent.
        settings: more fields of the request, such as {"temperature": 0, "max_tokens": 200}.
        timeout: seconds that one attempt may wait for the server.
        attempts: attempts at one score, at least 1.
        wait: seconds before the second attempt, doubled before each other, at most 30. A server's Retry-After counts
            instead where it is longer, up to the same 30.
        concurrency: requests at a time in `judged`, at least 1.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        template: str = TEMPLATE,
        key: str | None = None,
        settings: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
        attempts: int = 3,
        wait: float = 1.0,
        concurrency: int = 4,
    ) -> None:
        _check_url(url)
        if not isinstance(model, str) or not model:
            raise ValueError(f"model: expected the name of a model, got {model!r}")
        if missing := {"question", "reference", "answer"} - {*_FIELD.findall(template)}:
            raise ValueError(f"template: expected {{{min(missing)}}} in it, got {template!r:.80}")
        if key is not None and not re.fullmatch(r"[\x21-\x7e]+", key):
            raise ValueError("key: expected printable ASCII without white space, got something else")
        for name, number, least in (("attempts", attempts, 1), ("concurrency", concurrency, 1), ("wait", wait, 0)):
            if not least <= number < math.inf:
                raise ValueError(f"{name}: expected at least {least}, got {number}")
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout: expected a number above 0, got {timeout}")
        self.url, self.model, self.template = url.rstrip("/"), model, template
        self.settings = {"temperature": 0, **(settings or {})}
        self.timeout, self.attempts, self.wait, self.concurrency = timeout, attempts, wait, concurrency
        self.reads_context = "{context}" in template
        self._key = key
        self._opener = build_opener(_NoRedirects)

    def __repr__(self) -> str:
        return f"OpenAIJudge({self.url!r}, {self.model!r})"

    @property
    def description(self) -> dict[str, Any]:
        """What a report says of the judge; never the key."""
        return {"url": self.url, "model": self.model, "template": self.template, "settings": self.settings}

    def check(self) -> None:
        """Asks for the score of one answer, so that a wrong address, name or key shows before an evaluation.

        Raises:
            JudgeError: if none came.
        """
        self("What is one and one?", "2", "2", context="One and one are two.")

    def __call__(self, question: str, reference: str, answer: str, *, context: str = "") -> float:
        """The score of one answer.

        Raises:
            JudgeError: if no attempt gave one, with the reason of the last one in a line.
        """
        texts = {"question": question, "reference": reference, "answer": answer, "context": context}
        prompt = _FIELD.sub(lambda match: texts[match[1]], self.template)
        reason, delay = "", self.wait
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(min(delay, LONGEST_WAIT))
                delay = self.wait * 2**attempt
            try:
                return _score(self._reply(prompt))
            except HTTPError as error:
                with error:
                    reason = self._reason(error)
                    if error.code not in (408, 429) and error.code < 500:
                        break
                    delay = max(delay, _seconds(error.headers.get("Retry-After")))
            except (OSError, HTTPException, ValueError) as error:
                reason = str(getattr(error, "reason", "") or error or type(error).__name__)
        attempts = f"{attempt + 1} attempt{'s' if attempt else ''}"
        message = " ".join(reason.split())[:MESSAGE]
        raise JudgeError(f"judge: expected a score from {self.model} at {self.url}, got none in {attempts}: {message}")

    def _reply(self, prompt: str) -> str:
        """The text of the model's reply."""
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}], **self.settings}
        headers = {"Content-Type": "application/json"} | (
            {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        )
        request = Request(f"{self.url}/chat/completions", json.dumps(body).encode(), headers, method="POST")
        with self._opener.open(request, timeout=self.timeout) as response:
            content = response.read(LARGEST)
        try:
            text = json.loads(content)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"a reply without choices[0].message.content: {content[:80]!r}") from error
        if not isinstance(text, str):
            raise ValueError(f"a reply whose content is no text: {text!r:.80}")
        return text

    def _reason(self, error: HTTPError) -> str:
        """The status, and what the server says of it, except where that may repeat a part of the key."""
        reason = f"HTTP {error.code} {error.reason}"
        if error.code in (401, 403):
            return reason
        said = error.read(LARGEST).decode("utf-8", "replace")
        if self._key:
            said = said.replace(self._key, "***")
        return f"{reason}: {said}" if said.strip() else reason


def judged(
    judge: Judge, answers: Sequence[Answered], *, on_answer: Callable[[], Any] = lambda: None
) -> list[float | None]:
    """The scores of answers, from 0 to 1; None where the judge raised a `JudgeError`.

    An answer with several references has the best score over them; after a 1 the others are not asked for.

    Args:
        judge: called as judge(question, reference, answer). An attribute `reads_context` that is true adds the keyword
            `context`, the whole document; an attribute `concurrency` is how many threads may call it at a time.
        answers: the texts.
        on_answer: called in this thread after each answer, in their order.

    Raises:
        ValueError: if a score is no number from 0 to 1. What else a judge raises ends the evaluation.
    """
    scores = []
    for score in _in_order(partial(_best, judge), answers, int(getattr(judge, "concurrency", 1))):
        scores.append(score)
        on_answer()
    return scores


def _best(judge: Judge, answered: Answered) -> float | None:
    best = None
    more = {"context": answered.context} if getattr(judge, "reads_context", False) else {}
    for reference in dict.fromkeys(answered.references):
        try:
            score = judge(answered.question, reference, answered.answer, **more)
        except JudgeError:
            continue
        if not isinstance(score, int | float) or not 0 <= score <= 1:
            raise ValueError(f"judge: expected a score from 0 to 1, got {score!r}")
        best = max(best or 0.0, float(score))
        if best == 1:
            break
    return best


def _in_order(
    score: Callable[[Answered], float | None], answers: Iterable[Answered], threads: int
) -> Iterator[float | None]:
    if threads <= 1:
        yield from map(score, answers)
        return
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(score, answer) for answer in answers]
        try:
            for future in futures:
                yield future.result()
        finally:
            # After an error, or Ctrl-C, what waits is not asked for.
            pool.shutdown(wait=False, cancel_futures=True)


class _NoRedirects(HTTPRedirectHandler):
    """Leaves a redirect as the error that it then is."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except (ValueError, AttributeError) as error:
        raise ValueError(f"url: expected an address such as http://localhost:8000/v1, got {url!r:.80}") from error
    if parts.username is not None or parts.password is not None:
        raise ValueError("url: expected no user or password in it, got one; give a key as `key`")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ValueError(f"url: expected an address such as http://localhost:8000/v1, got {url!r:.80}")


def _score(text: str) -> float:
    """The score of the last JSON object in a reply that has one."""
    for part in reversed(_OBJECT.findall(text)):
        try:
            score = json.loads(part).get("score")
        except (ValueError, RecursionError):
            continue
        if isinstance(score, int | float) and 0 <= score <= 1:
            return float(score)
    raise ValueError(f'a reply without {{"score": a number from 0 to 1}}: {text!r:.80}')


def _seconds(header: str | None) -> float:
    """Retry-After in seconds; 0 where it is a date or missing."""
    return float(header) if header and header.isdecimal() and len(header) < 9 else 0.0
