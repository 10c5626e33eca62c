// A team of threads that compute one step together.
//
// All members run the same body, which is a sequence of phases; a phase is a number of independent pieces that members
// claim one by one. A phase is over when its pieces are done, not when all members have come: a member whose core is
// busy with something else arrives late, finds nothing to do and holds up nobody, except by a piece that it has begun.
// A step may even be over, and the next one begun, while a late member is still on its way through it.
// Between steps the helpers sleep. Within a step they spin briefly, then give their core to whoever wants it.
// Besides, a team may borrow cores that belong to other processes: a helper there leaves a step as soon as the owner of
// its core begins to use it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tandem {

// A core of another process, which sets `is_in_use` while it has something to do.
struct BorrowedCore {
    int number;
    const std::atomic<uint32_t>* is_in_use;
};

// Of `count` cores, where board[c] says whether core c is in use.
std::vector<BorrowedCore> borrowed_cores(const int32_t* cores, int32_t count, const uint32_t* board);

class Team {
  public:
    class Member;

    // Holds all it needs by value, and does nothing outside of phases: a late member may run it when the caller has
    // left. What the pieces of a phase touch need only live until `run` returns.
    using Body = std::function<void(Member&)>;

    // `num_threads` counts the caller of `run`, and none of those on borrowed cores; a body has at most `max_phases`.
    // The helpers start with the first step, so that they take over the niceness and the cores of the thread that runs
    // it.
    Team(int num_threads, int max_phases, std::vector<BorrowedCore> borrowed = {});
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // How many may compute at once, on borrowed cores, too.
    int num_members() const { return num_members_; }

    // Run `body` on all members; return when all its phases are over. One caller at a time.
    void run(Body body);

  private:
    // `next` is the piece to be claimed next, with the number of the step above it; `num_done` counts finished pieces.
    struct alignas(64) Phase {
        std::atomic<uint64_t> next{0};
        alignas(64) std::atomic<int64_t> num_done{0};
    };

    void start_helpers();
    void help(int index, const std::atomic<uint32_t>* is_in_use);

    const int num_own_;
    const std::vector<BorrowedCore> borrowed_;
    const int num_members_;
    const int max_phases_;
    std::unique_ptr<Phase[]> phases_;
    std::vector<std::thread> helpers_;
    std::mutex mutex_;  // of `body_` together with `step_`
    std::shared_ptr<const Body> body_;
    std::atomic<uint32_t> step_{0};
    std::atomic<bool> is_ending_{false};

  public:
    // What a member knows while it runs a body.
    class Member {
      public:
        // Run `work(piece)` for pieces 0 .. count - 1, each once, by whoever claims it; return when all are done.
        // What was written in earlier phases is visible. All members come by the same phases with the same counts
        // (below 2^32).
        template <typename Work>
        void phase(int64_t count, Work&& work) {
            if (is_late_) return;
            Phase& phase = team_->phases_[next_++];
            int64_t num_done = 0;
            for (int64_t piece; (piece = claim(phase, count)) >= 0; ++num_done) work(piece);
            if (num_done) phase.num_done.fetch_add(num_done, std::memory_order_acq_rel);
            if (!is_late_) await(phase, count);
        }

        // 0 for the caller of `run`, below `num_members`: for memory of its own.
        int index() const { return index_; }

      private:
        friend class Team;
        Member(Team* team, int index, uint32_t step, const std::atomic<uint32_t>* is_in_use)
            : team_(team), index_(index), step_(step), is_in_use_(is_in_use) {}

        // Whether the owner of a borrowed core wants it back; then this member is late for the rest of the step.
        bool must_leave() {
            if (is_in_use_ && is_in_use_->load(std::memory_order_relaxed)) is_late_ = true;
            return is_late_;
        }

        int64_t claim(Phase& phase, int64_t count) {
            uint64_t seen = phase.next.load(std::memory_order_relaxed);
            if (must_leave()) return -1;
            while ((seen >> 32) == step_ && static_cast<int64_t>(seen & 0xffffffffu) < count) {
                if (phase.next.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire,
                                                     std::memory_order_relaxed)) {
                    return static_cast<int64_t>(seen & 0xffffffffu);
                }
            }
            return -1;
        }

        void await(Phase& phase, int64_t count);

        Team* team_;
        const int index_;
        const uint32_t step_;
        const std::atomic<uint32_t>* const is_in_use_;  // null on a core of our own
        int next_ = 0;
        bool is_late_ = false;
    };
};

}  // namespace tandem
