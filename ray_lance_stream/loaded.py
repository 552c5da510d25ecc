"""A transform as the process calls it that runs it: what goes into the user's function, and what must come out."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import ray

from ray_lance_stream._ray import from_batch, take_rows, within_context
from ray_lance_stream.columns import to_batch
from ray_lance_stream.error_transport import PASSING
from ray_lance_stream.errors import TransformError, text_of
from ray_lance_stream.failures import attempt
from ray_lance_stream.nullable_ints import exact_parts, join_rows, with_unchanged_columns
from ray_lance_stream.transform import Transform, UserCall


class LoadedTransform:
    """A transform as this process calls it.

    Raises:
        TransformError: the constructor of a class failed.
    """

    def __init__(self, transform: Transform) -> None:
        self.transform = transform
        pickled = transform.call.get()
        call, failure = attempt_user(f"the module of {transform.name}", partial(pickle.loads, pickled))
        if failure is not None:
            raise TransformError(
                f"{transform.name} cannot be loaded where it is to run: {text_of(failure)}; have its module there, or define "
                "it in the script itself",
                failure,
            ) from failure
        self.call: UserCall = call
        self._fn = self.call.fn
        self._one_at_a_time: Any = nullcontext()
        if transform.is_class:
            self._one_at_a_time = threading.Lock()  # the threads of a reader share the instance
            args, kwargs = _resolved(self.call.constructor_args, self.call.constructor_kwargs)
            constructor = partial(self.call.fn, *args, **kwargs)
            with within_context(self.call.context):
                instance, failure = attempt_user(f"the constructor of {transform.name}", constructor)
            if failure is not None:
                raise TransformError(
                    f"the constructor of {transform.name} failed: {text_of(failure)}", failure
                ) from failure
            assert instance is not None
            self._fn = instance
        self._args, self._kwargs = _resolved(self.call.args, self.call.kwargs)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """What the user's function makes of some rows.

        Raises:
            TransformError: another number of rows, or no batch.
            KeyboardInterrupt, SystemExit: as the function raised them.
        """
        with within_context(self.call.context):  # it also decides which types an array becomes
            parts = exact_parts(rows) if self.transform.batch_format == "numpy" else []
            if len(parts) < 2:
                return self._run(rows)
            output = join_rows([self._run(rows.take(part)) for part in parts])
            return take_rows(output, np.argsort(np.concatenate(parts)))

    def _run(self, rows: pa.Table) -> pa.Table:
        name = self.transform.name
        batch = to_batch(rows, self.transform.batch_format)
        with self._one_at_a_time:
            result, failure = attempt_user(name, partial(self._fn, batch, *self._args, **self._kwargs))
        if failure is not None:
            raise failure
        if not isinstance(result, Mapping | pa.Table | pd.DataFrame):
            raise TransformError(
                f"{name} must return a dict of arrays, a pyarrow.Table or a pandas.DataFrame, got {type(result).__name__}"
            )
        columns = result.values() if isinstance(result, Mapping) else [result]
        if not all(hasattr(column, "__len__") for column in columns):
            kinds = {key: type(column).__name__ for key, column in result.items()}
            raise TransformError(f"{name} must return a dict of arrays, one value for each row, got {kinds}")
        counts = {len(column) for column in columns}
        if counts != {len(rows)}:
            given = " and ".join(str(count) for count in sorted(counts or {0}))
            raise TransformError(f"{name} must return as many rows as it is given, got {given} rows for {len(rows)}")
        # An instance may fill the same array at each call.
        output = from_batch(result, copy=self.transform.is_class)
        is_numpy = self.transform.batch_format == "numpy" and isinstance(result, Mapping)
        return with_unchanged_columns(output, rows) if is_numpy else output


def _resolved(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments, with the objects behind references, as Ray passes them."""

    def value(given: Any) -> Any:
        return ray.get(given) if isinstance(given, ray.ObjectRef) else given

    return tuple(value(each) for each in args), {key: value(each) for key, each in kwargs.items()}


def attempt_user(what: str, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """(result, None) or (None, exception) of code of the user's.

    Raises:
        KeyboardInterrupt, SystemExit: as they are.
        TransformError: it raised something else that is no error, such as GeneratorExit.
    """
    try:
        return attempt(call)
    except PASSING:
        raise
    except BaseException as error:
        raise TransformError(f"{what} raised {text_of(error)}, which is no error; raise an Exception", error) from error
