"""Messages between the launchers of different machines: JSON, each with a proof that the sender knows the secret.

Nothing that comes in is parsed before its proof has been checked, and nothing is ever unpickled. Both sides begin with
a random number; the keys are made of these and the secret, so a recorded conversation is worth nothing in another one,
and a message cannot be repeated, left out, reordered or sent back.
"""

import contextlib
import hashlib
import hmac
import json
import os
import socket
from typing import Any

from fleetx.launch.readable import readable

_MAGIC = b"fleetx/1"
_NONCE = 32
_MAC = 32
_LENGTH = 4
# Before the other side has shown that it knows the secret, and after.
_MOST_STRANGE, _MOST = 1 << 16, 1 << 24
_SEND_TIMEOUT = 5.0


class ChannelClosedError(Exception):
    """The other side is gone."""


class StrangerError(ChannelClosedError):
    """The other side does not know the secret, or does not speak our language."""


class Channel:
    """One connection between two launchers."""

    def __init__(self, connection: socket.socket, secret: bytes, *, leads: bool) -> None:
        self._socket = connection
        self._secret = secret
        self._leads = leads
        self._nonce = os.urandom(_NONCE)
        self._keys: tuple[bytes, bytes] | None = None  # to send with, and to check with
        self._sent = self._received = 0
        self._buffer = b""
        self._waiting: list[dict[str, Any]] = []
        self.peer = _name(connection)
        self.host = self.peer.rpartition(":")[0]
        connection.settimeout(_SEND_TIMEOUT)
        self._write(_MAGIC + self._nonce)

    @property
    def is_trusted(self) -> bool:
        """Whether the other side has shown that it knows the secret."""
        return self._received > 0

    def fileno(self) -> int:
        """For waiting on several things at once."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send, or keep until the other side's random number is here."""
        if self._keys is None:
            self._waiting.append(message)
            return
        body = json.dumps(message).encode()
        proof = _proof(self._keys[0], self._sent, body)
        self._sent += 1
        self._write(len(body).to_bytes(_LENGTH, "big") + proof + body)

    def receive(self, wait: float) -> list[dict[str, Any]]:
        """What has come, within `wait` seconds."""
        if readable([self._socket], wait):
            try:
                data = self._socket.recv(1 << 16)
            except OSError as error:
                raise ChannelClosedError(f"the connection to {self.peer} broke ({error.strerror})") from error
            if not data:
                raise ChannelClosedError(f"{self.peer} closed the connection")
            self._buffer += data
        if self._keys is None and not self._shake_hands():
            return []
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _shake_hands(self) -> bool:
        if not self._buffer.startswith(_MAGIC[: len(self._buffer)]):
            raise StrangerError(f"{self.peer} is no launcher of FleetX, or of another version")
        if len(self._buffer) < len(_MAGIC) + _NONCE:
            return False
        theirs = self._buffer[len(_MAGIC) : len(_MAGIC) + _NONCE]
        self._buffer = self._buffer[len(_MAGIC) + _NONCE :]
        numbers = self._nonce + theirs if self._leads else theirs + self._nonce
        leader, member = (_digest(self._secret, role + numbers) for role in (b"leader", b"member"))
        self._keys = (leader, member) if self._leads else (member, leader)
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self.send(message)
        return True

    def _next(self) -> dict[str, Any] | None:
        assert self._keys is not None
        head = _LENGTH + _MAC
        if len(self._buffer) < head:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH], "big")
        if length > (_MOST if self.is_trusted else _MOST_STRANGE):
            raise StrangerError(f"{self.peer} announced a message of {length} bytes")
        if len(self._buffer) < head + length:
            return None
        proof, body = self._buffer[_LENGTH:head], self._buffer[head : head + length]
        if not hmac.compare_digest(proof, _proof(self._keys[1], self._received, body)):
            raise StrangerError(f"{self.peer} does not know the secret of this job")
        self._buffer = self._buffer[head + length :]
        self._received += 1
        return self._parsed(body)

    def _parsed(self, body: bytes) -> dict[str, Any]:
        message = None
        with contextlib.suppress(ValueError, RecursionError):  # one that knows the secret may still send anything
            message = json.loads(body)
        if not isinstance(message, dict):
            raise StrangerError(f"{self.peer} sent what is no message of FleetX")
        return message

    def _write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ChannelClosedError(f"the connection to {self.peer} broke ({error})") from error


def _digest(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def _proof(key: bytes, number: int, body: bytes) -> bytes:
    return _digest(key, number.to_bytes(8, "big") + body)


def _name(connection: socket.socket) -> str:
    try:
        peer = connection.getpeername()
    except OSError:
        peer = None
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "the other side"
