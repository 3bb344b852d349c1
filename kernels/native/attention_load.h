// Reading keys and values of a tile out of the paged cache.
#pragma once

#include "attention.h"
#include "vec.h"

struct Span {  // of the context that the queries of an item see in one segment
    int64_t begin, end;
    Span(const AttentionShape& shape, const AttentionItem& item, int64_t segment)
        : begin(std::max(shape.first_key, segment * SEGMENT)),
          end(std::min(item.position + item.num_queries, (segment + 1) * SEGMENT)) {
        if (shape.window) begin = std::max(begin, item.position - shape.window + 1);
    }
};

// The keys of one tile that a pass sees: [from, to) of TILE, and the slot of each.
struct Tile {
    int64_t start;  // absolute position
    int from, to;
    int64_t slots[TILE];

    void find(const int32_t* table, int64_t block_size, int64_t at, Span span) {
        start = at;
        from = std::max<int64_t>(0, span.begin - at);
        to = std::max<int64_t>(from, std::min<int64_t>(TILE, span.end - at));
        if (from == to) return;
        int64_t block = (at + from) / block_size, offset = (at + from) % block_size;
        int64_t base = table[block] * block_size;
        for (int i = from; i < to; ++i) {
            if (offset == block_size) {
                base = table[++block] * block_size;
                offset = 0;
            }
            slots[i] = base + offset++;
        }
    }
};

// Cache lines of rows to bring in, one after the other. They come a few at a time between products: of many that are asked
// for at once, processors forget most.
struct Ahead {
    static constexpr int64_t LINE = 64;
    const char *cache, *at = nullptr, *row_end = nullptr;
    int64_t stride, row_bytes;
    const int64_t *slot, *end;
    int64_t pace, wait = 1;

    template <typename T>
    Ahead(const T* from, int64_t row_stride, int64_t width, const Tile& tile, int64_t row_blocks)
        : cache((const char*)from), stride(row_stride * sizeof(T)), row_bytes(width * sizeof(T)),
          slot(tile.slots + tile.from), end(tile.slots + tile.to), pace(row_blocks) {}

    // A step's share, where the micro-kernels of a tile take 2 D steps for every block of rows and a key has D numbers.
    template <typename T>
    SPECDEC_INLINE void fetch() {
        if (--wait) return;
        wait = pace;
        for (size_t i = 0; i < std::max<size_t>(1, sizeof(T) * vec::W / 16); ++i) {
            if (at == row_end) {
                if (slot == end) return;
                at = cache + *slot++ * stride;
                row_end = at + (row_bytes + LINE - 1) / LINE * LINE;
            }
            __builtin_prefetch(at, 0, 2);  // into the second cache: the first is full
            at += LINE;
        }
    }
};

// What an item's groups will read of the tile that comes next.
struct NextTile {
    Ahead keys, values;
    template <typename T>
    NextTile(const AttentionShape& shape, const AttentionItem& item, const Tile& tile, const T* k, const T* v,
             int64_t row_blocks)
        : keys(k + item.first_group * shape.D, shape.G * shape.D, item.num_groups * shape.D, tile, row_blocks),
          values(v + item.first_group * shape.Dv, shape.G * shape.Dv, item.num_groups * shape.Dv, tile, row_blocks) {}
};

// The same by whole rows, evenly over what a tile's groups compute: rows of keys, then rows of values. Lines that are on
// their way hold buffers that loads from the second cache need too, so it is called where work is done in the first.
struct RowsAhead {
    const char *keys, *values;
    int64_t key_bytes, value_bytes, key_stride, value_stride;
    const Tile& tile;
    int64_t at = 0, end, calls, credit = 0;  // rows; calls that end of them are spread over

    template <typename T>
    RowsAhead(const AttentionShape& shape, const AttentionItem& item, const Tile& next, const T* k, const T* v,
              int64_t group_rows)
        : keys((const char*)(k + item.first_group * shape.D)), values((const char*)(v + item.first_group * shape.Dv)),
          key_bytes(item.num_groups * shape.D * sizeof(T)), value_bytes(item.num_groups * shape.Dv * sizeof(T)),
          key_stride(shape.G * shape.D * sizeof(T)), value_stride(shape.G * shape.Dv * sizeof(T)), tile(next),
          end(2 * (next.to - next.from)), calls(num_calls(shape, item, group_rows)) {}

    static int64_t num_calls(const AttentionShape& shape, const AttentionItem& item, int64_t group_rows) {
        const int64_t blocks = (group_rows + 15) / 16;  // each takes D / 8 and Dv / 8 products
        return item.num_groups * (blocks * (shape.D + shape.Dv) / 8 + 2 * group_rows);
    }

    SPECDEC_INLINE void fetch() {
        for (credit += end; credit >= calls && at < end; credit -= calls, ++at) {
            const bool is_key = 2 * at < end;
            const int64_t slot = tile.slots[tile.from + (is_key ? at : at - end / 2)];
            const char* row = is_key ? keys + slot * key_stride : values + slot * value_stride;
            const char* row_end = row + (is_key ? key_bytes : value_bytes);
            for (; row < row_end; row += Ahead::LINE) __builtin_prefetch(row, 0, 2);
        }
    }
};

// [width] -> [padded], the rest zero
template <typename T>
SPECDEC_INLINE void widen_row(const T* row, int64_t width, int64_t padded, float* to) {
    for (int64_t d = 0; d < padded; d += vec::W) vec::store(to + d, vec::load_first(row + d, width - d));
}

// [width] -> [padded] in the order of load_pair, the rest zero
template <typename T>
SPECDEC_INLINE void widen_pairs(const T* row, int64_t width, int64_t padded, float* to) {
    for (int64_t d = 0; d < padded; d += 2 * vec::W) {
        vec::F first, second;
        if (width - d >= 2 * vec::W) {
            vec::load_pair(row + d, first, second);
        } else {
            T lanes[2 * vec::W] = {};
            for (int64_t i = 0; i < width - d; ++i) lanes[i] = row[d + i];
            vec::load_pair(lanes, first, second);
        }
        vec::store(to + d, first);
        vec::store(to + d + vec::W, second);
    }
}

// even and odd neighbours, as load_pair leaves them in bfloat16 -> in order
SPECDEC_INLINE void put_pairs_in_order(float* row, int64_t padded) {
    for (int64_t d = 0; d < padded; d += 2 * vec::W) {
        float lanes[2 * vec::W];
        for (int i = 0; i < vec::W; ++i) lanes[2 * i] = row[d + i], lanes[2 * i + 1] = row[d + vec::W + i];
        std::memcpy(row + d, lanes, sizeof lanes);
    }
}

#if defined(__AVX512F__)

// 16 rows of 16 words -> 16 columns
SPECDEC_INLINE void transpose_words(const char* const rows[16], int64_t byte, __m512i out[16]) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + byte);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // a[4 j + i] holds words i, 4 + i, 8 + i, 12 + i of rows 4 j .. 4 j + 3
        __m512i low = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), high = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        __m512i high2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
        out[i] = _mm512_shuffle_i32x4(low, low2, 0x88);
        out[8 + i] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        out[4 + i] = _mm512_shuffle_i32x4(high, high2, 0x88);
        out[12 + i] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
}

SPECDEC_INLINE void transpose_16(const char* const rows[16], int64_t d, float* keys, int64_t stride, const float*) {
    __m512i words[16];
    transpose_words(rows, d * 4, words);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(keys + (d + i) * stride, words[i]);
}

SPECDEC_INLINE void transpose_16(const char* const rows[16], int64_t d, float* keys, int64_t stride, const vec::bf16*) {
    __m512i words[16];
    transpose_words(rows, d * 2, words);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {  // a word is two neighbours of d
        _mm512_storeu_si512(keys + (d + 2 * i) * stride, _mm512_slli_epi32(words[i], 16));
        _mm512_storeu_si512(keys + (d + 2 * i + 1) * stride, _mm512_and_si512(words[i], _mm512_set1_epi32(0xffff0000)));
    }
}

#endif

#if SPECDEC_VECTOR_BYTES == 32

// 8 rows of 8 words -> 8 columns
SPECDEC_INLINE void transpose_words(const char* const rows[8], int64_t byte, __m256 out[8]) {
    __m256 a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)  // words 0-3 of rows i and 4 + i, then words 4-7
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m128 low = _mm_loadu_ps((const float*)(rows[i] + byte) + 4 * half);
            const __m128 high = _mm_loadu_ps((const float*)(rows[4 + i] + byte) + 4 * half);
            a[4 * half + i] = _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const __m256d first = _mm256_castps_pd(b[i + j]), second = _mm256_castps_pd(b[i + 2 + j]);
            out[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(first, second));
            out[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(first, second));
        }
}

SPECDEC_INLINE void transpose_8(const float* const rows[8], int64_t d, float* keys, int64_t stride) {
    __m256 words[8];
    transpose_words((const char* const*)rows, d * 4, words);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) _mm256_storeu_ps(keys + (d + i) * stride, words[i]);
}

SPECDEC_INLINE void transpose_8(const vec::bf16* const rows[8], int64_t d, float* keys, int64_t stride) {
    __m256 words[8];
    transpose_words((const char* const*)rows, d * 2, words);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {  // a word is two neighbours of d
        const vec::U word = vec::as<vec::U>(words[i]);
        vec::store(keys + (d + 2 * i) * stride, vec::as<vec::F>(word << 16));
        vec::store(keys + (d + 2 * i + 1) * stride, vec::as<vec::F>(word & 0xffff0000u));
    }
}

#endif

// W rows of [D] -> [DP][STRIDE] in float; the rest of DP is zero
template <int STRIDE, typename T>
void transpose_keys(const T* const rows[vec::W], int64_t D, int64_t DP, float* keys) {
    int64_t d = 0;
#if defined(__AVX512F__)
    constexpr int64_t STEP = 64 / sizeof(T);
    for (; d + STEP <= D; d += STEP) transpose_16((const char* const*)rows, d, keys, STRIDE, (const T*)nullptr);
#elif SPECDEC_VECTOR_BYTES == 32
    constexpr int64_t STEP = 32 / sizeof(T);
    for (; d + STEP <= D; d += STEP) transpose_8(rows, d, keys, STRIDE);
#endif
    for (; d < DP; ++d)
        for (int i = 0; i < vec::W; ++i) keys[d * STRIDE + i] = d < D ? vec::to_float(rows[i][d]) : 0.0f;
}
