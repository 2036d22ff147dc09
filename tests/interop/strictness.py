"""Plays hostile and careless clients against a relay and compares its reactions with the RFCs.

Every case has its own connection. The last line counts results; the exit status is 0 if
nothing failed. The relay must allow the target, by default an echo on 127.0.0.1 that
the program itself provides.
"""

import argparse
import asyncio
import sys
from contextlib import AsyncExitStack

import cases_connection  # noqa: F401 (its cases register themselves)
import cases_request  # noqa: F401
import cases_tunnel  # noqa: F401
from cases import ALL, Case
from raw_client import Outcome, RawClient, UnusableTunnel
from relay_options import RelayOptions, add_relay_options, host_and_port, relay_options
from udp_echo import udp_echo


async def play(case: Case, relay: RelayOptions, path: str) -> Outcome:
    """Runs one case; returns the relay's reaction."""
    try:
        async with RawClient.open(relay, case.quic_datagrams) as client:
            client.relay, client.path = relay, path
            return await case.body(client)
    except UnusableTunnel as unusable:
        return unusable.outcome
    except ConnectionError:
        return Outcome("cannot connect")


def report(case: Case, seen: Outcome, width: int) -> bool:
    """Prints one line of the table; returns whether the case passed."""
    passed = case.passes(seen)
    verdict = "ok" if passed else "FAIL"
    unlike = "" if passed else f"; expected {' or '.join(map(str, case.expected))}"
    print(f"{verdict:4}  {case.source:17}  {case.name:{width}}  {seen}{unlike}")
    return passed


async def run(options: argparse.Namespace) -> int:
    """Plays the chosen cases, a few at a time; returns how many failed."""
    relay = relay_options(options)
    chosen = [case for case in ALL if options.only in case.name]
    playable = [case for case in chosen if relay.token or not case.needs_token]
    at_once = asyncio.Semaphore(options.jobs)

    async def play_in_turn(case: Case) -> Outcome:
        async with at_once:
            return await play(case, relay, path)

    async with AsyncExitStack() as stack:
        target = options.target or await stack.enter_async_context(udp_echo())
        path = relay.path(*target)
        outcomes = await asyncio.gather(*map(play_in_turn, playable))

    width = max((len(case.name) for case in playable), default=0)
    passed = sum(report(*played, width) for played in zip(playable, outcomes))
    skipped = len(chosen) - len(playable)
    note = f", {skipped} skipped (they need --token)" if skipped else ""
    print(f"{passed} passed, {len(playable) - passed} failed{note}")
    return len(playable) - passed


def main() -> int:
    """Runs the suite; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_relay_options(parser)
    parser.add_argument("--target", type=host_and_port, metavar="HOST:PORT")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--jobs", type=int, default=8, help="number of simultaneous cases")
    return 1 if asyncio.run(run(parser.parse_args())) else 0


if __name__ == "__main__":
    sys.exit(main())
