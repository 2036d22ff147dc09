"""The base of all clients here: a QUIC connection to a relay, with a way to wait for a state."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self

from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.quic.connection import NetworkAddress
from aioquic.quic.events import ConnectionTerminated, QuicEvent

from relay_options import RelayOptions


class RelayConnection(QuicConnectionProtocol):
    """A connection that remembers how it ended; subclasses note the other events."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.terminated: ConnectionTerminated | None = None
        self._changed = asyncio.Event()

    def quic_event_received(self, event: QuicEvent) -> None:
        """Notes one event and wakes all waiting tasks."""
        if isinstance(event, ConnectionTerminated):
            self.terminated = event
        self.note(event)
        self._changed.set()

    def datagram_received(self, data: bytes | str, addr: NetworkAddress) -> None:
        """Notes a close as soon as it arrives: aioquic reports it after draining."""
        super().datagram_received(data, addr)
        self.terminated = self.terminated or self._quic._close_event
        self._changed.set()

    def note(self, event: QuicEvent) -> None:
        """Updates the subclass's state for one event."""

    async def until(self, holds: Callable[[], object], seconds: float) -> bool:
        """Waits until holds() is true; returns whether that happened in time."""
        try:
            async with asyncio.timeout(seconds):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            # The event may have come while this program itself had to wait for a CPU.
            return bool(holds())
        return True

    @classmethod
    @asynccontextmanager
    async def open(cls, relay: RelayOptions, datagrams: bool) -> AsyncIterator[Self]:
        """Connects; without datagrams, QUIC's DATAGRAM frames are not offered."""
        async with connect(
            *relay.address,
            configuration=relay.quic_configuration(datagrams),
            create_protocol=cls,
        ) as connection:
            assert isinstance(connection, cls)
            yield connection
