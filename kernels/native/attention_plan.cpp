// Cutting a step's attention into items for threads, and the door's entry.
#include "attention.h"
#include "scratch.h"

namespace {

constexpr int64_t GROUP_ROWS = 64;  // (query, head) rows of one group that share a pass over its keys
constexpr int64_t PASS_ROWS = 128;  // rows of an item: neighbouring groups are neighbours in memory, so take several

// All queries, those of a row that share a pass in one item with up to most_groups groups; returns how many segments of
// items there are.
int64_t cut(const AttentionShape& shape, const int32_t* seq_lens, const int32_t* cu_query_lens, int64_t num_rows,
            int64_t most_groups, AttentionPlan& plan) {
    const int64_t heads = shape.H / shape.G, most = std::max<int64_t>(1, GROUP_ROWS / heads);
    int64_t all_segments = 0;
    plan.whole.clear();
    plan.num_multiplications = 0;
    for (int64_t row = 0; row < num_rows; ++row) {
        int64_t begin = cu_query_lens[row], end = cu_query_lens[row + 1];
        for (int64_t first = begin; first < end; first += most) {
            int64_t count = std::min(most, end - first), position = seq_lens[row] - (end - first);
            int64_t from = shape.window ? std::max<int64_t>(0, position - shape.window + 1) / SEGMENT : 0;
            int64_t to = (position + count + SEGMENT - 1) / SEGMENT;
            int64_t groups = std::clamp<int64_t>(PASS_ROWS / (count * heads), 1, most_groups);
            for (int64_t group = 0; group < shape.G; group += groups) {
                AttentionItem item;
                item.row = row, item.first_group = group, item.num_groups = std::min(groups, shape.G - group);
                item.first_query = first, item.num_queries = count, item.position = position;
                item.first_segment = from, item.end_segment = to, item.part = -1;
                plan.whole.push_back(item);
                all_segments += to - from;
                plan.num_multiplications += count * heads * item.num_groups * (to - from) * SEGMENT * (shape.D + shape.Dv);
            }
        }
    }
    return all_segments;
}

}  // namespace

void plan_attention(const AttentionShape& shape, const int32_t* seq_lens, const int32_t* cu_query_lens, int64_t num_rows,
                    int64_t num_threads, AttentionPlan& plan) {
    plan.items.clear();
    plan.merges.clear();
    plan.part_floats = 0;
    plan.num_queries = cu_query_lens[num_rows];
    const int64_t heads = shape.H / shape.G;
    int64_t all_segments = cut(shape, seq_lens, cu_query_lens, num_rows, shape.G, plan);
    if (all_segments < num_threads) all_segments = cut(shape, seq_lens, cu_query_lens, num_rows, 1, plan);
    // A long item would keep one thread busy while the others wait: its segments become items.
    const int64_t longest = num_threads == 1 ? all_segments : std::max<int64_t>(1, all_segments / (num_threads * 4));
    for (AttentionItem& item : plan.whole) {
        if (item.end_segment - item.first_segment <= longest) {
            plan.items.push_back(item);
            continue;
        }
        item.part = plan.part_floats;
        plan.merges.push_back(item);
        for (int64_t s = item.first_segment; s < item.end_segment; ++s) {
            plan.items.push_back(item);
            plan.items.back().first_segment = s;
            plan.items.back().end_segment = s + 1;
            plan.items.back().part = plan.part_floats;
            plan.part_floats += state_floats(item.num_queries * heads * item.num_groups, padded_width(shape.Dv));
        }
    }
}

extern "C" void specdec_paged_attention(const void* q, const void* k_cache, const void* v_cache,
                                        const int32_t* block_tables, const int32_t* seq_lens,
                                        const int32_t* cu_query_lens, const float* sinks, void* out,
                                        const int64_t* shape_numbers, int64_t num_tokens, int64_t num_rows, float scale,
                                        float softcap, int64_t num_threads) {
    const int64_t* n = shape_numbers;
    AttentionShape shape{n[0], n[1], n[2], n[3], n[4], n[5], n[6], scale, softcap, n[7], n[8], n[9], n[10]};
    static thread_local AttentionPlan plan_of_thread;
    AttentionPlan& plan = plan_of_thread;  // a lambda would otherwise name the worker's own
    plan_attention(shape, seq_lens, cu_query_lens, num_rows, num_threads, plan);
    num_threads = worthwhile_threads(plan.num_multiplications, num_threads);
    float* parts = call_scratch(plan.part_floats);
    Team::run(num_threads, [&](Team& team) {
        attention_team(team, shape, plan, q, k_cache, v_cache, block_tables, sinks, out, parts);
    });
    const int64_t row_bytes = shape.H * shape.Dv * (shape.out_dtype == BFLOAT16 ? 2 : 4);
    std::memset((char*)out + plan.num_queries * row_bytes, 0, (num_tokens - plan.num_queries) * row_bytes);
}
