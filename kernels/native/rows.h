// What becomes of one token between the linear layers of a decoder: norms, heads, its place in a cache.
#pragma once

#include <cmath>

#include "linear.h"
#include "vec.h"

inline float inverse_rms(const float* x, int64_t width, float eps) {
    vec::F squares = vec::F{};
    for (int64_t d = 0; d < width; d += vec::W) {
        vec::F v = vec::load_first(x + d, width - d);
        squares = vec::fma(v, v, squares);
    }
    return 1.0f / std::sqrt(vec::sum(squares) / (float)width + eps);
}

// Norms x and places it at numbers from, from + 1, ... of a token's activations.
inline void norm_part(const float* x, const float* weight, float eps, int64_t width, const Activations::Column& to,
                      int64_t from) {
    const float scale = inverse_rms(x, width, eps);
    for (int64_t d = 0; d < width; d += vec::W)
        to.put(from + d, vec::load_first(x + d, width - d) * scale * vec::load_first(weight + d, width - d), width - d);
}

inline void norm_into(const float* x, const float* weight, float eps, const Activations& to, int64_t token) {
    norm_part(x, weight, eps, to.K, to.column(token), 0);
}

inline void norm_head(float* head, const float* weight, float eps, int64_t width) {
    const float scale = inverse_rms(head, width, eps);
    for (int64_t d = 0; d < width; d += vec::W)
        vec::store_first(head + d, vec::load_first(head + d, width - d) * scale * vec::load_first(weight + d, width - d),
                         width - d);
}

template <typename T>
void keep(const float* row, int64_t count, void* cache, int64_t slot) {
    T* to = (T*)cache + slot * count;
    for (int64_t d = 0; d < count; d += vec::W)
        vec::store_first(to + d, vec::load_first(row + d, count - d), count - d);
}
