"""Block hashes: the names by which router and worker speak of cached KV blocks.

A prompt is cut into blocks of ``block_size`` tokens. Each full block is named by a hash of its own tokens, of what
else its KV depends on (adapter, media, salt) *and* of the block before it, so one equal hash means an equal prefix
all the way back to the first token. A partial last block has no name.

The names are byte for byte those of vLLM 0.32 (tests/golden/vllm_block_hashes.json): block i is
``H((parent, tokens, extra or None))``, where H is SHA-256 or XXH3-128 over pickle protocol 5 (``sha256``, ``xxhash``)
or over canonical CBOR (``sha256_cbor``, ``xxhash_cbor``), and the root is ``H(seed)``. Both encodings of a block
without extra keys are simple enough to be written here by hand: all token bytes of a prompt in a few numpy calls.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

BlockHash: TypeAlias = bytes
ExtraKeys: TypeAlias = tuple[tuple[str, ...] | tuple[str, str, int], ...]
TokenIds: TypeAlias = "Sequence[int] | array[int] | bytes | bytearray | memoryview | npt.NDArray[Any]"

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
DEFAULT_SEED = "vllm-none-hash"
MAX_TOKEN_ID = 2**31 - 1
ROOT_KEY = 0
"""The index key that stands for "no parent" in events and snapshots."""

# A pickle opens a second frame at 64 KiB; blocks that could reach it are left to the pickle module.
_MAX_HAND_PICKLED_TOKENS = 8192
_TOKENS_AT_ONCE = 8192  # what is prepared for them stays in a core's cache


class MediaSpan(NamedTuple):
    """Where one image (or other medium) stands in the prompt: placeholder tokens ``start`` to ``start + length``."""

    identifier: str
    start: int
    length: int


def index_key(block_hash: BlockHash) -> int:
    """The low 64 bits of a hash (its last 8 bytes, big-endian): the name used in events and in the router's index."""
    return int.from_bytes(block_hash[-8:], "big")


def extra_keys(
    num_tokens: int,
    block_size: int,
    *,
    lora: tuple[str, str] | None = None,
    media: Sequence[MediaSpan | tuple[str, int, int]] = (),
    cache_salt: str | None = None,
) -> tuple[ExtraKeys | None, ...] | None:
    """What the KV of each block depends on besides its tokens, or None where that is nothing.

    ``lora`` is an ``Adapter``: its name, and the version of its content in place of a path, so that a reload under one
    name never meets old KV and equal content has equal hashes wherever it lies. One entry per block of the prompt, a
    partial last one included: ``("lora", name, version)`` in every block, ``("mm", identifier, start - block start)``
    in each block a medium touches (negative in its later blocks), ``("cache_salt", salt)`` in block 0 only. The tags
    keep a salt "x" apart from an adapter "x".
    """
    if lora is None and not media and not cache_salt:
        return None
    adapter: list[Any] = [("lora", *lora)] if lora is not None else []
    per_block: list[list[Any]] = [list(adapter) for _ in range(max(1, -(-num_tokens // block_size)))]
    for identifier, start, length in media:
        if start < 0 or length < 1 or start + length > num_tokens:
            raise ValueError(f"media {identifier!r} spans tokens {start} to {start + length} of {num_tokens}")
        for block in range(start // block_size, (start + length - 1) // block_size + 1):
            per_block[block].append(("mm", identifier, start - block * block_size))
    if cache_salt:
        per_block[0].append(("cache_salt", cache_salt))
    return tuple(tuple(keys) if keys else None for keys in per_block)


class HashScheme:
    """How this fleet names blocks. Two schemes that differ in anything share nothing.

    Raises ``ValueError`` for an unknown algorithm, a block size below 1, and for an xxhash form without a seed: XXH3
    is not collision-resistant, so its root must be a secret. ``ModuleNotFoundError`` names a missing xxhash here and
    not at the first request. The ``sha256`` forms default to vLLM's seed.
    """

    __slots__ = ("_cbor", "_digest", "_is_sha", "algorithm", "block_size", "root", "seed", "verifies_tokens")

    def __init__(self, algorithm: str = "sha256_cbor", block_size: int = 16, seed: str | None = None) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"hash algorithm {algorithm!r} is none of {', '.join(ALGORITHMS)}")
        if block_size < 1:
            raise ValueError(f"block size {block_size} is below 1")
        self._is_sha = algorithm.startswith("sha256")
        if not seed:
            if not self._is_sha:
                raise ValueError(
                    f"{algorithm} needs a secret seed that the fleet shares: "
                    "set WARMFRONT_HASH_SEED or --prefix-caching-hash-seed-file"
                )
            seed = DEFAULT_SEED
        self.algorithm = algorithm
        self.block_size = block_size
        self.seed = seed
        self.verifies_tokens = not self._is_sha
        """Whether a hit must also compare token ids, since the hash alone can be made to collide."""
        self._cbor = algorithm.endswith("_cbor")
        self._digest: Callable[[bytes], bytes]
        if self._is_sha:
            self._digest = _sha256_digest
        else:
            from xxhash import xxh3_128_digest

            self._digest = xxh3_128_digest
        self.root: BlockHash = self._digest(_cbor_text(seed) if self._cbor else pickle.dumps(seed, protocol=5))

    def __repr__(self) -> str:
        return f"HashScheme({self.algorithm!r}, block_size={self.block_size})"

    def fingerprint(self) -> str:
        """Equal exactly when two schemes name blocks alike; says nothing of the seed. For the fleet contract."""
        text = f"warmfront-hash-scheme:{self.algorithm}:{self.block_size}:{self.root.hex()}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def block_hashes(
        self,
        token_ids: TokenIds,
        extra: Sequence[ExtraKeys | None] | None = None,
        parent: BlockHash | None = None,
    ) -> list[BlockHash]:
        """The hash of each full block of ``token_ids``, first block first, after ``parent`` instead of the root.

        ``extra`` has, per full block, what else its KV depends on (see ``extra_keys``). ``token_ids`` may be a list,
        an int array or packed little-endian uint32 bytes.
        Raises ``ValueError`` for a token id below 0 or above 2**31 - 1, or for fewer ``extra`` than full blocks.
        """
        tokens = as_token_array(token_ids)
        return self._hash(tokens[: self._num_full(tokens, extra) * self.block_size], extra, parent or self.root)

    def keys(self, token_ids: TokenIds, extra: Sequence[ExtraKeys | None] | None = None) -> array[int]:
        """The packed 8-byte index keys (``array('Q')``) of the same chain."""
        return pack_keys(self.block_hashes(token_ids, extra))

    def chain(self, token_ids: TokenIds, extra: Sequence[ExtraKeys | None] | None = None) -> BlockChain:
        """The growing chain of one request."""
        return BlockChain(self, token_ids, extra)

    def _num_full(self, tokens: npt.NDArray[np.int32], extra: Sequence[ExtraKeys | None] | None) -> int:
        num_full = len(tokens) // self.block_size
        if extra is not None and len(extra) < num_full:
            raise ValueError(f"extra keys for {len(extra)} of {num_full} full blocks")
        return num_full

    def _hash(
        self, tokens: npt.NDArray[np.int32], extra: Sequence[ExtraKeys | None] | None, parent: BlockHash
    ) -> list[BlockHash]:
        """The hashes of whole blocks after ``parent``."""
        size = self.block_size
        if extra is not None or (not self._cbor and size > _MAX_HAND_PICKLED_TOKENS):
            return self._hash_with_extra(tokens, extra, parent)
        hashes: list[BlockHash] = []
        at_once = max(1, _TOKENS_AT_ONCE // size) * size
        for start in range(0, len(tokens), at_once):
            self._hash_plain(tokens[start : start + at_once], hashes[-1] if hashes else parent, hashes)
        return hashes

    def _hash_plain(self, tokens: npt.NDArray[np.int32], parent: BlockHash, hashes: list[BlockHash]) -> None:
        """Append the hashes of whole blocks without extra keys."""
        size = self.block_size
        heads: Iterable[bytes]
        if self._cbor:
            pieces, borders = _cbor_pieces(tokens, size)
            heads = repeat(b"\x83" + _cbor_uint(2, len(parent)))
        else:
            pieces, borders = _pickle_pieces(tokens, size)
            lengths = np.diff(borders).tolist()
            by_length = {length: _pickle_head(len(parent), length) for length in set(lengths)}
            heads = map(by_length.__getitem__, lengths)
        ends = borders.tolist()
        spans = zip(heads, ends, ends[1:], strict=False)
        if self._is_sha:
            sha256 = hashlib.sha256
            hashes += [parent := sha256(head + parent + pieces[start:end]).digest() for head, start, end in spans]
        else:
            digest = self._digest
            hashes += [parent := digest(head + parent + pieces[start:end]) for head, start, end in spans]

    def _hash_with_extra(
        self, tokens: npt.NDArray[np.int32], extra: Sequence[ExtraKeys | None] | None, parent: BlockHash
    ) -> list[BlockHash]:
        """Block by block where the libraries are needed, in stretches where they are not."""
        size = self.block_size
        num_full = len(tokens) // size
        hashes: list[BlockHash] = []
        while (block := len(hashes)) < num_full:
            plain = block
            while extra is not None and plain < num_full and not extra[plain]:
                plain += 1
            if plain > block and (self._cbor or size <= _MAX_HAND_PICKLED_TOKENS):
                hashes += self._hash(tokens[block * size : plain * size], None, parent)
            else:
                ids = tuple(tokens[block * size : (block + 1) * size].tolist())
                keys = extra[block] if extra is not None else None
                hashes.append(self._digest(serialise_block(self._cbor, parent, ids, keys)))
            parent = hashes[-1]
        return hashes


class BlockChain:
    """The token ids of one request and the hashes of their full blocks; it only grows.

    ``token_ids`` (an ``array('i')``), ``hashes`` and ``keys`` (``array('Q')``) are live views for reading.
    ``len(chain)`` is the number of tokens.
    """

    __slots__ = ("_extra", "_later_extra", "hashes", "keys", "scheme", "token_ids")

    def __init__(
        self, scheme: HashScheme, token_ids: TokenIds, extra: Sequence[ExtraKeys | None] | None = None
    ) -> None:
        self.scheme = scheme
        self.token_ids = array("i")
        self.hashes: list[BlockHash] = []
        self.keys = array("Q")
        self._extra = extra
        # Media and salt belong to the prompt; an adapter goes on through the answer.
        first = extra[0] if extra else None
        adapter = tuple(key for key in first or () if key[0] == "lora")
        self._later_extra: ExtraKeys | None = adapter or None
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    def copy(self) -> BlockChain:
        """A chain that begins as this one and grows apart; nothing is hashed again."""
        other = BlockChain(self.scheme, (), self._extra)
        other.token_ids, other.hashes, other.keys = self.token_ids[:], self.hashes[:], self.keys[:]
        return other

    def extra_of(self, block: int) -> ExtraKeys | None:
        """The extra keys of a block, full or not: past the prompt's blocks, the adapter alone."""
        if self._extra is not None and block < len(self._extra):
            return self._extra[block]
        return self._later_extra

    def extend(self, token_ids: TokenIds) -> None:
        """Append tokens and hash the blocks they complete. ``ValueError`` for an id out of range; nothing changes."""
        tokens = as_token_array(token_ids)
        self.token_ids.frombytes(tokens.tobytes())
        size = self.scheme.block_size
        num_old = len(self.hashes)
        num_full = len(self.token_ids) // size
        if num_full == num_old:
            return
        fresh = np.frombuffer(self.token_ids[num_old * size : num_full * size], dtype=np.int32)
        extra = None if self._extra is None else [self.extra_of(block) for block in range(num_old, num_full)]
        hashes = self.scheme._hash(fresh, extra, self.hashes[-1] if self.hashes else self.scheme.root)
        self.hashes += hashes
        self.keys += pack_keys(hashes)


def pack_keys(hashes: Sequence[BlockHash]) -> array[int]:
    """The index keys of hashes of one scheme, packed."""
    return keys_of(b"".join(hashes), len(hashes[0])) if hashes else array("Q")


def keys_of(hashes: bytes, hash_bytes: int) -> array[int]:
    """The same of hashes that are joined already, of so many bytes each."""
    per_hash = hash_bytes // 8
    return array("Q", np.frombuffer(hashes, dtype=">u8")[per_hash - 1 :: per_hash].astype(np.uint64).tobytes())


def num_token_ids(token_ids: TokenIds) -> int:
    """How many tokens these are, in any accepted form."""
    is_packed = isinstance(token_ids, (bytes, bytearray, memoryview))
    return len(token_ids) // 4 if is_packed else len(token_ids)


def as_token_array(token_ids: TokenIds) -> npt.NDArray[np.int32]:
    """Token ids of any accepted form as int32, checked; ``ValueError`` for an id below 0 or above 2**31 - 1."""
    if isinstance(token_ids, np.ndarray):
        wide: npt.NDArray[Any] = token_ids
        if wide.dtype.kind not in "iu":
            raise ValueError(f"token ids of type {wide.dtype} are not integers")
        if wide.size and (int(wide.min()) < 0 or int(wide.max()) > MAX_TOKEN_ID):
            raise ValueError(f"a token id is outside 0 to {MAX_TOKEN_ID}")
        return np.ascontiguousarray(wide, dtype=np.int32)
    if isinstance(token_ids, (bytes, bytearray, memoryview)):
        if len(token_ids) % 4:
            raise ValueError(f"{len(token_ids)} bytes are no whole number of 4-byte token ids")
        tokens = np.frombuffer(token_ids, dtype="<i4").astype(np.int32, copy=False)
    else:
        try:
            # "I" takes a list three times as fast as "i" does, and refuses what is negative.
            if not isinstance(token_ids, array) or token_ids.typecode not in "iI":
                token_ids = array("I", token_ids)
        except OverflowError:
            raise ValueError(f"a token id is outside 0 to {MAX_TOKEN_ID}") from None
        except TypeError as error:
            raise ValueError(f"a token id is not an integer: {error}") from None
        tokens = np.frombuffer(token_ids, dtype=np.int32)
    if tokens.size and int(tokens.min()) < 0:
        raise ValueError(f"a token id is outside 0 to {MAX_TOKEN_ID}")
    return tokens


def serialise_block(cbor: bool, parent: BlockHash, token_ids: tuple[int, ...], extra: ExtraKeys | None) -> bytes:
    """The bytes that are hashed, by the libraries: for blocks with extra keys."""
    if cbor:
        import cbor2

        return bytes(cbor2.dumps((parent, token_ids, extra or None), canonical=True))
    # Pickle writes an object it has seen as a reference, and sees by identity: equal strings must be one object.
    one: dict[str, str] = {}
    same = tuple(tuple(one.setdefault(k, k) if isinstance(k, str) else k for k in key) for key in extra or ())
    return pickle.dumps((parent, token_ids, same or None), protocol=5)


def _sha256_digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _cbor_uint(major: int, value: int) -> bytes:
    """Head of a CBOR item: the value in the fewest bytes (RFC 8949, section 3)."""
    if value < 24:
        return bytes([major << 5 | value])
    for code, width in ((24, 1), (25, 2), (26, 4)):
        if value < 1 << 8 * width:
            return bytes([major << 5 | code]) + value.to_bytes(width, "big")
    return bytes([major << 5 | 27]) + value.to_bytes(8, "big")


def _cbor_text(text: str) -> bytes:
    data = text.encode()
    return _cbor_uint(3, len(data)) + data


def _cbor_pieces(tokens: npt.NDArray[np.int32], block_size: int) -> tuple[bytes, npt.NDArray[np.int64]]:
    """What follows the parent in each block: the array of ids and null; joined, and the borders."""
    return _join(_words(_cbor_words, tokens), block_size, _cbor_uint(4, block_size), b"\xf6")


def _cbor_words(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """CBOR of each id in the low bytes of a little-endian word, the number of bytes in its highest."""
    swapped = tokens.byteswap().view(np.uint32).astype(np.uint64)
    return np.select(
        [tokens < 24, tokens < 1 << 8, tokens < 1 << 16],
        [
            swapped >> np.uint64(24) | _width(1),
            swapped >> np.uint64(16) & np.uint64(0xFF00) | np.uint64(0x18) | _width(2),
            swapped >> np.uint64(8) & np.uint64(0xFFFF00) | np.uint64(0x19) | _width(3),
        ],
        swapped << np.uint64(8) | np.uint64(0x1A) | _width(5),
    )


def _pickle_head(parent_bytes: int, piece_bytes: int) -> bytes:
    """PROTO 5, FRAME length, SHORT_BINBYTES length: what stands before the parent."""
    return b"\x80\x05\x95" + (2 + parent_bytes + piece_bytes).to_bytes(8, "little") + b"C" + bytes([parent_bytes])


def _pickle_pieces(tokens: npt.NDArray[np.int32], block_size: int) -> tuple[bytes, npt.NDArray[np.int64]]:
    """What follows the parent in each block: MEMOIZE, the tuple of ids and None; joined, and the borders.

    A tuple of up to 3 has an opcode of its own and no MARK.
    """
    words = _words(_pickle_words, tokens)
    end = b"N\x87\x94."
    if block_size <= 3:
        return _join(words, block_size, b"\x94", bytes([0x84 + block_size]) + b"\x94" + end)
    return _join(words, block_size, b"\x94(", b"t\x94" + end)


def _pickle_words(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """BININT1, BININT2 or BININT of each id in the low bytes of a word, the number of bytes in its highest."""
    values = tokens.astype(np.uint64) << np.uint64(8)
    return np.select(
        [tokens < 1 << 8, tokens < 1 << 16],
        [values | np.uint64(ord("K")) | _width(2), values | np.uint64(ord("M")) | _width(3)],
        values | np.uint64(ord("J")) | _width(5),
    )


def _width(num_bytes: int) -> np.uint64:
    return np.uint64(num_bytes << 56)


_Words: TypeAlias = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.uint64]]
_TABLE_SIZE = 1 << 18  # ids of nearly every vocabulary; 2 MiB


@functools.cache
def _word_table(words: _Words) -> npt.NDArray[np.uint64]:
    return words(np.arange(_TABLE_SIZE, dtype=np.int32))


def _words(words: _Words, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    if int(tokens.max()) < _TABLE_SIZE:
        return _word_table(words).take(tokens)
    return words(tokens)


def _join(
    words: npt.NDArray[np.uint64], block_size: int, before: bytes, after: bytes
) -> tuple[bytes, npt.NDArray[np.int64]]:
    """The bytes of the words, block by block between ``before`` and ``after``, and the borders."""
    num_blocks = words.size // block_size
    widths = (words >> np.uint64(56)).view(np.int64)
    ends = widths.cumsum()
    frame = len(before) + len(after)
    block_ends = ends[block_size - 1 :: block_size] + frame * np.arange(1, num_blocks + 1)
    total = int(block_ends[-1])
    data = np.empty(total + 8, dtype=np.uint8)
    at = (ends - widths).reshape(num_blocks, block_size)
    at += len(before) + frame * np.arange(num_blocks)[:, None]
    # Whole words are laid over one another in rising order: what one writes too far the next one covers.
    overlaid = np.ndarray((total + 1,), dtype="<u8", buffer=data.data, strides=(1,))
    overlaid[at.reshape(-1)] = words
    borders = np.concatenate(([0], block_ends))
    for offset, byte in enumerate(before):
        data[borders[:-1] + offset] = byte
    for offset, byte in enumerate(after, -len(after)):
        data[block_ends + offset] = byte
    return data[:total].tobytes(), borders
