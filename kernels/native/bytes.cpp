// y = x W^T for inputs rounded to bytes; see bytes.h.
#include "bytes.h"

using namespace vec;

namespace {

// The products of one step's codes with the inputs of a row, summed over a group: h is the half of the panel.
template <typename Reader>
struct Products {
    typedef I Sum;
    U bytes[2];

    SPECDEC_INLINE void load(const Reader& reader) { reader.bytes(bytes[0], bytes[1]); }
    SPECDEC_INLINE Sum add(Sum sum, int h, int32_t inputs) const { return add_dot(sum, bytes[h], inputs); }
    static SPECDEC_INLINE I total(Sum sum) { return sum; }
    static SPECDEC_INLINE void offsets(const Reader& reader, F& low, F& high) { reader.offsets(low, high); }
};

#if SPECDEC_VECTOR_BYTES == 32 && !defined(__AVXVNNI__)

// Eight sums of two products of a 4-bit code and a byte fit 16 bits: they are at most 8 * 2 * 15 * 127 = 30480.
template <>
struct Products<groups::Reader4> {
    typedef __m256i Sum;
    U bytes[2];

    SPECDEC_INLINE void load(const groups::Reader4& reader) { reader.bytes(bytes[0], bytes[1]); }
    SPECDEC_INLINE Sum add(Sum sum, int h, int32_t inputs) const {
        return _mm256_add_epi16(sum, _mm256_maddubs_epi16((__m256i)bytes[h], _mm256_set1_epi32(inputs)));
    }
    static SPECDEC_INLINE I total(Sum sum) { return (I)_mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
    static SPECDEC_INLINE void offsets(const groups::Reader4& reader, F& low, F& high) { reader.offsets(low, high); }
};

// Codes keep their sign, which goes to the inputs: a pair of products is at most 2 * 128 * 127 = 32512.
template <>
struct Products<groups::Reader8> {
    typedef __m256i Sum;
    __m256i codes[2], magnitudes[2];

    SPECDEC_INLINE void load(const groups::Reader8& reader) {
        codes[0] = (__m256i)reader.words0, codes[1] = (__m256i)reader.words1;
        for (int h = 0; h < 2; ++h) magnitudes[h] = _mm256_abs_epi8(codes[h]);
    }
    SPECDEC_INLINE Sum add(Sum sum, int h, int32_t inputs) const {
        const __m256i pairs = _mm256_maddubs_epi16(magnitudes[h], _mm256_sign_epi8(_mm256_set1_epi32(inputs), codes[h]));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    static SPECDEC_INLINE I total(Sum sum) { return (I)sum; }
    static SPECDEC_INLINE void offsets(const groups::Reader8&, F& low, F& high) { low = high = F{}; }
};

#endif

// words [K / 4][ROWS], scales [K / 32][2][ROWS] -> sums [ROWS][OUTPUTS]
template <typename Reader, int ROWS>
void multiply(const uint8_t* panel, const int32_t* words, const float* scales, int64_t num_groups, float* sums) {
    F total[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) total[r][0] = total[r][1] = F{};
    for (int64_t g = 0; g < num_groups; ++g) {
        Reader reader(panel + g * Reader::BYTES);
        typename Products<Reader>::Sum acc[ROWS][2];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = typename Products<Reader>::Sum{};
#pragma GCC unroll 8
        for (int64_t k = 0; k < groups::SIZE; k += Reader::STEP, words += ROWS) {
            Products<Reader> products;
            reader.step(k);
            products.load(reader);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r)
                for (int h = 0; h < 2; ++h) acc[r][h] = products.add(acc[r][h], h, words[r]);
        }
        F offset0, offset1;
        Products<Reader>::offsets(reader, offset0, offset1);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const F scale = splat(scales[r]), scaled_sum = splat(scales[ROWS + r]);
            const I sum0 = Products<Reader>::total(acc[r][0]), sum1 = Products<Reader>::total(acc[r][1]);
            total[r][0] = fma(reader.d0, __builtin_convertvector(sum0, F) * scale, total[r][0]);
            total[r][1] = fma(reader.d1, __builtin_convertvector(sum1, F) * scale, total[r][1]);
            total[r][0] = fma(offset0, scaled_sum, total[r][0]);
            total[r][1] = fma(offset1, scaled_sum, total[r][1]);
        }
        scales += 2 * ROWS;
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
        for (int h = 0; h < 2; ++h) store(sums + r * groups::OUTPUTS + h * W, total[r][h]);
}

template <typename Reader>
void multiply_blocks(const uint8_t* panel, const ByteActivations& x, float* sums) {
    const int64_t num_groups = x.K / groups::SIZE;
    for (int64_t b = 0; b < x.num_blocks; ++b) {
        const int64_t start = x.start(b);
        const int32_t* words = x.words + start * (x.K / 4);
        const float* scales = x.scales + start * num_groups * 2;
        float* to = sums + start * groups::OUTPUTS;
        switch (x.rows(b)) {
            case 1: multiply<Reader, 1>(panel, words, scales, num_groups, to); break;
            case 2: multiply<Reader, 2>(panel, words, scales, num_groups, to); break;
            case 3: multiply<Reader, 3>(panel, words, scales, num_groups, to); break;
            case 4: multiply<Reader, 4>(panel, words, scales, num_groups, to); break;
            case 5: multiply<Reader, 5>(panel, words, scales, num_groups, to); break;
            case 6: multiply<Reader, 6>(panel, words, scales, num_groups, to); break;
        }
    }
}

}  // namespace

void multiply_bytes(int64_t dtype, const uint8_t* panel, const ByteActivations& x, float* sums) {
    if (dtype == GROUPS_4_BYTES)
        multiply_blocks<groups::Reader4>(panel, x, sums);
    else
        multiply_blocks<groups::Reader8>(panel, x, sums);
}
