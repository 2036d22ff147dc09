"""The command-line options about a relay that the programs share."""

import argparse
import ssl
from dataclasses import dataclass
from urllib.parse import quote

from aioquic.h3.connection import H3_ALPN
from aioquic.quic.configuration import QuicConfiguration

DEFAULT_TEMPLATE = "/.well-known/masque/udp/{target_host}/{target_port}/"
"""The path of the default URI template (RFC 9298 §2)."""

MAX_DATAGRAM_FRAME_BYTES = 65536
"""The max_datagram_frame_size that is offered: every frame is accepted (RFC 9221 §3)."""

IDLE_TIMEOUT_S = 10.0
"""The time after which a silent relay is given up, before and after the handshake."""

UDP_PAYLOAD_BYTES = 1400
"""The size of outgoing QUIC packets: a 1,200-byte payload fits, and the packet fits the path."""


def host_and_port(text: str) -> tuple[str, int]:
    """Parses HOST:PORT, with an IPv6 address in brackets."""
    host, separator, port = text.rpartition(":")
    if not separator or not host:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


@dataclass(frozen=True)
class RelayOptions:
    """A relay's address and name, the trust in it, and the client's token."""

    address: tuple[str, int]
    server_name: str
    template: str
    token: str | None
    ca: str | None
    insecure: bool

    @property
    def authority(self) -> str:
        """The :authority of requests."""
        return f"{self.server_name}:{self.address[1]}"

    def path(self, host: str, port: int | str) -> str:
        """The :path of a tunnel to this target."""
        return self.template.replace("{target_host}", quote(host, safe="")).replace(
            "{target_port}", str(port)
        )

    def request(self, path: str, token: str | None = None) -> list[tuple[bytes, bytes]]:
        """The header section of a request for a tunnel (RFC 9298 §3.4)."""
        token = token or self.token
        fields = [
            (b":method", b"CONNECT"),
            (b":protocol", b"connect-udp"),
            (b":scheme", b"https"),
            (b":authority", self.authority.encode()),
            (b":path", path.encode()),
            (b"capsule-protocol", b"?1"),
        ]
        if token:
            fields.append((b"proxy-authorization", b"Bearer " + token.encode()))
        return fields

    def quic_configuration(self, datagrams: bool) -> QuicConfiguration:
        """The QUIC configuration; without datagrams, none are offered."""
        return QuicConfiguration(
            alpn_protocols=H3_ALPN,
            server_name=self.server_name,
            idle_timeout=IDLE_TIMEOUT_S,
            cafile=self.ca,
            verify_mode=ssl.CERT_NONE if self.insecure else ssl.CERT_REQUIRED,
            max_datagram_size=UDP_PAYLOAD_BYTES,
            max_datagram_frame_size=MAX_DATAGRAM_FRAME_BYTES if datagrams else None,
        )


def add_relay_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `relay_options` reads."""
    parser.add_argument(
        "--relay", type=host_and_port, default=("127.0.0.1", 4433), metavar="HOST:PORT"
    )
    parser.add_argument(
        "--server-name", default="localhost", help="the relay's name in TLS and :authority"
    )
    parser.add_argument("--template", default=DEFAULT_TEMPLATE, metavar="PATH")
    parser.add_argument("--token", help="sent as proxy-authorization: Bearer TOKEN")
    trust = parser.add_mutually_exclusive_group()
    trust.add_argument("--ca", metavar="FILE", help="certificates to trust, PEM")
    trust.add_argument(
        "--insecure", action="store_true", help="do not verify the relay's certificate"
    )


def relay_options(parsed: argparse.Namespace) -> RelayOptions:
    """Extracts the relay from parsed options."""
    return RelayOptions(
        address=parsed.relay,
        server_name=parsed.server_name,
        template=parsed.template,
        token=parsed.token,
        ca=parsed.ca,
        insecure=parsed.insecure,
    )
