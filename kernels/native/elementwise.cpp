// Norms, gates and rotations, one token at a time, in the order of roundings of transformers' Llama.
#include "elementwise.h"

#include "team.h"

using namespace vec;

template <typename T>
void rms_norm_row(const T* x, T* residual, const T* weight, float eps, int64_t width, T* y) {
    F squares = F{};
    for (int64_t d = 0; d < width; d += W) {
        F value = load_first(x + d, width - d);
        if (residual) {
            T rounded[W];  // the sum is stored in T and normalised as stored
            store(rounded, value + load_first(residual + d, width - d));
            value = load(rounded);
            store_first(residual + d, value, width - d);
        }
        squares = fma(value, value, squares);
    }
    const T* from = residual ? residual : x;
    float scale = 1.0f / std::sqrt(sum(squares) / (float)width + eps);
    for (int64_t d = 0; d < width; d += W) {
        T rounded[W];
        store(rounded, load_first(from + d, width - d) * scale);
        store_first(y + d, load(rounded) * load_first(weight + d, width - d), width - d);
    }
}

template <typename T>
void silu_mul_row(const T* gate, const T* up, int64_t width, T* y) {
    for (int64_t d = 0; d < width; d += W) {
        T rounded[W];
        store(rounded, silu(load_first(gate + d, width - d)));
        store_first(y + d, load(rounded) * load_first(up + d, width - d), width - d);
    }
}

template <typename T>
void rotate_head(T* head, const T* cos, const T* sin, int64_t rotary_width) {
    const int64_t half = rotary_width / 2;
    auto rounded = [](F v) {
        T lanes[W];
        store(lanes, v);
        return load(lanes);
    };
    for (int64_t d = 0; d < half; d += W) {
        int64_t n = half - d;
        F a = load_first(head + d, n), b = load_first(head + half + d, n);
        F low = rounded(a * load_first(cos + d, n)) - rounded(b * load_first(sin + d, n));
        F high = rounded(b * load_first(cos + half + d, n)) + rounded(a * load_first(sin + half + d, n));
        store_first(head + d, low, n);
        store_first(head + half + d, high, n);
    }
}

#define INSTANTIATE(T)                                                                        \
    template void rms_norm_row<T>(const T*, T*, const T*, float, int64_t, T*);                \
    template void silu_mul_row<T>(const T*, const T*, int64_t, T*);                           \
    template void rotate_head<T>(T*, const T*, const T*, int64_t);
INSTANTIATE(float)
INSTANTIATE(bf16)

namespace {

template <typename Body>
void for_tokens(int64_t num_tokens, int64_t width, int64_t num_threads, Body body) {
    Team::run(worthwhile_threads(num_tokens * width * 4, num_threads), [&](Team& team) { team.share(num_tokens, body, 16); });
}

}  // namespace

extern "C" {

void specdec_rms_norm(const void* x, void* residual, const void* weight, void* y, int64_t num_tokens, int64_t width,
                      float eps, int64_t dtype, int64_t num_threads) {
    for_tokens(num_tokens, width, num_threads, [&](int64_t t) {
        auto run = [&](auto* zero) {
            using T = std::remove_pointer_t<decltype(zero)>;
            rms_norm_row((const T*)x + t * width, residual ? (T*)residual + t * width : zero, (const T*)weight, eps, width,
                         (T*)y + t * width);
        };
        dtype == BFLOAT16 ? run((bf16*)nullptr) : run((float*)nullptr);
    });
}

void specdec_silu_mul(const void* gate_up, void* y, int64_t num_tokens, int64_t width, int64_t dtype,
                      int64_t num_threads) {
    for_tokens(num_tokens, width, num_threads, [&](int64_t t) {
        auto run = [&](auto* zero) {
            using T = std::remove_pointer_t<decltype(zero)>;
            const T* gate = (const T*)gate_up + t * 2 * width;
            silu_mul_row(gate, gate + width, width, (T*)y + t * width);
        };
        dtype == BFLOAT16 ? run((bf16*)nullptr) : run((float*)nullptr);
    });
}

// x [T, heads, width], a stride between tokens; cos and sin [T, rotary_width]
void specdec_rotary(void* x, const void* cos, const void* sin, int64_t num_tokens, int64_t heads, int64_t width,
                    int64_t rotary_width, int64_t token_stride, int64_t dtype, int64_t num_threads) {
    for_tokens(num_tokens, heads * width, num_threads, [&](int64_t t) {
        auto run = [&](auto* zero) {
            using T = std::remove_pointer_t<decltype(zero)>;
            for (int64_t h = 0; h < heads; ++h)
                rotate_head((T*)x + t * token_stride + h * width, (const T*)cos + t * rotary_width,
                            (const T*)sin + t * rotary_width, rotary_width);
        };
        dtype == BFLOAT16 ? run((bf16*)nullptr) : run((float*)nullptr);
    });
}
}
