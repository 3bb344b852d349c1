// Attention over a paged cache; see attention.cpp.
#pragma once

#include <vector>

#include "team.h"
#include "vec.h"

constexpr int64_t SEGMENT = 256;  // keys that are summed on their own, at absolute positions
constexpr int TILE = 64;          // keys that one step of the online softmax takes, at absolute positions

struct AttentionShape {
    int64_t H = 0, G = 0, D = 0, Dv = 0;
    int64_t block_size, table_stride, window;  // window: 0 sees everything
    float scale, softcap;                      // softcap: 0 has none
    int64_t q_dtype, kv_dtype, out_dtype;
    int64_t may_tile;  // whether attention_tiles.h may be used, where it fits
    int64_t q_stride = H * D;  // between tokens
    int64_t first_key = 0;     // no query sees the positions before it

    bool is_tiled() const { return may_tile && kv_dtype == BFLOAT16 && D % 64 == 0 && Dv % 64 == 0; }
};

struct AttentionItem {  // work that one thread does: some queries of one row, the heads of some groups, some segments
    int64_t row, first_group, num_groups, first_query, num_queries;
    int64_t position;                    // of the first query
    int64_t first_segment, end_segment;  // of the context that these queries see
    int64_t part;                        // where its partial result goes; -1: it sees all and writes the output
};

struct AttentionPlan {
    std::vector<AttentionItem> items;   // what threads take
    std::vector<AttentionItem> merges;  // items whose segments were given to several threads
    std::vector<AttentionItem> whole;   // before cutting
    int64_t part_floats = 0;            // scratch that partial results need
    int64_t num_queries = 0, num_multiplications = 0;  // the latter to within a segment
};

inline int64_t padded_width(int64_t width) { return (width + 2 * vec::W - 1) / (2 * vec::W) * (2 * vec::W); }

// Of a partial result of so many rows: products of tiles run over into rows of slack.
inline int64_t state_floats(int64_t rows, int64_t width) { return (rows + 15) * width + 2 * rows; }

void plan_attention(const AttentionShape& shape, const int32_t* seq_lens, const int32_t* cu_query_lens, int64_t num_rows,
                    int64_t num_threads, AttentionPlan& plan);

// Called by every thread of the team.
void attention_team(Team& team, const AttentionShape& shape, const AttentionPlan& plan, const void* q,
                    const void* k_cache, const void* v_cache, const int32_t* block_tables, const float* sinks, void* out,
                    float* parts);
