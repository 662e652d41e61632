"""Programs that share their batches: any order of what they do, with one right answer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asgd.caches.batch_board import NUMBERS, BatchBoard, Program

PATIENCE_MS = 1000


class World:
    """Programs that train ``epochs`` epochs each. Every action is one that a real program can take then."""

    def __init__(self, programs: int, per_epoch: int, epochs: int) -> None:
        self.now, self.per_epoch = 1, per_epoch
        self.dead: set[int] = set()
        self.board = BatchBoard(
            [0] * NUMBERS, per_epoch, lambda p, _: p not in self.dead, lambda: self.now, PATIENCE_MS
        )
        self.programs = [Program(100 + n, n, 7) for n in range(1, programs + 1)]
        self.left = dict.fromkeys(self.programs, epochs)
        self.at: dict[Program, int] = {}
        self.end: dict[Program, int] = {}
        self.claims: dict[Program, list[int]] = {p: [] for p in self.programs}
        self.taken: dict[Program, list[int]] = {p: [] for p in self.programs}
        self.made: list[int] = []
        self.skipped = False

    def is_alive(self, process: int, started: int) -> bool:
        return process not in self.dead and started == 7

    @property
    def living(self) -> list[Program]:
        return [p for p in self.programs if p.process not in self.dead]

    def step(self, program: Program, action: int) -> bool:
        """Whether the program could do it."""
        if program.process in self.dead:
            return False
        if program not in self.at:
            if action != 0 or not self.left[program]:
                return False
            self.at[program] = self.board.join(program)
            self.end[program] = self.at[program] + self.per_epoch
            assert self.at[program] % self.per_epoch == 0
            return True
        if action == 1 and len(self.claims[program]) < 2:
            number = self.board.claim(program, self.end[program])
            if number is not None:
                self.claims[program].append(number)
            return number is not None
        if action == 2 and self.claims[program]:
            number = self.claims[program].pop(0)
            assert self.board.publish(program, number, number, program.process) == (number >= self.board.first)
            self.made.append(number)
            return True
        if action == 3:
            found = self.board.find(self.at[program])
            if found is None or found.process in self.dead:
                return False
            assert found.descriptor == self.at[program]
            self.taken[program].append(self.at[program])
            self.board.take(program)
            self.at[program] += 1
            if self.at[program] == self.end[program]:
                del self.at[program]
                self.left[program] -= 1
                self.board.give_back(program)
                self.claims[program].clear()
            return True
        if action == 6:
            self.board.skip(program, self.end[program])
            self.board.give_back(program)
            self.claims[program].clear()
            del self.at[program]
            self.left[program] -= 1
            self.skipped = True
            return True
        return False

    def finish(self) -> None:
        """Everything that can happen, in turns, until nothing can: then all must have trained their epochs."""
        while any(self.left[p] for p in self.living):
            did = [self.step(p, action) for p in self.living for action in range(4)]
            if not any(did):
                self.now += 2 * PATIENCE_MS
                before = self.board.first
                self.board.forget()
                did = [self.step(p, action) for p in self.living for action in range(4)]
                assert any(did) or self.board.first > before, "all wait for each other"


@settings(max_examples=200)
@given(st.data())
def test_every_program_takes_all_batches_of_its_epochs_in_order(data: st.DataObject) -> None:
    world = World(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3)))
    actions = st.tuples(st.sampled_from(world.programs), st.sampled_from([0, 1, 1, 2, 2, 3, 3, 4, 5, 6]))
    for program, action in data.draw(st.lists(actions, max_size=120)):
        if action == 4 and data.draw(st.booleans()):
            world.dead.add(program.process)
        elif action == 5:
            world.now += 300
            world.board.forget()
        else:
            world.step(program, action)
    world.finish()
    for program in world.living:
        epochs = [
            world.taken[program][i : i + world.per_epoch] for i in range(0, len(world.taken[program]), world.per_epoch)
        ]
        for epoch in epochs:
            assert epoch == list(range(epoch[0], epoch[0] + world.per_epoch))
            assert epoch[0] % world.per_epoch == 0
    if not world.dead:
        assert len(world.made) == len(set(world.made)) or world.now > PATIENCE_MS, "no batch is made twice"


def test_a_program_that_comes_late_begins_with_the_next_epoch() -> None:
    world = World(2, 5, 2)
    first, second = world.programs
    for action in (0, 1, 2, 3):
        assert world.step(first, action)
    assert world.step(second, 0)
    assert world.at[second] == 5
    world.finish()
    assert world.taken[first] == [*range(10)]
    assert world.taken[second][:5] == [*range(5, 10)]


def test_a_pause_between_two_epochs_is_waited_for_and_no_longer_than_said() -> None:
    world = World(2, 1, 40)
    first, second = world.programs
    for program in (first, second):
        world.step(program, 0)
    for action in (1, 2, 3):
        world.step(first, action)
    world.step(second, 3)  # which pauses now
    for _ in range(100):
        for action in range(4):
            world.step(first, action)
    assert world.at[first] - 1 == 16, "as far as batches are kept"
    world.now += PATIENCE_MS
    assert world.board.forget() == []
    world.now += 1
    assert world.board.forget() == [second.process]
    assert world.step(first, 1)


def test_what_a_program_has_claimed_is_made_by_others_when_it_ends() -> None:
    world = World(2, 4, 1)
    first, second = world.programs
    for program in (first, second):
        world.step(program, 0)
    assert world.step(first, 1)
    assert world.step(first, 2)
    assert world.step(first, 1)
    world.dead.add(first.process)
    assert world.board.forget() == []
    world.finish()
    assert world.taken[second] == [0, 1, 2, 3]
    assert world.made == [0, 0, 1, 2, 3]


def test_there_is_room_for_a_bounded_number_of_programs() -> None:
    world = World(65, 1, 1)
    for program in world.programs[:64]:
        assert world.step(program, 0)
    with pytest.raises(RuntimeError, match="64 programs share"):
        world.step(world.programs[64], 0)
