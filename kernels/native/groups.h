// Weights in groups of 32 along k, one scale (and one least value) an output and group: w = d * code + m.
//
// These are GGUF's Q4_1 (codes of 4 bits) and Q8_0 (codes of 8 bits, m = 0), in panels: a group of a panel holds d of all
// its outputs, then m where there is one, then codes. d and m are halves, so d * code is exact in float and w is rounded
// once, fused or not: decoding gives the very floats that the codes stand for.
#pragma once

#include "vec.h"

namespace groups {

constexpr int64_t SIZE = 32;               // k in a group
constexpr int64_t OUTPUTS = 2 * vec::W;    // of a panel
constexpr int64_t HALVES = OUTPUTS * 2;    // bytes of d, and of m
constexpr int64_t BYTES_4 = 2 * HALVES + SIZE * OUTPUTS / 2;
constexpr int64_t BYTES_8 = HALVES + SIZE * OUTPUTS;

inline float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return vec::as<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    // As if it were a tiny float, then scaled up: subnormal halves need no case of their own.
    float magnitude = vec::as<float>(rest << 13) * 0x1p112f;
    return sign ? -magnitude : magnitude;
}

SPECDEC_INLINE vec::F load_halves(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vec::F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return (vec::F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vec::F v;
    for (int i = 0; i < vec::W; ++i) {
        uint16_t half;
        std::memcpy(&half, p + 2 * i, 2);
        v[i] = from_half(half);
    }
    return v;
#endif
}

// the number that the low four bits of every lane stand for
SPECDEC_INLINE vec::F low_nibble(vec::U words) {
#if defined(__AVX512F__)  // the permutation looks at just those bits
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (vec::F)_mm512_permutexvar_ps((__m512i)words, table);
#else
    return __builtin_convertvector((vec::I)(words & 15u), vec::F);
#endif
}

constexpr int64_t FETCH_AHEAD = 2048;  // bytes, of what is read once from memory

// One group of a panel, STEP k at a time. Lane j of a word: STEP k of outputs j and W + j, lowest bits first.
struct Reader4 {
    static constexpr int64_t BYTES = BYTES_4;
    static constexpr int STEP = 4;
    vec::F d0, d1, m0, m1;
    const uint8_t* codes;
    vec::U words;

    SPECDEC_INLINE explicit Reader4(const uint8_t* group) : codes(group + 2 * HALVES) {
        d0 = load_halves(group), d1 = load_halves(group + 2 * vec::W);
        m0 = load_halves(group + HALVES), m1 = load_halves(group + HALVES + 2 * vec::W);
        for (int64_t byte = 0; byte < 2 * HALVES; byte += 64) __builtin_prefetch(group + byte + FETCH_AHEAD);
    }
    SPECDEC_INLINE void step(int64_t k) {
        std::memcpy(&words, codes + k / STEP * sizeof words, sizeof words);
        __builtin_prefetch(codes + k / STEP * sizeof words + FETCH_AHEAD);
    }
    SPECDEC_INLINE void pair(int i, vec::F& low, vec::F& high) const {
        low = vec::fma(d0, low_nibble(words >> (8 * i)), m0);
        high = vec::fma(d1, low_nibble(words >> (8 * i + 4)), m1);
    }
    SPECDEC_INLINE void bytes(vec::U& low, vec::U& high) const {
        low = words & 0x0f0f0f0fu, high = (words >> 4) & 0x0f0f0f0fu;
    }
    SPECDEC_INLINE void offsets(vec::F& low, vec::F& high) const { low = m0, high = m1; }
};

// Lane j of a word: STEP k of one output, lowest bits first; a word of outputs 0 .. W - 1, then one of the others.
struct Reader8 {
    static constexpr int64_t BYTES = BYTES_8;
    static constexpr int STEP = 4;
    vec::F d0, d1;
    const uint8_t* codes;
    vec::I words0, words1;

    SPECDEC_INLINE explicit Reader8(const uint8_t* group) : codes(group + HALVES) {
        d0 = load_halves(group), d1 = load_halves(group + 2 * vec::W);
        __builtin_prefetch(group + FETCH_AHEAD);
    }
    SPECDEC_INLINE void step(int64_t k) {
        const uint8_t* at = codes + k / STEP * 2 * sizeof words0;
        std::memcpy(&words0, at, sizeof words0);
        std::memcpy(&words1, at + sizeof words0, sizeof words1);
        __builtin_prefetch(at + FETCH_AHEAD);
        __builtin_prefetch(at + sizeof words0 + FETCH_AHEAD);
    }
    SPECDEC_INLINE void pair(int i, vec::F& low, vec::F& high) const {
        low = d0 * __builtin_convertvector((words0 << (24 - 8 * i)) >> 24, vec::F);
        high = d1 * __builtin_convertvector((words1 << (24 - 8 * i)) >> 24, vec::F);
    }
    // The same, with codes made unsigned: w = d * byte + offset.
    SPECDEC_INLINE void bytes(vec::U& low, vec::U& high) const {
        low = (vec::U)words0 ^ 0x80808080u, high = (vec::U)words1 ^ 0x80808080u;
    }
    SPECDEC_INLINE void offsets(vec::F& low, vec::F& high) const { low = d0 * -128.0f, high = d1 * -128.0f; }
};

// one group of a panel -> [SIZE][OUTPUTS]
template <typename Reader>
SPECDEC_INLINE void decode(const uint8_t* group, float* to) {
    Reader reader(group);
    for (int64_t k = 0; k < SIZE; k += Reader::STEP) {
        reader.step(k);
#pragma GCC unroll 4
        for (int i = 0; i < Reader::STEP; ++i) {
            vec::F low, high;
            reader.pair(i, low, high);
            vec::store(to + (k + i) * OUTPUTS, low);
            vec::store(to + (k + i) * OUTPUTS + vec::W, high);
        }
    }
}

// codes [N, K] (a byte each), d and m [N, K / SIZE] -> panel p
inline void pack_panel(const uint8_t* codes, const uint16_t* d, const uint16_t* m, int64_t N, int64_t K, int64_t p,
                       bool is_4, uint8_t* to) {
    const int64_t num_groups = K / SIZE, bytes = is_4 ? BYTES_4 : BYTES_8;
    to += p * num_groups * bytes;
    std::memset(to, 0, num_groups * bytes);
    for (int64_t j = 0; j < std::min(OUTPUTS, N - p * OUTPUTS); ++j)
        for (int64_t g = 0; g < num_groups; ++g) {
            const int64_t n = p * OUTPUTS + j, lane = j % vec::W, half = j / vec::W;
            uint8_t *group = to + g * bytes, *code_bytes = group + (is_4 ? 2 : 1) * HALVES;
            std::memcpy(group + 2 * j, d + n * num_groups + g, 2);
            if (is_4) std::memcpy(group + HALVES + 2 * j, m + n * num_groups + g, 2);
            for (int64_t k = 0; k < SIZE; ++k) {
                uint8_t code = codes[n * K + g * SIZE + k];
                if (is_4)
                    code_bytes[k / 4 * sizeof(vec::U) + lane * 4 + k % 4] |= code << (4 * half);
                else
                    code_bytes[(k / 4 * 2 + half) * sizeof(vec::U) + lane * 4 + k % 4] = code;
            }
        }
}

}  // namespace groups
