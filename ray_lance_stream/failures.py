"""Lance's failures as errors of the library, without secrets.

Lance fails with OSError, ValueError or a PanicException, which is a BaseException that threads and retries would miss;
`guarded` makes an error of the library of all of them. Its text may repeat a URI or a storage option, so secrets are
cut out of the message, and the original is chained only when it holds none.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar, cast
from urllib.parse import unquote

from ray_lance_stream.errors import StreamError

T = TypeVar("T")

_MAX_TEXT_CHARS = 1000
# Storage options that are no secrets, and whose values (regions, "true") would garble a message if cut out of it.
_HARMLESS_OPTION = re.compile(
    r"region|endpoint|allow_http|timeout|retr|virtual|express|expires|user_agent|account_name", re.I
)
MIN_SECRET_CHARS = 4
_QUERY_VALUE = re.compile(r"(?<=[?&])([\w.%-]+)=[^&#\s'\",)]+")
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
# How Lance puts that an object store knows the credentials no more, or never did.
_REFUSED = re.compile(
    r"status code: 40[13]|necessary privileges|Unauthenticated|ExpiredToken|InvalidToken|InvalidAccessKeyId"
)
# What its object store gave up after retries, or lost in the middle of an answer.
_PASSING = re.compile(r"retries, max_retries|HTTP error")
# That a result is too large for the offsets of an Arrow array, in the words of Lance, Arrow and of this library.
_OVERFLOW = re.compile(r"offset overflow|overflow list array|i32::MAX|large container type|may hold at most", re.I)
# That there is no way to read what lies there, or not enough of something to read it with.
_LIMIT = re.compile(
    r"not supported|not (?:yet )?implemented|unsupported data type|resources exhausted|allocat|os error (?:12|24)\b",
    re.I,
)
_RUST_LOCATION = re.compile(r",?\s*/\S+\.rs:\d+(:\d+)?")


def secrets_of(uri: str, options: Mapping[str, str] | None) -> set[str]:
    """The parts of a URI and its storage options that no message may show."""
    found = {value for key, value in (options or {}).items() if not _HARMLESS_OPTION.search(key)}
    authority = uri.partition("://")[2].partition("/")[0]
    if "@" in authority:
        user_info = authority.rpartition("@")[0]
        found |= {user_info, *user_info.split(":")[1:]}
    for pair in uri.partition("?")[2].partition("#")[0].split("&"):
        found.add(pair.partition("=")[2])
    found |= {unquote(value) for value in found}
    return {value for value in found if len(value) >= MIN_SECRET_CHARS}


def redact(text: str, secrets: Collection[str], max_chars: int = _MAX_TEXT_CHARS) -> str:
    """`text`, cut, without secrets, user info and query values of URIs, and source positions of Lance's own code."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    text = _USER_INFO.sub("***@", _QUERY_VALUE.sub(r"\1=***", text))
    text = _RUST_LOCATION.sub("", text).strip()
    return text if len(text) <= max_chars else text[:max_chars] + "..."


def is_refusal(text: str) -> bool:
    """Whether a failure of Lance is one of credentials."""
    return bool(_REFUSED.search(text))


def is_passing(text: str) -> bool:
    """Whether a failure of Lance is one of the way to the object store, and not of what lies there."""
    return bool(_PASSING.search(text))


def is_overflow(text: str) -> bool:
    """Whether a failure is that of a result too large for one Arrow array: fewer rows can be read."""
    return bool(_OVERFLOW.search(text))


def is_limit(text: str) -> bool:
    """Whether a failure of Lance is one of what it can read or hold at once, and not of what lies there."""
    return is_overflow(text) or bool(_LIMIT.search(text))


def is_cut_listing(text: str) -> bool:
    """Whether a failure of Lance is a listing whose answer ended in its middle."""
    return "list response body" in text


def attempt(function: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """(result, None), or (None, failure) for an exception or a Lance panic; a KeyboardInterrupt and its like pass.

    Returned rather than handled in place, because an error raised in an except block carries the failure, and with it
    perhaps a secret, as its context.
    """
    try:
        return function(), None
    except Exception as failure:
        return None, failure
    except BaseException as failure:
        if type(failure).__name__ != "PanicException":
            raise
        return None, failure


def chained(error: StreamError, failure: BaseException, secrets: Collection[str]) -> StreamError:
    """`error`, caused by the failure that it reports unless that one's text holds a secret."""
    text = "".join(traceback.format_exception(failure))
    is_secret = any(s in text for s in secrets) or _USER_INFO.search(text) or _QUERY_VALUE.search(text)
    error.__cause__ = None if is_secret else failure
    return error


def guarded(function: Callable[[], T], action: str, error: type[StreamError], secrets: Collection[str]) -> T:
    """`function()`, with every failure of Lance raised as `error` that starts with the action."""
    result, failure = attempt(function)
    if failure is not None:
        if isinstance(failure, StreamError):
            raise failure
        raise chained(error(f"{action}: {redact(str(failure), secrets)}"), failure, secrets)
    return cast(T, result)
