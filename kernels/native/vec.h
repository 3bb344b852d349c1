// Vectors of floats, as wide as the machine's registers, and the arithmetic that all kernels share.
//
// Compiled with contraction off: a product and a sum fuse only where `fma` says so. Otherwise the compiler could fuse
// in one instantiation of a template and not in another, and a token's bits would depend on its neighbours.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#define SPECDEC_VECTOR_BYTES 64
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define SPECDEC_VECTOR_BYTES 32
#else
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#define SPECDEC_VECTOR_BYTES 16
#endif

#define SPECDEC_INLINE inline __attribute__((always_inline))

namespace vec {

constexpr int W = SPECDEC_VECTOR_BYTES / 4;  // lanes

typedef float F __attribute__((vector_size(SPECDEC_VECTOR_BYTES)));
typedef int32_t I __attribute__((vector_size(SPECDEC_VECTOR_BYTES)));
typedef uint32_t U __attribute__((vector_size(SPECDEC_VECTOR_BYTES)));
typedef uint16_t H __attribute__((vector_size(SPECDEC_VECTOR_BYTES / 2)));

typedef uint16_t bf16;  // the upper half of a float

SPECDEC_INLINE F splat(float x) { return x - F{}; }
SPECDEC_INLINE I splat_int(int32_t x) { return x - I{}; }
SPECDEC_INLINE U splat_bits(uint32_t x) { return x - U{}; }

template <typename To, typename From>
SPECDEC_INLINE To as(From from) {
    static_assert(sizeof(To) == sizeof(From), "only the type may change");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

SPECDEC_INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

SPECDEC_INLINE F max(F a, F b) {
#if defined(__AVX512F__)
    return (F)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

SPECDEC_INLINE F min(F a, F b) {
#if defined(__AVX512F__)
    return (F)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}

// acc + the products of four unsigned bytes of a lane with four signed ones, which all lanes share
SPECDEC_INLINE I add_dot(I acc, U bytes, int32_t signed_bytes) {
#if defined(__AVX512VNNI__)
    return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)bytes, _mm512_set1_epi32(signed_bytes));
#elif defined(__AVXVNNI__) && SPECDEC_VECTOR_BYTES == 32
    return (I)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)bytes, _mm256_set1_epi32(signed_bytes));
#elif SPECDEC_VECTOR_BYTES == 32  // pairs of 16 bits: even bytes, then odd ones; nothing saturates
    const __m256i all = _mm256_set1_epi32(signed_bytes), low_bytes = _mm256_set1_epi16(255);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256((__m256i)bytes, low_bytes),
                                           _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16((__m256i)bytes, 8), _mm256_srai_epi16(all, 8));
    return acc + (I)_mm256_add_epi32(even, odd);
#else
    for (int i = 0; i < 4; ++i)
        acc += (I)((bytes >> (8 * i)) & 255u) * splat_int((int8_t)((uint32_t)signed_bytes >> (8 * i)));
    return acc;
#endif
}

// Sums and maxima across lanes halve the vector, so their order is one tree on every path.
SPECDEC_INLINE float sum(F v) {
#if SPECDEC_VECTOR_BYTES == 32
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
    float lane[W];
    std::memcpy(lane, &v, sizeof v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
#endif
}

SPECDEC_INLINE float max_lane(F v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#elif SPECDEC_VECTOR_BYTES == 32
    __m128 half = _mm_max_ps(_mm256_extractf128_ps((__m256)v, 1), _mm256_castps256_ps128((__m256)v));
    half = _mm_max_ps(_mm_movehl_ps(half, half), half);  // of two, the second where one is a NaN
    return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(half), half));
#else
    float lane[W];
    std::memcpy(lane, &v, sizeof v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] = std::max(lane[i], lane[i + half]);
    return lane[0];
#endif
}

// ---- memory -----------------------------------------------------------------------------------------------------

SPECDEC_INLINE float to_float(float x) { return x; }
SPECDEC_INLINE float to_float(bf16 x) { return as<float>((uint32_t)x << 16); }

template <typename T>
T from_float(float x);
template <>
SPECDEC_INLINE float from_float<float>(float x) { return x; }
template <>
SPECDEC_INLINE bf16 from_float<bf16>(float x) {
    if (x != x) return 0x7fc0;
    uint32_t bits = as<uint32_t>(x);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
}

SPECDEC_INLINE F load(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

SPECDEC_INLINE U zero_extend(const bf16* p) {
    H half;
    std::memcpy(&half, p, sizeof half);
#if defined(__AVX512F__)  // GCC would convert in two halves
    return as<U>(_mm512_cvtepu16_epi32(as<__m256i>(half)));
#elif defined(__AVX2__)
    return as<U>(_mm256_cvtepu16_epi32(as<__m128i>(half)));
#else
    return __builtin_convertvector(half, U);
#endif
}

SPECDEC_INLINE F load(const bf16* p) { return as<F>(zero_extend(p) << 16); }

// 2 W neighbours: in float, the first W and the last W; in bfloat16, the even ones and the odd ones, which is cheaper.
SPECDEC_INLINE void load_pair(const float* p, F& first, F& second) {
    first = load(p);
    second = load(p + W);
}

SPECDEC_INLINE void load_pair(const bf16* p, F& first, F& second) {
    U words;
    std::memcpy(&words, p, sizeof words);
    first = as<F>(words << 16);
    second = as<F>(words & 0xffff0000u);
}

SPECDEC_INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }

SPECDEC_INLINE void store(bf16* p, F v) {
    U bits = as<U>(v);
    U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = v == v ? rounded : splat_bits(0x7fc0);
#if defined(__AVX512F__)
    H half = as<H>(_mm512_cvtepi32_epi16(as<__m512i>(rounded)));
#else
    H half = __builtin_convertvector(rounded, H);
#endif
    std::memcpy(p, &half, sizeof half);
}

template <typename T>
SPECDEC_INLINE F load_first(const T* p, int64_t count) {  // the other lanes are zero
    if (count >= W) return load(p);
    T lanes[W] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
    return load(lanes);
}

template <typename T>
SPECDEC_INLINE void store_first(T* p, F v, int64_t count) {
    if (count >= W) return store(p, v);
    T lanes[W];
    store(lanes, v);
    for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

// ---- functions (polynomials of Cephes: expf, logf, tanhf) ---------------------------------------------------------

SPECDEC_INLINE F exp(F x) {  // below -87 it is zero
    F clamped = min(splat(88.0f), max(splat(-87.0f), x));  // in this order a NaN stays
    const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    F shifted = fma(clamped, splat(1.44269504088896341f), magic);
    F n = shifted - magic;
    F r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    F y = splat(1.9875691500e-4f);
    y = fma(y, r, splat(1.3981999507e-3f));
    y = fma(y, r, splat(8.3334519073e-3f));
    y = fma(y, r, splat(4.1665795894e-2f));
    y = fma(y, r, splat(1.6666665459e-1f));
    y = fma(y, r, splat(5.0000001201e-1f));
    y = fma(y, r * r, r) + 1.0f;
    I exponent = (as<I>(shifted) - as<I>(magic)) << 23;
    y = as<F>(as<I>(y) + exponent);
    return x < splat(-87.0f) ? F{} : y;
}

// 2^x for x <= 0; below -126 it is zero, and a NaN stays
SPECDEC_INLINE F exp2_negative(F x) {
    F clamped = max(splat(-126.0f), x);
    F shifted = clamped + 12582912.0f;
    F r = clamped - (shifted - 12582912.0f);
    F y = splat(1.535336188319500e-4f);
    y = fma(y, r, splat(1.339887440266574e-3f));
    y = fma(y, r, splat(9.618437357674640e-3f));
    y = fma(y, r, splat(5.550332471162809e-2f));
    y = fma(y, r, splat(2.402264791363012e-1f));
    y = fma(y, r, splat(6.931472028550421e-1f));
    y = fma(y, r, splat(1.0f));
    y = as<F>(as<I>(y) + (as<I>(shifted) << 23));
    return x < splat(-126.0f) ? F{} : y;
}

SPECDEC_INLINE float exp_scalar(float x) { return exp(splat(x))[0]; }

SPECDEC_INLINE F log(F x) {  // for positive, normal x
    const I root_half = splat_int(0x3f3504f3);
    I bits = as<I>(x) - root_half;
    F e = __builtin_convertvector(bits >> 23, F);
    F f = as<F>((bits & 0x007fffff) + root_half) - 1.0f;
    F z = f * f;
    F y = splat(7.0376836292e-2f);
    y = fma(y, f, splat(-1.1514610310e-1f));
    y = fma(y, f, splat(1.1676998740e-1f));
    y = fma(y, f, splat(-1.2420140846e-1f));
    y = fma(y, f, splat(1.4249322787e-1f));
    y = fma(y, f, splat(-1.6668057665e-1f));
    y = fma(y, f, splat(2.0000714765e-1f));
    y = fma(y, f, splat(-2.4999993993e-1f));
    y = fma(y, f, splat(3.3333331174e-1f));
    y = y * f * z;
    y = fma(e, splat(-2.12194440e-4f), y);
    y = fma(z, splat(-0.5f), y);
    return fma(e, splat(0.693359375f), f + y);
}

SPECDEC_INLINE F tanh(F x) {
    F z = x * x;
    F small = splat(-5.70498872745e-3f);
    small = fma(small, z, splat(2.06390887954e-2f));
    small = fma(small, z, splat(-5.37397155531e-2f));
    small = fma(small, z, splat(1.33314422036e-1f));
    small = fma(small, z, splat(-3.33332819422e-1f));
    small = fma(small * z, x, x);
    F magnitude = x < F{} ? -x : x;
    F large = 1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f);
    large = x < F{} ? -large : large;
    return magnitude < splat(0.625f) ? small : large;
}

SPECDEC_INLINE F silu(F x) { return x / (1.0f + exp(-x)); }

}  // namespace vec

enum DType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT64 = 2, GROUPS_4 = 3, GROUPS_8 = 4,  // groups.h
                       GROUPS_4_BYTES = 5, GROUPS_8_BYTES = 6,                   // the same, by bytes.h
                       BFLOAT16_TILES = 7, GROUPS_8_TILES = 8 };                 // tiles.h
