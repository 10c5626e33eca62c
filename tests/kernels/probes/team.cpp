// What the tests see of Team, which has no entry of its own in the library.
#include "native/team.h"

#include <unistd.h>

#include <atomic>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

using tandem::Team;

EXPORT void* team_new(int num_threads, int max_phases) { return new Team(num_threads, max_phases); }

EXPORT void team_delete(Team* team) { delete team; }

// A team of the caller and a helper on each of `count` cores, which are in use as the board says.
EXPORT void* team_new_borrowing(int max_phases, const int32_t* cores, int32_t count, const uint32_t* board) {
    return new Team(1, max_phases, tandem::borrowed_cores(cores, count, board));
}

// Run `num_steps` steps of `num_phases` phases. In step s, phase p has counts[p] pieces plus s % 3; each must be run
// once, by a member that exists, when all of the phase before it are done and none of the phase after it. Return the
// number of violations. `slow_us` delays helpers as they begin a step, so that they come late.
EXPORT int64_t team_violations(Team* team, int num_steps, int num_phases, const int64_t* counts, int slow_us) {
    auto violations = std::make_shared<std::atomic<int64_t>>(0);
    for (int step = 0; step < num_steps; ++step) {
        std::vector<std::atomic<int>> runs(1000);
        std::vector<std::atomic<int64_t>> finished(num_phases);
        const std::vector<int64_t> sizes = [&] {
            std::vector<int64_t> sums;
            for (int phase = 0; phase < num_phases; ++phase) sums.push_back(counts[phase] + step % 3);
            return sums;
        }();
        std::atomic<int>* const run_counts = runs.data();
        std::atomic<int64_t>* const done = finished.data();
        team->run([=](Team::Member& member) {
            if (slow_us && member.index()) usleep(slow_us * (1 + (step + member.index()) % 3));
            int64_t first = 0;
            for (int phase = 0; phase < num_phases; ++phase) {
                member.phase(sizes[phase], [&](int64_t piece) {
                    const bool is_in_order = (phase == 0 || done[phase - 1] == sizes[phase - 1]) &&
                                             (phase + 1 == num_phases || done[phase + 1] == 0);
                    const bool is_member = member.index() >= 0 && member.index() < team->num_members();
                    if (!is_in_order || !is_member) violations->fetch_add(1);
                    run_counts[first + piece].fetch_add(1);
                    done[phase].fetch_add(1);
                });
                first += sizes[phase];
            }
        });
        int64_t num_pieces = 0;
        for (const int64_t size : sizes) num_pieces += size;
        for (int64_t piece = 0; piece < 1000; ++piece) {
            if (runs[piece] != (piece < num_pieces)) violations->fetch_add(1);
        }
    }
    return *violations;
}

// Pass a sum through `num_phases` phases of plain memory: what one phase writes, the next reads.
EXPORT int64_t team_relay(Team* team, int num_phases, int width) {
    std::vector<int64_t> cells(2 * width, 1);
    int64_t* const memory = cells.data();
    team->run([=](Team::Member& member) {
        for (int phase = 0; phase < num_phases; ++phase) {
            const int64_t* const from = memory + (phase % 2) * width;
            int64_t* const to = memory + ((phase + 1) % 2) * width;
            member.phase(width, [=](int64_t piece) { to[piece] = from[piece] + from[(piece + 1) % width]; });
        }
    });
    return cells[(num_phases % 2) * width];
}

// How many members ran a piece, where each piece waits a while.
EXPORT int team_members_seen(Team* team, int num_pieces) {
    std::atomic<int> seen{0};
    std::atomic<int>* const mask = &seen;
    team->run([=](Team::Member& member) {
        member.phase(num_pieces, [&](int64_t) {
            mask->fetch_or(1 << member.index());
            usleep(2000);
        });
    });
    return __builtin_popcount(seen);
}
