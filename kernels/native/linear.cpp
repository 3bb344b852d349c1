// y = x W^T + b for few tokens: weights are read once, in panels, and widened to float on the way.
//
// A panel holds PANEL outputs, k-major. In bfloat16 a word of 32 bits carries output j in its low half and output
// W + j in its high half, so that a shift and a mask widen both. Every output sums k in ascending order inside
// stretches of K_STRETCH, and the stretches in ascending order: the bits of a token do not depend on how many others
// are computed beside it.
#include "linear.h"

#include "bytes.h"
#include "groups.h"
#include "scratch.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

using namespace vec;

namespace {

constexpr int64_t K_STRETCH = 64;
#if SPECDEC_VECTOR_BYTES == 32
constexpr int64_t K_SPAN = 2 * K_STRETCH;  // that a micro-kernel is given
constexpr int MOST_SUMS = 12;              // vectors that it keeps
constexpr int FEW = 4;                     // tokens for which weights are decoded in registers
#else
constexpr int64_t K_SPAN = K_STRETCH;
constexpr int MOST_SUMS = 0;
constexpr int FEW = 6;
#endif

struct Ahead {  // memory to bring in on the way: `bytes` after every k
    const char* from;
    int64_t bytes;
};

// sums[r][:] (+)= x[:, r] . panel over STRETCHES stretches of k, of `count` numbers each, side by side: few sums would wait
// for each other
template <typename T, int ROWS, int STRETCHES>
SPECDEC_INLINE void multiply(const T* panel, const float* x, int64_t count, float* sums, bool first, Ahead ahead) {
    F acc[STRETCHES][ROWS][2];
#pragma GCC unroll 2
    for (int s = 0; s < STRETCHES; ++s)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) acc[s][r][0] = acc[s][r][1] = F{};
    for (int64_t k = 0; k < count; ++k) {
#pragma GCC unroll 2
        for (int s = 0; s < STRETCHES; ++s) {
            F low, high;
            load_pair(panel + (s * K_STRETCH + k) * PANEL, low, high);
            const char* at = ahead.from + (s * K_STRETCH + k) * ahead.bytes;
            __builtin_prefetch(at);
            if (sizeof(T) * PANEL > 64) __builtin_prefetch(at + ahead.bytes / 2);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                F a = splat(x[(s * K_STRETCH + k) * ROWS + r]);
                acc[s][r][0] = fma(a, low, acc[s][r][0]);
                acc[s][r][1] = fma(a, high, acc[s][r][1]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h) {
            float* sum = sums + r * PANEL + h * W;
            F total = first ? acc[0][r][h] : load(sum) + acc[0][r][h];
            if (STRETCHES == 2) total = total + acc[STRETCHES - 1][r][h];
            store(sum, total);
        }
}

// The same over a span of k.
template <typename T, int ROWS>
void multiply(const T* panel, const float* x, int64_t count, float* sums, bool first, Ahead ahead) {
    if constexpr (ROWS * 4 <= MOST_SUMS)
        if (count == 2 * K_STRETCH) return multiply<T, ROWS, 2>(panel, x, K_STRETCH, sums, first, ahead);
    for (int64_t k = 0; k < count; k += K_STRETCH) {
        const int64_t length = std::min(count - k, K_STRETCH);
        multiply<T, ROWS, 1>(panel + k * PANEL, x + k * ROWS, length, sums, first && k == 0, ahead);
        ahead.from += length * ahead.bytes;
    }
}

template <typename T>
void multiply_rows(int64_t rows, const T* panel, const float* x, int64_t count, float* sums, bool first,
                   Ahead ahead) {
    switch (rows) {
#define CASE(n) \
    case n: return multiply<T, n>(panel, x, count, sums, first, ahead)
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
#if SPECDEC_VECTOR_BYTES != 32  // MAX_ROWS
        CASE(7);
        CASE(8);
        CASE(9);
        CASE(10);
        CASE(11);
        CASE(12);
#endif
#undef CASE
    }
}

// Where a panel's spans of weights come from, and what to fetch while they are multiplied.
template <typename T>
struct Plain {
    const T* panel;
    const T* span(int64_t from, int64_t, float*) const { return panel + from * PANEL; }
    // All blocks of tokens together bring in the span that follows, so that memory is busy while they multiply.
    Ahead ahead(int64_t from, int64_t block, int64_t num_blocks, const float*) const {
        int64_t bytes = PANEL * sizeof(T) / num_blocks;
        return {(const char*)(panel + (from + K_SPAN) * PANEL) + block * K_SPAN * bytes, bytes};
    }
};

template <typename Reader>
struct Groups {
    const uint8_t* panel;
    const float* span(int64_t from, int64_t count, float* decoded) const {
        for (int64_t k = 0; k < count; k += groups::SIZE)
            groups::decode<Reader>(panel + (from + k) / groups::SIZE * Reader::BYTES, decoded + k * PANEL);
        return decoded;
    }
    Ahead ahead(int64_t, int64_t, int64_t, const float* decoded) const { return {(const char*)decoded, 0}; }
};

template <typename Source>
void multiply_panel(const Source& source, const Activations& x, float* sums) {
    alignas(64) float decoded[K_SPAN * PANEL];
    for (int64_t from = 0; from < x.K; from += K_SPAN) {
        const int64_t count = std::min(K_SPAN, x.K - from);
        const auto* weights = source.span(from, count, decoded);
        for (int64_t b = 0; b < x.num_blocks; ++b) {
            const int64_t rows = x.rows(b), start = x.start(b);
            multiply_rows(rows, weights, x.data + start * x.K + from * rows, count, sums + start * PANEL, from == 0,
                          source.ahead(from, b, x.num_blocks, decoded));
        }
    }
}

// For few tokens: the same sums over the same floats, but these never leave the registers.
template <typename Reader, int ROWS>
void multiply_groups(const uint8_t* panel, const float* x, int64_t K, float* sums) {
    F total[ROWS][2];
    for (int64_t from = 0; from < K; from += K_STRETCH) {
        F acc[ROWS][2];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = F{};
        for (int64_t start = from; start < std::min(K, from + K_STRETCH); start += groups::SIZE) {
            Reader reader(panel + start / groups::SIZE * Reader::BYTES);
            for (int64_t k = 0; k < groups::SIZE; k += Reader::STEP) {
                reader.step(k);
#pragma GCC unroll 4
                for (int i = 0; i < Reader::STEP; ++i) {
                    F low, high;
                    reader.pair(i, low, high);
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; ++r) {
                        F a = splat(x[(start + k + i) * ROWS + r]);
                        acc[r][0] = fma(a, low, acc[r][0]);
                        acc[r][1] = fma(a, high, acc[r][1]);
                    }
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
            for (int h = 0; h < 2; ++h) total[r][h] = from ? total[r][h] + acc[r][h] : acc[r][h];
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h) store(sums + r * PANEL + h * W, total[r][h]);
}

template <typename Reader>
void multiply_groups(const uint8_t* panel, const Activations& x, float* sums) {
    switch (x.num_tokens <= FEW ? x.num_tokens : 0) {
        case 1: return multiply_groups<Reader, 1>(panel, x.data, x.K, sums);
        case 2: return multiply_groups<Reader, 2>(panel, x.data, x.K, sums);
        case 3: return multiply_groups<Reader, 3>(panel, x.data, x.K, sums);
        case 4: return multiply_groups<Reader, 4>(panel, x.data, x.K, sums);
#if SPECDEC_VECTOR_BYTES != 32
        case 5: return multiply_groups<Reader, 5>(panel, x.data, x.K, sums);
        case 6: return multiply_groups<Reader, 6>(panel, x.data, x.K, sums);
#endif
        default: return multiply_panel(Groups<Reader>{panel}, x, sums);
    }
}

void multiply_panel(const Linear& layer, int64_t p, const Activations& x, float* sums) {
    const uint8_t* bytes = (const uint8_t*)layer.weights;
    const int64_t first_group = p * (x.K / groups::SIZE);
    switch (layer.dtype) {
        case FLOAT32: return multiply_panel(Plain<float>{(const float*)bytes + p * x.K * PANEL}, x, sums);
        case BFLOAT16: return multiply_panel(Plain<bf16>{(const bf16*)bytes + p * x.K * PANEL}, x, sums);
        case GROUPS_4: return multiply_groups<groups::Reader4>(bytes + first_group * groups::BYTES_4, x, sums);
        case GROUPS_8: return multiply_groups<groups::Reader8>(bytes + first_group * groups::BYTES_8, x, sums);
    }
}

const bf16* tiled_panel(const Linear& layer, int64_t p) {
    return (const bf16*)layer.weights + p * tiles::steps(layer.K) * 2 * tiles::SIZE;
}

// bytes of one panel
int64_t group_bytes(int64_t K, int64_t dtype) {
    return K / groups::SIZE * (without_bytes(dtype) == GROUPS_4 ? groups::BYTES_4 : groups::BYTES_8);
}

struct Tokens {  // whose sums are at hand
    int64_t first, count;
};

template <typename Put>
SPECDEC_INLINE void for_outputs(const float* sums, const Linear& layer, Tokens tokens, int64_t column, Put put) {
    for (int h = 0; h < 2; ++h) {
        int64_t at = column + h * W, width = std::min<int64_t>(W, layer.N - at);
        if (width <= 0) return;
        F b = layer.bias ? load_first(layer.bias + at, width) : F{};
        for (int64_t t = 0; t < tokens.count; ++t)
            put((tokens.first + t) * layer.N + at, load(sums + t * PANEL + h * W) + b, width);
    }
}

void finish(const float* sums, const Linear& layer, Tokens tokens, int64_t column, const Destination& to) {
    float* out = (float*)to.out;
    switch (to.kind) {
        case Destination::FLOAT:
            return for_outputs(sums, layer, tokens, column, [&](int64_t at, F y, int64_t n) { store_first(out + at, y, n); });
        case Destination::BF16:
            return for_outputs(sums, layer, tokens, column,
                               [&](int64_t at, F y, int64_t n) { store_first((bf16*)to.out + at, y, n); });
        case Destination::ADD:
            return for_outputs(sums, layer, tokens, column, [&](int64_t at, F y, int64_t n) {
                store_first(out + at, load_first(out + at, n) + y, n);
            });
        case Destination::GATE:
            for (int64_t t = 0; t < tokens.count; ++t) {
                F gate = load(sums + t * PANEL), value = load(sums + t * PANEL + W);
                to.next->column(tokens.first + t).put(column / 2, silu(gate) * value, to.next->K - column / 2);
            }
    }
}

void linear_tiles(Team& team, const Linear& layer, const Activations& x, const Destination& to, int64_t chunk) {
    tiles::enter();
    auto one_panel = [&](int64_t p) {
        alignas(64) float sums[tiles::BLOCK_ROWS * PANEL];
        for (int64_t first = 0; first < x.num_tokens; first += tiles::BLOCK_ROWS) {
            const int64_t count = std::min(tiles::BLOCK_ROWS, x.num_tokens - first);
            const bf16* inputs = x.tiled() + first / tiles::ROWS * tiles::steps(x.K) * tiles::SIZE;
            if (layer.dtype == BFLOAT16_TILES)
                tiles::multiply(tiled_panel(layer, p), inputs, count, x.K, sums);
            else
                tiles::multiply_codes((const uint8_t*)layer.weights + p * group_bytes(x.K, layer.dtype), inputs, count, x.K,
                                      sums);
            finish(sums, layer, {first, count}, p * PANEL, to);
        }
    };
    team.share((layer.N + PANEL - 1) / PANEL, one_panel, chunk);
    tiles::leave();
}

template <typename X>
void pack_rows(const X* x, int64_t rows, int64_t K, int64_t from, int64_t to, float* packed) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = from; k < to; ++k) packed[k * rows + r] = to_float(x[r * K + k]);
}

template <typename T>
void pack_panel(const T* weight, T* packed, int64_t N, int64_t K, int64_t p) {
    for (int64_t k = 0; k < K; ++k)
        for (int j = 0; j < PANEL; ++j) {
            // bfloat16: neighbours in memory are the two halves of a word (little-endian)
            int output = sizeof(T) == 2 ? j / 2 + (j % 2) * W : j;
            int64_t n = p * PANEL + output;
            packed[(p * K + k) * PANEL + j] = n < N ? weight[n * K + k] : T(0);
        }
}

void pack_tiles(const bf16* weight, bf16* packed, int64_t N, int64_t K, int64_t p) {
    const int64_t padded = tiles::steps(K) * tiles::DEPTH;
    packed += p * padded * PANEL;
    for (int64_t j = 0; j < PANEL; ++j)
        for (int64_t k = 0, n = p * PANEL + j; k < padded; ++k)
            packed[tiles::weight_place(j, k)] = n < N && k < K ? weight[n * K + k] : 0;
}

void put_codes_in_tiles(const uint8_t* codes, int64_t N, int64_t K, int64_t p, uint8_t* packed) {
    for (int64_t n = p * PANEL; n < std::min(N, (p + 1) * PANEL); ++n)
        for (int64_t k = 0; k < K; ++k) {
            uint8_t* group = packed + p * group_bytes(K, GROUPS_8) + k / groups::SIZE * groups::BYTES_8;
            group[groups::HALVES + tiles::weight_place(n % PANEL, k % groups::SIZE)] = codes[n * K + k];
        }
}

template <typename X>
void pack_token(const X* x, const Activations::Column& to, int64_t K) {
    for (int64_t k = 0; k < K; k += W) to.put(k, load_first(x + k, K - k), K - k);
}

}  // namespace

void pack_team(Team& team, const void* x, int64_t dtype, const Activations& to) {
    if (to.is_tiled)
        return team.share(to.num_tokens, [&](int64_t t) {
            if (dtype == BFLOAT16)
                pack_token((const bf16*)x + t * to.K, to.column(t), to.K);
            else
                pack_token((const float*)x + t * to.K, to.column(t), to.K);
        });
    constexpr int64_t STEP = 256;
    const int64_t K = to.K, steps = (K + STEP - 1) / STEP;
    team.share(to.num_blocks * steps, [&](int64_t i) {
        int64_t b = i / steps, from = i % steps * STEP, end = std::min(K, from + STEP), start = to.start(b) * K;
        if (dtype == BFLOAT16)
            pack_rows((const bf16*)x + start, to.rows(b), K, from, end, to.data + start);
        else
            pack_rows((const float*)x + start, to.rows(b), K, from, end, to.data + start);
    });
}

void linear_team(Team& team, const Linear& layer, const Activations& x, const Destination& to, float* bytes) {
    const bool in_bytes = takes_bytes(layer.dtype);
    const ByteActivations rounded(bytes, x.num_tokens, x.K);
    if (in_bytes) team.share(x.num_tokens, [&](int64_t t) { rounded.put(t, x.data + t * x.K); });
    const int64_t panels = (layer.N + PANEL - 1) / PANEL;
    // Neighbouring panels for one thread, so that what it fetches ahead is mostly its own.
    int64_t chunk = std::max<int64_t>(1, panels / (16 * team.size()));
    if (to.kind == Destination::GATE) chunk = (chunk + 1) / 2 * 2;  // two panels fill a cache line of the next inputs
    if (x.is_tiled) return linear_tiles(team, layer, x, to, chunk);
    auto one_panel = [&](int64_t p) {
        float* sums = thread_scratch(x.num_tokens * PANEL);
        if (in_bytes)
            multiply_bytes(layer.dtype, (const uint8_t*)layer.weights + p * group_bytes(layer.K, layer.dtype), rounded, sums);
        else
            multiply_panel(layer, p, x, sums);
        finish(sums, layer, {0, x.num_tokens}, p * PANEL, to);
    };
    team.share(panels, one_panel, chunk);
}

void unpack_row(const Linear& layer, int64_t n, float* row) {
    const int64_t panel = n / PANEL, output = n % PANEL, num_groups = layer.K / groups::SIZE;
    const bf16* narrow = (const bf16*)layer.weights + panel * layer.K * PANEL + output % W * 2 + output / W;
    const float* wide = (const float*)layer.weights + panel * layer.K * PANEL + output;
    float decoded[groups::SIZE * PANEL];
    for (int64_t k = 0; k < layer.K; ++k) {
        if (layer.dtype == GROUPS_8_TILES) {
            const uint8_t* group = (const uint8_t*)layer.weights + (panel * num_groups + k / groups::SIZE) * groups::BYTES_8;
            const int8_t code = group[groups::HALVES + tiles::weight_place(output, k % groups::SIZE)];
            row[k] = groups::from_half(((const uint16_t*)group)[output]) * code;
            continue;
        }
        if (layer.dtype == BFLOAT16_TILES) {
            row[k] = to_float(tiled_panel(layer, panel)[tiles::weight_place(output, k)]);
            continue;
        }
        if (layer.dtype <= BFLOAT16) {
            row[k] = layer.dtype == BFLOAT16 ? to_float(narrow[k * PANEL]) : wide[k * PANEL];
            continue;
        }
        const int64_t group = panel * num_groups + k / groups::SIZE;
        if (k % groups::SIZE == 0) {
            if (without_bytes(layer.dtype) == GROUPS_4)
                groups::decode<groups::Reader4>((const uint8_t*)layer.weights + group * groups::BYTES_4, decoded);
            else
                groups::decode<groups::Reader8>((const uint8_t*)layer.weights + group * groups::BYTES_8, decoded);
        }
        row[k] = decoded[k % groups::SIZE * PANEL + output];
    }
}

extern "C" {

int64_t specdec_panel() { return PANEL; }

// Asks for large pages, before anything is written there; the system may have none.
void specdec_ask_for_large_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
    constexpr int64_t PAGE = 1 << 21;
    const int64_t from = ((int64_t)memory + PAGE - 1) / PAGE * PAGE, to = ((int64_t)memory + bytes) / PAGE * PAGE;
    if (from < to) madvise((void*)from, to - from, MADV_HUGEPAGE);
#endif
}

void specdec_pack(const void* weight, void* packed, int64_t N, int64_t K, int64_t dtype, int64_t num_threads) {
    Team::run(num_threads, [&](Team& team) {
        team.share((N + PANEL - 1) / PANEL, [&](int64_t p) {
            if (dtype == BFLOAT16_TILES)
                pack_tiles((const bf16*)weight, (bf16*)packed, N, K, p);
            else if (dtype == BFLOAT16)
                pack_panel((const bf16*)weight, (bf16*)packed, N, K, p);
            else
                pack_panel((const float*)weight, (float*)packed, N, K, p);
        });
    });
}

int64_t specdec_group_bytes(int64_t K, int64_t dtype) { return group_bytes(K, dtype); }

void specdec_pack_groups(const uint8_t* codes, const uint16_t* d, const uint16_t* m, uint8_t* packed, int64_t N,
                         int64_t K, int64_t dtype, int64_t num_threads) {
    Team::run(num_threads, [&](Team& team) {
        team.share((N + PANEL - 1) / PANEL,
                   [&](int64_t p) {
                       groups::pack_panel(codes, d, m, N, K, p, dtype == GROUPS_4, packed);
                       if (dtype == GROUPS_8_TILES) put_codes_in_tiles(codes, N, K, p, packed);
                   });
    });
}

void specdec_linear(const void* x, const void* weights, const float* bias, void* out, int64_t num_tokens, int64_t N,
                    int64_t K, int64_t x_dtype, int64_t w_dtype, int64_t out_dtype, int64_t num_threads) {
    const Linear layer{weights, bias, N, K, w_dtype};
    const int64_t floats = Activations::floats(num_tokens, K);
    float* at = call_scratch(floats + ByteActivations::floats(num_tokens, K));
    const Activations packed(at, num_tokens, K, w_dtype);
    const Destination to{out_dtype == BFLOAT16 ? Destination::BF16 : Destination::FLOAT, out};
    Team::run(worthwhile_threads(num_tokens * N * K, num_threads), [&](Team& team) {
        pack_team(team, x, x_dtype, packed);
        linear_team(team, layer, packed, to, at + floats);
    });
}
}
