"""How a command ends after an error: one line for mistakes of the user, a traceback for our own."""

import errno
import linecache
import os
import pathlib
import signal
import sys
import sysconfig
import traceback
import typing

from maxmeg.config.schema import Config
from maxmeg.config.setting import walk

# Errors for the user, if a `raise` statement of this program raised them: no traceback.
EXIT_CODES = {ValueError: 2, NotImplementedError: 2, OSError: 2}
EXIT_CODES |= {FloatingPointError: 1, MemoryError: 1}
RESTART_CODE = 75  # EX_TEMPFAIL: a hang or a lost process or disk; launchers start the run again
# Errors of file systems and networks that may be gone when the run starts again.
TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO}
TRANSIENT |= {errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET}
TRANSIENT |= {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH}
REMEDIES = {
    errno.EEXIST: "a file is there: name a folder",
    errno.ENOTDIR: "a file is there: name a folder",
    errno.EROFS: "nothing can be written there: name a folder on another file system",
    errno.ENOSPC: "free some space, or name a folder on another disk",
}
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_STANDARD_LIBRARY = pathlib.Path(sysconfig.get_path("stdlib")).resolve()
_LIBRARIES = {"site-packages", "dist-packages"}  # folders of installed packages


def report(error: BaseException, config: Config | None, options: typing.Any = None) -> int:
    """Print an error that ends a command: one line if it is for the user, else a traceback.

    Returns the command's exit code.
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if not is_for_user(error):
        traceback.print_exception(error)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    text = _os_error_text(error, config, options) if isinstance(error, OSError) else error
    print(f"error: {text}", file=sys.stderr)
    if isinstance(error, OSError) and error.errno in TRANSIENT:
        return RESTART_CODE
    return next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))


def is_for_user(error: BaseException) -> bool:
    """Return whether a `raise` statement of this program or of a config file raised an error."""
    if not isinstance(error, tuple(EXIT_CODES)):
        return False
    if isinstance(error, OSError):
        return True
    *_, frame = traceback.extract_tb(error.__traceback__)
    path = pathlib.Path(frame.filename).resolve()
    library = not _LIBRARIES.isdisjoint(path.parts) or _STANDARD_LIBRARY in path.parents
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return line.startswith("raise ") and (_PACKAGE in path.parents or not library)


def _os_error_text(error, config, options):
    """Return the text of an OSError, with the setting that holds its path."""
    if error.errno == errno.EADDRINUSE and hasattr(options, "port"):
        return f"--port={options.port} is taken: --port=0 finds a free one ({error})"
    if not isinstance(error.filename, str | os.PathLike) or not error.strerror:
        return str(error)
    place = os.path.abspath(error.filename)
    settings = [
        (name, value)
        for section in (config, options)
        if section is not None
        for name, value, _ in walk(section)
        if isinstance(value, str) and value
    ]
    inside = [s for s in settings if _is_inside(place, s[1])]
    above = [s for s in settings if _is_inside(s[1], place)]  # parent folders are created too
    if not inside + above:
        return str(error)
    name, value = max(inside or above[:1], key=lambda setting: len(os.path.abspath(setting[1])))
    where = "" if value == os.fspath(error.filename) else f" ({error.filename})"
    remedy = REMEDIES.get(error.errno, "name a path that can be used")
    return f"--{name}={value}: {error.strerror}{where}; {remedy}"


def _is_inside(path, folder):
    return pathlib.Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))
