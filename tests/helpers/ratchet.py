"""Numbers that may only fall: what a test finds is compared with what is recorded beside it."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["complaints"]


def complaints(
    found: Mapping[str, int], recorded: Mapping[str, int], limit: int, table: str, what: str, slack: int = 0
) -> list[str]:
    """What has become worse than recorded, and what has become better without being recorded.

    Args:
        found: the numbers of today, by name; those within the limit may be left out.
        recorded: exceptions to the limit, by name.
        limit: what everything else has to keep to.
        table: name of the table with the exceptions.
        what: what the numbers count.
        slack: by how much a number may fall before it is to be recorded.
    """
    said = []
    for name in sorted({*found, *recorded}):
        number, allowed = found.get(name), recorded.get(name)
        if number is None or (allowed is not None and number <= limit):
            now = "is gone" if number is None else f"has {number} {what}, within the limit of {limit}"
            said.append(f'{name} {now}: remove "{name}" from {table}.')
        elif allowed is not None and number < allowed - slack:
            said.append(f'{name} has {number} {what} instead of {allowed}: write "{name}": {number} in {table}.')
        elif number > (limit if allowed is None else allowed):
            most = limit if allowed is None else f"{allowed}, as recorded in {table}"
            said.append(f"{name} has {number} {what}. Expected at most {most}.")
    return said
