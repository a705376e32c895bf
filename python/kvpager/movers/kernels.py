"""CUDA source of the three kernels: blocks to records, records to blocks, blocks to blocks. No header is included.

All take the table of pieces (``Layout.pieces()``, int64 [p, 4], on the device) and spread (block, piece) pairs over the
thread blocks of a small grid: copies to and from the host are bound by the bus, and few multiprocessors keep it busy.

=======  ========================================================================================================
kernel   arguments, 8 bytes each
=======  ========================================================================================================
gather   table, pieces, block ids (int32 [n], on the device), n, records (out), bytes of a record
scatter  table, pieces, block ids, n, records (in), bytes of a record
move     table, pieces, pairs of source and destination (int32 [n, 2], on the device), n
=======  ========================================================================================================

Each comes in five widths: a thread copies words of 16, 8, 4, 2 or 1 bytes, the largest that divides every address,
stride and length. Names are ``gather_16`` and so on.
"""

from __future__ import annotations

__all__ = ["KERNELS", "OPTIONS", "SOURCE", "THREADS", "WIDTHS"]

KERNELS = ("gather", "scatter", "move")
WIDTHS = (16, 8, 4, 2, 1)
"""Bytes that a thread copies at once."""
OPTIONS = ("-std=c++17",)
"""For the compiler."""
THREADS = 512
"""Threads of a thread block."""

SOURCE = r"""
typedef unsigned long long u64;
struct Piece { u64 address, stride, offset, bytes; };

// All threads of a thread block copy one piece. Four words a thread are under way at once, to cover memory's latency.
template <typename Word>
__device__ void copy_piece(const char* __restrict__ from, char* __restrict__ to, u64 bytes)
{
    const Word* source = reinterpret_cast<const Word*>(from);
    Word* target = reinterpret_cast<Word*>(to);
    const u64 words = bytes / sizeof(Word), step = blockDim.x;
    u64 i = threadIdx.x;
    for (; i + 3 * step < words; i += 4 * step) {
        const Word a = source[i], b = source[i + step], c = source[i + 2 * step], d = source[i + 3 * step];
        target[i] = a;
        target[i + step] = b;
        target[i + 2 * step] = c;
        target[i + 3 * step] = d;
    }
    for (; i < words; i += step)
        target[i] = source[i];
}

template <typename Word, bool GATHER>
__device__ void between(const Piece* table, u64 pieces, const int* ids, u64 blocks, char* records, u64 record_bytes)
{
    for (u64 item = blockIdx.x; item < blocks * pieces; item += gridDim.x) {
        const u64 number = item / pieces;
        const Piece piece = table[item % pieces];
        char* block = reinterpret_cast<char*>(piece.address + static_cast<u64>(ids[number]) * piece.stride);
        char* record = records + number * record_bytes + piece.offset;
        copy_piece<Word>(GATHER ? block : record, GATHER ? record : block, piece.bytes);
    }
}

template <typename Word>
__device__ void within(const Piece* table, u64 pieces, const int* pairs, u64 count)
{
    for (u64 item = blockIdx.x; item < count * pieces; item += gridDim.x) {
        const u64 number = item / pieces;
        const Piece piece = table[item % pieces];
        const u64 source = piece.address + static_cast<u64>(pairs[2 * number]) * piece.stride;
        const u64 target = piece.address + static_cast<u64>(pairs[2 * number + 1]) * piece.stride;
        copy_piece<Word>(reinterpret_cast<const char*>(source), reinterpret_cast<char*>(target), piece.bytes);
    }
}

#define KERNELS(WIDTH, WORD)                                                                                          \
    extern "C" __global__ void __launch_bounds__(512) gather_##WIDTH(                                                 \
        const Piece* table, u64 pieces, const int* ids, u64 blocks, char* records, u64 record_bytes)                  \
    { between<WORD, true>(table, pieces, ids, blocks, records, record_bytes); }                                       \
    extern "C" __global__ void __launch_bounds__(512) scatter_##WIDTH(                                                \
        const Piece* table, u64 pieces, const int* ids, u64 blocks, char* records, u64 record_bytes)                  \
    { between<WORD, false>(table, pieces, ids, blocks, records, record_bytes); }                                      \
    extern "C" __global__ void __launch_bounds__(512) move_##WIDTH(                                                   \
        const Piece* table, u64 pieces, const int* pairs, u64 count)                                                  \
    { within<WORD>(table, pieces, pairs, count); }

KERNELS(16, uint4)
KERNELS(8, unsigned long long)
KERNELS(4, unsigned int)
KERNELS(2, unsigned short)
KERNELS(1, unsigned char)
"""
