"""Files of a model on the Hugging Face Hub."""

import os

from meshscope.errors import SpecError

HUB = "https://huggingface.co"
HUB_TIMEOUT_S = 5.0


class NotDownloadedError(SpecError):
    """A file that the Hub does not give; the message is the reason."""

    def __init__(self, reason: str, *, is_missing: bool = False) -> None:
        """`is_missing` if the model has no such file, or no such model exists."""
        super().__init__(reason)
        self.is_missing = is_missing


def file_url(name: str, file: str) -> str:
    """The address of a file of `owner/name`."""
    from urllib.parse import quote  # noqa: PLC0415  slow to import, rarely needed

    return f"{HUB}/{quote(name)}/resolve/main/{file}"


def downloaded(name: str, file: str, *, max_bytes: int) -> bytes:
    """The first `max_bytes` of a file of `owner/name`; NotDownloadedError if it is unavailable."""
    import urllib.error  # noqa: PLC0415  slow to import, rarely needed
    import urllib.request  # noqa: PLC0415
    from http import HTTPStatus  # noqa: PLC0415

    token = os.environ.get("HF_TOKEN")
    request = urllib.request.Request(  # noqa: S310  HUB is https
        file_url(name, file), headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S) as reply:  # noqa: S310  HUB is https
            return reply.read(max_bytes)
    except urllib.error.HTTPError as error:
        reason = f"the Hub answered {error.code} for '{name}'"
        if error.code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            reason += " (gated or private: set HF_TOKEN)"
        is_missing = error.code == HTTPStatus.NOT_FOUND
        raise NotDownloadedError(reason, is_missing=is_missing) from error
    except OSError as error:
        raise NotDownloadedError("the Hub cannot be reached") from error
