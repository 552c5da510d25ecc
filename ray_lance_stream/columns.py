"""What columns become in batches: tensors, where numpy and torch can hold their values. `docs/types.md` is the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from ray.data.block import BlockAccessor
from ray.data.collate_fn import ArrowBatchCollateFn

from ray_lance_stream._ray import ArrowTensorArray
from ray_lance_stream.decode import was_bfloat16, with_columns
from ray_lance_stream.errors import ConfigError, ReadError

if TYPE_CHECKING:
    from ray_lance_stream.plan import StreamPlan
    from ray_lance_stream.reader import ReadRequest


class NullInTensorError(ValueError):
    """A null where a tensor is to be.

    Attributes:
        row: index in the table of a row with one.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


def with_tensor_columns(table: pa.Table) -> pa.Table:
    """Columns of fixed shape as Arrow tensors: they become numpy and torch tensors without a copy of each row.

    These are fixed-size lists of numbers and bools, nested ones too, and `arrow.fixed_shape_tensor`.

    Raises:
        NullInTensorError: a column of fixed shape holds a null, which a tensor cannot.
    """
    tensors: dict[int, tuple[pa.Field, pa.Array]] = {}
    for index, field in enumerate(table.schema):
        if is_tensor(field.type):
            chunks = table.column(index).chunks or [pa.nulls(0, field.type)]
            # Not combine_chunks(), which copies even one chunk.
            array = _tensors(chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks), field.name)
            tensors[index] = pa.field(field.name, array.type), array
    return with_columns(table, tensors)


def to_batch(table: pa.Table, batch_format: str) -> Any:
    """A table as a transform gets it: as `iter_batches` gives it, but tables are what they are."""
    if batch_format == "pyarrow":
        return table
    return BlockAccessor.for_block(with_tensor_columns(table)).to_batch_format(batch_format)


def batch_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of batches from a table with this schema."""
    return with_tensor_columns(_empty(schema)).schema


def refuse_nulls(table: pa.Table) -> None:
    """Check a table `with_tensor_columns` that is to become torch tensors.

    Raises:
        NullInTensorError: a column holds a null, which would become a NaN or another type.
    """
    for field, column in zip(table.schema, table.columns, strict=True):
        if column.null_count:
            raise NullInTensorError(_null_message(field) + " (a collate_fn can fill it)", _first_null(column))


def null_error(name: str, error: NullInTensorError, request: ReadRequest, plan: StreamPlan) -> ReadError:
    """A null in a chunk as an error that names its row.

    Args:
        name: of the stream.
        error: says which row of the chunk it is.
        request: the chunk.
        plan: of the request, resolved.
    """
    table = request.plan.table
    return ReadError(
        f"stream {name!r}: {error}, in row {request.rows(plan)[error.row]} of table {table.identity} version "
        f"{table.version}; leave the column out with columns=[...] or its nulls with filter='... IS NOT NULL', or fill them "
        "with map_batches(..., batch_format='pyarrow')"
    )


class TensorCollateFn(ArrowBatchCollateFn):
    """What `iter_torch_batches` makes of a batch without a `collate_fn` of the user's: a dict of tensors by column.

    The tensors have memory of their own: maths in place changes nothing else.

    Args:
        dtypes: as `iter_torch_batches`: a torch dtype for all columns, or one by column; None: as in `docs/types.md`.
    """

    def __init__(self, dtypes: Any = None) -> None:
        self._asked = dtypes
        self._schema: pa.Schema | None = None
        self._dtypes: dict[str, Any] = {}

    def prepare(self, schema: pa.Schema) -> None:
        """Find the dtype of each column, before the first batch of a schema is made.

        Args:
            schema: of a chunk, before `with_tensor_columns`.

        Raises:
            ConfigError: a column that torch cannot hold, or a dtype for a column that there is not.
        """
        import torch

        if schema == self._schema:
            return
        asked = self._asked if isinstance(self._asked, dict) else dict.fromkeys(schema.names, self._asked)
        unknown = sorted(set(asked) - set(schema.names))
        if unknown:
            raise ConfigError(f"dtypes must name columns of the stream, got {unknown}: they are {schema.names}")
        own = {field.name: torch.bfloat16 for field in schema if was_bfloat16(field)}
        self._dtypes = {name: asked.get(name) or own.get(name) for name in schema.names}
        empty = with_tensor_columns(_empty(schema))
        held: dict[tuple[pa.DataType, Any], bool] = {}  # each type is tried once: tables may have thousands of columns
        for field in schema:
            kind = field.type, self._dtypes[field.name]
            if kind not in held:
                held[kind] = self._can_hold(empty.select([field.name]))
            if not held[kind]:
                raise ConfigError(
                    f"iter_torch_batches needs columns that torch can hold, got {field.name!r} of type {field.type}: drop it "
                    "with columns=[...], or transform it with map_batches() or collate_fn=..."
                )
        self._schema = schema

    def _can_hold(self, empty: pa.Table) -> bool:
        try:
            self(empty)
        except TypeError:
            return False
        return not pa.types.is_null(empty.schema.types[0])

    def __call__(self, batch: pa.Table) -> Any:
        """The columns of a batch by name, as tensors [rows, ...]."""
        import torch

        arrays = BlockAccessor.for_block(batch).to_batch_format("numpy")
        return {
            # Copied if it is read-only: it may be shared memory, and torch would write to it.
            name: torch.as_tensor(array if array.flags.writeable else array.copy(), dtype=self._dtypes[name])
            for name, array in arrays.items()
        }


def _empty(schema: pa.Schema) -> pa.Table:
    """`schema.empty_table()`, which knows not all types."""
    return pa.Table.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def _element_type(kind: pa.DataType) -> pa.DataType:
    """The type of one number of a tensor."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return kind.value_type
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind


def is_tensor(kind: pa.DataType) -> bool:
    """Whether values of a type have a fixed shape of numbers or bools."""
    element = _element_type(kind)
    is_number = pa.types.is_integer(element) or pa.types.is_floating(element) or pa.types.is_boolean(element)
    return is_number and element != kind


def _tensors(array: pa.Array, name: str) -> pa.Array:
    """An array of fixed shape as an Arrow tensor."""
    shape: list[int] = []
    axes: list[int] = []
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        array, shape, axes = array.storage, list(kind.shape), list(kind.permutation or [])
    rows, is_outer = len(array), not shape
    per_row = 1
    while pa.types.is_fixed_size_list(array.type):
        _refuse_null_in(array, pa.field(name, kind), per_row)
        per_row *= array.type.list_size
        shape += [array.type.list_size] * is_outer
        array = array.flatten()
    _refuse_null_in(array, pa.field(name, kind), per_row)
    numbers = array.to_numpy(zero_copy_only=False).reshape(rows, *shape)
    if axes:
        numbers = numbers.transpose(0, *[1 + axis for axis in axes])
    return ArrowTensorArray.from_numpy(numbers, column_name=name)


def _refuse_null_in(array: pa.Array, field: pa.Field, per_row: int) -> None:
    if array.null_count:
        raise NullInTensorError(_null_message(field), _first_null(array) // per_row)


def _null_message(field: pa.Field) -> str:
    return f"column {field.name!r} of type {field.type} holds a null, which a tensor cannot"


def _first_null(array: pa.Array | pa.ChunkedArray) -> int:
    return array.is_null().index(True).as_py()
