"""The secret that the machines of one job share."""

import os
from pathlib import Path

VARIABLE = "FLEETX_JOB_SECRET"
_LEAST = 16
_MAKE = "head -c 24 /dev/urandom | base64"


def read_secret(file: Path | None) -> bytes:
    """From the file, or from the environment, where it does not stay: workers have no use for it."""
    given = os.environ.pop(VARIABLE, None)
    if file is not None:
        try:
            given = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--secret_file {file} cannot be read: {error.strerror}.") from error
    if given is None:
        raise ValueError(
            "a job on several machines needs a secret that all of them know, so that nobody else can take part. Give "
            f"the same one everywhere, with --secret_file FILE or in the variable {VARIABLE}; `{_MAKE}` makes one."
        )
    secret = given.strip().encode()
    if len(secret) < _LEAST:
        where = f"--secret_file {file}" if file else VARIABLE
        raise ValueError(f"the secret in {where} must have at least {_LEAST} characters; `{_MAKE}` makes one.")
    return secret
