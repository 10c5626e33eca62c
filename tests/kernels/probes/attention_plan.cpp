// What the tests see of a plan: its tasks and combines as rows of numbers.
#include "paged_attention/plan.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Write a row per task, at most `most`: first_row, num_tokens, position, kv_head, first_split, last_split, and whether
// it has a partial.
// Return how many there are, and in `num_combines` how many tiles are combined.
EXPORT int64_t tasks_of(const tandem::AttentionShape* shape, const tandem::AttentionBatch* batch, int num_threads,
                        int64_t* rows, int64_t most, int64_t* num_combines) {
    const tandem::AttentionPlan plan = tandem::plan_attention(*shape, *batch, num_threads);
    int64_t index = 0;
    for (const tandem::AttentionTask& task : plan.tasks) {
        if (index++ == most) break;
        const int64_t row[] = {task.tile.first_row, task.tile.num_tokens, task.tile.position,       task.tile.kv_head,
                               task.first_split,    task.last_split,      task.partial != nullptr};
        rows = std::copy(std::begin(row), std::end(row), rows);
    }
    *num_combines = plan.num_combines();
    return plan.num_tasks();
}
