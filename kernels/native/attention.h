// Attention over a paged cache; see attention.cpp.
#pragma once

#include <vector>

#include "team.h"
#include "vec.h"

struct AttentionShape {
    int64_t H, G, D, Dv;
    int64_t block_size, table_stride, window;  // window: 0 sees everything
    float scale, softcap;                      // softcap: 0 has none
    int64_t q_dtype, kv_dtype, out_dtype;
};

struct AttentionItem {  // work that one thread does: some queries of one row, the heads of one group, some segments
    int32_t row, group, first_query, num_queries;
    int32_t position;                        // of the first query
    int32_t first_segment, end_segment;      // of the context that these queries see
    int32_t part;                            // where its partial result goes; -1: it sees all and writes the output
};

struct AttentionMerge {  // queries whose segments were given to several items
    int32_t row, group, first_query, num_queries, first_part, num_parts;
};

struct AttentionPlan {
    std::vector<AttentionItem> items;
    std::vector<AttentionMerge> merges;
    int64_t part_floats = 0, num_parts = 0;  // scratch needed: their product
    int64_t num_queries = 0;
};

void plan_attention(const AttentionShape& shape, const int32_t* seq_lens, const int32_t* cu_query_lens, int64_t num_rows,
                    int64_t num_threads, AttentionPlan& plan);

// Called by every thread of the team.
void attention_team(Team& team, const AttentionShape& shape, const AttentionPlan& plan, const void* q, const void* k_cache,
                    const void* v_cache, const int32_t* block_tables, const float* sinks, void* out, float* parts);
