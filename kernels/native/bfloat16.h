// bfloat16 as bits, and the names of element types.
#pragma once

#include <cstdint>
#include <cstring>

namespace tandem {

// The upper half of a float. Arithmetic is done in float.
struct bfloat16 {
    uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(bfloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
}

// Round to nearest, ties to even; NaN stays NaN.
inline bfloat16 to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// As in the numbers that Python passes.
enum class Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1 };

}  // namespace tandem
