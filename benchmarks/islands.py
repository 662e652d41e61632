"""Islands: killed ones, accuracy compared with DDP, checkpoints, speed, bytes on a slow cable, and memory.

    python benchmarks/islands.py                             # as root under Linux: about twenty minutes
    python benchmarks/islands.py --only kills --inside fsdp2

An island is a group of ranks that train in lock-step inside, with Lightning's DDP or FSDP2, and that train together
with other groups as one worker.

kills       two islands of two ranks on machines of their own (network namespaces). A rank of one is killed ten times,
            and torchrun restarts that island. The weights count how often each sample was trained.
accuracy    two islands of two ranks, with DDP and with FSDP2 inside, beside Lightning's DDP over all four ranks with
            the same hyper-parameters: images of digits, and a small transformer on the standard library's source.
checkpoint  two islands of two ranks with FSDP2 inside write a checkpoint at each epoch's end, as one file and as one
            per rank. One process, an island of four ranks and two islands in another run load it and continue.
speed       four ranks as one island, two islands and four workers, beside DDP over all of them, interleaved: equal
            ranks, 100 Mbit/s between the two halves (network namespaces), and one slow rank. Then one island of two
            ranks beside DDP over two.
bytes       bytes per step on the cable of an island with FSDP2 inside.
memory      peak memory of a rank with FSDP2 inside, beside FSDP2 alone, with 60 M parameters.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from common import prepared
from engines import FIRST, SECOND, Stage, stage, unless, verdict
from engines_program import SILENCE_S
from islands_parts import accuracy, checkpoint
from islands_speed import SCENARIOS, memory, speed, traffic
from network import available
from rich.markup import escape
from throughput import CONSOLE

PROGRAM = str(Path(__file__).with_name("islands_program.py"))
KILLS, BACK_S = 10, 10.0
WAITS_S = SILENCE_S / 2  # for an island that waits for another one, less than the shortest such wait
# Else torchrun keeps one store for all attempts, where restarted ranks find the addresses of those before them.
STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
AGENT = ["torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=20", "--monitor-interval=0.1"]


def kills(inside: str, number: int) -> bool:
    """Kill ranks of one island; True if nothing is lost, and the other one never waits."""
    chance = random.Random(1)
    with stage("rpc") as on:
        on.serve()
        for name, machine in (("a", FIRST), ("b", SECOND)):
            on.run(name, machine, [*AGENT, PROGRAM, str(on.folder), inside], **on.joins(), **STORES)
        for name in "ab":
            on.join(name, 2, 180)
        backs, totals = [], []
        for restarts in range(1, number + 1):
            on.train()
            time.sleep(chance.uniform(0.2, 1.5))
            killed = time.time()
            os.kill(chance.choice(on.living("b"))["pid"], signal.SIGKILL)
            on.wait(partial(restarted, on, restarts), 120, f"training of the island after kill {restarts}")
            latest = on.living("b")
            backs.append(max(told["first"] - told["imported"] for told in latest))
            totals.append(max(told["first"] for told in latest) - killed)
        problems, end = on.finish("a", "b")
        (other,) = [told for told in on.told("a") if told["engine"]["RANK"] == "0"]
    longest = max(other.get("within_s", [0.0]))
    problems += [
        unless(longest < WAITS_S, f"the other island did nothing for {longest:.2f} s within an epoch"),
        unless(max(backs) <= BACK_S, f"the killed island needed {max(backs):.1f} s from its imports to its first step"),
    ]
    within, between = rounded(other["within_s"]), rounded(other["between_s"])
    text = (
        f"{number} kills. The other island: {other['steps']} steps of usually {1000 * other['usual_s']:.0f} ms; the "
        f"longest within an epoch {within} s, from an epoch to the next {between} s. The killed one trained "
        f"{min(backs):.1f} - {max(backs):.1f} s after its imports, {min(totals):.1f} - {max(totals):.1f} s after the "
        f"kill; {end}"
    )
    return verdict(f"kills, {inside} inside", problems, text)


def restarted(on: Stage, times: int) -> bool:
    """Whether the killed island has been restarted so often, and both of its ranks train."""
    latest = [told["engine"]["TORCHELASTIC_RESTART_COUNT"] for told in on.living("b")]
    return latest == [str(times)] * 2


def rounded(values: list[float]) -> str:
    """Seconds, for people."""
    return ", ".join(f"{value:.2f}" for value in values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Any] = {
        "kills": lambda: [kills(inside, args.kills) for inside in args.inside or ("ddp", "fsdp2")],
        "accuracy": lambda: accuracy(args.seeds),
        "checkpoint": checkpoint,
        "speed": lambda: speed(args.repeats, args.seconds, args.scenario),
        "bytes": traffic,
        "memory": memory,
    }
    parser.add_argument("--only", choices=parts, action="append", help="the default is all")
    parser.add_argument("--inside", choices=("ddp", "fsdp2"), action="append", help="of the islands that are killed")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="of the speed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    reason = available() if {*(args.only or parts)} & {"kills", "speed", "bytes"} else None
    if reason is not None:
        CONSOLE.print(f"[red]Cannot make machines.[/] {escape(reason)}")
        return 2
    passed = True
    with prepared():
        for name in args.only or parts:
            begun = time.monotonic()
            done = parts[name]()
            good = all(done) if isinstance(done, list) else done
            CONSOLE.print(
                f"{'[green]PASS[/]' if good else '[red]FAIL[/]'}  {name} ({time.monotonic() - begun:.0f} s)\n"
            )
            passed &= good
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
