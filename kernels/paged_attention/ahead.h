// Prefetching of the next tile while this one is computed.
//
// Half a page of one head is 1-8 KB, and the next one is anywhere in memory. Read one after the other, such pieces
// come with a quarter of the bandwidth of a long array (6-8 of 30 GB/s for 2 KB on one core of a server CPU): each has
// to be found (TLB), and is over before the core's own prefetcher is up to speed. Fetched side by side, a line of each
// at a time, those of a tile come twice as fast, and if that is spread over the work on the tile before, they overlap
// with it. Lines go to the second cache: fetched into the first they wait for its few buffers.
#pragma once

#include <cstdint>

#include "../native/vector.h"

namespace tandem {

class Ahead {
  public:
    static constexpr int64_t kMaxPieces = 4;

    // Forget what is left; `add_piece` then adds stretches of `piece_bytes`, each with another one `distance` behind.
    void aim(int64_t piece_bytes, int64_t distance) {
        num_pieces_ = at_ = 0;
        end_ = piece_bytes;
        distance_ = distance;
    }

    void add_piece(const void* start) { pieces_[num_pieces_++] = static_cast<const char*>(start); }

    // Fetch `bytes` more, if there are. Always inlined: GCC drops calls of functions that only prefetch.
    TANDEM_INLINE void fetch(int64_t bytes) {
        const int64_t bytes_per_line = 2 * num_pieces_ * kLine;
        for (; bytes > 0 && at_ < end_; bytes -= bytes_per_line, at_ += kLine) {
            for (int64_t piece = 0; piece < num_pieces_; ++piece) {
                const char* const line = pieces_[piece] + at_;
                _mm_prefetch(line, _MM_HINT_T1);
                _mm_prefetch(line + distance_, _MM_HINT_T1);
            }
        }
    }

    TANDEM_INLINE void fetch_all() { fetch(2 * num_pieces_ * end_); }

  private:
    static constexpr int64_t kLine = 64;

    const char* pieces_[kMaxPieces];
    int64_t num_pieces_ = 0;
    int64_t at_ = 0;
    int64_t end_ = 0;
    int64_t distance_ = 0;
};

}  // namespace tandem
