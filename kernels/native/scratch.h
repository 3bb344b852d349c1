// Scratch memory that outlives a call: it grows to the largest request and is then reused.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

class Scratch {
  public:
    ~Scratch() { std::free(data_); }

    float* get(int64_t floats) {
        if (floats > size_) {
            std::free(data_);
            size_ = (floats + 1023) / 1024 * 1024;
            data_ = static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float)));
            if (!data_) throw std::bad_alloc();
        }
        return data_;
    }

  private:
    float* data_ = nullptr;
    int64_t size_ = 0;
};

// Two arenas a thread: one for the call as a whole (taken by the thread that makes it), one for a worker's own use.
inline float* call_scratch(int64_t floats) {
    static thread_local Scratch scratch;
    return scratch.get(floats);
}

inline float* thread_scratch(int64_t floats) {
    static thread_local Scratch scratch;
    return scratch.get(floats);
}
