"""Files that are complete or absent: written in a private folder beside their place, then moved there.

A file's mode follows the umask. Of several writers of one file the last to finish wins. A failed write leaves the file
as it was, and raises one OSError whose line names the file and, where the disk is full, the space.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gistkit.common.messages import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

_JSON_BYTES = 2**24
# An interrupted write leaves a folder of such a name.
PREFIX, SUFFIX = ".gistkit-", ".partial"
Shapes = Mapping[str, tuple[int, ...]]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file; see the module for what holds of all files here."""
    with replacing(path, len(content)) as partial:
        partial.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of text in UTF-8."""
    write_bytes(path, text.encode())


def write_picture(path: Path, figure: Figure, *, dpi: int) -> None:
    """Writes a figure in the format that the name ends with."""
    buffer = BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], dpi=dpi)
    write_bytes(path, buffer.getvalue())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file of tensors that share no memory, with a header of texts by name."""
    from safetensors.torch import save_file

    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path, sum(tensor.nbytes for tensor in own.values())) as partial, _os_errors():
        save_file(own, partial, metadata=None if header is None else dict(header))


def read_tensors(
    path: Path, content: str, broken: str = "a file that cannot be read"
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header and the tensors, on the CPU, of a safetensors file; errors say that it should be `content`.

    Raises:
        OSError: if there is no such file, or it cannot be opened.
        ValueError: if it is truncated or not a safetensors file.
    """
    with _opened(path, content, broken) as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def tensor_shapes(path: Path, content: str) -> Shapes:
    """{name: shape} of a file as in `read_tensors`, all of floating point, only from its header."""
    with _opened(path, content, "a file that cannot be read") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        for name, tensor in slices.items():
            if tensor.get_dtype() not in ("F16", "BF16", "F32", "F64"):
                raise ValueError(f"{name[:60]!r} in {tensor.get_dtype()}")
        return {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}


def read_json(path: Path, content: str) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is too large, or no object of JSON.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected {content}, found none")
    if path.stat().st_size > _JSON_BYTES:
        raise ValueError(f"{path}: expected {content} of at most {_JSON_BYTES} bytes, got {path.stat().st_size}")
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got a file that cannot be read ({one_line(error)})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected settings by name, got {type(value).__name__}")
    return value


@contextmanager
def _opened(path: Path, content: str, broken: str) -> Iterator[Any]:
    """Opens a safetensors file; any error of a malformed file becomes one of the two."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected {content}, found none")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise type(error)(f"{path}: expected {content}, got {error.strerror or error}") from error
    except (SafetensorError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        reason = one_line(error)
        raise ValueError(f"{path}: expected {content}, got {broken} ({reason})") from error


@contextmanager
def replacing(path: Path, size: int | None = None) -> Iterator[Path]:
    """A file to write, which replaces `path` in one move; if writing fails, `path` stays as it was.

    Args:
        path: its folder is made if there is none. Of a link the file is replaced that it leads to.
        size: bytes that are to be written, for the message when the disk is full; None: not known.

    Raises:
        OSError: of the class of what failed, with its errno.
    """
    try:
        if path.is_dir() or (path.exists() and not path.is_file()):
            raise OSError(errno.EINVAL, f"{'a folder' if path.is_dir() else 'no regular file'} there")
        place = Path(os.path.realpath(path))
        with _moved(place.parent, place.parent) as partial:
            yield partial / place.name
    except OSError as error:
        raise _write_error(error, path, size) from error


class Lines:
    """A file to which whole lines are added at its end, each at once: after a write that fails it ends as before.

    Args:
        path: made if there is none; its folder exists.

    Raises:
        OSError: as `replacing`, here and when a line is added.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with one_line_errors(self.path):
            self.file = path.open("ab", buffering=0)

    def write(self, line: str) -> None:
        """Adds a line, given without its end."""
        rest = memoryview(f"{line}\n".encode())
        with one_line_errors(self.path, len(rest)):
            end = os.fstat(self.file.fileno()).st_size
            try:
                while rest:
                    rest = rest[self.file.write(rest) :]
            except BaseException:
                with suppress(OSError):
                    self.file.truncate(end)
                raise

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


@contextmanager
def replacing_files(
    folder: Path, size: int | None = None, *, last: str | None = None, stale: Sequence[Path] = ()
) -> Iterator[Path]:
    """A folder to write, whose files then replace those of the same names in `folder`; if that fails, none does.

    Args:
        folder: made if there is none.
        size: as in `replacing`.
        last: the file without which nothing reads the folder. It goes before any other file does, and is replaced
            after all others: an interruption leaves no mixture that could be read.
        stale: files of the folder that are removed in between.

    Raises:
        OSError: as `replacing`.
    """
    try:
        with _moved(folder, folder.parent, last, stale) as partial, _os_errors():
            yield partial
    except OSError as error:
        raise _write_error(error, folder, size) from error


@contextmanager
def _moved(folder: Path, beside: Path, last: str | None = None, stale: Sequence[Path] = ()) -> Iterator[Path]:
    """A folder in `beside` to write, whose files then move to `folder`; `last` and `stale` as in `replacing_files`."""
    beside.mkdir(parents=True, exist_ok=True)
    with private_folder(beside) as private:
        partial = private / "files"
        partial.mkdir()
        # The mode that the umask and the folder's defaults give to a new file.
        (private / "mode").touch(0o666, exist_ok=False)
        mode = stat.S_IMODE((private / "mode").stat().st_mode)
        yield partial
        written = sorted(path for path in partial.rglob("*") if path.is_file())
        for path in written:
            os.chmod(path, mode)
            # On the disk before it replaces a good file.
            sync(path)
        aside, others = private / "last", [*written, *(path for path in stale if path.exists())]
        try:
            if last is not None and (folder / last).is_file():
                os.replace(folder / last, aside)
                with suppress(OSError):
                    sync(folder)
            for path in stale:
                path.unlink(missing_ok=True)
                with suppress(OSError):
                    # Somebody may have put other files there.
                    path.parent.rmdir()
            for path in sorted(written, key=lambda path: path == partial / str(last)):
                place = folder / path.relative_to(partial)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, place)
                with suppress(OSError):
                    sync(place.parent)
        except BaseException:
            # Nothing has moved or gone yet: the folder is whole again.
            if aside.exists() and all(path.exists() for path in others):
                os.replace(aside, folder / str(last))
            raise


def remove_partials(folder: Path, prefix: str = PREFIX) -> None:
    """Removes what interrupted writes, or holders of a `private_folder`, left in `folder`; who still runs keeps it."""
    for path in folder.glob(f"{prefix}*{SUFFIX}"):
        with suppress(OSError):
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # Root could remove other users' folders too.
                if os.fstat(held).st_uid == os.geteuid():
                    # A writer holds this lock until it ends, however it ends.
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            finally:
                os.close(held)


def lock(folder: Path, user: str) -> int:
    """Holds a folder until the descriptor is closed, however the process ends.

    Raises:
        OSError: if another process holds it, a `user` too, there is no such folder, or its disk has no locks.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        if not isinstance(error, BlockingIOError):
            raise
        raise OSError(f"{folder}: expected a folder of no other {user}, got one that is in use") from error
    return held


@contextmanager
def private_folder(parent: Path, prefix: str = PREFIX) -> Iterator[Path]:
    """A new folder in `parent` of a name that nobody can foresee; removed with all that is in it."""
    with ExitStack() as stack:
        while True:
            private = TemporaryDirectory(SUFFIX, prefix, parent, ignore_cleanup_errors=True)
            path = Path(stack.enter_context(private))
            # `remove_partials` may come between.
            with suppress(FileNotFoundError):
                held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                stack.callback(os.close, held)
                with suppress(OSError):
                    # Some network disks have no locks.
                    fcntl.flock(held, fcntl.LOCK_EX)
            if path.exists():
                break
        yield path


@contextmanager
def one_line_errors(path: Path, size: int | None = None) -> Iterator[None]:
    """Raises an OSError of writing `path` as one line that names it, unless it has one; `size` as in `replacing`."""
    try:
        with _os_errors():
            yield
    except OSError as error:
        # One from here has no reason of the system's beside its line.
        if error.errno is not None and error.strerror is None:
            raise
        raise _write_error(error, path, size) from error


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raises what safetensors and torch say of an error of the system as an OSError."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        if (code := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
    except RuntimeError as error:
        # torch's writer names its own file in place of the system's reason, which is a full disk.
        if "inline_container" not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write_error(error: OSError, path: Path, size: int | None) -> OSError:
    """An error of the same class and errno, in one line that names `path`."""
    reason = error.strerror or one_line(error)
    if error.errno in _FULL:
        # An error of an inner call has a line of its own.
        reason = os.strerror(error.errno)
        needed = "space" if size is None else f"{_amount(size)} of space"
        said = f"expected {needed} to write it, got {_free(path.parent)} ({reason})"
    else:
        elsewhere = error.filename is not None and PREFIX not in str(error.filename) and Path(error.filename) != path
        said = f"expected a file that can be written, got {reason}" + (f" at {error.filename}" if elsewhere else "")
    new = type(error)(f"{path}: {said}")
    new.errno = error.errno
    return new


def _free(folder: Path) -> str:
    try:
        return f"{_amount(shutil.disk_usage(folder).free)} free"
    except OSError:
        return "less"


def _amount(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size:,} bytes"
