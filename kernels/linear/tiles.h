// The tile registers of AMX: eight of them, each up to 16 rows of 64 bytes.
//
// TANDEM_EMULATED_TILES gives the same functions without the hardware, to test what is built on them.
#pragma once

#include <cstdint>
#include <cstring>

#include "../native/vector.h"

#if defined(__AMX_BF16__) || defined(TANDEM_EMULATED_TILES)
#define TANDEM_TILES
#endif

#ifdef TANDEM_TILES

#ifndef TANDEM_EMULATED_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tandem {

constexpr int kTiles = 8;
constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;

// Palette 1. A tile that is not used has no rows.
struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t first_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t num_rows[16] = {};

    void set(int tile, int rows) {
        num_rows[tile] = static_cast<uint8_t>(rows);
        row_bytes[tile] = rows ? kTileBytes : 0;
    }
};

#ifdef TANDEM_EMULATED_TILES

struct EmulatedTile {
    int num_rows = 0;
    alignas(64) unsigned char bytes[kTileRows][kTileBytes];
};

inline thread_local EmulatedTile emulated_tiles[kTiles];

inline bool may_use_tiles() { return true; }

inline void configure_tiles(const TileShapes& shapes) {
    for (int tile = 0; tile < kTiles; ++tile) emulated_tiles[tile].num_rows = shapes.num_rows[tile];
}

inline void release_tiles() { configure_tiles(TileShapes()); }

template <int kTile>
inline void clear_tile() {
    std::memset(emulated_tiles[kTile].bytes, 0, sizeof(emulated_tiles[kTile].bytes));
}

// Rows are `stride` bytes apart.
template <int kTile>
inline void load_tile(const void* from, int64_t stride) {
    EmulatedTile& tile = emulated_tiles[kTile];
    for (int row = 0; row < tile.num_rows; ++row) {
        std::memcpy(tile.bytes[row], static_cast<const char*>(from) + row * stride, kTileBytes);
    }
}

template <int kTile>
inline void store_tile(void* to, int64_t stride) {
    const EmulatedTile& tile = emulated_tiles[kTile];
    for (int row = 0; row < tile.num_rows; ++row) {
        std::memcpy(static_cast<char*>(to) + row * stride, tile.bytes[row], kTileBytes);
    }
}

// sums[r][c] += x[r][2 p] w[p][c][0] + x[r][2 p + 1] w[p][c][1], for all pairs p in order.
template <int kSums, int kX, int kWeights>
inline void dot_tiles() {
    constexpr int kColumns = kTileBytes / 4;
    EmulatedTile& sums = emulated_tiles[kSums];
    for (int row = 0; row < sums.num_rows; ++row) {
        bfloat16 x[2 * kColumns], weights[2 * kColumns];
        float row_sums[kColumns];
        std::memcpy(x, emulated_tiles[kX].bytes[row], kTileBytes);
        std::memcpy(row_sums, sums.bytes[row], kTileBytes);
        for (int pair = 0; pair < emulated_tiles[kWeights].num_rows; ++pair) {
            std::memcpy(weights, emulated_tiles[kWeights].bytes[pair], kTileBytes);
            for (int column = 0; column < kColumns; ++column) {
                row_sums[column] += to_float(x[2 * pair]) * to_float(weights[2 * column]);
                row_sums[column] += to_float(x[2 * pair + 1]) * to_float(weights[2 * column + 1]);
            }
        }
        std::memcpy(sums.bytes[row], row_sums, kTileBytes);
    }
}

#else

// Ask the system for the state of tiles, once per process.
inline bool may_use_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

inline void configure_tiles(const TileShapes& shapes) { _tile_loadconfig(&shapes); }
inline void release_tiles() { _tile_release(); }

// Written as assembly because the intrinsics take no template's number.
template <int kTile>
TANDEM_INLINE void clear_tile() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// Rows are `stride` bytes apart.
template <int kTile>
TANDEM_INLINE void load_tile(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
TANDEM_INLINE void store_tile(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}

// sums[r][c] += x[r][2 p] w[p][c][0] + x[r][2 p + 1] w[p][c][1], for all pairs p.
template <int kSums, int kX, int kWeights>
TANDEM_INLINE void dot_tiles() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kX), "i"(kWeights));
}

#endif

}  // namespace tandem

#endif
