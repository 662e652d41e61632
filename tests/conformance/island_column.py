"""Every case of the battery in one island with DDP inside, beside DDP: ``python -m tests.conformance.island_column``.

Writes ``islands.json`` beside this file, from which the page takes its column: *equal* if the facts, the sync points,
the metrics' names and the loss are DDP's, to the bit. Arguments are names of cases; without any all are run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.conformance.case import Case
from tests.conformance.cases import CASES
from tests.conformance.pair import DDP, ISLAND, Outcome, Pair

FILE = Path(__file__).with_name("islands.json")
PACKAGE, DEADLINE_S = "pytorch_lightning", 90.0


def facts(outcomes: list[Outcome]) -> dict[str, Any]:
    """What is compared: the first process's facts, and the sync points it passed."""
    records = outcomes[0].records
    keys = sorted(records[-1].metrics) if records else []
    return {"events": [(r.event, r.epoch, r.step) for r in records], "metrics": keys, **outcomes[0].facts}


def found(case: Case, pairs: dict[str, Pair], folder: Path) -> str:
    """What the page says of a case."""
    outcomes = {}
    for name, pair in pairs.items():
        where = folder / name
        where.mkdir(parents=True)
        try:
            outcomes[name] = pair.run(case.run, where, DEADLINE_S)
        except TimeoutError:
            return "DDP hangs" if name == DDP else "hangs"
    theirs, ours = (next((each.error for each in outcomes[name] if each.error), "") for name in (DDP, ISLAND))
    if theirs:
        return "DDP fails" if ours else "works, DDP fails"
    if ours:
        return "refused" if "Expected" in ours else f"fails: *{ours.splitlines()[0][:120]}*"
    expected, mine = facts(outcomes[DDP]), facts(outcomes[ISLAND])
    differing = [key for key in expected if expected[key] != mine.get(key)]
    return f"differs: {', '.join(differing)}" if differing else "equal"


def main(names: list[str]) -> None:
    """Run the cases, and write what was found."""
    known: dict[str, str] = json.loads(FILE.read_text()) if FILE.exists() else {}
    pairs = {name: Pair(PACKAGE, name) for name in (DDP, ISLAND)}
    try:
        for name in names or [name for name in CASES if CASES[name].ddp]:
            with tempfile.TemporaryDirectory() as folder:
                known[name] = found(CASES[name], pairs, Path(folder))
            sys.stdout.write(f"{name}: {known[name]}\n")
            sys.stdout.flush()
            FILE.write_text(json.dumps({each: known[each] for each in CASES if each in known}, indent=1) + "\n")
    finally:
        for pair in pairs.values():
            pair.close()


if __name__ == "__main__":
    main(sys.argv[1:])
