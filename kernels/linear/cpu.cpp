#include "cpu.h"

#include "../native/entry.h"
#include "../native/team.h"

using namespace tandem;

// output [num_rows, num_out] = x [num_rows, num_in] W^T (lines.h), gated if `is_gated`, as float or, if not
// `is_output_float`, of the type of x.
TANDEM_ENTRY void tandem_linear(Team* team, int32_t dtype, const void* x, int64_t num_rows, const void* panels,
                                const float* bias, int64_t num_out, int64_t num_in, int32_t is_gated,
                                int32_t is_output_float, void* output) {
    with_type(dtype, [&]<typename T>(T*) {
        const PackedWeights<T> weights{static_cast<const T*>(panels), bias, num_out, num_in, is_gated != 0};
        const LinearPieces<T> pieces(weights, num_rows, team->num_members());
        const T* const rows = static_cast<const T*>(x);
        team->run([=](Team::Member& member) {
            member.phase(pieces.count(), [&](int64_t piece) {
                if (is_output_float) {
                    pieces.run(piece, rows, num_in, WriteOutput<float>{static_cast<float*>(output), num_out});
                } else {
                    pieces.run(piece, rows, num_in, WriteOutput<T>{static_cast<T*>(output), num_out});
                }
            });
        });
    });
}
