// Linear layers in bfloat16 on the matrix units of x86 (AMX): inputs rounded to bfloat16, sums in float.
//
// A tile is 16 rows of 64 bytes. Inputs lie in tiles of 16 tokens x 32 numbers, weights in tiles of 16 pairs of numbers
// x 16 outputs, K padded with zeros. One accumulator takes all of K in ascending order, and a row of a tile never sees
// the other rows, so a token's bits do not depend on its neighbours. Rows beyond the last token hold anything.
//
// Codes of 8 bits (groups.h) are whole numbers that bfloat16 holds exactly: a group is multiplied as they are, and its sum
// by the scale of the output afterwards. A group is one step, so it holds 32 scales, then the codes of two tiles.
#pragma once

#include "vec.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__)
#define SPECDEC_HAS_TILES 1
#else
#define SPECDEC_HAS_TILES 0
#endif

namespace tiles {

constexpr int64_t ROWS = 16, DEPTH = 32;       // tokens, and numbers of each, that a tile of inputs holds
constexpr int64_t SIZE = ROWS * DEPTH;         // numbers in a tile
constexpr int64_t BLOCK_ROWS = 2 * ROWS;       // tokens that share a pass over a panel

inline int64_t steps(int64_t K) { return (K + DEPTH - 1) / DEPTH; }

// floats that hold the inputs of so many tokens
inline int64_t floats(int64_t tokens, int64_t K) { return (tokens + ROWS - 1) / ROWS * steps(K) * SIZE / 2; }

// where number k of a token lies, from the start of its row in the first tile
inline int64_t place(int64_t k) { return k / DEPTH * SIZE + k % DEPTH; }

inline vec::bf16* row(vec::bf16* inputs, int64_t token, int64_t K) {
    return inputs + token / ROWS * steps(K) * SIZE + token % ROWS * DEPTH;
}

inline void put(vec::bf16* row, int64_t K, int64_t k, vec::F v, int64_t count) {
    count = std::min<int64_t>(count, vec::W);
    if (count == vec::W && k % vec::W == 0) {
        vec::store(row + place(k), v);
    } else {
        vec::bf16 lanes[vec::W];
        vec::store(lanes, v);
        for (int64_t i = 0; i < count; ++i) row[place(k + i)] = lanes[i];
    }
    if (k + count == K)
        for (int64_t pad = K; pad % DEPTH; ++pad) row[place(pad)] = 0;
}

// of output n of a panel of two tiles a step, from the start of the panel
inline int64_t weight_place(int64_t n, int64_t k) {
    return (k / DEPTH * 2 + n / 16) * SIZE + k % DEPTH / 2 * DEPTH + n % 16 * 2 + k % 2;
}

// Whether this process may use them; asks the system once.
bool available();

// What a thread does around its products; rows: of registers 0 to 5, of 6 and 7 there are 16.
void enter(int64_t rows = ROWS);
void leave();

// Stores before it come before loads of tiles after it: GCC does not know that these read memory.
SPECDEC_INLINE void order_memory() { asm volatile("" ::: "memory"); }

// sums[t][0:32] = inputs of token t . panel, for up to BLOCK_ROWS tokens; inputs: of a block's first tile
void multiply(const vec::bf16* panel, const vec::bf16* inputs, int64_t num_tokens, int64_t K, float* sums);
void multiply_codes(const uint8_t* panel, const vec::bf16* inputs, int64_t num_tokens, int64_t K, float* sums);

}  // namespace tiles
