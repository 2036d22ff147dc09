"""How a case of the strictness suite is written down and collected."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from raw_client import Outcome, RawClient

CaseBody = Callable[..., Awaitable[Outcome]]


@dataclass(frozen=True)
class Case:
    """One client that does something particular, and what a relay has to do then."""

    name: str
    source: str
    expected: tuple[Outcome, ...]
    body: Callable[[RawClient], Awaitable[Outcome]]
    quic_datagrams: bool
    needs_token: bool

    def passes(self, seen: Outcome) -> bool:
        """Whether the relay did one of the things it may do."""
        return any(seen.satisfies(expected) for expected in self.expected)


ALL: list[Case] = []
"""Every case, in the order in which the modules define them."""


def case(
    source: str,
    *expected: Outcome,
    each: dict[str, Any] | None = None,
    quic_datagrams: bool = True,
    needs_token: bool = False,
) -> Callable[[CaseBody], CaseBody]:
    """Makes a function a case, or one for every entry of `each`.

    `source` is the section that asks for one of the `expected` outcomes. The function
    gets a fresh connection, then the value of its entry; its name is the case's name.
    """

    def register(body: CaseBody) -> CaseBody:
        name = body.__name__.replace("_", " ")
        variants: dict[str, tuple[Any, ...]] = {name: ()}
        if each is not None:
            variants = {f"{name}: {label}": (each[label],) for label in each}
        for variant, arguments in variants.items():
            ALL.append(
                Case(
                    name=variant,
                    source=source,
                    expected=expected,
                    body=lambda client, rest=arguments: body(client, *rest),
                    quic_datagrams=quic_datagrams,
                    needs_token=needs_token,
                )
            )
        return body

    return register
