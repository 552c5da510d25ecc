"""What `map_batches` was given, checked on the driver, and how calls join into stages."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import ray

from ray_lance_stream.config import Shared, at_least
from ray_lance_stream.errors import ConfigError

if TYPE_CHECKING:
    from ray.data import DataContext

BATCH_FORMATS = ("numpy", "pyarrow", "pandas")
# What a stage sets itself: a lost chunk is sent again by the window, and a process has one call at a time.
OWN_OPTIONS = (
    "get_if_exists",
    "lifetime",
    "max_concurrency",
    "max_restarts",
    "max_retries",
    "max_task_retries",
    "name",
    "namespace",
    "num_returns",
    "retry_exceptions",
)
RESOURCES = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "label_selector")

OnError = Literal["raise", "replace"] | Callable[[BaseException, dict[str, Any]], str]


@dataclass(frozen=True)
class UserCall:
    """The part of a `map_batches` call that is the user's own; travels pickled, once to each process that runs it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    constructor_args: tuple[Any, ...] = ()
    constructor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    on_error: OnError = "raise"
    context: DataContext | None = None  # of the stream; that of the process where there is none


@dataclass(frozen=True)
class Transform:
    """One `map_batches` call.

    Attributes:
        key: tells calls apart.
        name: of the function or class, for messages.
        is_class: whether each process makes an instance of it.
        batch_size: the most rows that it is given at a time; None: all rows of a chunk.
        batch_format: what it is given.
        max_replaced_rows: rows of a pass that a rank may replace; None: any number.
        call: a pickled UserCall.
    """

    key: str
    name: str
    is_class: bool
    batch_size: int | None
    batch_format: str
    max_replaced_rows: int | None
    call: Shared[bytes] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Processes:
    """The processes that a stage has of its own.

    Attributes:
        concurrency: at most so many over the whole stream; None: one for each chunk in flight.
        options: of `ray.remote`.
    """

    concurrency: int | None
    options: Mapping[str, Any] = field(repr=False)  # environment variables may be among them

    def __str__(self) -> str:
        """What they ask of the cluster; not all options, which may hold secrets (environment variables)."""
        wishes = ", ".join(f"{key}={self.options[key]!r}" for key in RESOURCES if key in self.options)
        return f"concurrency={self.concurrency}, {wishes} each"


@dataclass(frozen=True)
class Stage:
    """Transforms that a chunk goes through in one process.

    Attributes:
        transforms: in order; not empty.
        processes: None: where the chunk is read.
        before: what a chunk has gone through when it arrives; for a row from elsewhere that replaces one that fails.
    """

    transforms: tuple[Transform, ...]
    processes: Processes | None
    before: tuple[Transform, ...] = ()

    def __str__(self) -> str:
        return " -> ".join(each.name for each in self.transforms)

    @property
    def key(self) -> str:
        """Tells stages apart."""
        return "+".join(each.key for each in self.transforms)

    @property
    def is_pool(self) -> bool:
        """Whether its processes are actors, which keep the instance of a class, or tasks."""
        return self.processes is not None and self.has_class

    @property
    def special_options(self) -> list[str]:
        """What its processes ask for that a process which just reads has not: all but CPUs and memory."""
        options = self.processes.options if self.processes is not None else {}
        return sorted(key for key, value in options.items() if value and key not in ("num_cpus", "memory"))

    @property
    def has_class(self) -> bool:
        """Whether a process has an instance to make."""
        return any(each.is_class for each in self.transforms)


def make_transform(
    fn: Any,
    *,
    batch_size: int | None,
    batch_format: str,
    fn_args: Iterable[Any] | None,
    fn_kwargs: Mapping[str, Any] | None,
    fn_constructor_args: Iterable[Any] | None,
    fn_constructor_kwargs: Mapping[str, Any] | None,
    on_transform_error: OnError,
    max_replaced_rows: int | None,
    context: DataContext | None = None,
) -> Transform:
    """A call as it travels. Arguments as `LanceStream.map_batches`, and the DataContext that is current where it runs.

    Raises:
        ConfigError: an argument cannot be served.
    """
    name, is_class, called = name_of(fn), isinstance(fn, type), _called(fn)
    if called is None:
        raise ConfigError(f"map_batches takes a function or a class with a __call__ method, got {fn!r}")
    if inspect.isgeneratorfunction(called) or inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise ConfigError(f"{name} must return one batch for each batch, but it is a generator or a coroutine")
    if not is_class and (fn_constructor_args is not None or fn_constructor_kwargs is not None):
        raise ConfigError(f"fn_constructor_args and fn_constructor_kwargs are for classes, {name} is none; use fn_args")
    if batch_size is not None:
        at_least("batch_size", batch_size, 1)
    if batch_format not in BATCH_FORMATS:
        raise ConfigError(f"batch_format must be one of {list(BATCH_FORMATS)}, got {batch_format!r}")
    if on_transform_error not in ("raise", "replace") and not callable(on_transform_error):
        raise ConfigError(
            f'on_transform_error must be "raise", "replace" or a function (exception, row) that returns one of them, got '
            f"{on_transform_error!r}"
        )
    if max_replaced_rows is not None:
        at_least("max_replaced_rows", max_replaced_rows, 0)
        if on_transform_error == "raise":
            raise ConfigError(
                'max_replaced_rows is a limit for on_transform_error="replace" or a function; pass one too'
            )
    call = UserCall(
        fn,
        tuple(fn_args or ()),
        dict(fn_kwargs or {}),
        tuple(fn_constructor_args or ()),
        dict(fn_constructor_kwargs or {}),
        on_transform_error,
        context,
    )
    return Transform(
        uuid.uuid4().hex, name, is_class, batch_size, batch_format, max_replaced_rows, Shared(_pickled(call, name))
    )


def make_processes(
    fn_name: str,
    *,
    batch_size: int | None,
    concurrency: int | tuple[int, int] | None,
    num_cpus: float | None,
    num_gpus: float | None,
    memory: float | None,
    ray_remote_args: Mapping[str, Any],
) -> Processes | None:
    """The processes that a call asks for; None: none of its own. Arguments as `LanceStream.map_batches`.

    Raises:
        ConfigError: an argument cannot be served.
    """
    own = sorted(set(ray_remote_args) & set(OWN_OPTIONS))
    if own:
        raise ConfigError(f"{fn_name}: the stream sets {own} itself; leave them out")
    resources = {"num_cpus": num_cpus, "num_gpus": num_gpus, "memory": memory}
    options = {key: value for key, value in resources.items() if value is not None} | dict(ray_remote_args)
    if isinstance(concurrency, tuple):
        smallest, concurrency = concurrency if len(concurrency) == 2 else (None, None)
        at_least("the first number of concurrency=(min, max)", smallest, 1)
        at_least("the second number of concurrency=(min, max)", concurrency, smallest or 1)
    elif concurrency is not None:
        at_least("concurrency", concurrency, 1)
    if num_gpus and batch_size is None:
        raise ConfigError(f"{fn_name}: with num_gpus a batch must fit the memory of the GPU; pass batch_size")
    return Processes(concurrency, {"num_cpus": 1} | options) if concurrency is not None or options else None


def with_transform(
    stages: tuple[Stage, ...], transform: Transform, processes: Processes | None, *, replaces: bool
) -> tuple[Stage, ...]:
    """`stages` and one more call, which joins the last stage if it can: one without processes of its own runs where the
    chunk is, and calls with equal processes share them, but for two classes.

    Args:
        stages: those so far.
        transform: the call.
        processes: its own.
        replaces: whether it may replace rows that fail.

    Raises:
        ConfigError: a class in tasks; a row that replaces another would have to pass through the processes of a class.
    """
    if replaces and any(stage.is_pool for stage in _left_behind(stages, transform, processes)):
        raise ConfigError(
            f"{transform.name} cannot replace rows after a class with processes of its own: a row that replaces another "
            "goes through all transforms; map it before that class, or with equal processes"
        )
    joined = _joins(stages, transform, processes)
    if joined:
        last = replace(stages[-1], transforms=(*stages[-1].transforms, transform))
    else:
        last = Stage((transform,), processes, tuple(each for stage in stages for each in stage.transforms))
    if last.is_pool and last.processes is not None and last.processes.concurrency is None:
        raise ConfigError(f"{transform.name}: a class with processes of its own needs concurrency, the number of them")
    _check_options(last)
    return (*(stages[:-1] if joined else stages), last)


def in_one_process(stages: Sequence[Stage]) -> Stage | None:
    """All transforms as one stage, where the rows are read; None if there are none."""
    transforms = tuple(each for stage in stages for each in stage.transforms)
    return Stage(transforms, None) if transforms else None


def name_of(fn: Any) -> str:
    """The name of a function, of what a partial calls, or of a class."""
    fn = getattr(fn, "func", fn)
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


def _joins(stages: tuple[Stage, ...], transform: Transform, processes: Processes | None) -> bool:
    if not stages:
        return False
    last = stages[-1]
    return processes is None or (processes == last.processes and not (transform.is_class and last.has_class))


def _left_behind(stages: tuple[Stage, ...], transform: Transform, processes: Processes | None) -> tuple[Stage, ...]:
    """The stages whose processes a chunk has left when it comes to a call."""
    return stages[:-1] if _joins(stages, transform, processes) else stages


def _called(fn: Any) -> Any:
    """What is called with a batch; None if there is nothing."""
    if isinstance(fn, type):
        return next((vars(base)["__call__"] for base in fn.__mro__ if "__call__" in vars(base)), None)
    return fn if callable(fn) else None


def _pickled(call: UserCall, name: str) -> bytes:
    try:
        return ray.cloudpickle.dumps(call)
    except Exception as error:
        raise ConfigError(
            f"{name} and its arguments must be picklable, which they are not: {type(error).__name__}: {error}; make what "
            "cannot be pickled inside of the function, or in the constructor of a class"
        ) from error


def _check_options(stage: Stage) -> None:
    """Ask Ray, which needs no cluster for it."""
    if stage.processes is None:
        return
    remote: Any = ray.remote(Stage if stage.is_pool else name_of)  # any class and any function will do
    try:
        remote.options(**stage.processes.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{stage}: not an option of its processes: {error}") from None
