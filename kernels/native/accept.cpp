// Choosing a token: argmax of logits / temperature + Gumbel noise, the noise a pure function of (seed, position, id).
//
// Noise comes from Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). One counter
// yields the words of four neighbouring ids; a vector of counters therefore covers 4 W ids.
#include <cmath>
#include <limits>
#include <vector>

#include "team.h"
#include "vec.h"

using namespace vec;

namespace {

constexpr uint32_t MULTIPLIER_0 = 0xD2511F53, MULTIPLIER_1 = 0xCD9E8D57, WEYL_0 = 0x9E3779B9, WEYL_1 = 0xBB67AE85;
constexpr int GROUP = 4 * W;           // ids that one vector of counters covers
constexpr int64_t STRETCH = 8192;      // ids one thread takes at once; a multiple of GROUP
constexpr double GREEDY_BELOW = 1e-5;  // temperatures below are zero

typedef uint64_t Wide __attribute__((vector_size(SPECDEC_VECTOR_BYTES)));

SPECDEC_INLINE Wide multiply_even(U a, uint32_t b) {
#if defined(__AVX512F__)
    return (Wide)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
    return (Wide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
    return (as<Wide>(a) & 0xffffffffull) * (uint64_t)b;
#endif
}

// the high and low halves of the products of all lanes
SPECDEC_INLINE void multiply(U a, uint32_t b, U& high, U& low) {
    Wide even = multiply_even(a, b), odd = multiply_even(as<U>(as<Wide>(a) >> 32), b);
    low = as<U>((even & 0xffffffffull) | (odd << 32));
    high = as<U>((even >> 32) | (odd & 0xffffffff00000000ull));
}

struct Stream {  // the noise of one row
    uint32_t key0, key1, position0, position1;
    Stream(int64_t seed, int64_t position)
        : key0((uint32_t)seed), key1((uint32_t)((uint64_t)seed >> 32)), position0((uint32_t)position),
          position1((uint32_t)((uint64_t)position >> 32)) {}

    // words[j][i]: id 4 * (first_counter + i) + j
    SPECDEC_INLINE void words(uint32_t first_counter, U words[4]) const {
        U c0;
        for (int i = 0; i < W; ++i) c0[i] = first_counter + i;
        U c1 = splat_bits(position0), c2 = splat_bits(position1), c3 = U{};
        uint32_t k0 = key0, k1 = key1;
#pragma GCC unroll 10
        for (int round = 0; round < 10; ++round) {
            U high0, low0, high1, low1;
            multiply(c0, MULTIPLIER_0, high0, low0);
            multiply(c2, MULTIPLIER_1, high1, low1);
            c0 = high1 ^ c1 ^ k0;
            c2 = high0 ^ c3 ^ k1;
            c1 = low1;
            c3 = low0;
            k0 += WEYL_0;
            k1 += WEYL_1;
        }
        words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
    }
};

// [4][W] -> ids in order
SPECDEC_INLINE void put_in_order(const U words[4], uint32_t out[GROUP]) {
    uint32_t lanes[4][W];
    std::memcpy(lanes, words, sizeof lanes);
    for (int i = 0; i < W; ++i)
        for (int j = 0; j < 4; ++j) out[4 * i + j] = lanes[j][i];
}

// -log(-log1p(-u)) for u = x / 2^32 and x = word + 0.5: large values belong to small u, where floats are dense
SPECDEC_INLINE F gumbel(F x) {
    F u = min(x * 0x1p-32f, splat(1 - 0x1p-24f));
    F rest = 1.0f - u;
    F lost = (1.0f - rest) - u;  // what rounding took from 1 - u
    return -log(-(log(rest) + lost));
}

// At least gumbel(x): -log1p(-u) >= u, and the exponent of u is at most its logarithm.
SPECDEC_INLINE F at_least_gumbel(F x) {
    const float log_2 = 0.69314718f;
    return fma(__builtin_convertvector(as<I>(x) >> 23, F), splat(-log_2), splat((127 + 32) * log_2));
}

SPECDEC_INLINE bool any(I mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int32_t all = 0;
    for (int i = 0; i < W; ++i) all |= mask[i];
    return all != 0;
#endif
}

double gumbel(uint32_t word) { return -std::log(-std::log1p(-((double)word + 0.5) * 0x1p-32)); }

template <typename T>
struct Best {
    T value = -std::numeric_limits<T>::infinity();
    int64_t id = std::numeric_limits<int64_t>::max();
    bool is_finite = true;  // no NaN and no +inf

    void offer(T other, int64_t other_id) {
        if (other > value || (other == value && other_id < id)) value = other, id = other_id;
    }
    void merge(const Best& other) {
        offer(other.value, other.id);
        is_finite = is_finite && other.is_finite;
    }
};

struct Row {
    Stream stream;
    double temperature;
    bool is_greedy() const { return temperature < GREEDY_BELOW; }
};

template <typename T>
Best<float> greedy(const T* logits, int64_t from, int64_t to) {
    F top = splat(-std::numeric_limits<float>::infinity());
    I at = splat_int(0), bad = splat_int(0), index = splat_int(0);
    const float infinity = std::numeric_limits<float>::infinity();
    int64_t id = from;
    for (; id + W <= to; id += W, index = index + 1) {
        F x = load(logits + id);
        bad |= ~(x < splat(infinity));  // +inf or NaN
        I is_better = x > top;
        top = is_better ? x : top;
        at = is_better ? index : at;
    }
    Best<float> best;
    for (int i = 0; i < W; ++i) {
        if (bad[i]) best.is_finite = false;
        if (id > from && top[i] > -infinity) best.offer(top[i], from + (int64_t)at[i] * W + i);
    }
    for (; id < to; ++id) {
        float x = to_float(logits[id]);
        if (!(x < infinity)) best.is_finite = false;
        else if (x > -infinity) best.offer(x, id);
    }
    return best;
}

// True where no id may be chosen: no noise need be drawn.
template <typename T>
SPECDEC_INLINE bool is_masked(const T* logits, int64_t count) {
    const F never = splat(-std::numeric_limits<float>::infinity());
    if (count < GROUP) return false;
    I is_open = splat_int(0);
    for (int part = 0; part < GROUP; part += W) is_open |= ~(load(logits + part) == never);
    return !any(is_open);
}

template <typename T>
Best<float> sampled(const T* logits, int64_t from, int64_t to, const Row& row) {
    const float infinity = std::numeric_limits<float>::infinity(), temperature = (float)row.temperature;
    Best<float> best;
    const F inverse = splat(1 / temperature);
    F top = splat(-infinity), worth = splat(-infinity);
    I at = splat_int(0), bad = splat_int(0);
    U words[4];
    uint32_t ordered[GROUP];
    int64_t id = from;
    for (; id < to; id += GROUP) {
        if (is_masked(logits + id, std::min<int64_t>(GROUP, to - id))) continue;
        row.stream.words((uint32_t)(id / 4), words);
        put_in_order(words, ordered);
        for (int part = 0; part < GROUP && id + part < to; part += W) {
            int64_t count = std::min<int64_t>(W, to - id - part);
            U word;
            std::memcpy(&word, ordered + part, sizeof word);
            F x = load_first(logits + id + part, count);
            if (count < W)
                for (int i = count; i < W; ++i) x[i] = -infinity;
            bad |= ~(x < splat(infinity));
            F random = __builtin_convertvector(word, F) + 0.5f;
            // Most ids are beaten whatever their noise turns out to be, and logarithms are what takes time.
            if (!any(fma(x, inverse, at_least_gumbel(random)) >= worth)) continue;
            F value = x / temperature + gumbel(random);
            I is_better = value > top;
            top = is_better ? value : top;
            at = is_better ? splat_int((int32_t)((id + part - from) / W)) : at;
            float best_yet = max_lane(top);  // less a margin far above the roundings of the bound
            worth = splat(best_yet - (1e-3f + 1e-5f * std::fabs(best_yet)));
        }
    }
    for (int i = 0; i < W; ++i) {
        if (bad[i]) best.is_finite = false;
        if (top[i] > -infinity) best.offer(top[i], from + (int64_t)at[i] * W + i);
    }
    return best;
}

Best<double> choose(const double* logits, int64_t from, int64_t to, const Row& row) {
    Best<double> best;
    U words[4];
    uint32_t ordered[GROUP];
    const double infinity = std::numeric_limits<double>::infinity();
    for (int64_t id = from; id < to; ++id) {
        if (!row.is_greedy() && (id - from) % GROUP == 0) {
            row.stream.words((uint32_t)(id / 4), words);
            put_in_order(words, ordered);
        }
        double x = logits[id];
        if (!(x < infinity)) best.is_finite = false;
        else if (x > -infinity)
            best.offer(row.is_greedy() ? x : x / row.temperature + gumbel(ordered[(id - from) % GROUP]), id);
    }
    return best;
}

template <typename T>
Best<float> choose(const T* logits, int64_t from, int64_t to, const Row& row) {
    return row.is_greedy() ? greedy(logits, from, to) : sampled(logits, from, to, row);
}

// A stretch is the unit of work, so one row too is shared by all threads; the largest value wins, the lowest id on ties,
// in whichever order stretches are merged.
template <typename T, typename Value>
void sample(const T* logits, const int64_t* seeds, const int64_t* positions, const double* temperatures, int64_t num_rows,
            int64_t V, int64_t* token_ids, bool* is_finite, int64_t num_threads) {
    const int64_t stretches = (V + STRETCH - 1) / STRETCH;
    std::vector<Best<Value>> best(num_rows * stretches);
    auto choose_stretch = [&](int64_t i) {
        int64_t r = i / stretches, from = i % stretches * STRETCH;
        Row row{Stream(seeds[r], positions[r]), temperatures[r]};
        best[i] = choose(logits + r * V, from, std::min(V, from + STRETCH), row);
    };
    int64_t work = 0;  // a noisy id is worth some eighty multiplications, a greedy one two
    for (int64_t r = 0; r < num_rows; ++r) work += V * (temperatures[r] < GREEDY_BELOW ? 2 : 80);
    Team::run(worthwhile_threads(work, num_threads), [&](Team& team) { team.share(num_rows * stretches, choose_stretch); });
    for (int64_t r = 0; r < num_rows; ++r) {
        Best<Value> all;
        for (int64_t s = 0; s < stretches; ++s) all.merge(best[r * stretches + s]);
        is_finite[r] = all.is_finite && all.id < V;
        token_ids[r] = is_finite[r] ? all.id : 0;
    }
}

}  // namespace

extern "C" {

void specdec_philox(const int64_t* seeds, const int64_t* positions, int64_t num_rows, int64_t V, int64_t* bits) {
    for (int64_t r = 0; r < num_rows; ++r) {
        Stream stream(seeds[r], positions[r]);
        for (int64_t from = 0; from < V; from += GROUP) {
            U words[4];
            uint32_t ordered[GROUP];
            stream.words((uint32_t)(from / 4), words);
            put_in_order(words, ordered);
            for (int64_t i = 0; i < std::min<int64_t>(GROUP, V - from); ++i) bits[r * V + from + i] = ordered[i];
        }
    }
}

void specdec_sample(const void* logits, const int64_t* seeds, const int64_t* positions, const double* temperatures,
                    int64_t* token_ids, bool* is_finite, int64_t num_rows, int64_t V, int64_t dtype,
                    int64_t num_threads) {
    if (dtype == FLOAT32)
        sample<float, float>((const float*)logits, seeds, positions, temperatures, num_rows, V, token_ids, is_finite,
                             num_threads);
    else if (dtype == BFLOAT16)
        sample<bf16, float>((const bf16*)logits, seeds, positions, temperatures, num_rows, V, token_ids, is_finite,
                            num_threads);
    else
        sample<double, double>((const double*)logits, seeds, positions, temperatures, num_rows, V, token_ids, is_finite,
                               num_threads);
}
}
