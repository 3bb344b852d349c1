// Attention of queries to the keys and values of their row's blocks, by online softmax.
//
// The context is cut at absolute positions: SEGMENT keys are summed on their own and segments are merged in ascending
// order; inside one, TILE keys make one step of the softmax. Every query goes through the same sums whether it shares
// its pass with none or with sixty others, and whether one thread or many take its segments: sharing only decides what
// is loaded once. Keys that no query of the pass may see are not read at all.
#include "attention.h"

#include <limits>

#include "attention_load.h"
#include "scratch.h"

using namespace vec;

namespace {

constexpr int SEGMENT = 256;
constexpr int PASS_ROWS = 64;  // (query, head) rows that share a pass over the keys
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int BLOCK_ROWS = 2;  // rows of one micro-kernel: 4 accumulators each
#else
constexpr int BLOCK_ROWS = 6;
#endif
constexpr float NONE = -std::numeric_limits<float>::infinity();

int64_t padded(int64_t width) { return (width + W - 1) / W * W; }

struct State {   // an unnormalised result over some keys
    float* out;  // [R, Dv padded]
    float* max;  // [R]
    float* sum;  // [R]
    State(float* at, int64_t rows, int64_t width) : out(at), max(at + rows * width), sum(max + rows) {}
};

struct Pass {  // one item's buffers and geometry
    const AttentionShape& shape;
    int64_t heads, rows, DP, DvP;
    float *q, *keys, *scores, *values, *lane_sums;
    const char* zeros;
    const int32_t* table;
    int64_t position, num_queries;

    static int64_t floats(const AttentionShape& shape, int64_t rows) {
        int64_t DP = padded(shape.D), DvP = padded(shape.Dv);
        return rows * (DP + TILE + W + 2 * (DvP + 2)) + DP * W + TILE * DvP + DP;
    }
};

template <int ROWS>
void score_rows(const float* q, const float* keys, int64_t DP, float scale, float softcap, float* scores) {
    F acc[ROWS][4];  // four sums over d modulo 4, so that few rows do not wait for each other
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < 4; ++c) acc[r][c] = F{};
    for (int64_t d = 0; d < DP; d += 4)
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            F key = load(keys + (d + c) * W);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) acc[r][c] = fma(splat(q[r * DP + d + c]), key, acc[r][c]);
        }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        F score = ((acc[r][0] + acc[r][1]) + (acc[r][2] + acc[r][3])) * scale;
        if (softcap > 0) score = softcap * tanh(score / softcap);
        store(scores + r * TILE, score);
    }
}

// out[r] += sum over keys of weights[r][key] * values[key], for N vectors of the width
template <int ROWS, int N, typename Row>
void add_values(const float* weights, Row row, int from, int to, int64_t width, float* out) {
    F acc[ROWS][N];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
        for (int n = 0; n < N; ++n) acc[r][n] = load(out + r * width + n * W);
    for (int key = from; key < to; ++key) {
        F value[N];
        auto* at = row(key);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) value[n] = load(at + n * W);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            F weight = splat(weights[r * TILE + key]);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) acc[r][n] = fma(weight, value[n], acc[r][n]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
        for (int n = 0; n < N; ++n) store(out + r * width + n * W, acc[r][n]);
}

template <int ROWS, typename Row>
void add_values_wide(const float* weights, Row row, int from, int to, int64_t width, float* out) {
    int64_t d = 0;
    auto shifted = [&](int key) { return row(key) + d; };
    for (; d + 4 * W <= width; d += 4 * W) add_values<ROWS, 4>(weights, shifted, from, to, width, out + d);
    switch ((width - d) / W) {
        case 1: return add_values<ROWS, 1>(weights, shifted, from, to, width, out + d);
        case 2: return add_values<ROWS, 2>(weights, shifted, from, to, width, out + d);
        case 3: return add_values<ROWS, 3>(weights, shifted, from, to, width, out + d);
    }
}

template <typename Body>
SPECDEC_INLINE void for_row_blocks(int64_t rows, Body body) {
    int64_t r = 0;
    for (; r + BLOCK_ROWS <= rows; r += BLOCK_ROWS) body(r, std::integral_constant<int, BLOCK_ROWS>());
    switch (rows - r) {
        case 1: return body(r, std::integral_constant<int, 1>());
#if !defined(__AVX2__) || defined(__AVX512F__)
        case 2: return body(r, std::integral_constant<int, 2>());
        case 3: return body(r, std::integral_constant<int, 3>());
        case 4: return body(r, std::integral_constant<int, 4>());
        case 5: return body(r, std::integral_constant<int, 5>());
#endif
    }
}

// One step of the online softmax for one row: scores become weights in place, and out is rescaled where the maximum
// grew. [from, to): the keys of the tile that this row sees.
void soften_row(float* scores, int from, int to, float* max, float* lane_sum, float* out, int64_t width) {
    constexpr int N = TILE / W;
    F score[N], top = splat(NONE);
    for (int n = 0; n < N; ++n) {
        score[n] = load(scores + n * W);
        if (from > n * W || to < (n + 1) * W) {
            I at;
            for (int i = 0; i < W; ++i) at[i] = n * W + i;
            score[n] = (at >= splat_int(from)) & (at < splat_int(to)) ? score[n] : splat(NONE);
        }
        top = vec::max(top, score[n]);
    }
    float new_max = std::max(*max, max_lane(top));
    if (new_max == NONE) {  // nothing seen yet, here or before
        for (int n = 0; n < N; ++n) store(scores + n * W, F{});
        return;
    }
    F total = F{};
    for (int n = 0; n < N; ++n) {
        F weight = exp(score[n] - new_max);
        store(scores + n * W, weight);
        total = total + weight;
    }
    if (new_max == *max) return store(lane_sum, load(lane_sum) + total);
    F shrink = exp(splat(*max - new_max));
    *max = new_max;
    store(lane_sum, load(lane_sum) * shrink + total);
    for (int64_t d = 0; d < width; d += W) store(out + d, load(out + d) * shrink);
}

template <typename T>
void attend_tile(const Pass& pass, const T* k, const T* v, int64_t tile, int64_t lo, int64_t hi, State& state) {
    const AttentionShape& shape = pass.shape;
    int64_t slots[TILE];
    find_slots(pass.table, shape.block_size, lo, hi, slots + (lo - tile));
    const int from = lo - tile, to = hi - tile;
    const int64_t k_stride = shape.G * shape.D, v_stride = shape.G * shape.Dv;
    for (int key = from; key < to; ++key) prefetch_row(v + slots[key] * v_stride, shape.Dv);

    for (int part = 0; part < TILE; part += W) {
        if (part + W <= from || part >= to) continue;
        const T* rows[W];
        for (int i = 0; i < W; ++i)
            rows[i] = part + i >= from && part + i < to ? k + slots[part + i] * k_stride : (const T*)pass.zeros;
        transpose_keys(rows, shape.D, pass.DP, pass.keys);
        for_row_blocks(pass.rows, [&](int64_t r, auto count) {
            score_rows<decltype(count)::value>(pass.q + r * pass.DP, pass.keys, pass.DP, shape.scale, shape.softcap,
                                               pass.scores + r * TILE + part);
        });
    }
    for (int64_t r = 0; r < pass.rows; ++r) {
        int64_t own = pass.position + r / pass.heads;
        int64_t first = shape.window ? std::max(lo, own - shape.window + 1) : lo;
        soften_row(pass.scores + r * TILE, first - tile, std::min(hi, own + 1) - tile, state.max + r,
                   pass.lane_sums + r * W, state.out + r * pass.DvP, pass.DvP);
    }
    const bool in_place = pass.DvP == shape.Dv && (sizeof(T) == 4 || pass.rows <= BLOCK_ROWS);
    if (!in_place)
        for (int key = from; key < to; ++key)
            widen_row(v + slots[key] * v_stride, shape.Dv, pass.DvP, pass.values + key * pass.DvP);
    for_row_blocks(pass.rows, [&](int64_t r, auto count) {
        constexpr int ROWS = decltype(count)::value;
        float *weights = pass.scores + r * TILE, *out = state.out + r * pass.DvP;
        if (in_place)
            add_values_wide<ROWS>(weights, [&](int key) { return v + slots[key] * v_stride; }, from, to, pass.DvP, out);
        else
            add_values_wide<ROWS>(weights, [&](int key) { return pass.values + key * pass.DvP; }, from, to, pass.DvP, out);
    });
}

template <typename T>
void attend_segment(const Pass& pass, const T* k, const T* v, int64_t segment, State& state) {
    const AttentionShape& shape = pass.shape;
    std::fill(state.max, state.max + pass.rows, NONE);
    std::fill(state.out, state.out + pass.rows * pass.DvP, 0.0f);
    std::fill(pass.lane_sums, pass.lane_sums + pass.rows * W, 0.0f);
    const int64_t begin = shape.window ? std::max<int64_t>(0, pass.position - shape.window + 1) : 0;
    const int64_t end = pass.position + pass.num_queries;
    for (int64_t tile = segment * SEGMENT; tile < (segment + 1) * SEGMENT; tile += TILE) {
        int64_t lo = std::max(tile, begin), hi = std::min(tile + TILE, end);
        if (lo < hi) attend_tile(pass, k, v, tile, lo, hi, state);
    }
    for (int64_t r = 0; r < pass.rows; ++r) state.sum[r] = vec::sum(load(pass.lane_sums + r * W));
}

void merge(State& total, const State& part, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; ++r) {
        if (part.max[r] == NONE) continue;
        float top = std::max(total.max[r], part.max[r]);
        F old_weight = exp(splat(total.max[r] - top)), new_weight = exp(splat(part.max[r] - top));
        total.max[r] = top;
        total.sum[r] = fma(splat(total.sum[r]), old_weight, splat(part.sum[r]) * new_weight)[0];
        for (int64_t d = 0; d < width; d += W) {
            float* out = total.out + r * width + d;
            store(out, fma(load(out), old_weight, load(part.out + r * width + d) * new_weight));
        }
    }
}

template <typename Out>
void finish(const AttentionShape& shape, const State& state, int64_t group, int64_t first_query, int64_t num_queries,
            const float* sinks, Out* out) {
    const int64_t heads = shape.H / shape.G, DvP = padded(shape.Dv);
    for (int64_t r = 0; r < num_queries * heads; ++r) {
        int64_t query = first_query + r / heads, head = group * heads + r % heads;
        float sum = state.sum[r], weight = 1;
        if (sinks) {  // one more logit, with no value
            float top = std::max(state.max[r], sinks[head]);
            weight = exp_scalar(state.max[r] - top);
            sum = fma(splat(sum), splat(weight), exp(splat(sinks[head] - top)))[0];
        }
        weight = sum > 0 || sum != sum ? weight / sum : 0;
        for (int64_t d = 0; d < shape.Dv; d += W)
            store_first(out + (query * shape.H + head) * shape.Dv + d, load(state.out + r * DvP + d) * weight, shape.Dv - d);
    }
}

void finish(const AttentionShape& shape, const State& state, int64_t group, int64_t first_query, int64_t num_queries,
            const float* sinks, void* out) {
    if (shape.out_dtype == BFLOAT16)
        finish(shape, state, group, first_query, num_queries, sinks, (bf16*)out);
    else
        finish(shape, state, group, first_query, num_queries, sinks, (float*)out);
}

template <typename T>
void attend(const AttentionShape& shape, const AttentionItem& item, const void* q, const T* k, const T* v,
            const int32_t* tables, const float* sinks, void* out, float* parts, int64_t part_floats) {
    const int64_t heads = shape.H / shape.G, rows = item.num_queries * heads;
    const int64_t DP = padded(shape.D), DvP = padded(shape.Dv);
    float* at = thread_scratch(Pass::floats(shape, rows));
    auto take = [&](int64_t floats) { return (at += floats) - floats; };
    Pass pass{shape, heads, rows, DP, DvP, take(rows * DP), take(DP * W), take(rows * TILE), take(TILE * DvP),
              take(rows * W), (const char*)take(DP), tables + item.row * shape.table_stride, item.position,
              item.num_queries};
    std::memset((void*)pass.zeros, 0, DP * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) {
        int64_t row = (item.first_query + r / heads) * shape.H + item.group * heads + r % heads;
        if (shape.q_dtype == BFLOAT16)
            widen_row((const bf16*)q + row * shape.D, shape.D, DP, pass.q + r * DP);
        else
            widen_row((const float*)q + row * shape.D, shape.D, DP, pass.q + r * DP);
    }
    k += item.group * shape.D;
    v += item.group * shape.Dv;
    if (item.part >= 0) {
        for (int64_t s = item.first_segment; s < item.end_segment; ++s) {
            State part(parts + (item.part + s - item.first_segment) * part_floats, rows, DvP);
            attend_segment(pass, k, v, s, part);
        }
        return;
    }
    State total(take(rows * (DvP + 2)), rows, DvP), part(take(rows * (DvP + 2)), rows, DvP);
    for (int64_t s = item.first_segment; s < item.end_segment; ++s)
        if (s == item.first_segment) {
            attend_segment(pass, k, v, s, total);
        } else {
            attend_segment(pass, k, v, s, part);
            merge(total, part, rows, DvP);
        }
    finish(shape, total, item.group, item.first_query, item.num_queries, sinks, out);
}

}  // namespace

void plan_attention(const AttentionShape& shape, const int32_t* seq_lens, const int32_t* cu_query_lens, int64_t num_rows,
                    int64_t num_threads, AttentionPlan& plan) {
    plan.items.clear();
    plan.merges.clear();
    plan.num_parts = 0;
    plan.num_queries = cu_query_lens[num_rows];
    const int64_t heads = shape.H / shape.G, most = std::max<int64_t>(1, PASS_ROWS / heads);
    int64_t all_segments = 0;
    for (int64_t row = 0; row < num_rows; ++row) {
        int64_t begin = cu_query_lens[row], end = cu_query_lens[row + 1];
        for (int64_t first = begin; first < end; first += most) {
            int64_t count = std::min(most, end - first), position = seq_lens[row] - (end - first);
            int64_t from = shape.window ? std::max<int64_t>(0, position - shape.window + 1) / SEGMENT : 0;
            int64_t to = (position + count + SEGMENT - 1) / SEGMENT;
            for (int64_t group = 0; group < shape.G; ++group)
                plan.items.push_back({(int32_t)row, (int32_t)group, (int32_t)first, (int32_t)count, (int32_t)position,
                                      (int32_t)from, (int32_t)to, -1});
            all_segments += (to - from) * shape.G;
        }
    }
    // A long item would keep one thread busy while the others wait: its segments become items.
    const int64_t longest = std::max<int64_t>(1, all_segments / (num_threads * 4));
    if (num_threads > 1) {
        std::vector<AttentionItem> whole;
        whole.swap(plan.items);
        for (const AttentionItem& item : whole) {
            if (item.end_segment - item.first_segment <= longest) {
                plan.items.push_back(item);
                continue;
            }
            plan.merges.push_back({item.row, item.group, item.first_query, item.num_queries, (int32_t)plan.num_parts,
                                   item.end_segment - item.first_segment});
            for (int32_t s = item.first_segment; s < item.end_segment; ++s) {
                plan.items.push_back(item);
                plan.items.back().first_segment = s;
                plan.items.back().end_segment = s + 1;
                plan.items.back().part = plan.num_parts++;
            }
        }
    }
    plan.part_floats = std::max<int64_t>(heads, PASS_ROWS) * (padded(shape.Dv) + 2);
}

void attention_team(Team& team, const AttentionShape& shape, const AttentionPlan& plan, const void* q, const void* k_cache,
                    const void* v_cache, const int32_t* block_tables, const float* sinks, void* out, float* parts) {
    const int64_t num_items = plan.items.size(), num_merges = plan.merges.size();
    team.share(num_items, [&](int64_t i) {
        if (shape.kv_dtype == BFLOAT16)
            attend(shape, plan.items[i], q, (const bf16*)k_cache, (const bf16*)v_cache, block_tables, sinks, out, parts,
                   plan.part_floats);
        else
            attend(shape, plan.items[i], q, (const float*)k_cache, (const float*)v_cache, block_tables, sinks, out, parts,
                   plan.part_floats);
    });
    if (!num_merges) return;
    team.share(num_merges, [&](int64_t i) {
        const AttentionMerge& m = plan.merges[i];
        const int64_t rows = m.num_queries * (shape.H / shape.G), width = padded(shape.Dv);
        State total(parts + m.first_part * plan.part_floats, rows, width);
        for (int32_t p = 1; p < m.num_parts; ++p) {
            State part(parts + (m.first_part + p) * plan.part_floats, rows, width);
            merge(total, part, rows, width);
        }
        finish(shape, total, m.group, m.first_query, m.num_queries, sinks, out);
    });
}

extern "C" void specdec_paged_attention(const void* q, const void* k_cache, const void* v_cache,
                                        const int32_t* block_tables, const int32_t* seq_lens,
                                        const int32_t* cu_query_lens, const float* sinks, void* out,
                                        const int64_t* shape_numbers, int64_t num_tokens, int64_t num_rows, float scale,
                                        float softcap, int64_t num_threads) {
    const int64_t* n = shape_numbers;
    AttentionShape shape{n[0], n[1], n[2], n[3], n[4], n[5], n[6], scale, softcap, n[7], n[8], n[9]};
    static thread_local AttentionPlan plan_of_thread;
    AttentionPlan& plan = plan_of_thread;
    plan_attention(shape, seq_lens, cu_query_lens, num_rows, num_threads, plan);
    float* parts = call_scratch(plan.num_parts * plan.part_floats);
    Team::run(num_threads, [&](Team& team) {
        attention_team(team, shape, plan, q, k_cache, v_cache, block_tables, sinks, out, parts);
    });
    const int64_t row_bytes = shape.H * shape.Dv * (shape.out_dtype == BFLOAT16 ? 2 : 4);
    std::memset((char*)out + plan.num_queries * row_bytes, 0, (num_tokens - plan.num_queries) * row_bytes);
}
