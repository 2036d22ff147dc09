"""A CONNECT-UDP client on aioquic: opens tunnels and checks that payloads come back.

The target has to echo; without --target, the client brings an echo on 127.0.0.1 of its
own. It prints one line of JSON and ends with 0 if the relay answered as expected and
every payload came back, otherwise with 1.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from aioquic.h3.connection import H3Connection, Setting
from aioquic.h3.events import DatagramReceived, DataReceived, HeadersReceived
from aioquic.quic.events import QuicEvent, StreamReset

import wire
from relay_connection import RelayConnection
from relay_options import RelayOptions, add_relay_options, host_and_port, relay_options
from udp_echo import udp_echo


class TunnelError(Exception):
    """The relay's reaction made a tunnel unusable."""


class HttpConnection(H3Connection):
    """aioquic's HTTP/3; it offers H3_DATAGRAM if and only if QUIC offers datagrams."""

    def _get_local_settings(self) -> dict[int, int]:
        datagrams = self._quic.configuration.max_datagram_frame_size is not None
        return super()._get_local_settings() | {Setting.H3_DATAGRAM: int(datagrams)}


@dataclass
class Tunnel:
    """One tunnel: the answer to its request and the payloads received since."""

    stream_id: int
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    payloads: list[bytes] = field(default_factory=list)
    datagrams_received: int = 0
    capsules_received: int = 0
    ended: str | None = None
    _stream: bytearray = field(default_factory=bytearray)

    def on_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Takes the final response; interim ones are skipped."""
        fields = {name.decode(): value.decode() for name, value in headers}
        status = int(fields.pop(":status"))
        if status >= 200:
            self.status, self.headers = status, fields

    def on_datagram(self, datagram: bytes) -> bool:
        """Takes one HTTP datagram; only UDP payloads (context 0) are expected. Returns whether it is one."""
        context, payload = wire.split_datagram(datagram)
        if context == 0:
            self.payloads.append(payload)
        return context == 0

    def on_data(self, data: bytes) -> None:
        """Takes bytes of the capsule stream."""
        self._stream += data
        while record := wire.pull_record(self._stream):
            kind, value = record
            if kind == wire.CapsuleType.DATAGRAM:
                self.capsules_received += 1
                self.on_datagram(value)


class Client(RelayConnection):
    """A connection to a relay with its tunnels."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.http = HttpConnection(self._quic)
        self.tunnels: dict[int, Tunnel] = {}

    def note(self, event: QuicEvent) -> None:
        """Passes the HTTP/3 events of a QUIC event to their tunnels."""
        if isinstance(event, StreamReset) and event.stream_id in self.tunnels:
            self.tunnels[event.stream_id].ended = f"stream reset: {event.error_code:#x}"
        for http_event in self.http.handle_event(event):
            tunnel = self.tunnels.get(getattr(http_event, "stream_id", None))
            if tunnel is None:
                continue
            match http_event:
                case DatagramReceived(data=data):
                    # Other contexts are ignored: paced fills packets up with them.
                    tunnel.datagrams_received += tunnel.on_datagram(data)
                case HeadersReceived(headers=headers):
                    tunnel.on_headers(headers)
                case DataReceived(data=data) if tunnel.status in range(200, 300):
                    tunnel.on_data(data)
            if getattr(http_event, "stream_ended", False):
                tunnel.ended = "stream ended"

    async def expect(
        self,
        holds: Callable[[], bool],
        tunnel: Tunnel | None,
        seconds: float,
        what: str,
    ) -> None:
        """Waits until `holds`; fails if that has become impossible."""

        def over() -> bool:
            ended = tunnel is not None and tunnel.ended is not None
            return holds() or ended or self.terminated is not None

        await self.until(over, seconds)
        if holds():
            return
        if self.terminated:
            code, reason = self.terminated.error_code, self.terminated.reason_phrase
            raise TunnelError(f"connection closed: {code:#x} {reason}")
        raise TunnelError((tunnel and tunnel.ended) or f"no {what} in {seconds} s")

    async def settings(self, seconds: float) -> dict[int, int]:
        """The relay's settings, which must arrive before a tunnel may be requested (RFC 9220 §3)."""
        await self.expect(
            lambda: self.http.received_settings is not None, None, seconds, "SETTINGS"
        )
        return self.http.received_settings or {}

    def request(self, relay: RelayOptions, target: tuple[str, int]) -> Tunnel:
        """Requests one tunnel."""
        tunnel = Tunnel(self._quic.get_next_available_stream_id())
        self.tunnels[tunnel.stream_id] = tunnel
        fields = relay.request(relay.path(*target))
        self.http.send_headers(tunnel.stream_id, fields)
        self.transmit()
        return tunnel

    def send(self, tunnel: Tunnel, payload: bytes, capsule: bool) -> None:
        """Sends one UDP payload in a DATAGRAM capsule or in a DATAGRAM frame."""
        datagram = wire.udp_payload(payload)
        if capsule:
            data = wire.capsule(wire.CapsuleType.DATAGRAM, datagram)
            self.http.send_data(tunnel.stream_id, data, end_stream=False)
        else:
            self.http.send_datagram(tunnel.stream_id, datagram)
        self.transmit()


@dataclass
class Report:
    """The result of one tunnel."""

    tunnel: Tunnel
    sent: int = 0
    received: int = 0
    round_trips_s: list[float] = field(default_factory=list)
    error: str | None = None


async def use_tunnel(
    client: Client,
    relay: RelayOptions,
    target: tuple[str, int],
    options: argparse.Namespace,
) -> Report:
    """Opens one tunnel and sends every payload once the previous one has come back."""
    report = Report(client.request(relay, target))
    tunnel = report.tunnel
    try:
        await client.expect(
            lambda: tunnel.status is not None, tunnel, options.timeout, "response"
        )
        if tunnel.status not in range(200, 300):
            return report
        content = random.Random(tunnel.stream_id)
        for number in range(options.count):
            payload = content.randbytes(options.sizes[number % len(options.sizes)])
            started = time.perf_counter()
            client.send(tunnel, payload, options.capsule)
            report.sent += 1
            await client.expect(
                lambda: bool(tunnel.payloads), tunnel, options.timeout, "echo"
            )
            report.round_trips_s.append(time.perf_counter() - started)
            if tunnel.payloads.pop(0) != payload:
                raise TunnelError(f"payload {number} came back changed")
            report.received += 1
    except TunnelError as error:
        report.error = str(error)
    return report


async def run(options: argparse.Namespace) -> dict[str, object]:
    """Opens all tunnels over one connection and sums up their results."""
    relay = relay_options(options)
    async with AsyncExitStack() as stack:
        target = options.target or await stack.enter_async_context(udp_echo())
        datagrams = not options.no_quic_datagrams
        client = await stack.enter_async_context(Client.open(relay, datagrams))
        settings = await client.settings(options.timeout)
        if settings.get(Setting.ENABLE_CONNECT_PROTOCOL) != 1:
            raise TunnelError("the relay does not offer extended CONNECT")
        if not options.capsule and settings.get(Setting.H3_DATAGRAM) != 1:
            raise TunnelError("the relay does not offer HTTP datagrams")
        tunnels = (
            use_tunnel(client, relay, target, options) for _ in range(options.tunnels)
        )
        reports = await asyncio.gather(*tunnels)

    round_trips = [t for report in reports for t in report.round_trips_s]
    errors = sorted({report.error for report in reports if report.error})
    sent = sum(report.sent for report in reports)
    received = sum(report.received for report in reports)
    statuses = {report.tunnel.status for report in reports}
    expected = options.expect_status
    answered = statuses == {expected} if expected else statuses <= set(range(200, 300))
    return {
        "ok": answered and sent == received and not errors,
        "status": reports[0].tunnel.status,
        "headers": reports[0].tunnel.headers,
        "tunnels": len(reports),
        "sent": sent,
        "received": received,
        "datagrams_received": sum(r.tunnel.datagrams_received for r in reports),
        "capsules_received": sum(r.tunnel.capsules_received for r in reports),
        "rtt_median_us": (
            round(statistics.median(round_trips) * 1e6) if round_trips else None
        ),
        "errors": errors,
    }


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_relay_options(parser)
    parser.add_argument("--target", type=host_and_port, metavar="HOST:PORT")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--datagram",
        action="store_true",
        help="send payloads in QUIC DATAGRAM frames (the default)",
    )
    form.add_argument(
        "--capsule", action="store_true", help="send payloads in DATAGRAM capsules"
    )
    form.add_argument(
        "--no-quic-datagrams",
        action="store_true",
        help="do not offer QUIC datagrams: capsules both ways",
    )
    parser.add_argument("--count", type=int, default=20, help="payloads per tunnel")
    parser.add_argument(
        "--sizes",
        type=lambda text: [int(size) for size in text.split(",")],
        default=[1200, 0, 1, 64],
        metavar="BYTES,...",
        help="payload sizes, taken in turn",
    )
    parser.add_argument("--tunnels", type=int, default=1, help="tunnels over one connection")
    parser.add_argument("--expect-status", type=int, help="the expected status of the answer")
    parser.add_argument("--timeout", type=float, default=3.0, help="time limit of each wait, in seconds")
    options = parser.parse_args()
    options.capsule = options.capsule or options.no_quic_datagrams
    return options


def main() -> int:
    """Runs the client; returns its exit status."""
    try:
        result = asyncio.run(run(parse_options()))
    except (TunnelError, ConnectionError) as error:
        result = {"ok": False, "errors": [str(error) or "the connection failed"]}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
