// What every function has that Python calls.
#pragma once

#include <cstdint>

#include "bfloat16.h"

#define TANDEM_ENTRY extern "C" __attribute__((visibility("default")))

namespace tandem {

// Call `work` with a null pointer of the element type that Python's number stands for.
template <typename Work>
void with_type(int32_t dtype, Work&& work) {
    switch (static_cast<Dtype>(dtype)) {
        case Dtype::kFloat32:
            work(static_cast<float*>(nullptr));
            break;
        case Dtype::kBfloat16:
            work(static_cast<bfloat16*>(nullptr));
            break;
    }
}

}  // namespace tandem
