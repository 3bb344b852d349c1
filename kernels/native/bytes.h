// Linear layers whose inputs are rounded to bytes: integer products, one scale a token and group of 32 inputs.
//
// x = scale * byte, byte in -127 .. 127. A group's products are summed exactly in integers, so the bits of a token
// depend neither on its neighbours nor on the instructions at hand; scales are applied group by group, in ascending order.
#pragma once

#include "groups.h"
#include "linear.h"

// Tokens in nearly equal blocks of at most MAX_ROWS.
struct ByteActivations {
    static constexpr int64_t MAX_ROWS = 6;  // 12 integer and 12 float accumulators, 2 weights, 2 scales, 2 offsets

    int32_t* words;  // of a block: [K / 4][rows], four inputs a word
    float* scales;   // of a block: [K / 32][2][rows]: the scale, and the scale times the sum of the bytes
    int64_t K, num_blocks, block_size, rest;

    ByteActivations(float* to, int64_t tokens, int64_t width)
        : words((int32_t*)to), scales(to + tokens * width / 4), K(width), num_blocks((tokens + MAX_ROWS - 1) / MAX_ROWS),
          block_size(tokens / std::max<int64_t>(1, num_blocks)), rest(tokens % std::max<int64_t>(1, num_blocks)) {}

    static int64_t floats(int64_t tokens, int64_t width) { return tokens * (width / 4 + width / groups::SIZE * 2); }

    int64_t start(int64_t block) const { return block * block_size + std::min(block, rest); }
    int64_t rows(int64_t block) const { return block_size + (block < rest); }

    // x [K]
    void put(int64_t token, const float* x) const {
        const int64_t large = rest * (block_size + 1);
        const int64_t block = token < large ? token / (block_size + 1) : rest + (token - large) / block_size;
        const int64_t row = token - start(block), stride = rows(block);
        int32_t* to = words + start(block) * (K / 4) + row;
        float* scale_to = scales + start(block) * (K / groups::SIZE) * 2 + row;
        for (int64_t g = 0; g < K / groups::SIZE; ++g, to += groups::SIZE / 4 * stride, scale_to += 2 * stride)
            put_group(x + g * groups::SIZE, to, scale_to, stride);
    }

  private:
    // the low bytes of numbers in -127 .. 127
    static SPECDEC_INLINE void to_bytes(const vec::I (&numbers)[groups::SIZE / vec::W], int32_t* words) {
#if SPECDEC_VECTOR_BYTES == 32
        const __m256i first = _mm256_packs_epi32((__m256i)numbers[0], (__m256i)numbers[1]);
        const __m256i second = _mm256_packs_epi32((__m256i)numbers[2], (__m256i)numbers[3]);
        const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), in_order);
        _mm256_storeu_si256((__m256i*)words, bytes);
#else
        typedef int8_t Bytes __attribute__((vector_size(vec::W)));
        for (int64_t i = 0; i < groups::SIZE / vec::W; ++i) {
            const Bytes bytes = __builtin_convertvector(numbers[i], Bytes);
            std::memcpy(words + i * vec::W / 4, &bytes, vec::W);
        }
#endif
    }

    static void put_group(const float* x, int32_t* to, float* scale_to, int64_t stride) {
        using namespace vec;
        F largest = F{}, poison = F{};
        for (int64_t k = 0; k < groups::SIZE; k += W) {
            F v = load(x + k);
            largest = vec::max(largest, v < F{} ? -v : v);
            poison = fma(v, F{}, poison);  // an input that is no number makes outputs that are none
        }
        const float most = max_lane(largest);
        const float scale = most / 127.0f + vec::sum(poison), inverse = most > 0.0f ? 127.0f / most : 0.0f;
        const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
        I rounded[groups::SIZE / W], total = I{};
#pragma GCC unroll 8
        for (int64_t i = 0; i < groups::SIZE / W; ++i) {
            rounded[i] = as<I>(fma(load(x + i * W), splat(inverse), magic)) - as<I>(magic);
            total += rounded[i];
        }
        int32_t words[groups::SIZE / 4];
        to_bytes(rounded, words);
#pragma GCC unroll 8
        for (int64_t i = 0; i < groups::SIZE / 4; ++i) to[i * stride] = words[i];
        int32_t sum_of_bytes = 0, lanes[W];
        std::memcpy(lanes, &total, sizeof total);
        for (int i = 0; i < W; ++i) sum_of_bytes += lanes[i];
        scale_to[0] = scale;
        scale_to[stride] = scale * (float)sum_of_bytes;
    }
};

// sums [T][OUTPUTS] = x . panel
void multiply_bytes(int64_t dtype, const uint8_t* panel, const ByteActivations& x, float* sums);
