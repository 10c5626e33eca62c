#include "cpu.h"

#include <mutex>

#include "../native/entry.h"
#include "../native/team.h"

namespace tandem {
namespace {

// The threads of calls from Python, one call at a time. Never taken down: a library is not unloaded.
std::mutex team_mutex;
Team* team = nullptr;

Team& team_of(int num_threads) {
    if (!team || team->num_members() != num_threads) {
        delete team;
        team = new Team(num_threads, 2);
    }
    return *team;
}

struct Aligned {
    explicit Aligned(int64_t bytes)
        : memory(static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes), std::align_val_t{64}))) {}
    ~Aligned() { ::operator delete(memory, std::align_val_t{64}); }
    Aligned(const Aligned&) = delete;
    Aligned& operator=(const Aligned&) = delete;
    std::byte* const memory;
};

template <typename T>
void attend_all(const AttentionPlan& plan, const AttentionLayer<T>& operands, int num_threads) {
    const int64_t bytes = AttentionScratch<T>::bytes(plan.shape);
    const Aligned scratch(bytes * num_threads);
    std::byte* const memory = scratch.memory;
    const int64_t num_tasks = plan.num_tasks(), num_combines = plan.num_combines();
    const AttentionPlan* const steps = &plan;
    team_of(num_threads).run([=](Team::Member& member) {
        member.phase(num_tasks, [&](int64_t task) {
            attend<T>(*steps, task, operands, memory + member.index() * bytes);
        });
        member.phase(num_combines, [&](int64_t piece) { combine<T>(*steps, piece, operands); });
    });
}

}  // namespace
}  // namespace tandem

// Attend one layer: `batch` and `shape` as in plan.h, `queries` with rows `query_stride` numbers apart, `outputs`
// [num_tokens, num_heads * head_dim].
TANDEM_ENTRY void tandem_paged_attention(int32_t dtype, const tandem::AttentionShape* shape,
                                         const tandem::AttentionBatch* batch, const void* queries, int64_t query_stride,
                                         const void* pages, int64_t layer, void* outputs, int32_t num_threads) {
    const std::lock_guard<std::mutex> guard(tandem::team_mutex);
    const tandem::AttentionPlan plan = tandem::plan_attention(*shape, *batch, num_threads);
    tandem::with_type(dtype, [&]<typename T>(T*) {
        tandem::attend_all<T>(plan,
                              {static_cast<const T*>(queries), query_stride, static_cast<const T*>(pages), layer,
                               static_cast<T*>(outputs), shape->num_heads * shape->pages.head_dim},
                              num_threads);
    });
}
