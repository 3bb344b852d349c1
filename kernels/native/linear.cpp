// y = x W^T + b for few tokens: weights are read once, in panels, and widened to float on the way.
//
// A panel holds PANEL outputs, k-major. In bfloat16 a word of 32 bits carries output j in its low half and output
// W + j in its high half, so that a shift and a mask widen both. Every output sums k in ascending order inside
// stretches of K_STRETCH, and the stretches in ascending order: the bits of a token do not depend on how many others
// are computed beside it.
#include "linear.h"

#include "scratch.h"

using namespace vec;

namespace {

constexpr int MAX_ROWS = 12;  // tokens a micro-kernel takes: 24 accumulators, 2 weights, 1 activation
constexpr int64_t K_STRETCH = 64;
constexpr int64_t PREFETCH_BYTES = 2048;  // some microseconds of one processor's share of the memory's bandwidth

struct Blocks {  // num_tokens in nearly equal blocks of at most MAX_ROWS
    int64_t count, size, rest;
    explicit Blocks(int64_t num_tokens)
        : count((num_tokens + MAX_ROWS - 1) / MAX_ROWS), size(num_tokens / count), rest(num_tokens % count) {}
    int64_t start(int64_t i) const { return i * size + std::min(i, rest); }
    int64_t rows(int64_t i) const { return size + (i < rest); }
};

// sums[r][:] (+)= x[:, r] . panel over one stretch of k; `ahead` is what will be read next
template <typename T, int ROWS>
void multiply(const T* panel, const float* x, int64_t count, float* sums, bool first, const char* ahead) {
    F acc[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = F{};
    for (int64_t k = 0; k < count; ++k) {
        F low, high;
        load_pair(panel + k * PANEL, low, high);
        for (int line = 0; line < (int)(PANEL * sizeof(T)); line += 64)
            __builtin_prefetch(ahead + k * PANEL * sizeof(T) + line);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            F a = splat(x[k * ROWS + r]);
            acc[r][0] = fma(a, low, acc[r][0]);
            acc[r][1] = fma(a, high, acc[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h) {
            float* sum = sums + r * PANEL + h * W;
            store(sum, first ? acc[r][h] : load(sum) + acc[r][h]);
        }
}

template <typename T>
void multiply_rows(int64_t rows, const T* panel, const float* x, int64_t count, float* sums, bool first,
                   const char* ahead) {
    switch (rows) {
#define CASE(n) \
    case n: return multiply<T, n>(panel, x, count, sums, first, ahead)
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(7);
        CASE(8);
        CASE(9);
        CASE(10);
        CASE(11);
        CASE(12);
#undef CASE
    }
}

template <typename T>
void finish(const float* sums, const float* bias, T* out, int64_t num_tokens, int64_t N, int64_t column) {
    for (int h = 0; h < 2; ++h) {
        int64_t at = column + h * W, width = std::min<int64_t>(W, N - at);
        if (width <= 0) return;
        F b = bias ? load_first(bias + at, width) : F{};
        for (int64_t t = 0; t < num_tokens; ++t)
            store_first(out + t * N + at, load(sums + t * PANEL + h * W) + b, width);
    }
}

template <typename X>
void pack_rows(const X* x, int64_t rows, int64_t K, int64_t from, int64_t to, float* packed) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = from; k < to; ++k) packed[k * rows + r] = to_float(x[r * K + k]);
}

template <typename T>
void all_blocks(const T* panel, const Blocks& blocks, const float* x, int64_t K, float* sums) {
    for (int64_t from = 0; from < K; from += K_STRETCH) {
        int64_t count = std::min(K_STRETCH, K - from);
        for (int64_t b = 0; b < blocks.count; ++b) {
            int64_t rows = blocks.rows(b), start = blocks.start(b);
            const float* block = x + start * K + from * rows;
            // The first block brings weights in from memory; the others find them near and bring in their successor.
            const char* ahead = b ? (const char*)(block + rows * K) : (const char*)(panel + from * PANEL) + PREFETCH_BYTES;
            multiply_rows(rows, panel + from * PANEL, block, count, sums + start * PANEL, from == 0, ahead);
        }
    }
}

template <typename T>
void pack_panels(const T* weight, T* packed, int64_t N, int64_t K, int64_t num_threads) {
    int64_t panels = (N + PANEL - 1) / PANEL;
    auto pack_panel = [&](int64_t p) {
        for (int64_t k = 0; k < K; ++k)
            for (int j = 0; j < PANEL; ++j) {
                // bfloat16: neighbours in memory are the two halves of a word (little-endian)
                int output = sizeof(T) == 2 ? j / 2 + (j % 2) * W : j;
                int64_t n = p * PANEL + output;
                packed[(p * K + k) * PANEL + j] = n < N ? weight[n * K + k] : T(0);
            }
    };
    Team::run(num_threads, [&](Team& team) { team.share(panels, pack_panel); });
}

}  // namespace

int64_t linear_scratch(int64_t num_tokens, int64_t K) { return num_tokens * K; }

void linear_team(Team& team, const Linear& layer, const void* x, int64_t x_dtype, void* out, int64_t out_dtype,
                 int64_t num_tokens, float* scratch) {
    if (!num_tokens) return;
    const int64_t K = layer.K, N = layer.N;
    const Blocks blocks(num_tokens);
    const int64_t stretches = (K + K_STRETCH - 1) / K_STRETCH, panels = (N + PANEL - 1) / PANEL;
    team.share(blocks.count * stretches, [&](int64_t i) {
        int64_t b = i / stretches, from = i % stretches * K_STRETCH, to = std::min(K, from + K_STRETCH);
        int64_t start = blocks.start(b) * K;
        if (x_dtype == BFLOAT16)
            pack_rows((const bf16*)x + start, blocks.rows(b), K, from, to, scratch + start);
        else
            pack_rows((const float*)x + start, blocks.rows(b), K, from, to, scratch + start);
    });
    // Neighbouring panels for one thread, so that what it fetches ahead is mostly its own.
    const int64_t chunk = std::max<int64_t>(1, panels / (16 * team.size()));
    auto multiply_panel = [&](int64_t p) {
        float* sums = thread_scratch(num_tokens * PANEL);
        if (layer.dtype == BFLOAT16)
            all_blocks((const bf16*)layer.weights + p * K * PANEL, blocks, scratch, K, sums);
        else
            all_blocks((const float*)layer.weights + p * K * PANEL, blocks, scratch, K, sums);
        if (out_dtype == BFLOAT16)
            finish(sums, layer.bias, (bf16*)out, num_tokens, N, p * PANEL);
        else
            finish(sums, layer.bias, (float*)out, num_tokens, N, p * PANEL);
    };
    team.share(panels, multiply_panel, chunk);
}

extern "C" {

int64_t specdec_panel() { return PANEL; }

void specdec_pack(const void* weight, void* packed, int64_t N, int64_t K, int64_t dtype, int64_t num_threads) {
    if (dtype == BFLOAT16)
        pack_panels((const bf16*)weight, (bf16*)packed, N, K, num_threads);
    else
        pack_panels((const float*)weight, (float*)packed, N, K, num_threads);
}

void specdec_linear(const void* x, const void* weights, const float* bias, void* out, int64_t num_tokens, int64_t N,
                    int64_t K, int64_t x_dtype, int64_t w_dtype, int64_t out_dtype, int64_t num_threads) {
    Linear layer{weights, bias, N, K, w_dtype};
    float* scratch = call_scratch(linear_scratch(num_tokens, K));
    Team::run(num_threads, [&](Team& team) {
        linear_team(team, layer, x, x_dtype, out, out_dtype, num_tokens, scratch);
    });
}
}
