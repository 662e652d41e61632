"""Which optimizer closes a round of steps in a loop whose batches are not known. Without torch.

Several optimizers step in turn, such as a GAN's. After the last one's step no autograd graph of the round is alive, so
the weights may change. The order in which optimizers step shows which one is last; the order of a list does not.
"""

from __future__ import annotations

from collections.abc import Hashable

_PATIENCE = 16  # rounds in a row


class Rounds:
    """Learns in which order optimizers step. ``number`` is how many there are.

    A round ends when an optimizer steps that has stepped in it. The longest round is the usual one. After 16 in a row
    that differ from it, as in a phase of one optimizer alone, the latest becomes the usual one. Until a round has held
    all optimizers, or 16 have passed, none is known, and no step closes a round.

    Example:
        >>> rounds = Rounds(2)
        >>> [rounds.ends(each) for each in "DGDDG"]  # the second step of G was skipped
        [False, True, False, False, True]
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._present: list[Hashable] = []  # the steps of the present round
        self._usual: tuple[Hashable, ...] = ()
        self._others = 0  # rounds in a row that were not the usual one

    def ends(self, optimizer: Hashable) -> bool:
        """Note a step, taken or skipped. Returns whether it closes the usual round."""
        usual, present = self._usual, self._present
        closed = bool(usual and present) and present[-1] == usual[-1] and optimizer in usual
        if optimizer in present or closed:
            self._learn(tuple(present))
            present = self._present = []
        present.append(optimizer)
        if len(present) == self._number > len(self._usual):
            self._usual, self._others = tuple(present), 0
        return bool(self._usual) and optimizer == self._usual[-1]

    def _learn(self, past: tuple[Hashable, ...]) -> None:
        self._others = 0 if past == self._usual else self._others + 1
        if self._others >= _PATIENCE or 0 < len(self._usual) < len(past):
            self._usual, self._others = past, 0
