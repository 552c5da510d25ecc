"""order="lancedb": the lists of LanceDB's permutation builder, row for row as `lancedb.streaming.StreamingDataset` has them.

Without a shuffle that order is the table's own, which is computed. With one, only LanceDB's own code knows it.
"""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import version
from typing import Any

import numpy as np

from ray_lance_stream.config import ReadPlan
from ray_lance_stream.errors import ConfigError, ReadError
from ray_lance_stream.failures import guarded, secrets_of
from ray_lance_stream.manifest import manifest_bytes
from ray_lance_stream.order import LANCEDB
from ray_lance_stream.permutation import listed_splits
from ray_lance_stream.row_ids import offsets_of
from ray_lance_stream.storage_options import current_options
from ray_lance_stream.table import TableRef

# As in lancedb.streaming: the builder's seed of an epoch is shuffle_seed + epoch * EPOCH_FACTOR, an unsigned 64-bit number.
EPOCH_FACTOR = 100_003
MAX_BUILDER_SEED = 2**64 - 1

MEMORY_LIMIT = "LANCEDB_PERM_BUILDER_MEMORY_LIMIT"
DEFAULT_LIMIT_BYTES = 100 * 2**20  # lancedb's
BYTES_PER_ROW = 64  # what its sort takes, with room above what was measured, see docs/design.md
FORMAT = 1  # of what is listed: another one makes kept lists useless


def made_by() -> str:
    """The release of lancedb that lists rows here."""
    return f"lancedb {version('lancedb')}"


def check_lancedb_order(plan: ReadPlan, first_epoch: int) -> None:
    """Refuse what LanceDB's order cannot be.

    Raises:
        ConfigError: names the argument.
    """
    if plan.order.order_id != LANCEDB:
        return
    if not plan.drop_remainder:
        raise ConfigError(
            f"order={LANCEDB!r} leaves the N % num_splits last rows out, as LanceDB does, so drop_remainder=False cannot be "
            "served; leave it out, or use the default order"
        )
    if plan.order.shuffle:
        builder_seed(plan, first_epoch)


def builder_seed(plan: ReadPlan, epoch: int) -> int:
    """The seed that LanceDB shuffles an epoch with.

    Raises:
        ConfigError: no unsigned number of 64 bits.
    """
    seed = plan.order.seed + epoch * EPOCH_FACTOR
    if not 0 <= seed <= MAX_BUILDER_SEED:
        raise ConfigError(
            f"LanceDB shuffles with shuffle_seed + epoch * {EPOCH_FACTOR}, which must be in [0, 2**64), got shuffle_seed="
            f"{plan.order.seed} and epoch={epoch}; use a shuffle_seed in [0, 2**63)"
        )
    return seed


def list_key(plan: ReadPlan, epoch: int) -> str:
    """A name for the list of an epoch: of everything that it follows from."""
    manifest = hashlib.blake2b(manifest_bytes(plan.table.open()), digest_size=16).hexdigest()
    follows_from = (
        FORMAT,
        made_by(),
        plan.table.identity,
        plan.table.version,
        manifest,
        plan.filter,
        plan.grid.num_splits,
        plan.order.clump_size,
        builder_seed(plan, epoch),
    )
    return hashlib.blake2b(repr(follows_from).encode(), digest_size=16).hexdigest()


def build_list(plan: ReadPlan, epoch: int) -> np.ndarray:
    """int64 [S * R]: the rows of an epoch by index, as offsets of the pinned version. Scans row ids and the filter's columns.

    Raises:
        ConfigError: the builder's memory limit is too small.
        ReadError: the builder failed.
    """
    table = plan.table
    where = f"table {table.identity} version {table.version}"
    dataset = table.open()

    def build() -> np.ndarray:
        from lancedb.permutation import permutation_builder

        builder = permutation_builder(_lancedb_table(table))
        if plan.filter is not None:
            builder = builder.filter(plan.filter)
        built = builder.split_random(
            fixed=plan.grid.num_splits, seed=builder_seed(plan, epoch), clump_size=plan.order.clump_size
        ).execute()
        return offsets_of(dataset, listed_splits(built.to_arrow()).cut_row_ids(), where)

    secrets = secrets_of(table.uri, dataset.initial_storage_options)
    try:
        rows = guarded(build, f"LanceDB cannot list the rows of epoch {epoch} of {where}", ReadError, secrets)
    except ReadError as error:
        if "Resources exhausted" not in str(error):
            raise
        raise ConfigError(_memory_text(plan, where)) from error.__cause__
    if len(rows) != plan.grid.epoch_rows:
        raise ReadError(f"LanceDB lists {len(rows)} rows of {where}, not the {plan.grid.epoch_rows} of an epoch")
    return rows


def _memory_text(plan: ReadPlan, where: str) -> str:
    limit = os.environ.get(MEMORY_LIMIT, str(DEFAULT_LIMIT_BYTES))
    wanted = max(plan.order.num_rows * BYTES_PER_ROW, 2 * DEFAULT_LIMIT_BYTES)
    return (
        f"LanceDB's permutation builder may use {limit} bytes, which is not enough for the {plan.order.num_rows} rows of "
        f"{where}; set {MEMORY_LIMIT} to {wanted} or more where the stream's coordinator runs: in the environment that "
        f'Ray is started from, or with ray.init(runtime_env={{"env_vars": {{"{MEMORY_LIMIT}": "{wanted}"}}}}). The '
        "default order takes no memory"
    )


def _lancedb_table(ref: TableRef) -> Any:
    """The version as a LanceDB table, wherever its folder is and whatever its name."""
    import lancedb
    from lancedb.table import LanceTable

    folder, _, name = ref.uri.rstrip("/").rpartition("/")
    database = lancedb.connect(folder, storage_options=current_options(ref.storage_options) or None)
    table = LanceTable.open(database, name.removesuffix(".lance"), location=ref.uri)
    table.checkout(ref.version)
    return table
