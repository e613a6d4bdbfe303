"""The secret that the machines of one job share."""

import os
import stat
from pathlib import Path

VARIABLE = "FLEETX_JOB_SECRET"
_LEAST, _MOST = 16, 4096
_MAKE = "head -c 24 /dev/urandom | base64"


def read_secret(file: Path | None, *, is_needed: bool = True) -> bytes | None:
    """From the file, or from the environment, where it does not stay: workers have no use for it.

    None if there is none and it is not needed.
    """
    given = os.environ.pop(VARIABLE, None)
    if file is not None:
        return _checked(_content(file), f"--secret_file {file}")
    if given is not None:
        return _checked(os.fsencode(given), VARIABLE)
    if not is_needed:
        return None
    raise ValueError(
        "a job on several machines needs a secret that all of them know, so that nobody else can take part. Give "
        f"the same one everywhere, with --secret_file FILE or in the variable {VARIABLE}; `{_MAKE}` makes one."
    )


def _content(file: Path) -> bytes:
    """A little more than a secret may have, so that its length can be checked."""
    try:
        opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # one that is a pipe must not keep us waiting
        try:
            mode = os.fstat(opened).st_mode
            if not stat.S_ISREG(mode):
                kind = "a folder" if stat.S_ISDIR(mode) else "no ordinary file (a pipe, a socket or a device)"
                raise ValueError(f"--secret_file must name a file with the secret in it, and {file} is {kind}.")
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ValueError(
                    f"--secret_file {file} can be read or changed by other users (mode {stat.S_IMODE(mode):o}), who "
                    f"could then take part in the job: `chmod 600 {file}` takes that from them. Where the file system "
                    f"knows no such rights, give the secret in the variable {VARIABLE}."
                )
            return os.read(opened, _MOST + 1)
        finally:
            os.close(opened)
    except OSError as error:
        raise ValueError(
            f"--secret_file {file} cannot be read: {error.strerror}. Name a file that holds the secret "
            "and that you may read."
        ) from error


def _checked(content: bytes, where: str) -> bytes:
    secret = content.strip()
    text = secret.decode(errors="replace")
    if len(content) > _MOST:
        raise ValueError(f"the secret in {where} must have at most {_MOST} characters; `{_MAKE}` makes one.")
    if not text.isprintable() or "\ufffd" in text:
        raise ValueError(
            f"the secret in {where} must be one line of text in UTF-8, and it has other bytes; `{_MAKE}` makes one."
        )
    if len(secret) < _LEAST:
        raise ValueError(
            f"the secret in {where} must have at least {_LEAST} characters, and it has {len(secret)}; `{_MAKE}` makes "
            "one."
        )
    return secret
