"""What a pass waits for, in words and to be asked: a chunk on its way, or the block of one that has been read."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from ray_lance_stream._ray import where_is
from ray_lance_stream.doing import Doing
from ray_lance_stream.line import ChunkLine, Sent
from ray_lance_stream.reader import ReadRequest
from ray_lance_stream.stage_board import holders


class ChunkOnItsWay:
    """A chunk that a reader reads, or that has come as far as one of the stages.

    Args:
        line: that it is on.
        sent: its processes.
        request: which rows.
        attempt: which of how many, as text.
    """

    def __init__(self, line: ChunkLine, sent: Sent, request: ReadRequest, attempt: str) -> None:
        self.alive: Callable[[], None] = line.alive
        self._line = line
        self._sent = sent
        self._request = request
        self._attempt = attempt

    def ask(self) -> Future[Doing] | None:
        """See ReadWatch."""
        return self._sent.reader.doing.remote(self._request.send_id).future() if self.has_limit() else None

    def has_limit(self) -> bool:
        """Reading has one, also where users' code runs in the reader: it says so if asked. The stages have none."""
        return not self._sent.steps_done()

    def text(self, doing: Doing | None) -> str:
        """The process, where it is, what it is doing, the chunk, and how often it was sent."""
        done = self._sent.steps_done()
        stage, worker = self._line.stage_after(done, self._sent)
        if stage is None:
            its_stage = f" with transform {self._request.stage}" if self._request.stage is not None else ""
            what = f"reader{its_stage} {where_is(self._sent.reader)}, which {doing or 'does not answer'}"
        else:
            where = "" if worker is None else f" {where_is(worker)}"
            what = f"transform {stage}{where}, which is slow or waits for free resources ({stage.processes})"
        held = f"; {holders()}" if stage is not None and holders() else ""
        return f"{what}: {self._request}, {self._attempt}{held}"


class Block:
    """The block of a chunk, that has been made and comes from another node. Arguments as those of ChunkOnItsWay."""

    def __init__(self, line: ChunkLine, sent: Sent, request: ReadRequest, attempt: str) -> None:
        self.alive: Callable[[], None] = line.alive
        self._line = line
        self._sent = sent
        self._text = f"{request}, {attempt}"

    def ask(self) -> Future[Doing] | None:
        """There is nobody to ask."""
        return None

    def has_limit(self) -> bool:
        """It is read again where it does not come."""
        return True

    def text(self, doing: Doing | None) -> str:
        """The chunk, and where its block comes from."""
        stage, worker = self._line.stage_after(len(self._sent.info_refs), self._sent)
        if stage is None:
            worker = self._sent.reader
        made_by = f"a task of {stage}" if worker is None else where_is(worker)
        return f"a block to come from another node, made by {made_by}: {self._text}"
