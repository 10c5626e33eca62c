// Entries of sampling for Python: rows are shared out among the members of a team.
#include "cpu.h"

#include <mutex>

#include "../native/team.h"

namespace tandem {

namespace {

// Below this many logits another thread takes longer to wake than it saves.
constexpr int64_t kWorthSharing = 1 << 18;

thread_local SamplingMemory memory;

// Call `work(row)` for all rows; by a team of the process unless somebody else is using it, or it is not worth while.
template <typename Work>
void for_each_row(int64_t num_rows, int64_t vocab, int32_t num_threads, Work work) {
    static std::mutex is_used;
    static Team* team = nullptr;  // never ended: a process that forked has no threads to wait for
    const bool is_shared = num_threads > 1 && num_rows > 1 && num_rows * vocab >= kWorthSharing;
    if (is_shared && is_used.try_lock()) {
        const std::lock_guard<std::mutex> guard(is_used, std::adopt_lock);
        if (team && team->num_members() != num_threads) {
            delete team;
            team = nullptr;
        }
        if (!team) team = new Team(num_threads, 1);
        team->run([=](Team::Member& member) { member.phase(num_rows, work); });
    } else {
        for (int64_t row = 0; row < num_rows; ++row) work(row);
    }
}

}  // namespace

// Write the token of every row, or why there is none; `logits` [num_rows, vocab] begin `stride` numbers apart.
extern "C" __attribute__((visibility("default"))) void tandem_sample(const float* logits, int64_t num_rows,
                                                                     int64_t vocab, int64_t stride,
                                                                     const SamplingParameters* rows, int64_t* tokens,
                                                                     int32_t num_threads) noexcept {
    for_each_row(num_rows, vocab, num_threads, [=](int64_t row) {
        tokens[row] = choose_token(logits + row * stride, vocab, rows[row], memory);
    });
}

// Write the logprob of every row's token [num_rows] and of its likeliest tokens [num_rows, num_top] with their ids.
extern "C" __attribute__((visibility("default"))) void tandem_logprobs(const float* logits, int64_t num_rows,
                                                                       int64_t vocab, int64_t stride,
                                                                       const int64_t* tokens, int64_t num_top,
                                                                       double* of_tokens, int64_t* top_ids,
                                                                       double* of_top, int32_t num_threads) noexcept {
    for_each_row(num_rows, vocab, num_threads, [=](int64_t row) {
        of_tokens[row] = token_logprob(logits + row * stride, vocab, tokens[row], num_top, top_ids + row * num_top,
                                       of_top + row * num_top, memory);
    });
}

}  // namespace tandem
