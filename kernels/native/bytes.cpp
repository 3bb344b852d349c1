// y = x W^T for inputs rounded to bytes; see bytes.h.
#include "bytes.h"

using namespace vec;

namespace {

// words [K / 4][ROWS], scales [K / 32][2][ROWS] -> sums [ROWS][OUTPUTS]
template <typename Reader, int ROWS>
void multiply(const uint8_t* panel, const int32_t* words, const float* scales, int64_t num_groups, float* sums) {
    F total[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) total[r][0] = total[r][1] = F{};
    for (int64_t g = 0; g < num_groups; ++g) {
        Reader reader(panel + g * Reader::BYTES);
        I acc[ROWS][2];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = I{};
#pragma GCC unroll 8
        for (int64_t k = 0; k < groups::SIZE; k += Reader::STEP, words += ROWS) {
            U low, high;
            reader.step(k);
            reader.bytes(low, high);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                acc[r][0] = add_dot(acc[r][0], low, words[r]);
                acc[r][1] = add_dot(acc[r][1], high, words[r]);
            }
        }
        F offset0, offset1;
        reader.offsets(offset0, offset1);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const F scale = splat(scales[r]), scaled_sum = splat(scales[ROWS + r]);
            total[r][0] = fma(reader.d0, __builtin_convertvector(acc[r][0], F) * scale, total[r][0]);
            total[r][1] = fma(reader.d1, __builtin_convertvector(acc[r][1], F) * scale, total[r][1]);
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
