"""What is read of the tables of connections, and what stands in the way of an image."""

from __future__ import annotations

from sojourn.node.connections import obstacles, read_table

HEAD = b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when\n"
HOME, AWAY, HOME_6 = "0100007F", "08080808", "0" * 24 + "01000000"
MAPPED = "0000000000000000FFFF0000" + HOME
NONE = "00000000"


def line(local: str, port: int, peer: str, peer_port: int, state: int) -> bytes:
    ends = f"{local}:{port:04X} {peer}:{peer_port:04X}"
    return f"   7: {ends} {state:02X} 00000000:00000000 00:00000000 00000000\n".encode()


def looked(*lines: bytes) -> tuple[int | None, dict[int, int], bool]:
    return tuple(obstacles(read_table(HEAD + b"".join(lines))))  # type: ignore[return-value]


LISTENER = line(NONE, 80, NONE, 0, 0x0A)


def test_a_connection_that_is_made_and_taken_is_none() -> None:
    assert looked() == looked(LISTENER) == (None, {}, False)
    taken = (line(HOME, 5000, HOME, 80, 1), line(HOME, 80, HOME, 5000, 1))
    assert looked(LISTENER, *taken) == (None, {}, True)
    # The end that was taken may be closed on one side already, or write its addresses as IPv6.
    assert looked(LISTENER, taken[0], line(MAPPED, 80, MAPPED, 5000, 8)) == (None, {}, True)


def test_a_socket_that_connects_is_found() -> None:
    assert looked(line(HOME, 5000, HOME, 80, 2))[0] == 5000
    assert looked(line(HOME_6, 80, HOME_6, 5000, 3))[0] == 80


def test_connections_that_nobody_took_are_counted_for_each_listener() -> None:
    waiting = [line(home, 5000 + n, home, 80, 1) for n, home in enumerate((HOME, HOME_6, MAPPED))]
    assert looked(LISTENER, *waiting)[1] == {80: 3}
    assert obstacles(read_table(HEAD + LISTENER + b"".join(waiting))).full == 80
    assert looked(LISTENER, line(HOME, 5000, HOME, 80, 4))[1] == {80: 1}  # said all it had to say
    assert obstacles(read_table(HEAD + LISTENER + waiting[0])).full is None


def test_what_goes_outside_or_to_nobody_waits_for_none() -> None:
    assert looked(LISTENER, line(HOME, 5000, AWAY, 80, 1))[1] == {}
    assert looked(LISTENER, line(HOME, 5000, HOME, 81, 1))[1] == {}


def test_what_is_no_table_tells_nothing() -> None:
    assert read_table(b"") == read_table(b"\xff\n x: y\n" * 3) == []
    assert read_table(HEAD + b"   1: 0100007F:00G0 0100007F:0050 01 \n") == []
