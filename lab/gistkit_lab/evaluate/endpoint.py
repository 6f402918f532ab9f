"""PromptedJudge: a model behind an OpenAI-compatible interface, which is asked one prompt at a time."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

# What is read of a reply, in bytes, and the longest wait before another attempt, in seconds.
LARGEST, LONGEST_WAIT = 1 << 20, 30.0
# Characters that are read for the objects of a reply, at most: those that are nested are read again and again.
MOST_READ = 1 << 22
MESSAGE = 200

Read = TypeVar("Read")
Item = TypeVar("Item")


class JudgeError(OSError):
    """A judge that gave no score."""


class PromptedJudge:
    """A judge behind an OpenAI-compatible endpoint, which is called with the texts of the `fields` of its prompt.

    Subclasses have their own `default` prompt with its `fields`, texts for a `trial`, what is `wanted` of a reply, in
    which `form`, and how that is read.

    A reply that cannot be read, a failed connection, a timeout and the HTTP statuses 408, 429 and 5xx are tried again.
    Redirects are not followed, as they could carry the key elsewhere.

    Args:
        url: of the interface, such as "http://localhost:8000/v1"; requests go to `url`/chat/completions.
        model: its name there.
        template: the prompt, a user's message with the fields and, if the judge is to read the whole document,
            {context}. Other braces are text. None: the default.
        key: sent as a bearer token; it is in no message, report or `repr`. None: none is sent.
        settings: more fields of the request, such as {"temperature": 0, "max_tokens": 200}.
        timeout: seconds that one attempt may wait for the server.
        attempts: attempts at one reply, at least 1.
        wait: seconds before the second attempt, doubled before each other, at most 30. A server's Retry-After counts
            instead where it is longer, up to the same 30.
        concurrency: requests at a time where there are many, at least 1.

    Raises:
        ValueError: if an argument is out of range.
    """

    default: str
    fields: tuple[str, ...]
    trial: tuple[str, ...]
    wanted: str
    form: str

    def __init__(
        self,
        url: str,
        model: str,
        *,
        template: str | None = None,
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
        if key is not None and not re.fullmatch(r"[\x21-\x7e]+", key):
            raise ValueError("key: expected printable ASCII without white space, got something else")
        for name, number, least in (("attempts", attempts, 1), ("concurrency", concurrency, 1), ("wait", wait, 0)):
            if not least <= number < math.inf:
                raise ValueError(f"{name}: expected at least {least}, got {number}")
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout: expected a number above 0, got {timeout}")
        self.url, self.model = url.rstrip("/"), model
        self.settings = {"temperature": 0, **(settings or {})}
        self.timeout, self.attempts, self.wait, self.concurrency = timeout, attempts, wait, concurrency
        self.template = self.default if template is None else template
        if missing := [field for field in self.fields if f"{{{field}}}" not in self.template]:
            raise ValueError(f"template: expected {{{min(missing)}}} in it, got {self.template!r:.80}")
        self.reads_context = "{context}" in self.template
        self._key = key
        self._opener = build_opener(_NoRedirects)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, {self.model!r})"

    @property
    def description(self) -> dict[str, Any]:
        """What a report says of it; never the key."""
        return {"url": self.url, "model": self.model, "settings": self.settings, "template": self.template}

    def read(self, found: Mapping[str, Any]) -> float | None:
        """What a JSON object of a reply says, from 0 to 1; None: nothing."""
        raise NotImplementedError

    def check(self) -> None:
        """Asks once, so that a wrong address, name or key shows, as a JudgeError, before all the others."""
        self(*self.trial, context="One and one are two.")

    def __call__(self, *texts: str, context: str = "") -> float:
        """What the judge says of the texts of its fields, from 0 to 1, by the last object of a reply that says it.

        Raises:
            JudgeError: if no attempt gave it, with the reason of the last one in a line.
        """
        filled = dict(zip(self.fields, texts, strict=True)) | {"context": context}
        # Other braces are text, as are those of the texts.
        prompt = re.sub("{(" + "|".join(filled) + ")}", lambda match: filled[match[1]], self.template)
        reason, delay = "", self.wait
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(min(delay, LONGEST_WAIT))
                delay = self.wait * 2**attempt
            try:
                text = self._reply(prompt)
                if (said := next((x for x in map(self.read, objects(text)) if x is not None), None)) is not None:
                    return said
                raise ValueError(f"a reply without {self.form}: {text!r:.80}")
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
        raise JudgeError(
            f"judge: expected {self.wanted} from {self.model} at {self.url}, got none in {attempts}: {message}"
        )

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
        said = ""
        # The body may end early.
        with suppress(OSError, HTTPException):
            said = error.read(LARGEST).decode("utf-8", "replace")
        if self._key:
            said = said.replace(self._key, "***")
        return f"{reason}: {said}" if said.strip() else reason


def in_order(
    asked: object, function: Callable[[Item], Read], items: Iterable[Item], on_each: Callable[[], Any] = lambda: None
) -> list[Read]:
    """`map` with a function that asks an object, whose attribute `concurrency` is how many threads may do so at a time.

    `on_each` is called in this thread after each item, in their order. After an error what waits is not asked for.
    """
    found, threads = [], max(1, int(getattr(asked, "concurrency", 1)))
    with ThreadPoolExecutor(threads) as pool:
        for each in (map if threads == 1 else pool.map)(function, items):
            found.append(each)
            on_each()
    return found


def objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects that a reply holds, the last to begin first."""
    decoder, left = json.JSONDecoder(), MOST_READ
    for brace in reversed([match.start() for match in re.finditer("{", text)]):
        try:
            found, end = decoder.raw_decode(text, brace)
            yield found
        except (ValueError, RecursionError):
            end = len(text)
        left -= end - brace
        if left < 0:
            return


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


def _seconds(header: str | None) -> float:
    """Retry-After in seconds; 0 where it is a date or missing."""
    return float(header) if header and header.isdecimal() and len(header) < 9 else 0.0
