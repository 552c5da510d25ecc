"""What can be asked of a LanceStream besides iterating it: rows of a step, an epoch as a dataset, state, progress."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import ray
from ray.data import Dataset

from ray_lance_stream import explain
from ray_lance_stream._ray import local_run
from ray_lance_stream.config import ReadPlan, StreamConfig, at_least
from ray_lance_stream.dataset import epoch_dataset
from ray_lance_stream.errors import ConfigError
from ray_lance_stream.forked import use_ray
from ray_lance_stream.meter import Tally, metrics_text
from ray_lance_stream.runs import RankView, RunSnapshot
from ray_lance_stream.state import StreamState
from ray_lance_stream.summary import PlanSummary, summarize

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from typing_extensions import Self

    from ray_lance_stream.shard import StreamShard


class Inspectable:
    """What a stream is as something to look at."""

    name: str | None
    _plan: ReadPlan
    _config: StreamConfig
    _coordinator: ray.actor.ActorHandle | None
    _local: StreamShard | None
    _is_missing_said = False

    @abstractmethod
    def _with(self, config: StreamConfig) -> Self: ...

    @property
    def plan(self) -> PlanSummary:
        """What this stream is going to do, as data: see PlanSummary. `explain()` is its text."""
        return summarize(self._plan, self._config, self.name or "")

    def explain(self) -> str:
        """What this stream is going to do: rows, splits, steps, worker counts, memory. `print(stream)` shows it."""
        return str(self.plan)

    def __str__(self) -> str:
        return self.explain()

    def row_ids(
        self, epoch: int, step: int, *, column: str | None = None, global_batch_size: int | None = None
    ) -> np.ndarray | list[Any]:
        """The rows of one global step, for finding the batch behind a loss spike.

        Args:
            epoch: from 0.
            step: from 0, counted from the start of the epoch, skipped steps included.
            column: read this column and return its values instead of row offsets.
            global_batch_size: G, where it is not the stream's; of a stream without one the default is
                `plan.default_global_batch_size`.

        Returns:
            int64 [G] row offsets in the pinned table version, or the G values of `column`; in the order of one worker.

        Raises:
            ConfigError: no such step or column, no such global batch size, or a stream without num_splits.
        """
        at_least("epoch", epoch, 0)
        rows = explain.step_rows(
            self._plan, epoch, explain.step_cycles(self._plan, self._config, step, global_batch_size)
        )
        return rows if column is None else explain.column_values(self._plan, rows, column)

    def step_digest(self, epoch: int, step: int, *, global_batch_size: int | None = None) -> int:
        """A number in [0, 2**64) for the rows of one global step.

        Digests add up modulo 2**64: over the steps of a pass and over the ranks, `shard.digest()` gives the same sum. Cycles
        that the stream skips do not count, also where they are a part of the step. Arguments as of `row_ids`.

        Raises:
            ConfigError: no such step or global batch size, or a stream without num_splits.
        """
        at_least("epoch", epoch, 0)
        cycles = explain.step_cycles(self._plan, self._config, step, global_batch_size)
        return explain.step_digest(self._plan, self._config_at_start, epoch, cycles)

    def skip(self, epoch: int, steps: range, *, global_batch_size: int | None = None) -> Self:
        """A stream that leaves out some global steps of an epoch, the same on every rank; the state records them.

        Args:
            epoch: from 0.
            steps: steps counted from the start of the epoch.
            global_batch_size: as of `row_ids`.

        Raises:
            ConfigError: no such steps or global batch size, or a stream without num_splits.
        """
        entries = explain.skip_entries(self._plan, self._config, epoch, steps, global_batch_size)
        return self._with(self._config.with_skipped(entries))

    def to_dataset(self, epoch: int = 0, global_batch_size: int | None = None) -> Dataset:
        """One epoch as a `ray.data.Dataset`: the rows that training sees, in the order of one worker. Lazy.

        Columns have the types of `ray.data.read_lance`. `dataset.context.execution_options.preserve_order` keeps the order.
        Transforms of `map_batches` run in the read tasks; where they enlarge rows a lot, Ray Data may cut blocks within a step.

        Args:
            epoch: from 0.
            global_batch_size: G, where it is not the stream's. Blocks hold whole steps of G rows, so that
                `map_batches(..., batch_size=G)` works on steps; without G, and where a step has more than half of
                `target_max_block_size` bytes, they hold whole cycles.

        Raises:
            ConfigError: an epoch or a global batch size that cannot be served, or a transform that asks for more than a CPU.
            VersionNotFoundError: the pinned version is gone.
        """
        return epoch_dataset(self._plan, self._config_at_start, epoch, global_batch_size)

    def state_dict(self, run: str | None = None) -> dict[str, Any]:
        """Where a run is: the position of its slowest rank, as last told (ranks tell about once a second).

        For looking at. A run continues from a checkpoint, never from here. In local mode, and where the stream iterates
        itself, the position of its only shard, up to the last row.

        Args:
            run: name of the run, where several share this stream.

        Raises:
            ConfigError: several runs and no name, or an unknown name.
        """
        local = self._local_of(run)
        if local is not None:
            return local.state_dict()
        found = self._snapshot(run)
        self._say_of_missing(found)
        return (found.state or self._start()).to_dict()

    def progress(self, run: str | None = None) -> dict[int, dict[str, Any]]:
        """By rank of the newest worker group, from `streaming_split` on:

        - `split_block`: (lo, hi), the splits that the coordinator has assigned to it;
        - `node`: id of the node where it runs, None where that is not known yet;
        - `reader`: actor ids of its readers, separated by commas, None before it has one;
        - `epoch` and `samples_consumed_per_split`: its position, before its first report that of the run;
        - `rows` received in this attempt, and `rows_per_s`;
        - `wait_share`: the part of the loop's time, from 0 to 1, that it waited for batches.

        As last reported; ranks report about once a second.

        Args:
            run: name of the run, where several share this stream.

        Raises:
            ConfigError: several runs and no name, or an unknown name.
        """
        found = self._snapshot(run)
        self._say_of_missing(found)
        start = found.state or self._start()
        return {rank: _progress_of(view, start) for rank, view in found.ranks.items()}

    def metrics(self, run: str | None = None) -> dict[str, Any]:
        """What all ranks of a run have counted in this attempt, added up, as last reported: the numbers of
        `StreamShard.metrics()`, and under "ranks" those of each rank.

        In local mode, and where the stream iterates itself, those of its only shard.

        Raises:
            ConfigError: several runs and no name, or an unknown name.
        """
        local = self._local_of(run)
        if local is not None:
            tallies = {local.world_rank: local._meter.tally()}
        else:
            found = self._snapshot(run)
            self._say_of_missing(found)
            tallies = {rank: view.tally for rank, view in found.ranks.items() if view.tally is not None}
        total = sum(tallies.values(), Tally()).to_dict(sum(tally.rows_per_s for tally in tallies.values()))
        return {**total, "ranks": {rank: tally.to_dict() for rank, tally in tallies.items()}}

    def stats(self, run: str | None = None) -> str:
        """`metrics()` as text; in local mode, and where the stream iterates itself, `stats()` of its only shard."""
        local = self._local_of(run)
        if local is not None:
            return local.stats()
        figures = self.metrics(run)
        waits = ", ".join(f"{rank}: {each['wait_share']:.1%}" for rank, each in figures["ranks"].items())
        return f"Ranks: {len(figures['ranks'])}\n{metrics_text(figures)}* Waiting by rank: {waits}\n"

    @property
    def _config_at_start(self) -> StreamConfig:
        """The config with what the state of `resume_from` skips."""
        saved = self._config.resume_state(self.name or "")
        return self._config.with_skipped(saved.skipped) if saved else self._config

    def _local_of(self, run: str | None) -> StreamShard | None:
        """The shard of this process, where it is what is asked for: this is local mode, or no Ray Train run is told of."""
        if run is not None or self._local is None:
            return None
        return self._local if local_run() is not None or not any(self._ask_snapshot(None).runs) else None

    def _say_of_missing(self, found: RunSnapshot) -> None:
        """Warn, once, where only some ranks have reported to the coordinator."""
        reported = [rank for rank, view in found.ranks.items() if view.state is not None]
        if reported and len(reported) < found.world_size and not self._is_missing_said:
            self._is_missing_said = True
            logger.warning(
                "stream %r: of %d ranks only %s have reported their position to the stream's coordinator so far, and what is "
                "shown is of these; shard.state_dict() of a rank is its own position",
                self.name,
                found.world_size,
                ", ".join(map(str, reported)),
            )

    def _ask_snapshot(self, run: str | None) -> RunSnapshot:
        assert self._coordinator is not None
        use_ray()
        return cast(RunSnapshot, ray.get(self._coordinator.snapshot.remote(run)))

    def _start(self) -> StreamState:
        """Where a run of this stream starts, as far as is known here."""
        saved = self._config.resume_state(self.name or "")
        identity = self._plan.identity(self._config.replicas)
        return saved or StreamState(identity, self._config.epoch, 0, self._config.global_batch_size)

    def _snapshot(self, run: str | None) -> RunSnapshot:
        if self._coordinator is None:
            return RunSnapshot(())
        found = self._ask_snapshot(run)
        if run is None and len(found.runs) > 1:
            raise ConfigError(f"several runs use this stream, name one of them: {list(found.runs)}")
        if run is not None and run not in found.runs:
            raise ConfigError(f"no run {run!r} has used this stream; runs so far: {list(found.runs)}")
        return found


def _progress_of(view: RankView, start: StreamState) -> dict[str, Any]:
    state, tally = view.state or start, view.tally or Tally()
    return {
        "split_block": (view.split_block.lo, view.split_block.hi),
        "node": view.node,
        "reader": view.reader,
        "epoch": state.epoch,
        "samples_consumed_per_split": state.samples_consumed_per_split,
        "rows": tally.rows,
        "rows_per_s": tally.rows_per_s,
        "wait_share": tally.wait_share,
    }
