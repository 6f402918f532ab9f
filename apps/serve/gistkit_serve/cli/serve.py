"""`gistkit serve`: a server that compresses texts once and answers questions about them in OpenAI's chat format."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gistkit.options.arguments import add_command, device, existing, number, path, positive, whole
from gistkit.options.models import (
    add_compressor,
    add_memory_dtype,
    add_model,
    chosen_compressor,
    load_model,
    memory_dtype,
)

KEY = "GISTKIT_API_KEY"
# Of a shorter one too little is kept to answer from.
EXAMPLE = "The office opens at 8:30. The gate code is 4471. Olga Singh: 0171 293488."
EXAMPLES = """\
example: gistkit serve
example: gistkit serve --model ./llama --compressor runs/x500 --memories memories/ --port 8080
example: gistkit serve --memories memories/ --max-memories 1000 --ram 4e9 --disk 5e10 --batch 32"""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "serve", _run, "serve memories over HTTP: compress once, ask often in OpenAI's chat format", EXAMPLES
    )
    parser.set_defaults(saved=_saved)
    parser.add_argument(
        "--host", default="127.0.0.1",
        help="address to listen on; the server has no TLS, so let other machines reach it through a proxy with TLS "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--port", type=whole(0, 65535), default=8000, help="port to listen on; 0: any free one (default: %(default)s)"
    )
    parser.add_argument(
        "--memories", type=path, metavar="FOLDER",
        help="keep memories there, also for the next start (default: a temporary folder, removed at the end)",
    )  # fmt: skip
    parser.add_argument(
        "--store", type=existing, action="append", default=[], metavar="PATH",
        help="a .gist file, or a store of `gistkit compress`, that questions may name too; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--api-key", metavar="KEY",
        help=f"bearer token that requests must send; the list of processes shows this option, but not the variable "
        f"{KEY} (default: that variable, or none)",
    )  # fmt: skip
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME",
        help="names of the model in requests; answers have the first (default: the compressor's name)",
    )  # fmt: skip
    parser.add_argument(
        "--log-level", choices=("info", "warning"), default="info", help="info: a line for each request; warning: none"
    )
    add_model(parser)
    add_memory_dtype(parser)
    add_compressor(parser)
    parser.add_argument(
        "--chat", action="store_true",
        help="the model's own chat template around questions (default: ### Question: and ### Answer: lines, as in "
        "training)",
    )  # fmt: skip
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-memories", type=positive, default=10000,
        help="most memories; beyond it the least recently used are removed (default: %(default)s)",
    )  # fmt: skip
    limits.add_argument(
        "--ram", type=number(0), default=1e9, metavar="BYTES",
        help="most bytes of memories in RAM; others are read from their files (default: 1e9)",
    )  # fmt: skip
    limits.add_argument(
        "--disk", type=number(1), default=1e10, metavar="BYTES",
        help="most bytes of files; beyond it the least recently used memories are removed (default: 1e10)",
    )  # fmt: skip
    limits.add_argument(
        "--max-text-tokens", type=positive, help="most tokens of a text (default: the model's positions)"
    )
    limits.add_argument(
        "--max-new-tokens", type=positive, default=1024, help="most tokens of an answer (default: %(default)s)"
    )
    limits.add_argument(
        "--max-body", type=positive, default=2**20, metavar="BYTES", help="most bytes of a request (default: 1 MiB)"
    )
    limits.add_argument(
        "--timeout", type=number(0.001), default=120, metavar="SECONDS",
        help="most time from a request to the end of its answer (default: %(default)s)",
    )  # fmt: skip
    limits.add_argument(
        "--queue", type=positive, default=128,
        help="most questions, and most texts, that wait; more are refused (default: %(default)s)",
    )  # fmt: skip
    limits.add_argument(
        "--peer", type=positive, help="most requests at a time from one other machine (default: half of --queue)"
    )
    limits.add_argument(
        "--batch", type=positive, default=16, help="most questions that are answered together (default: %(default)s)"
    )
    limits.add_argument(
        "--batch-tokens", type=positive, default=16384,
        help="most tokens answered together, with memories, answers and padding (default: %(default)s)",
    )  # fmt: skip


def _run(arguments: argparse.Namespace) -> int:
    device_name = device(arguments.device)
    key = _key(arguments)

    with ExitStack() as stack:
        # An address that is taken is told before the model is loaded.
        listener = stack.enter_context(_listener(arguments.host, arguments.port))
        app, repository, name = _application(arguments, device_name, key, _names(listener), stack)
        _greet(listener, name, repository, arguments, key)

        from gistkit_serve.server.running import run

        run(app, listener)
    return 0


def _application(
    arguments: argparse.Namespace, device_name: str, key: str | None, hosts: frozenset[str] | None, stack: ExitStack
) -> tuple[Any, Any, str]:
    """The application with its model, its repository, which is open as long as the stack is, and the model's name."""
    from gistkit.ask.turns import chat_turns
    from gistkit_serve.server import Limits, MemoryRepository, Offline, application
    from gistkit_serve.server.repository import temporary_folder

    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name)
    compressor = chosen_compressor(arguments, model)
    compressor.tokenizer = tokenizer
    try:
        turns = chat_turns(tokenizer) if arguments.chat else None
    except ValueError as error:
        raise ValueError(f"--chat: {error}") from error
    logging.basicConfig(format="gistkit serve: %(message)s", level=logging.WARNING)
    logging.getLogger("gistkit_serve").setLevel(arguments.log_level.upper())
    repository = MemoryRepository(
        arguments.memories or stack.enter_context(temporary_folder()), compressor, most=arguments.max_memories,
        ram_bytes=int(arguments.ram), disk_bytes=int(arguments.disk), dtype=memory_dtype(arguments.memory_dtype, model),
        offline=Offline(arguments.store, compressor),
    )  # fmt: skip
    stack.callback(repository.close)
    limits = Limits(
        text_tokens=arguments.max_text_tokens or getattr(compressor.config, "max_position_embeddings", None) or 2**15,
        new_tokens=arguments.max_new_tokens,
        batch=arguments.batch,
        batch_tokens=arguments.batch_tokens,
        queue=arguments.queue,
    )
    names = arguments.served_model_name or [_name(arguments)]
    app = application(
        compressor, repository, names=names, turns=turns, limits=limits, seconds=arguments.timeout,
        body_bytes=arguments.max_body, hosts=hosts, key=key, peer=arguments.peer,
    )  # fmt: skip
    return app, repository, names[0]


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens; who comes before uvicorn takes it over waits."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        # `create_server` adds the address to what the system says; the numbers of `getaddrinfo` are below 0.
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or error
        raise ValueError(f"--port: expected a free address, got {host} and {port}: {reason}") from error


def _is_loopback(listener: socket.socket) -> bool:
    """Whether other machines cannot reach an address."""
    host: str = listener.getsockname()[0]
    return host.startswith("127.") or host == "::1"


def _names(listener: socket.socket) -> frozenset[str] | None:
    """What requests may call an address; None: anything, where other machines reach it."""
    from gistkit_serve.server.app import LOOPBACK

    return LOOPBACK | {listener.getsockname()[0]} if _is_loopback(listener) else None


def _key(arguments: argparse.Namespace) -> str | None:
    """What requests must have, without the line end of a file that it came from; None: nothing."""
    given = {"--api-key": arguments.api_key, KEY: os.environ.get(KEY)}
    name, key = next(((name, key.strip()) for name, key in given.items() if key is not None), ("", None))
    if key == "":
        raise ValueError(f"{name}: expected a key, got an empty one")
    return key


def _name(arguments: argparse.Namespace) -> str:
    """What `/v1/models` calls the model."""
    from gistkit.common.trained import default_for

    if arguments.compressor is not None:
        return str(Path(arguments.compressor).name)
    untrained = arguments.method is not None or default_for(arguments.model) is None
    return f"{Path(arguments.model).name}-untrained" if untrained else str(default_for(arguments.model))


def _greet(listener: socket.socket, name: str, repository: Any, arguments: argparse.Namespace, key: str | None) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"{name} at {url}, {_kept(arguments)}, {len(repository)} there; Ctrl-C ends it")
    print("compress once, then ask with its id as often as you like:")
    json = "-H 'content-type: application/json'"
    if key is not None:
        json += f' -H "authorization: Bearer ${KEY}"'
    print(f"""  curl {url}/v1/memories {json} -d '{{"text": "{EXAMPLE}"}}'""")
    print(
        f"  curl {url}/v1/chat/completions {json} "
        """-d '{"memory": "ID", "messages": [{"role": "user", "content": "What is the gate code?"}]}'"""
    )
    sys.stdout.flush()
    if not _is_loopback(listener):
        keys = "without keys and " if key is None else ""
        print(f"gistkit serve: other machines can reach this address, {keys}without TLS", file=sys.stderr)


def _kept(arguments: argparse.Namespace) -> str:
    return "memories end with it" if arguments.memories is None else f"memories in {arguments.memories}"


def _saved(arguments: argparse.Namespace) -> str:
    if arguments.memories is None:
        return "its memories are gone, --memories FOLDER keeps them"
    return f"memories are in {arguments.memories}"
