// Linear layers over weights packed in panels; see linear.cpp.
#pragma once

#include "team.h"
#include "tiles.h"
#include "vec.h"

constexpr int PANEL = 2 * vec::W;  // outputs a panel holds

struct Linear {
    const void* weights;  // [panels][K][PANEL], bfloat16 or float32, or panels of groups.h
    const float* bias;    // [N] or null
    int64_t N, K;
    int64_t dtype;
};

inline bool takes_bytes(int64_t dtype) { return dtype == GROUPS_4_BYTES || dtype == GROUPS_8_BYTES; }
inline bool takes_tiles(int64_t dtype) { return dtype >= BFLOAT16_TILES; }
inline int64_t without_bytes(int64_t dtype) { return takes_bytes(dtype) ? dtype - 2 : dtype; }

// Inputs of a linear layer as its weights want them: in float, tokens in nearly equal blocks of at most MAX_ROWS (of one,
// where they become bytes), each [K][rows]; or in bfloat16, in tiles.
struct Activations {
    // Tokens a micro-kernel takes: 24 accumulators, 2 weights, 1 activation; half of them where registers are 16. There,
    // blocks are as large as that and one is what is left: fewer than 5 tokens leave multipliers idle.
    static constexpr bool IS_NARROW = SPECDEC_VECTOR_BYTES == 32;
    static constexpr int64_t MAX_ROWS = IS_NARROW ? 6 : 12;

    float* data;
    int64_t num_tokens, K, num_blocks, block_size, rest;
    bool is_tiled;

    // dtype: of the layer's weights
    Activations(float* to, int64_t tokens, int64_t width, int64_t dtype)
        : data(to), num_tokens(tokens), K(width), is_tiled(takes_tiles(dtype)) {
        const int64_t most_rows = is_tiled ? tiles::ROWS : takes_bytes(dtype) ? 1 : MAX_ROWS;
        num_blocks = (tokens + most_rows - 1) / most_rows;
        block_size = tokens / std::max<int64_t>(1, num_blocks), rest = tokens % std::max<int64_t>(1, num_blocks);
        if (IS_NARROW && !is_tiled) block_size = most_rows, rest = 0;
    }

    // room that is enough for any dtype
    static int64_t floats(int64_t tokens, int64_t width) { return std::max(tokens * width, tiles::floats(tokens, width)); }

    int64_t start(int64_t block) const { return block * block_size + std::min(block, rest); }
    int64_t rows(int64_t block) const { return std::min(block_size + (block < rest), num_tokens - start(block)); }
    vec::bf16* tiled() const { return (vec::bf16*)data; }

    struct Column {  // one token
        float* at;       // number k lies at[k * stride]
        int64_t stride;
        vec::bf16* row;  // or in its row of tiles; else null
        int64_t K;

        // count: numbers that are left of this part of the token, of which v holds the first
        void put(int64_t k, vec::F v, int64_t count) const {
            if (row) return tiles::put(row, K, k, v, count);
            if (stride == 1) return vec::store_first(at + k, v, count);
            float lanes[vec::W];
            vec::store(lanes, v);
            for (int64_t i = 0; i < std::min<int64_t>(vec::W, count); ++i) at[(k + i) * stride] = lanes[i];
        }
    };

    Column column(int64_t token) const {
        if (is_tiled) return {nullptr, 0, tiles::row(tiled(), token, K), K};
        int64_t large = rest * (block_size + 1);
        int64_t block = token < large ? token / (block_size + 1) : rest + (token - large) / block_size;
        return {data + start(block) * K + token - start(block), rows(block), nullptr, K};
    }
};

// Calls body(t) for every token of x, for which it makes the inputs. Tokens of a block of floats lie in the same cache
// lines, which two threads would take from each other at every number: they go to one.
template <typename Body>
void share_tokens(Team& team, const Activations& x, Body body) {
    if (x.is_tiled) return team.share(x.num_tokens, body);
    team.share(x.num_blocks, [&](int64_t b) {
        for (int64_t t = x.start(b); t < x.start(b) + x.rows(b); ++t) body(t);
    });
}

// What becomes of the sums: kept, rounded, added to what is there, or gated into the inputs of the next layer.
struct Destination {
    enum Kind { FLOAT, BF16, ADD, GATE } kind;
    void* out;                            // [T, N]; not for GATE
    const Activations* next = nullptr;    // GATE: outputs come in pairs of W gates and W values -> silu(gate) * value
};

// Called by every thread of the team.
void pack_team(Team& team, const void* x, int64_t dtype, const Activations& to);  // x [T, K]
// x made for layer.dtype; bytes: room for ByteActivations::floats(x.num_tokens, x.K) where the layer takes them
void linear_team(Team& team, const Linear& layer, const Activations& x, const Destination& to, float* bytes = nullptr);

// One row of the weights, in float.
void unpack_row(const Linear& layer, int64_t n, float* row);
