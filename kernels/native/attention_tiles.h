// Attention to a bfloat16 cache on the matrix units of tiles.h: the products of one tile of keys and its values.
//
// Queries and weights of the softmax are split into two bfloat16 numbers each, so what is lost of them is below 2^-16. A
// row of a tile never sees the others, and a key that a query does not see adds zero: rows keep their bits in any company.
#pragma once

#include "attention_load.h"
#include "tiles.h"

namespace attention_tiles {

// Rows of a product: nearly equal parts of all, at most those of a tile. The last may run over into rows of slack.
inline int64_t block_rows(int64_t rows) {
    const int64_t blocks = (rows + tiles::ROWS - 1) / tiles::ROWS;
    return (rows + blocks - 1) / blocks;
}

}  // namespace attention_tiles

#if SPECDEC_HAS_TILES

namespace attention_tiles {

using vec::bf16;

constexpr int64_t WIDTH = 64;                    // that heads are multiples of
constexpr int64_t STEP = tiles::DEPTH;           // numbers of a head, or keys, that one product takes
constexpr int64_t ROW_BYTES = TILE * 4;          // of scores, and of the weights that take their place
constexpr int64_t VALUE_STEPS = TILE / STEP;

// x = high + low, 32 numbers: what is left after 8 bits, and that
SPECDEC_INLINE void split(vec::F first, vec::F second, bf16* high, bf16* low) {
    const vec::U mask = vec::splat_bits(0xffff0000u);
    const vec::F h0 = vec::as<vec::F>(vec::as<vec::U>(first) & mask), h1 = vec::as<vec::F>(vec::as<vec::U>(second) & mask);
    const __m512bh h = _mm512_cvtne2ps_pbh((__m512)h1, (__m512)h0);
    const __m512bh l = _mm512_cvtne2ps_pbh((__m512)(second - h1), (__m512)(first - h0));
    std::memcpy(high, &h, sizeof h);
    std::memcpy(low, &l, sizeof l);
}

// q [D] -> [2][D]
template <typename Q>
void split_query(const Q* q, int64_t D, float* to) {
    bf16* high = (bf16*)to;
    for (int64_t d = 0; d < D; d += STEP) split(vec::load(q + d), vec::load(q + d + vec::W), high + d, high + D + d);
}

// weights [TILE] in float -> [2][TILE], in place
SPECDEC_INLINE void split_weights(float* weights) {
    static_assert(TILE == 4 * vec::W && TILE == 2 * STEP);
    bf16* high = (bf16*)weights;
    vec::F w[4];
    for (int n = 0; n < 4; ++n) w[n] = vec::load(weights + n * vec::W);
    split(w[0], w[1], high, high + TILE);
    split(w[2], w[3], high + STEP, high + TILE + STEP);
}

// 16 keys [D] -> [D / 32] tiles of 16 pairs of d and 16 keys
inline void pack_keys(const bf16* const rows[16], int64_t D, bf16* to) {
    for (int64_t d = 0; d < D; d += STEP, to += tiles::SIZE) {
        __m512i words[16];
        transpose_words((const char* const*)rows, d * 2, words);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + 32 * i, words[i]);
    }
}

// Two values [Dv] -> row `pair` of [Dv / 16] tiles of 16 pairs of keys and 16 numbers; which ones, put_in_order knows.
SPECDEC_INLINE void pack_values(const bf16* first, const bf16* second, int64_t Dv, int64_t pair, bf16* to) {
    for (int64_t d = 0; d < Dv; d += 32, to += 2 * tiles::SIZE) {
        const __m512i a = _mm512_loadu_si512(first + d), b = _mm512_loadu_si512(second + d);
        _mm512_storeu_si512(to + 32 * pair, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(to + tiles::SIZE + 32 * pair, _mm512_unpackhi_epi16(a, b));
    }
}

inline void put_in_order(float* row, int64_t width) {
    for (int64_t d = 0; d < width; d += 32) {
        float numbers[32];
        for (int i = 0; i < 32; ++i) numbers[i] = row[d + i / 4 % 2 * 16 + i / 8 * 4 + i % 4];
        std::memcpy(row + d, numbers, sizeof numbers);
    }
}

// Registers: 0-3 sums, 4 and 5 the two parts of queries or weights, 6 and 7 keys or values. A product's share of what comes
// next is asked for on the way.
#define SPECDEC_PRODUCT(sums, keys, from) \
    _tile_loadd(keys, from, 64);          \
    ahead.fetch();                        \
    _tile_dpbf16ps(sums, 4, keys);        \
    _tile_dpbf16ps(sums, 5, keys)

// scores [rows][TILE] = q [rows][2][D] . keys, of 4 times 16 keys
inline void score(const float* q, int64_t D, const bf16* keys, float* scores, RowsAhead& ahead) {
    tiles::order_memory();
    const bf16* high = (const bf16*)q;
    const int64_t next = D / STEP * tiles::SIZE;  // of 16 keys
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < D; d += STEP, keys += tiles::SIZE) {
        _tile_loadd(4, high + d, D * 4);
        _tile_loadd(5, high + D + d, D * 4);
        SPECDEC_PRODUCT(0, 6, keys);
        SPECDEC_PRODUCT(1, 7, keys + next);
        SPECDEC_PRODUCT(2, 6, keys + 2 * next);
        SPECDEC_PRODUCT(3, 7, keys + 3 * next);
    }
    _tile_stored(0, scores, ROW_BYTES);
    _tile_stored(1, scores + 16, ROW_BYTES);
    _tile_stored(2, scores + 32, ROW_BYTES);
    _tile_stored(3, scores + 48, ROW_BYTES);
}

// out [rows][Dv] += weights [rows][2][TILE] . values, of the steps that hold keys from .. to - 1
inline void add_values(const float* weights, const bf16* values, int from, int to, int64_t Dv, float* out,
                       RowsAhead& ahead) {
    tiles::order_memory();
    const bf16* high = (const bf16*)weights;
    const int64_t next = Dv / 16 * tiles::SIZE, stride = Dv * 4;
    for (int64_t d = 0; d < Dv; d += WIDTH, values += 4 * tiles::SIZE, out += WIDTH) {
        _tile_loadd(0, out, stride);
        _tile_loadd(1, out + 16, stride);
        _tile_loadd(2, out + 32, stride);
        _tile_loadd(3, out + 48, stride);
        for (int64_t s = from / STEP; s * STEP < to; ++s) {
            const bf16* at = values + s * next;
            _tile_loadd(4, high + s * STEP, ROW_BYTES);
            _tile_loadd(5, high + TILE + s * STEP, ROW_BYTES);
            SPECDEC_PRODUCT(0, 6, at);
            SPECDEC_PRODUCT(1, 7, at + tiles::SIZE);
            SPECDEC_PRODUCT(2, 6, at + 2 * tiles::SIZE);
            SPECDEC_PRODUCT(3, 7, at + 3 * tiles::SIZE);
        }
        _tile_stored(0, out, stride);
        _tile_stored(1, out + 16, stride);
        _tile_stored(2, out + 32, stride);
        _tile_stored(3, out + 48, stride);
    }
}

#undef SPECDEC_PRODUCT

}  // namespace attention_tiles

#endif
