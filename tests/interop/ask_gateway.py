"""A client on another HTTP/3 stack that asks a gateway directly, without an edge.

Prints a JSON object: the status, the fields and the body of the answer.
"""

import argparse
import asyncio
import json

from aioquic.h3.connection import H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.events import QuicEvent

from relay_connection import RelayConnection
from relay_options import add_relay_options, relay_options


class Gateway(RelayConnection):
    """A connection that has one request."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.http = H3Connection(self._quic)
        self.fields: dict[str, str] = {}
        self.body = b""
        self.is_over = False

    def note(self, event: QuicEvent) -> None:
        for heard in self.http.handle_event(event):
            if isinstance(heard, HeadersReceived):
                self.fields |= {name.decode(): value.decode() for name, value in heard.headers}
            if isinstance(heard, DataReceived):
                self.body += heard.data
            if isinstance(heard, (HeadersReceived, DataReceived)):
                self.is_over |= heard.stream_ended

    async def ask(self, authority: str, body: bytes, token: str) -> None:
        """Sends a request for a chat and waits for the end of its answer."""
        stream = self._quic.get_next_available_stream_id()
        fields = {
            ":method": "POST",
            ":scheme": "https",
            ":authority": authority,
            ":path": "/v1/chat/completions",
            "content-type": "application/json",
            "priority": "u=1, i",
            "proxy-authorization": f"Bearer {token}",
        }
        self.http.send_headers(stream, [(name.encode(), value.encode()) for name, value in fields.items()])
        self.http.send_data(stream, body, end_stream=True)
        self.transmit()
        if not await self.until(lambda: self.is_over or self.terminated, 20):
            raise SystemExit("no answer")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_relay_options(parser)
    parser.add_argument("--model", default="large")
    options = parser.parse_args()
    relay = relay_options(options)
    message = {"role": "user", "content": "hello"}
    body = {"model": options.model, "messages": [message], "stream": True, "max_tokens": 3}
    async with Gateway.open(relay, datagrams=False) as gateway:
        await gateway.ask(relay.authority, json.dumps(body).encode(), relay.token or "")
        fields = gateway.fields
        print(json.dumps({"status": int(fields[":status"]), "fields": fields, "body": gateway.body.decode()}))


if __name__ == "__main__":
    asyncio.run(main())
