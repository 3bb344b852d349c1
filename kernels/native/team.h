// A team of threads inside one OpenMP region: barriers and shared loops of our own.
//
// OpenMP starts the threads (the same that PyTorch's operations use), but its barriers spin for milliseconds, which on a
// busy machine keeps the very thread that they wait for off its processor. These spin for some microseconds, then sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif

// A second thread pays only if there is more to do than it takes to wake it; `multiplications` of 32 bits, or the like.
inline int64_t worthwhile_threads(int64_t multiplications, int64_t num_threads) {
    return std::clamp<int64_t>(multiplications / (1 << 18), 1, std::max<int64_t>(1, num_threads));
}

class Team {
  public:
    // Runs body(team) on up to num_threads threads; body must reach the same loops and barriers on each.
    template <typename Body>
    static void run(int64_t num_threads, Body body) {
        Team team;
#if defined(_OPENMP)
        if (num_threads > 1) {
#pragma omp parallel num_threads(num_threads)
            {
                if (omp_get_thread_num() == 0) team.size_.store(omp_get_num_threads());
                body(team);
                team.barrier();
            }
            return;
        }
#endif
        team.size_.store(1);
        body(team);
    }

    static int thread() {  // 0: the one that opened the region
#if defined(_OPENMP)
        return omp_get_thread_num();
#else
        return 0;
#endif
    }

    int size() const { return size_.load(std::memory_order_relaxed); }

    void barrier() {
        if (size() == 1) return;
        const int generation = generation_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == wait_for_size()) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            // Sequentially consistent: libstdc++ looks for sleepers before a weaker store need be visible to them, and
            // one that just then falls asleep on the old value would never be woken.
            generation_.store(generation + 1, std::memory_order_seq_cst);
            generation_.notify_all();
            return;
        }
        for (int spin = 0; spin < SPINS; ++spin) {
            if (generation_.load(std::memory_order_acquire) != generation) return;
            relax();
        }
        generation_.wait(generation, std::memory_order_acquire);
    }

    // Calls body(i) once for every i < count, in chunks, on whichever thread is free; ends with a barrier.
    template <typename Body>
    void share(int64_t count, Body body, int64_t chunk = 1) {
        if (size() == 1) {
            for (int64_t i = 0; i < count; ++i) body(i);
            return;
        }
        for (int64_t from; (from = next_.fetch_add(chunk, std::memory_order_relaxed)) < count;)
            for (int64_t i = from; i < std::min(count, from + chunk); ++i) body(i);
        barrier();
    }

  private:
    static constexpr int SPINS = 2000;

    static void relax() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    int wait_for_size() const {  // the first thread says how many there are; it may not have come to it yet
        int size;
        while ((size = size_.load(std::memory_order_acquire)) == 0) relax();
        return size;
    }

    std::atomic<int> size_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> generation_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};
