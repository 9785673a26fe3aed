"""Run the checks on this rank, never longer than the time-out each, and gather what all ranks say."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from .board import Board
from .checks import Check, Context, NotApplicable, NotNeeded, WrongResult
from .report import Outcome, Report, outcome_of, summarise

GRACE_S = 5.0  # how much longer than its time-out a check may take until a rank's answer has arrived


class Runner:
    """Runs checks in step with the other ranks.

    A rank in a collective that never ends cannot be called back. A thread of its own then writes down where it hangs,
    rank 0 prints what all ranks say, and the processes end.

    Args:
        context: Where the checks run.
        board: For this rank's answers.
        seconds: Time-out of one check.
        report: Rank 0 fills it in.
        emit: Shows the finished report; called on rank 0 only, from the thread that ends a hanging process.
    """

    def __init__(
        self, context: Context, board: Board, seconds: float, report: Report, emit: Callable[[Report], None]
    ) -> None:
        self._context = context
        self._board = board
        self._watching = board.another()  # for the thread of the time-out: this one may be inside the store
        self._seconds = seconds
        self._report = report
        self._emit = emit

    def run(self, checks: Sequence[Check]) -> bool:
        """Run the checks and return whether all is well; the same on every rank. The report is emitted on rank 0.

        Stops after a check in which a rank hangs or gives no answer: its process group cannot be used any more.
        """
        for number, check in enumerate(checks):
            left = [other.name for other in checks[number + 1 :]]
            with self._watched(number, check, left):
                outcome = perform(check, self._context)
            self._board.put(f"{number}/{self._context.rank}", [outcome.verdict, outcome.detail])
            if self._context.rank == 0:
                self._gather(self._board, number, check, left, self._seconds + GRACE_S)
                if not self._report.stuck:
                    self._board.put(f"{number}/then", "next")
            elif self._verdict(self._board, number) != "next":
                self._report.stuck = True
            if self._report.stuck:
                break
        if self._context.rank == 0:
            self._finish(self._board, number)
            return not self._report.failed
        return self._board.get("failed", self._seconds + GRACE_S) is False

    def _gather(self, board: Board, number: int, check: Check, left: Sequence[str], seconds: float) -> None:
        outcomes = [outcome_of(board.get(f"{number}/0", GRACE_S))]
        for rank in range(1, self._context.ranks):
            # The first that is missing costs the time; by then the others have had theirs too.
            waits = seconds if None not in outcomes else 0.0
            outcomes.append(outcome_of(board.get(f"{number}/{rank}", waits)))
        line = summarise(check.name, outcomes)
        self._report.lines.append(line)
        if line.verdict == "HANGS":
            self._report.stuck, self._report.left = True, left

    def _finish(self, board: Board, number: int) -> None:
        self._emit(self._report)  # before the others hear of it and end: a launcher then ends this rank as well
        board.put("failed", self._report.failed)
        if self._report.stuck:
            board.put(f"{number}/then", "stop")

    def _verdict(self, board: Board, number: int) -> object:
        return board.get(f"{number}/then", 2 * self._seconds + 3 * GRACE_S)  # rank 0 may have to wait twice itself

    @contextmanager
    def _watched(self, number: int, check: Check, left: Sequence[str]) -> Iterator[None]:
        timer = threading.Timer(self._seconds, self._end, (threading.get_ident(), number, check, left))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self, main: int, number: int, check: Check, left: Sequence[str]) -> NoReturn:
        board = self._watching
        detail = f"no end after {self._seconds:g} s in {_where(main)}"
        board.put(f"{number}/{self._context.rank}", ["HANGS", detail])
        if self._context.rank == 0:
            self._gather(board, number, check, left, GRACE_S)
            self._finish(board, number)
        else:
            self._verdict(board, number)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the main thread is inside the backend and hears nothing


def perform(check: Check, context: Context) -> Outcome:
    """Run one check on this rank and return its outcome; whatever it raises is part of that."""
    try:
        return Outcome("ok", check.body(context))
    except NotApplicable as reason:
        return Outcome("skipped", str(reason))
    except NotNeeded as reason:
        return Outcome("absent", str(reason))
    except WrongResult as wrong:
        return Outcome("FAIL", str(wrong))
    except Exception as error:  # noqa: BLE001 - the report carries it
        said = " ".join(str(error).split())
        return Outcome("FAIL" if check.needed else "absent", f"{type(error).__name__}: {said}"[:500])


def _where(thread: int) -> str:
    frame = sys._current_frames().get(thread)  # the standard library has no other way to look at another thread
    if frame is None:
        return "an ended thread"
    calls = [call for call in traceback.extract_stack(frame) if "contextlib" not in call.filename]
    inner = [f"{call.name} ({os.path.basename(call.filename)}:{call.lineno})" for call in calls[-3:]]
    return " > ".join(inner)
