"""`LanceStream.map_batches`: checked on the driver, before any worker starts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.transform import OnError, make_processes, make_transform, with_transform

if TYPE_CHECKING:
    from ray.data import DataContext
    from typing_extensions import Self


class Transformable:
    """What a stream is as a chain of transforms."""

    context: DataContext
    _config: StreamConfig

    @abstractmethod
    def _with(self, config: StreamConfig) -> Self: ...

    def map_batches(
        self,
        fn: Callable[..., Any],
        *,
        batch_size: int | None = None,
        batch_format: str = "numpy",
        fn_args: Iterable[Any] | None = None,
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Iterable[Any] | None = None,
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        concurrency: int | tuple[int, int] | None = None,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        memory: float | None = None,
        on_transform_error: OnError = "raise",
        max_replaced_rows: int | None = None,
        **ray_remote_args: Any,
    ) -> Self:
        """A stream whose rows have gone through a function, between readers and workers; see docs/transforms.md.

        Arguments are those of `ray.data.Dataset.map_batches`. What a row becomes must depend on that row alone: how many
        rows come together depends on the number of workers and on where a run was resumed. There must be as many rows
        as before, in their order; columns may change. Transforms are no part of the saved state.

        Args:
            fn: a function, or a class that is made once in each process and called. Gets a batch, read-only as Ray Data's,
                and returns a dict of arrays, a pyarrow.Table or a pandas.DataFrame.
            batch_size: the most rows that fn is given at a time; None: those of a whole chunk.
            batch_format: "numpy" (a dict of arrays), "pyarrow" or "pandas".
            fn_args: more arguments of fn.
            fn_kwargs: the same, by name.
            fn_constructor_args: arguments for the constructor of a class.
            fn_constructor_kwargs: the same, by name.
            concurrency: so many processes over all workers: tasks for a function (at least one for each worker), actors for a
                class. (min, max) means max: an actor that the cluster has no room for is not waited for while another one
                runs. None, without resources: fn runs where the chunk is, at first in the threads of the reader.
            num_cpus: CPUs of each process; 1 if it is not given.
            num_gpus: GPUs of each process; batch_size must be given too.
            memory: bytes of heap memory of each process.
            on_transform_error: what is done about a row on which fn raises. "raise": TransformError, which names it.
                "replace": the nearest good row of the same split stands in for it, within fixed windows of 64 positions of
                the split, an earlier one before a later one. A function (exception, row as a dict) returns one of the two.
            max_replaced_rows: with more rows replaced in a pass of one worker, the pass ends with TransformError.
            ray_remote_args: further options of `ray.remote` for each process.

        Raises:
            ConfigError: an argument cannot be served, or fn cannot be pickled.
        """
        transform = make_transform(
            fn,
            batch_size=batch_size,
            batch_format=batch_format,
            fn_args=fn_args,
            fn_kwargs=fn_kwargs,
            fn_constructor_args=fn_constructor_args,
            fn_constructor_kwargs=fn_constructor_kwargs,
            on_transform_error=on_transform_error,
            max_replaced_rows=max_replaced_rows,
            context=self.context,
        )
        processes = make_processes(
            transform.name,
            batch_size=batch_size,
            concurrency=concurrency,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            memory=memory,
            ray_remote_args=ray_remote_args,
        )
        replaces = on_transform_error != "raise"
        stages = with_transform(self._config.stages, transform, processes, replaces=replaces)
        return self._with(replace(self._config, stages=stages))
