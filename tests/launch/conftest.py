import socket

import pytest

from fleetx.launch.channel import Channel


@pytest.fixture(autouse=True)
def _closed_in_the_end(monkeypatch):
    """Tests make many sockets, and one left open is an error."""
    made = []
    pair, connect, begin = socket.socketpair, socket.create_connection, Channel.__init__

    def begun(channel, connection, *args, **options):
        made.append(connection)
        begin(channel, connection, *args, **options)

    def paired(*args):
        made.extend(both := pair(*args))
        return both

    def connected(*args, **options):
        made.append(one := connect(*args, **options))
        return one

    monkeypatch.setattr(socket, "socketpair", paired)
    monkeypatch.setattr(socket, "create_connection", connected)
    monkeypatch.setattr(Channel, "__init__", begun)
    yield
    for one in made:
        one.close()
