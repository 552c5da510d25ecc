"""Row orders: the function (epoch, index) -> row.

The default order is computed per index and never stored, so a billion rows cost no memory and no start-up time. What it
computes is a specification, `docs/order.md`, with test vectors: it is not allowed to change under a given order id.
Orders that others make are listed: an array of rows that somebody has to bring along.

Pure: numpy and hashlib only. Neither reads nor changes any global random state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_lance_stream.errors import ConfigError

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

FEISTEL_1 = "feistel-1"
LANCEDB = "lancedb"
ORDER_IDS = (FEISTEL_1, LANCEDB)
PERMUTATION_PREFIX = "permutation:"  # and the fingerprint of the user's list
MAX_ROWS = 2**62
# Python refuses to print integers of more than 4,300 digits, and a seed has to fit into a small saved state anyway.
MAX_SEED_BITS = 4096

# Both are measured, see docs/order.md, "Why these numbers": with 6 rounds, pairs of rows are visibly not random; with 5
# bits, some permutations of a few rows are visibly more frequent. An even number changes both halves equally often.
NUM_ROUNDS = 8
MIN_BITS = 6


def feistel_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """The round keys of one epoch: NUM_ROUNDS integers in [0, 2**64).

    They are the little-endian words of a 512-bit BLAKE2b hash of the decimal text of (seed, epoch). The text names the
    pair without ambiguity, so two pairs share keys only if BLAKE2b collides; sums such as seed + epoch would not do.
    """
    digest = hashlib.blake2b(f"{FEISTEL_1}:{seed}:{epoch}".encode("ascii"), digest_size=8 * NUM_ROUNDS).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8))


@dataclass(frozen=True)
class FeistelPermutation:
    """A keyed permutation of [0, num_rows), evaluated per element in O(1) expected time, with its exact inverse.

    An alternating Feistel network permutes [0, 2**bits), the smallest such range that holds num_rows (of at least
    MIN_BITS bits); values outside [0, num_rows) are sent through it again until they land inside ("cycle-walking":
    J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). At least half of the range is inside
    except for num_rows <= 32, so fewer than two passes are expected.

    Args:
        num_rows: N, 1 <= N <= 2**62.
        keys: NUM_ROUNDS integers in [0, 2**64), see `feistel_keys`.

    Raises:
        ConfigError: an argument is outside these limits.
    """

    num_rows: int
    keys: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_num_rows(self.num_rows)
        if len(self.keys) != NUM_ROUNDS or not all(_is_int(key) and 0 <= key < 2**64 for key in self.keys):
            raise ConfigError(
                f"keys must be {NUM_ROUNDS} integers in [0, 2**64), got {self.keys!r}; make them with feistel_keys()"
            )

    @property
    def bits(self) -> int:
        """Width of the range that the network permutes, before cycle-walking."""
        return max(MIN_BITS, (self.num_rows - 1).bit_length())

    def forward(self, index: npt.NDArray[np.integer[Any]]) -> Int64Array:
        """Rows at the given places: int64 [n] -> int64 [n], both in [0, num_rows). ConfigError if out of range."""
        return self._walk(index, range(NUM_ROUNDS))

    def inverse(self, row: npt.NDArray[np.integer[Any]]) -> Int64Array:
        """Places of the given rows: int64 [n] -> int64 [n], so that inverse(forward(i)) == i. Errors as `forward`."""
        return self._walk(row, range(NUM_ROUNDS - 1, -1, -1))

    def _walk(self, index: npt.NDArray[np.integer[Any]], rounds: range) -> Int64Array:
        """Runs the network in the given order of rounds, again for every value that is still out of range."""
        _check_index(index, self.num_rows)  # a value outside of the range would never come back into it
        if self.num_rows == 1:
            return np.zeros(index.shape, np.int64)
        table: UInt64Array | None = None  # [2**MIN_BITS]
        if self.bits == MIN_BITS:
            # A few rows (or a few large clumps) need up to 64 passes: look them up instead of computing each.
            table = self._network(np.arange(2**MIN_BITS, dtype=np.uint64), rounds)

        def once(value: UInt64Array) -> UInt64Array:
            return self._network(value, rounds) if table is None else table[value]

        value = once(index.astype(np.uint64))  # [n]
        outside = np.flatnonzero(value >= np.uint64(self.num_rows))  # [number still out of range]
        while outside.size:
            again = once(value[outside])
            value[outside] = again
            outside = outside[again >= np.uint64(self.num_rows)]
        return value.view(np.int64)

    def _network(self, value: UInt64Array, rounds: range) -> UInt64Array:
        """One pass of the Feistel network, a permutation of [0, 2**bits): uint64 [n] -> uint64 [n].

        A round XORs into one half a function of the other half, which undoes itself when done again: running the
        rounds backwards is the exact inverse. Halves stay where they are instead of changing places, so that each
        keeps its width and an odd number of bits needs no special case.
        """
        low_bits = np.uint64(self.bits - self.bits // 2)
        high_mask = np.uint64((1 << self.bits // 2) - 1)
        low_mask = np.uint64((1 << int(low_bits)) - 1)
        high = value >> low_bits
        low = value & low_mask
        mixed, scratch = np.empty_like(value), np.empty_like(value)
        for number in rounds:
            source, target, mask = (low, high, high_mask) if number % 2 == 0 else (high, low, low_mask)
            np.bitwise_xor(source, np.uint64(self.keys[number]), out=mixed)
            _mix64(mixed, scratch)
            mixed &= mask
            target ^= mixed
        high <<= low_bits
        high |= low
        return high


@dataclass(frozen=True)
class Order:
    """The function (epoch, index) -> row; 0 <= index < num_rows. In each epoch it is a permutation of the rows.

    Args:
        num_rows: N, rows that are ordered, 1 <= N <= 2**62.
        shuffle: False gives the identity, whatever the other arguments are.
        seed: any integer of up to MAX_SEED_BITS bits, negative ones included.
        clump_size: rows that stay together. Clumps of this many consecutive rows are permuted; inside one the rows
            keep their ascending order. The last clump is short if N is no multiple. None means 1.
        order_id: names the algorithm, see docs/order.md, or the user's permutation.

    Raises:
        ConfigError: an argument is outside these limits.
    """

    num_rows: int
    shuffle: bool = True
    seed: int = 0
    clump_size: int | None = None
    order_id: str = FEISTEL_1

    def __post_init__(self) -> None:
        if self.order_id not in ORDER_IDS and not self.is_permutation:
            known = ", ".join(map(repr, ORDER_IDS))
            raise ConfigError(f"order must be one of {known}, got {self.order_id!r}; leave it out for the default")
        _check_num_rows(self.num_rows)
        if not isinstance(self.shuffle, bool):
            raise ConfigError(f"shuffle must be True or False, got {self.shuffle!r}; pass a bool")
        if not _is_int(self.seed):
            raise ConfigError(f"shuffle_seed must be an int, got {self.seed!r}; pass int(seed)")
        if self.seed.bit_length() > MAX_SEED_BITS:
            raise ConfigError(
                f"shuffle_seed must have at most {MAX_SEED_BITS} bits, got {self.seed.bit_length()} bits; pass a smaller seed"
            )
        if self.clump_size is not None and (not _is_int(self.clump_size) or self.clump_size < 1):
            raise ConfigError(
                f"shuffle_clump_size must be an int >= 1, got {self.clump_size!r}; pass None to shuffle single rows"
            )

    @property
    def is_permutation(self) -> bool:
        """Whether the user's permutation table lists the rows, the same in each epoch."""
        return self.order_id.startswith(PERMUTATION_PREFIX)

    @property
    def is_listed(self) -> bool:
        """Whether the rows are listed rather than computed. LanceDB's order without a shuffle is the identity."""
        return self.is_permutation or (self.order_id == LANCEDB and self.shuffle)

    def rows(self, epoch: int, index: npt.NDArray[np.integer[Any]]) -> Int64Array:
        """Rows at the given places of one epoch's order, where that is computed.

        Args:
            epoch: >= 0. Epochs are unrelated permutations (`shuffle=False`: all the same).
            index: int64 [n], values in [0, num_rows), in any order and repeated or not.

        Returns:
            int64 [n], a new array with values in [0, num_rows).

        Raises:
            ConfigError: the epoch is negative or no int; the index is no integer vector, or out of range; a listed order.
        """
        if self.is_listed:
            raise ConfigError(
                f"the rows of order {self.order_id!r} are listed, not computed; ask a plan that has the list"
            )
        if not _is_int(epoch) or epoch < 0:
            raise ConfigError(f"epoch must be an int >= 0, got {epoch!r}; count epochs from 0")
        _check_index(index, self.num_rows)
        if not self.shuffle:
            return index.astype(np.int64)
        keys = feistel_keys(self.seed, epoch)
        clump_rows = min(self.clump_size or 1, self.num_rows)
        if clump_rows == 1:
            return FeistelPermutation(self.num_rows, keys).forward(index)
        return _clumped_rows(self.num_rows, clump_rows, keys, index.astype(np.int64))


def _clumped_rows(num_rows: int, clump_rows: int, keys: tuple[int, ...], index: Int64Array) -> Int64Array:
    """Rows at the given places when whole clumps are permuted: int64 [n] -> int64 [n]. Overwrites `index`.

    Slot s of the layout holds clump perm(s). Were all clumps full, index i would be row i % c of slot i // c. Only the
    last clump can be short, and the inverse permutation tells its slot: the places behind it are moved back to where
    they would be if it were full. So no table of slots is needed.
    """
    num_clumps = -(-num_rows // clump_rows)
    clumps = FeistelPermutation(num_clumps, keys)
    missing_rows = num_clumps * clump_rows - num_rows
    if missing_rows:
        slot = int(clumps.inverse(np.array([num_clumps - 1]))[0])
        np.add(index, missing_rows, out=index, where=index >= (slot + 1) * clump_rows - missing_rows)
    slots, row_in_clump = np.divmod(index, np.int64(clump_rows))  # [n], [n]
    rows = clumps.forward(slots)
    rows *= clump_rows
    rows += row_in_clump
    return rows


def mix64(value: UInt64Array) -> UInt64Array:
    """Every element mixed, in a new array: the hash that digests of rows are made of."""
    mixed = value.copy()
    _mix64(mixed, np.empty_like(mixed))
    return mixed


def _mix64(value: UInt64Array, scratch: UInt64Array) -> None:
    """Mixes every element in place, a bijection of [0, 2**64) in which each input bit changes each output bit.

    The finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA
    2014), constants "Mix13" of D. Stafford. Array times scalar wraps modulo 2**64 without a warning.
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(value, np.uint64(shift), out=scratch)
        value ^= scratch
        value *= np.uint64(factor)
    np.right_shift(value, np.uint64(31), out=scratch)
    value ^= scratch


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_num_rows(num_rows: int) -> None:
    if not _is_int(num_rows) or not 1 <= num_rows <= MAX_ROWS:
        raise ConfigError(
            f"the number of rows must be an int in [1, 2**62], got {num_rows!r}; stream a table that has rows"
        )


def _check_index(index: npt.NDArray[np.integer[Any]], num_rows: int) -> None:
    """Refuses anything but an integer vector with values in [0, num_rows). Costs one pass for min and one for max."""
    if not isinstance(index, np.ndarray) or index.ndim != 1 or not np.issubdtype(index.dtype, np.integer):
        got = f"{index.dtype} of shape {index.shape}" if isinstance(index, np.ndarray) else type(index).__name__
        raise ConfigError(f"an index must be an int64 numpy array of one dimension, got {got}; convert it first")
    smallest, largest = (int(index.min()), int(index.max())) if index.size else (0, 0)
    if smallest < 0 or largest >= num_rows:
        raise ConfigError(
            f"an index must be in [0, {num_rows}), got values from {smallest} to {largest}; "
            f"ask only for places inside the epoch"
        )
