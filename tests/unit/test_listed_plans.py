"""A pass keeps the list that it began with, and a state names the list that rows came from; without Ray."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ray_lance_stream import ConfigError, ReadError, lance_stream
from ray_lance_stream.attempts import Attempt, AttemptBook
from ray_lance_stream.config import ReadPlan, RowList, Shared
from ray_lance_stream.cursor import EpochWalk
from ray_lance_stream.link import CoordinatorLink
from ray_lance_stream.listed_plans import ListedPlans
from ray_lance_stream.restore import StreamPosition
from ray_lance_stream.splits import split_block
from ray_lance_stream.state import ListedEpoch, StreamState, merge_state_dicts
from tests.support import make_table

S = 8


class Link(CoordinatorLink):
    """A rank's line to a coordinator in this process, which lists rows as a release of LanceDB does."""

    def __init__(self, book: AttemptBook, rank: int = 0) -> None:
        self._book, self._name, self._rank = book, "train", rank
        self._attempt = Attempt("a", "run", 2)
        self.release = "1"

    def row_list(self, plan: ReadPlan, epoch: int) -> RowList:
        rows = np.arange(plan.grid.epoch_rows)
        return RowList(epoch, f"list {epoch} of release {self.release}", Shared(rows))

    def _ask(self, method: str, *args: Any, **_: Any) -> Any:
        return getattr(self._book, method)(*args)

    def tell(self, state: StreamState, passes: Any) -> None:
        pass


class Rank:
    """One rank of two: begins passes and receives their rows."""

    def __init__(self, plan: ReadPlan, config: Any, book: AttemptBook, rank: int) -> None:
        self.link, self._rank = Link(book, rank), rank
        self.position = StreamPosition("train", plan, config, 2, self.link)
        self.position.lists._then_next = False

    def begin(self) -> None:
        start = self.position.cursor().next_start
        plan = self.position.with_list(self.position.plan_from(start), start.epoch)
        self._walk = EpochWalk(plan.grid, split_block(S, 2, self._rank), start)
        self.position.begin(plan, self._walk, None, False)

    def receive(self) -> None:
        self.position.cursor().received(self._walk.num_rows)

    @property
    def listed(self) -> ListedEpoch | None:
        return self.position.state().listed


@pytest.fixture
def stream(tmp_path):
    return lance_stream(make_table(tmp_path / "t", 80), num_splits=S, order="lancedb")


@pytest.fixture
def ranks(stream) -> list[Rank]:
    book = AttemptBook()
    return [Rank(stream._plan, stream._config, book, rank) for rank in range(2)]


def test_a_list_that_was_lost_must_come_again_as_it_was(stream):
    link = Link(AttemptBook())
    lists = ListedPlans("train", link, then_next=False)
    plan = lists.of(stream._plan, 3)
    assert lists.again(plan, 3) == plan
    link.release = "2"
    for _ in range(2):
        with pytest.raises(
            ReadError, match=r"of epoch 3 of stream 'train' was lost .* list 3 of release 2 in place of"
        ):
            lists.again(plan, 3)
    link.release = "1"
    assert lists.again(plan, 3) == plan


def test_a_permutation_is_never_asked_for_again(stream):
    listed = replace(stream._plan, listed=RowList(None, "f", Shared(np.arange(80))))
    assert ListedPlans("train", None, then_next=False).again(listed, 3) is listed


def test_ranks_that_have_other_lists_are_refused(ranks):
    ranks[1].link.release = "2"
    ranks[0].begin()
    with pytest.raises(
        ConfigError, match=r"rank 1 has list 0 of release 2 and rank 0 has list 0 of release 1; have the"
    ):
        ranks[1].begin()


def test_a_state_names_the_newest_list_that_rows_came_from(ranks):
    """Ranks that are an epoch's edge apart, one of which has its next list already, save the same state."""
    for rank in ranks:
        rank.begin()
        assert rank.listed is None  # no row came yet
        rank.receive()
        assert rank.listed.fingerprint == "list 0 of release 1"
    ranks[0].begin()
    states = [rank.position.state().to_dict() for rank in ranks]
    assert states[0] == states[1] == merge_state_dicts(states)
    ranks[0].receive()
    assert (ranks[0].listed.epoch, ranks[0].listed.fingerprint) == (1, "list 1 of release 1")


def test_looking_at_a_list_is_no_use_of_it(ranks):
    """As `schema()` does, which has its first cycle transformed."""
    position = ranks[0].position
    position.with_list(position.plan_from(position.cursor().next_start), 0)
    assert ranks[0].listed is None


def test_a_loaded_state_keeps_its_list_until_a_row_came(ranks, stream):
    ranks[0].begin()
    ranks[0].receive()
    saved = ranks[0].position.state()
    again = Rank(stream._plan, stream._config, AttemptBook(), 0)
    again.position.load(saved)
    assert again.listed == saved.listed
    again.begin()
    assert again.listed == saved.listed
    again.receive()
    assert again.listed.epoch == 1
