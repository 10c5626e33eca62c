// Memory that is kept from step to step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace tandem {

// Aligned to 64 bytes; grows, and forgets what it held then.
class Memory {
  public:
    Memory() = default;
    ~Memory() { release(); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    // At least `count` elements, whatever they are.
    template <typename T>
    T* of(int64_t count) {
        const size_t bytes = static_cast<size_t>(count) * sizeof(T);
        if (bytes > size_) {
            release();
            begin_ = ::operator new(bytes, std::align_val_t{64});
            size_ = bytes;
        }
        return static_cast<T*>(begin_);
    }

  private:
    void release() {
        if (begin_) ::operator delete(begin_, std::align_val_t{64});
        begin_ = nullptr;
        size_ = 0;
    }

    void* begin_ = nullptr;
    size_t size_ = 0;
};

}  // namespace tandem
