#include "team.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <cassert>
#include <system_error>
#include <utility>

namespace tandem {

namespace {

// About 20 us on a 3.5 GHz core: longer than most phases last, shorter than what a scheduler would give somebody else.
constexpr int kSpins = 1000;

// Keep the calling thread on one core; whether the system does.
bool keep_on(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (core < 0 || core >= CPU_SETSIZE) return false;
    CPU_SET(core, &cores);
    return pthread_setaffinity_np(pthread_self(), sizeof(cores), &cores) == 0;
}

}  // namespace

std::vector<BorrowedCore> borrowed_cores(const int32_t* cores, int32_t count, const uint32_t* board) {
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);
    std::vector<BorrowedCore> borrowed;
    for (int32_t index = 0; index < count; ++index) {
        // Other processes write it: only as an atomic it may be read beside them.
        borrowed.push_back({cores[index], reinterpret_cast<const std::atomic<uint32_t>*>(board + cores[index])});
    }
    return borrowed;
}

Team::Team(int num_threads, int max_phases, std::vector<BorrowedCore> borrowed)
    : num_own_(num_threads),
      borrowed_(std::move(borrowed)),
      num_members_(num_threads + static_cast<int>(borrowed_.size())),
      max_phases_(max_phases),
      phases_(new Phase[max_phases]) {
    assert(num_threads >= 1 && max_phases >= 1);
}

Team::~Team() {
    {
        const std::lock_guard<std::mutex> guard(mutex_);
        is_ending_.store(true);
        step_.fetch_add(1);
    }
    step_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
}

void Team::run(Body body) {
    const auto shared = std::make_shared<const Body>(std::move(body));
    const uint32_t step = step_.load(std::memory_order_relaxed) + 1;
    for (int index = 0; index < max_phases_; ++index) {
        // First the count, then the tag that lets pieces be claimed: a late member of the last step looks at tags.
        phases_[index].num_done.store(0, std::memory_order_relaxed);
        phases_[index].next.store(static_cast<uint64_t>(step) << 32, std::memory_order_release);
    }
    if (num_members_ > 1) {
        {
            const std::lock_guard<std::mutex> guard(mutex_);
            body_ = shared;
            step_.store(step, std::memory_order_release);
        }
        if (helpers_.empty()) start_helpers();
        step_.notify_all();
    } else {
        step_.store(step, std::memory_order_relaxed);
    }
    Member member(this, 0, step, nullptr);
    (*shared)(member);
}

void Team::start_helpers() {
    try {
        for (int index = 1; index < num_own_; ++index) {
            helpers_.emplace_back([this, index] { help(index, nullptr); });
        }
        for (int index = num_own_; index < num_members_; ++index) {
            const BorrowedCore& core = borrowed_[static_cast<size_t>(index - num_own_)];
            helpers_.emplace_back([this, index, core] {
                if (keep_on(core.number)) help(index, core.is_in_use);
            });
        }
    } catch (const std::system_error&) {
        // The system gives no more threads: those that are there do all pieces.
    }
}

void Team::help(int index, const std::atomic<uint32_t>* is_in_use) {
    uint32_t seen = 0;
    while (true) {
        step_.wait(seen, std::memory_order_acquire);
        std::shared_ptr<const Body> body;
        {
            const std::lock_guard<std::mutex> guard(mutex_);
            if (is_ending_.load()) return;
            seen = step_.load(std::memory_order_relaxed);
            body = body_;
        }
        Member member(this, index, seen, is_in_use);
        if (!member.must_leave()) (*body)(member);
    }
}

void Team::Member::await(Phase& phase, int64_t count) {
    for (int spins = 0;; ++spins) {
        if (phase.num_done.load(std::memory_order_acquire) == count) return;
        if (team_->step_.load(std::memory_order_relaxed) != step_) {  // the caller of `run` saw all phases end
            is_late_ = true;
            return;
        }
        if (must_leave()) return;
        if (spins < kSpins) {
            _mm_pause();
        } else {
            sched_yield();
        }
    }
}

}  // namespace tandem
