"""The cases of the strictness suite, and how they are defined."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from raw_client import Outcome, RawClient

CaseBody = Callable[..., Awaitable[Outcome]]


@dataclass(frozen=True)
class Case:
    """A client's particular behaviour, and the reactions that a relay may show."""

    name: str
    source: str
    expected: tuple[Outcome, ...]
    body: Callable[[RawClient], Awaitable[Outcome]]
    quic_datagrams: bool
    needs_token: bool

    def passes(self, seen: Outcome) -> bool:
        """Whether the relay's reaction was permitted."""
        return any(seen.satisfies(expected) for expected in self.expected)


ALL: list[Case] = []
"""All cases, in the order of the modules."""


def case(
    source: str,
    *expected: Outcome,
    each: dict[str, Any] | None = None,
    quic_datagrams: bool = True,
    needs_token: bool = False,
) -> Callable[[CaseBody], CaseBody]:
    """Makes a function a case, or one case for every entry of `each`.

    `source` is the section that requires one of the `expected` outcomes. The function
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
