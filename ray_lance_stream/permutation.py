"""Permutation tables of LanceDB: the splits that one lists, and `permutation=`, a stream over the user's own.

A permutation table has a row for each row of the stream, with its id in the base table and its split; a split's rows come
in the order in which the table has them, whether it is sorted by split or not.
"""

from __future__ import annotations

import inspect
import json
import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from ray_lance_stream.config import ReadPlan, RowList, Shared
from ray_lance_stream.errors import ConfigError, ReadError
from ray_lance_stream.failures import guarded, secrets_of
from ray_lance_stream.order import FEISTEL_1, PERMUTATION_PREFIX, Order
from ray_lance_stream.plan import fingerprint_of
from ray_lance_stream.row_ids import offsets_of

logger = logging.getLogger(__name__)

ROW_ID, SPLIT_ID = "row_id", "split_id"
_ACCEPTED = (
    "pass the table that lancedb.permutation.permutation_builder(table).….execute() returned, a copy of it in a database, "
    "or what its to_arrow() returns"
)


@dataclass(frozen=True)
class ListedSplits:
    """What a permutation table lists.

    Attributes:
        row_ids: uint64 [n], of split 0, then of split 1, and so on.
        sizes: int64 [S], rows of each split.
        names: of the splits, where they have names.
        base_version: of the base table, where it is recorded.
        base_branch: of the base table; "" for the main one.
    """

    row_ids: np.ndarray
    sizes: np.ndarray
    names: tuple[str, ...] = ()
    base_version: int | None = None
    base_branch: str = ""

    @property
    def rows_per_split(self) -> int:
        """R, the rows of the shortest split."""
        return int(self.sizes.min())

    @property
    def num_cut(self) -> int:
        """Rows beyond the end of the shortest split."""
        return int(self.sizes.sum()) - self.rows_per_split * len(self.sizes)

    def cut_row_ids(self) -> np.ndarray:
        """uint64 [S * R]: the ids of all splits, cut to the shortest."""
        if not self.num_cut:
            return self.row_ids
        starts = np.cumsum(self.sizes) - self.sizes
        return np.concatenate([self.row_ids[start : start + self.rows_per_split] for start in starts])


def listed_splits(table: pa.Table) -> ListedSplits:
    """The splits of a permutation table.

    Raises:
        ConfigError: no permutation table, or a split without rows.
    """
    missing = {ROW_ID, SPLIT_ID} - set(table.column_names)
    if missing:
        raise ConfigError(
            f"a permutation table has the columns {ROW_ID} and {SPLIT_ID}, got {table.column_names}; {_ACCEPTED}"
        )
    if not len(table):
        raise ConfigError(f"a permutation table must list rows, got none; {_ACCEPTED}")
    ids, splits = (_numbers(table, name) for name in (ROW_ID, SPLIT_ID))
    metadata = table.schema.metadata or {}
    names = tuple(json.loads(metadata.get(b"split_names", b"[]")))
    found, sizes = np.unique(splits, return_counts=True)
    expected = max(len(names), int(found[-1]) + 1)
    if len(found) != expected:
        first = int(np.flatnonzero(np.append(found, expected) != np.arange(len(found) + 1))[0])
        name = f" ({names[first]!r})" if first < len(names) else ""
        raise ConfigError(
            f"every split of a permutation table needs rows, but split {first}{name} of {expected} has none; split ids "
            "count from 0: choose other weights, or another calculation"
        )
    if np.any(splits[1:] < splits[:-1]):
        ids = ids[np.argsort(splits, kind="stable")]
    version, branch = metadata.get(b"base_version"), metadata.get(b"base_branch", b"").decode()
    return ListedSplits(ids, sizes.astype(np.int64), names, int(version) if version else None, branch)


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    """uint64 [n]: a column of a permutation table."""
    column = table[name]
    if not pa.types.is_integer(column.type) or column.null_count:
        raise ConfigError(
            f"column {name} of a permutation table must hold integers, got {column.type} with {column.null_count} nulls; "
            f"{_ACCEPTED}"
        )
    return column.to_numpy().astype(np.uint64, copy=False)


def with_permutation(plan: ReadPlan, permutation: Any, takes_up_versions: bool) -> ReadPlan:
    """`plan` over the user's permutation table, at the version that this names as its base.

    Args:
        plan: with an order that nobody asked for; num_splits as given.
        permutation: a permutation table.
        takes_up_versions: whether epochs of the stream take up new versions.

    Raises:
        ConfigError: no permutation table, or an argument that it fixes.
        TableError: the base version is gone, or does not have the rows.
    """
    _refuse_arguments(plan, takes_up_versions)
    splits = listed_splits(_as_arrow(permutation))
    if plan.num_splits not in (None, len(splits.sizes)):
        raise ConfigError(
            f"num_splits comes from the permutation, which has {len(splits.sizes)} splits, got num_splits={plan.num_splits}; "
            "leave it out"
        )
    table = plan.table
    if splits.base_branch and not table.identity.endswith(f"/tree/{splits.base_branch}"):
        raise ConfigError(
            f"the permutation is of branch {splits.base_branch!r}, got table {table.identity}: pass the URI of the branch, "
            f"{table.identity}/tree/{splits.base_branch}"
        )
    if splits.base_version is None:
        logger.warning(
            "the permutation table names no base version: its rows are looked up in version %d of table %s",
            table.version,
            table.identity,
        )
    elif splits.base_version != table.version:
        logger.info("the permutation is of version %d of table %s", splits.base_version, table.identity)
        table = table.at(splits.base_version)
    dataset = table.open(fresh=True)
    where = f"table {table.identity} version {table.version}"
    rows = guarded(
        lambda: offsets_of(dataset, splits.cut_row_ids(), where),
        f"the rows of the permutation cannot be found in {where}",
        ReadError,
        secrets_of(table.uri, dataset.initial_storage_options),
    )
    if splits.num_cut:
        logger.warning(
            "%d of %d rows of the permutation are left out of every epoch: the splits of a stream are of one size, so its "
            "%d splits (%s rows) are cut to the shortest",
            splits.num_cut,
            len(splits.row_ids),
            len(splits.sizes),
            _sizes_text(splits),
        )
    fingerprint = fingerprint_of(rows, len(splits.sizes))
    return replace(
        plan,
        table=table,
        order=Order(len(rows), shuffle=False, order_id=PERMUTATION_PREFIX + fingerprint),
        num_splits=len(splits.sizes),
        listed=RowList(None, fingerprint, Shared(rows)),
    )


def _refuse_arguments(plan: ReadPlan, takes_up_versions: bool) -> None:
    order = plan.order
    given = {
        "order": order.order_id != FEISTEL_1 and order.order_id,
        "shuffle": not order.shuffle and "False",
        "shuffle_seed": order.seed,
        "shuffle_clump_size": order.clump_size,
        "filter": plan.filter,
        "drop_remainder": not plan.drop_remainder and "False",
        "on_new_version": takes_up_versions and "next_epoch",
    }
    named = ", ".join(f"{name}={value}" for name, value in given.items() if value)
    if named:
        raise ConfigError(
            f"a permutation fixes which rows come, and in which order, so {named} must not be given with it; leave it out, "
            "and filter or shuffle where the permutation is built"
        )


def _as_arrow(permutation: Any) -> pa.Table:
    if isinstance(permutation, pa.Table):
        return permutation
    library = type(permutation).__module__.partition(".")[0]
    read = {"lancedb": "to_arrow", "lance": "to_table"}.get(library)
    if read is None or not hasattr(permutation, read) or inspect.iscoroutinefunction(getattr(permutation, read)):
        kind = f"{type(permutation).__module__}.{type(permutation).__qualname__}"
        raise ConfigError(f"permutation must be a permutation table, got {kind}: {_ACCEPTED}")
    return guarded(getattr(permutation, read), "the permutation table cannot be read", ReadError, ())


def _sizes_text(splits: ListedSplits) -> str:
    if not splits.names:
        return f"{splits.rows_per_split} to {int(splits.sizes.max())}"
    return ", ".join(f"{name}: {size}" for name, size in zip(splits.names, splits.sizes.tolist(), strict=True))
