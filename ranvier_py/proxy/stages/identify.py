"""Gives a request its id: the client's own, or one of this node. Who may ask, and for whom, is to be found out here."""

from collections.abc import Iterator

from ranvier_py.proxy.call import Call


def identify(ids: Iterator[bytes], call: Call) -> None:
    """Set the id. `ids` are for requests without one, unique among nodes and restarts."""
    call.id = call.client.request_id = call.request.fields.request_id or next(ids)
